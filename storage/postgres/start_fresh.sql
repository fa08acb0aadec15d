-- name: start_fresh
-- The rows of `start` for runs whose ids were made for this call, so that nobody else has them, and that are born pending:
-- plain inserts, without asking for each id whether it exists and without joining what was made with what was wanted: a
-- third less work. An id that does exist (this very start was sent before, and its answer lost) refuses the whole statement;
-- then `start` finds out. The caller sorts by run_id and sends each id once. Columns are sent as in `start`.
with input as materialized (
  select *
    from unnest($1::text::text[], $2::text::int[], $3::text::text[], $4::text::int[], $5::text::text[], $6::text::text[], $7::text::text[], $8::text::text[], $9::text::text[],
                $10::text::text[], $11::text::bigint[], $12::text::bigint[], $13::text[], $14::text::smallint[])
      as u(run_id, slot, workflow, version, source, tenant, subject, tags, trace, parent_id, seed, start_token, payload, payload_format)
), run as (
  insert into perdure_runs (run_id, slot, workflow, version, source, tenant, subject, tags, trace, parent_id, seed, start_token,
                            payload, payload_format)
  select run_id, slot, workflow, coalesce(version, 1), coalesce(source, 'app'), tenant, subject, tags, trace, parent_id, seed,
         start_token, payload, coalesce(payload_format, 1)
    from input
), fence as (
  insert into perdure_fences (run_id, slot, workflow, version) select run_id, slot, workflow, coalesce(version, 1) from input
)  -- clock_timestamp(): low-water marks of scans rely on due times being no older than their statement
insert into perdure_wakes (run_id, slot, wake_at) select run_id, slot, clock_timestamp() from input;
