"""Executing runs: claim, body, steps, commit, park.

    claiming ──▶ engine ──▶ activation (one run in memory) ──▶ committer ──▶ storage
                               │   ▲
                          executor (step functions)

`decisions` holds every choice as a pure function; the other modules carry them out.
"""
