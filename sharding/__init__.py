"""Who may run what: placement, runners, leases and shards.

Read `keeper.py` and `lease.py` (how a runner stays alive), then `ownership.py` and `judgement.py` (which shards it
holds), then `placement.py` (which it should hold).
"""
