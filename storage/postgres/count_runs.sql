-- name: count_runs
-- By status; and how many of the running ones are executed by another runner than the holder of their shard.
select status, count(*) as n from perdure_fences group by status
union all
select 'running elsewhere', count(*)
  from perdure_fences f
  join perdure_shards s on s.shard_id = ((f.slot + 1)::bigint * (select max(x.shard_id) + 1 from perdure_shards x) - 1) / 65536
 where f.status = 'running' and f.runner_id is distinct from s.runner_id
having count(*) > 0;
