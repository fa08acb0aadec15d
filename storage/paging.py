"""Where a page of journals ends, judged from the rows read. Pure; the same on every engine."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.storage.model import Entry, JournalPage


def journal_page(
    run_ids: Sequence[str], read: Sequence[tuple[str, Entry]], *, found: int, limit: int
) -> JournalPage:
    """run_ids: in the order asked for. read: the entries that fitted. found: how many there were within ``limit``.

    A page that was cut ends in the midst of its last run, as far as anybody can tell, and before all that follow."""
    entries: dict[str, list[Entry]] = {}
    for run_id, entry in read:
        entries.setdefault(run_id, []).append(entry)
    more: frozenset[str] = frozenset()
    if read and (len(read) < found or found == limit):
        more = frozenset(run_ids[run_ids.index(read[-1][0]) :])
    return JournalPage(entries, more)
