"""Change feeds: committed inserts, updates and deletes as a resumable stream of row keys.

This floor stands on ``perdure.sharding`` and ``perdure.storage`` and beside ``perdure.cron``, which
it never imports. It is empty in this release: no change feed exists yet.
"""
