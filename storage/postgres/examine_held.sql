-- name: examine_held
select w.run_id, f.workflow, w.hold, count(*) over () as n
  from perdure_wakes w join perdure_fences f on f.run_id = w.run_id
 where w.hold is not null order by w.run_id limit $1;
