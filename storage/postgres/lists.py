"""The statement behind `list_runs`, put together from the filter so that each question gets its own index."""

from __future__ import annotations

from perdure.storage.model import RunFilter, RunStatus

# Texts from people travel as parameters; statuses and numbers are our own and stand in the statement, so that the
# planner can choose by them.
_LIVE = (RunStatus.PENDING, RunStatus.RUNNING, RunStatus.SUSPENDED)


def list_statement(filter: RunFilter) -> tuple[str, list[object]]:
    """The text and its parameters; newest first."""
    args: list[object] = []

    def parameter(value: object) -> str:
        args.append(value)
        return f"${len(args)}"

    wanted = [RunStatus(status) for status in filter.statuses]
    live = [status for status in wanted if not status.final]
    final = [status for status in wanted if status.final]
    conditions: list[str] = []
    if wanted and not live:
        conditions.append(f"r.status in ({_quoted(final)})")
    elif wanted and not final:
        conditions.append(f"r.status = 'open' and f.status in ({_quoted(live)})")
    elif wanted:
        conditions.append(f"coalesce(f.status, r.status) in ({_quoted(wanted)})")
    if filter.workflow is not None:
        conditions.append(f"r.workflow = {parameter(filter.workflow)}")
    if filter.source is not None:
        conditions.append(f"r.source = {parameter(filter.source)}")
    if filter.reason is not None:
        conditions.append(f"coalesce(f.reason, r.reason) = {parameter(filter.reason)}")
    if filter.since is not None:
        conditions.append(f"r.created_at >= {parameter(filter.since)}")
    if filter.id_prefix:
        # The highest code point ends the range: ids compare byte for byte, in the order of code points.
        conditions.append(f"r.run_id >= {parameter(filter.id_prefix)}")
        conditions.append(f"r.run_id <= {parameter(filter.id_prefix + chr(0x10FFFF))}")
    where = " and ".join(conditions) or "true"
    join = "join" if wanted and not final else "left join"
    text = f"""-- name: list_runs
select r.*, f.status as live_status, f.reason as live_reason, f.runner_id, f.claim_id, f.epoch, f.reclaim_count,
       f.next_seq, f.entered_at, w.wake_at, w.hold, w.stray_revision = f.revision as stray, m.unread
  from (select r.run_id, r.created_at from perdure_runs r {join} perdure_fences f on f.run_id = r.run_id
         where {where}
         order by r.created_at desc, r.run_id desc limit {int(filter.limit)} offset {int(filter.offset)}) page
  join perdure_runs r on r.run_id = page.run_id
  left join perdure_fences f on f.run_id = page.run_id
  left join perdure_wakes w on w.run_id = page.run_id
 cross join lateral (
   select count(*) as unread from perdure_messages
    where run_id = page.run_id and consumed_seq is null and kind <> 'suspend') m
 order by page.created_at desc, page.run_id desc"""
    return text, args


def _quoted(statuses: list[RunStatus]) -> str:
    return ", ".join(f"'{status.value}'" for status in statuses)
