-- name: examine_tables
select s.relname as name, s.n_live_tup as live, s.n_dead_tup as dead,
       coalesce(c.reloptions::text not like '%autovacuum_enabled=false%', true) as autovacuum
  from pg_stat_user_tables s
  join pg_class c on c.oid = s.relid
 where s.relid in ('perdure_fences'::regclass, 'perdure_wakes'::regclass, 'perdure_messages'::regclass,
                   'perdure_runners'::regclass, 'perdure_shards'::regclass)
 order by s.relname;
