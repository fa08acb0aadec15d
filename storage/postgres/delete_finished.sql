-- name: delete_finished
-- Retention: runs that ended before $1, oldest first, $2 at most, with everything kept about them.
with old as materialized (
  select run_id from perdure_runs where finished_at is not null and finished_at < $1 order by finished_at limit $2
     for update skip locked
), s as (
  delete from perdure_steps x using old where x.run_id = old.run_id
), e as (
  delete from perdure_run_events x using old where x.run_id = old.run_id
), m as (
  delete from perdure_messages x using old where x.run_id = old.run_id
), r as (
  delete from perdure_runs x using old where x.run_id = old.run_id
)
select count(*) from old;
