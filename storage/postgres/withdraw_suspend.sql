-- name: withdraw_suspend
-- Take back what asked for a hold that has not come: its messages count as read, and the mailbox has changed, so that a
-- park under way is refused. Waits for the wake row; a run on hold by then is left to `release_hold`.
--   $1 run
with w as materialized (
  select run_id from perdure_wakes where run_id = $1 and hold is null for no key update
), asked as (
  update perdure_messages m set consumed_seq = 0
   where m.run_id = $1 and m.kind = 'suspend' and m.consumed_seq is null and exists (select 1 from w)
  returning m.run_id
), told as materialized (
  select distinct run_id from asked
), uw as (
  update perdure_wakes x set wake_seq = x.wake_seq + 1, wake_at = least(x.wake_at, clock_timestamp())
    from told where x.run_id between told.run_id and told.run_id
), event as (
  insert into perdure_run_events (run_id, type, at) select run_id, 'run-resumed', clock_timestamp() from told
)
select run_id from told;
