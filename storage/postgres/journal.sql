-- name: journal
-- A page of journals: run after run in the order given, what fits, one entry at least. Texts that do not fit stay where
-- they are stored.
--   $1 runs  $2 seqs to read after  $3 bytes  $4 most entries
with found as materialized (  -- read only as far as the limit
  select i.place, s.run_id, s.seq, s.kind, s.step_key, s.at, s.status, s.attempt, s.input_hash, s.input, s.output, s.error,
         s.started_at, s.format,
         200 + coalesce(octet_length(s.input), 0) + coalesce(octet_length(s.output), 0) + coalesce(octet_length(s.error), 0) as bytes
    from unnest($1::text[], $2::bigint[]) with ordinality as i(run_id, after, place)
   cross join lateral (
     select * from perdure_steps where run_id = i.run_id and seq > i.after and superseded_by is null order by seq limit $4) s
   limit $4
), sized as (
  select *, sum(bytes) over (order by place, seq) as total, count(*) over () as found from found
)
select run_id, seq, kind, step_key, at, status, attempt, input_hash, input, output, error, started_at, format, found
  from sized where total - bytes < $3::bigint order by place, seq;
