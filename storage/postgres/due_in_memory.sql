-- name: due_in_memory
-- Of runs in my memory ($1, with what I have seen $2): those with newer mail. Due times of the others are cleared, so
-- that scans do not step over them. A row that changed since this statement's snapshot is left alone (another xmin):
-- a run that parked meanwhile has its timer there.
with mine as materialized (
  select m.run_id, m.seen, w.wake_seq, w.wake_at, w.version
    from unnest($1::text[], $2::bigint[]) as m(run_id, seen)
   cross join lateral (select wake_seq, wake_at, xmin as version from perdure_wakes where run_id = m.run_id offset 0) w
), idle as materialized (
  select m.run_id
    from mine m
   cross join lateral (
     select 1 from perdure_wakes w
      where w.run_id = m.run_id and w.xmin = m.version and m.wake_seq = m.seen and w.wake_at <= now()
        and (select f.status from perdure_fences f where f.run_id = m.run_id) = 'running'
        for no key update of w skip locked) w
), cleared as (
  update perdure_wakes w set wake_at = null from idle i where w.run_id between i.run_id and i.run_id
)
select run_id from mine where wake_seq > seen;
