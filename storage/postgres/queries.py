"""The statements of this engine, one readable `.sql` file each, loaded at import.

Every text begins with ``-- name: <file name>``, so that a statement can be told on the wire and in
`pg_stat_activity`.
"""

from __future__ import annotations

from importlib import resources

import asyncpg

Row = asyncpg.Record

_FOLDER = resources.files("perdure.storage.postgres")


def _load(name: str) -> str:
    text = _FOLDER.joinpath(f"{name}.sql").read_text("utf-8")
    if not text.startswith(f"-- name: {name}\n"):
        raise ValueError(f"{name}.sql must begin with the line '-- name: {name}'")
    return text.rstrip().removesuffix(";")


def _variant(text: str, *chosen: str) -> str:
    """The lines of one variant of a statement: those under a line ``--: `` that names it, beside others maybe. Lines
    above the first such line are in all. More than one ``chosen``: the lines of each."""
    kept, taken = [], True
    for line in text.splitlines():
        if line.startswith("--: "):
            taken = not set(chosen).isdisjoint(line[4:].split())
        elif taken:
            kept.append(line)
    return "\n".join(kept)


ABOUT_SESSION = _load("about_session")
ABOUT_SESSION_PLAIN = _load("about_session_plain")
AGREE = _load("agree")
BURY_RUNNERS = _load("bury_runners")
CANCEL_UNENTERED = _load("cancel_unentered")
CLAIM = _load("claim")
CLAIM_STRAYS = _load("claim_strays")
COMMIT = _variant(_load("commit"), "whole")
COMMIT_CAREFUL = _variant(_load("commit"), "whole", "careful")
COMMIT_ENDS = _variant(_load("commit"), "ends")
COMMIT_STEPS = _variant(_load("commit"), "steps")
COUNT_RUNS = _load("count_runs")
CREATE_SHARDS = _load("create_shards")
DECLARE_DEAD = _load("declare_dead")
DECLARE_LOST = _load("declare_lost")
DECLARE_OTHERS_DEAD = _load("declare_others_dead")
DELETE_DEAD_RUNNERS = _load("delete_dead_runners")
DELETE_FINISHED = _load("delete_finished")
DUE_IN_MEMORY = _load("due_in_memory")
END_GHOST = _load("end_ghost")
END_LOCK_HOLDER = _load("end_lock_holder")
EXAMINE_CONNECTIONS = _load("examine_connections")
EXAMINE_HELD = _load("examine_held")
EXAMINE_SESSIONS = _load("examine_sessions")
EXAMINE_SETTINGS = _load("examine_settings")
EXAMINE_STUCK = _load("examine_stuck")
EXAMINE_TABLES = _load("examine_tables")
EXAMINE_WORKFLOWS = _load("examine_workflows")
FIND_GHOST = _load("find_ghost")
FIND_RUN = _load("find_run")
FIND_RUNS = _load("find_runs")
FREE_LOCKS = _load("free_locks")
HINT_KEY = _load("hint_key")
HOLD_LOCK = _load("hold_lock")
HOLD_RUN = _load("hold_run")
IS_DEAD = _load("is_dead")
JOURNAL = _load("journal")
LEAVE = _load("leave")
LIVE_RUNNERS = _load("live_runners")
LOCK_MODE = _load("lock_mode")
LOCK_RUNNERS = _load("lock_runners")
LOCK_UNENTERED = _load("lock_unentered")
MAILBOX = _load("mailbox")
NOTE_EVENTS = _load("note_events")
NOTIFY = _load("notify")
OPEN_ATTEMPTS = _load("open_attempts")
OPEN_EVENTS = _load("open_events")
READ_EVENTS = _load("read_events")
READ_HINT_KEY = _load("read_hint_key")
READ_META = _load("read_meta")
READ_RESULTS = _load("read_results")
READ_RUNS = _load("read_runs")
RECORD_FACT = _load("record_fact")
REGISTER = _load("register")
RELEASE_HOLD = _load("release_hold")
RELEASE_SHARDS = _load("release_shards")
RENEW = _load("renew")
REPLACE_SHARDS = _load("replace_shards")
SERVER_NOW = _load("server_now")
SETTLE = _load("settle")
SETTLE_ONE = _load("settle_one")
SETTLE_REST = _load("settle_rest")
SET_DRAINING = _load("set_draining")
SET_LOCK_MODE = _load("set_lock_mode")
SET_META = _load("set_meta")
SIGNAL = _load("signal")
START = _load("start")
START_FRESH = _load("start_fresh")
TAKE_SHARDS = _load("take_shards")
TOPOLOGY = _load("topology")
UPCOMING = _load("upcoming")
VOID_CLAIMS = _load("void_claims")
VOID_RUNNERS = _load("void_runners")
VOID_SHARDS = _load("void_shards")
WITHDRAW_SUSPEND = _load("withdraw_suspend")
