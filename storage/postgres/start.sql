-- name: start
-- The cold row, the fence and the wake row of new runs, in one statement. Ids that exist are left alone and not
-- returned: `find_runs` reads them in a second statement, because a row inserted by another session meanwhile is
-- invisible to this one's snapshot. The caller sorts by run_id and sends each id once. A column whose values are all the
-- usual ones is sent empty: unnest fills it up with nulls. All but the payloads
-- are sent as one text each (`literals`).
--   $15 runner  $16 shard  $17 epoch  $18 claim: of runs to be born claimed, else null. They are if the shard is still that
--   runner's under that epoch and the runner is not dead; the others are born pending, due now.
with input as materialized (
  select u.*, b.born
    from unnest($1::text::text[], $2::text::int[], $3::text::text[], $4::text::int[], $5::text::text[], $6::text::text[], $7::text::text[], $8::text::text[], $9::text::text[],
                $10::text::text[], $11::text::bigint[], $12::text::bigint[], $13::text[], $14::text::smallint[],
                $15::text::bigint[], $16::text::int[], $17::text::bigint[], $18::text::bigint[])
      as u(run_id, slot, workflow, version, source, tenant, subject, tags, trace, parent_id, seed, start_token, payload, payload_format,
           runner_id, shard_id, epoch, claim_id)
    left join lateral (
      select true as born from perdure_shards s
       where s.shard_id = u.shard_id and s.runner_id = u.runner_id and s.epoch = u.epoch and u.slot between s.slot_lo and s.slot_hi
         and exists (select 1 from perdure_runners r where r.runner_id = u.runner_id and not r.dead)
      offset 0) b on true
), new as (
  insert into perdure_runs (run_id, slot, workflow, version, source, tenant, subject, tags, trace, parent_id, seed, start_token,
                            payload, payload_format)
  select run_id, slot, workflow, coalesce(version, 1), coalesce(source, 'app'), tenant, subject, tags, trace, parent_id, seed,
         start_token, payload, coalesce(payload_format, 1)
    from input order by run_id
  on conflict (run_id) do nothing
  returning run_id
), made as materialized (
  select * from input where run_id in (select run_id from new) order by run_id
), fence as (
  insert into perdure_fences (run_id, slot, workflow, version, status, claim_id, epoch, revision, runner_id, entered_at, claimed_at)
  select run_id, slot, workflow, coalesce(version, 1), case when born then 'running' else 'pending' end,
         case when born then claim_id end, case when born then epoch else 0 end, case when born then 1 else 0 end,
         case when born then runner_id end, case when born then now() end, case when born then now() end
    from made
), wake as (  -- clock_timestamp(): low-water marks of scans rely on due times being no older than their statement
  insert into perdure_wakes (run_id, slot, wake_at) select run_id, slot, case when born then null else clock_timestamp() end from made
)
select run_id, case when born then now() end as born_at from made;
