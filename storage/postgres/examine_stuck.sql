-- name: examine_stuck
-- Runs nothing happened to for $1 seconds though it should have, the longest first, $2 at most.
select * from (
  select f.run_id, f.workflow, 'due' as why, extract(epoch from now() - w.wake_at)::float8 as idle
    from perdure_wakes w join perdure_fences f on f.run_id = w.run_id
   where w.hold is null and f.status in ('pending', 'suspended') and w.wake_at < now() - $1::float8 * interval '1 second'
  union all
  select f.run_id, f.workflow, 'running', extract(epoch from now() - greatest(f.claimed_at, last.at))::float8
    from perdure_fences f
   cross join lateral (select max(s.finished_at) as at from perdure_steps s where s.run_id = f.run_id) last
   where f.status = 'running' and greatest(f.claimed_at, last.at) < now() - $1::float8 * interval '1 second'
  union all
  select f.run_id, f.workflow, 'timer', extract(epoch from now() - f.claimed_at)::float8
    from perdure_fences f join perdure_wakes w on w.run_id = f.run_id
   where f.status = 'suspended' and f.reason in ('timer', 'retry') and w.wake_at is null and w.hold is null
     and f.claimed_at < now() - $1::float8 * interval '1 second'
) stuck order by idle desc limit $2;
