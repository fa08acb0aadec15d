"""Schedules: cron expressions, time zones, and firings that happen once in the whole cluster.

This floor stands on ``perdure.sharding`` and ``perdure.storage`` and beside ``perdure.cdc``, which
it never imports. It is empty in this release: no schedule exists yet.
"""
