-- name: delete_finished
-- Retention: runs that ended before $1, oldest first, $2 at most, with everything kept about them. "= any (array(…))"
-- keeps to the indexes where a join would be planned by a guess of $2.
with old as materialized (
  select run_id from perdure_runs where finished_at is not null and finished_at < $1 order by finished_at limit $2
     for update skip locked
), s as (
  delete from perdure_steps where run_id = any (array(select run_id from old))
), e as (
  delete from perdure_run_events where run_id = any (array(select run_id from old))
), m as (
  delete from perdure_messages where run_id = any (array(select run_id from old))
), r as (
  delete from perdure_runs where run_id = any (array(select run_id from old))
)
select count(*) from old;
