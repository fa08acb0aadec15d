"""Who may run what: placement, runners, leases and shards."""
