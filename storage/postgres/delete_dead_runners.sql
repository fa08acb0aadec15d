-- name: delete_dead_runners
with gone as (
  delete from perdure_runners r
   where r.dead and r.expires_at < $1
     and not exists (select 1 from perdure_shards s where s.runner_id = r.runner_id)
     and not exists (select 1 from perdure_fences f where f.status = 'running' and f.runner_id = r.runner_id)
  returning 1
)
select count(*) from gone;
