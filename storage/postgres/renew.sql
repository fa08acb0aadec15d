-- name: renew
with u as (
  update perdure_runners
     set expires_at = least(
           greatest(expires_at, clock_timestamp() + $2::float8 * interval '1 second'),
           clock_timestamp() + 2 * $2::float8 * interval '1 second'  -- a clock that was set back is caught up with
         ), renew_count = renew_count + 1
   where runner_id = $1 and not dead
  returning renew_count
)
select exists (select 1 from u) as alive, (select renew_count from u) as renew_count, clock_timestamp() as db_now, pg_backend_pid() as session,
       case when not pg_is_in_recovery() then (pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::bigint end as flushed;
