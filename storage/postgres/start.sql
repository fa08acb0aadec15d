-- name: start
-- The cold row, the fence and the wake row of new runs, in one statement. Ids that exist are left alone and not
-- returned: `find_runs` reads them in a second statement, because a row inserted by another session meanwhile is
-- invisible to this one's snapshot. The caller sorts by run_id and sends each id once.
with input as materialized (
  select * from unnest($1::text[], $2::int[], $3::text[], $4::int[], $5::text[], $6::text[], $7::text[], $8::text[], $9::text[],
                       $10::text[], $11::bigint[], $12::bigint[], $13::text[], $14::smallint[])
    as u(run_id, slot, workflow, version, source, tenant, subject, tags, trace, parent_id, seed, start_token, payload, payload_format)
), new as (
  insert into perdure_runs (run_id, slot, workflow, version, source, tenant, subject, tags, trace, parent_id, seed, start_token,
                            payload, payload_format)
  select run_id, slot, workflow, version, source, tenant, subject, tags, trace, parent_id, seed, start_token, payload, payload_format
    from input order by run_id
  on conflict (run_id) do nothing
  returning run_id, slot, workflow, version
), fence as (
  insert into perdure_fences (run_id, slot, workflow, version) select run_id, slot, workflow, version from new order by run_id
), wake as (  -- clock_timestamp(): low-water marks of scans rely on due times being no older than their statement
  insert into perdure_wakes (run_id, slot, wake_at) select run_id, slot, clock_timestamp() from new order by run_id
)
select run_id from new;
