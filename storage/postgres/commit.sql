-- name: commit
-- Steps, parks and finishes of many runs, each applied whole or not at all behind its fence (R1). Nothing waits for a
-- lock on fence or wake row: a member whose rows are locked is set aside. A finish waits for its cold row, which nobody
-- of ours keeps locked. Only after such a wait was in vain are the lines marked `careful` taken: they lock that row first, too, which
-- costs each finish one more look-up and one more write. LATERAL look-ups keep index access and id order whatever the
-- planner believes; no two sets of batch size are joined by anything but hashing. Targets are found by BETWEEN x AND x: an
-- equality could as well be met by reading the whole index once and comparing, which looks as cheap to a planner whose
-- statistics are of a moment when the table was all but empty, and is quadratic when it is not. (OFFSET 0 does that for
-- look-ups without a lock.)
-- A column whose values are all the usual ones is sent empty: unnest fills it up with nulls. Columns of short values are sent
-- as one text each (`literals`).
--   $1 me  $2 batch
--   members, sorted by run_id: $3 run  $4 claim  $5 revision  $6 seq of its first entry or null  $7 number of entries
--   entries: $8 run  $9 seq  $10 key  $11 kind  $12 attempt  $13 status  $14 input hash  $15 input  $16 output  $17 error
--     $18 at  $19 started_at, as seconds since 1970  $20 format
--   outcomes of the members: $21 null, 'park' or 'finish'  $22 reason  $23 finish: status  $24 result  $25 error  $26 error_type
--     $27 error_message  $28 format of results
--   $29 parent  $30 park: wake_at  $31 park: seen  $32 park: is a hold that nothing refuses
--   consumed messages: $33 run  $34 message  $35 seq of the entry
--   events: $36 run  $37 type  $38 at  $39 detail
-- One line comes back: whether I am alive, the members that were not applied, the parks that were refused.
-- To set up all of it takes the server longer than a step, and 17 locks of tables and indexes. So there are three variants, each of
-- the lines under a mark that names it: `steps` of batches of nothing but entries ($1 to $20, 7 locks), `ends` where some runs finish,
-- no child among them ($1 to $28), `whole`. `careful` is taken together with `whole`.
with batch as materialized (
--: steps
  select * from unnest($3::text::text[], $4::text::bigint[], $5::text::bigint[], $6::text::bigint[], $7::text::int[])
    as b(run_id, claim_id, revision, first_seq, entries)
--: ends
  select * from unnest($3::text::text[], $4::text::bigint[], $5::text::bigint[], $6::text::bigint[], $7::text::int[], $21::text::text[],
                       $22::text::text[], $23::text::text[], $24::text[], $25::text[], $26::text::text[], $27::text[])
    as b(run_id, claim_id, revision, first_seq, entries, outcome, reason, final, result, error, error_type, error_message)
--: whole
  select * from unnest($3::text::text[], $4::text::bigint[], $5::text::bigint[], $6::text::bigint[], $7::text::int[], $21::text::text[],
                       $22::text::text[], $23::text::text[], $24::text[], $25::text[], $26::text::text[], $27::text[], $29::text::text[],
                       $30::timestamptz[], $31::text::bigint[], $32::text::boolean[])
    as b(run_id, claim_id, revision, first_seq, entries, outcome, reason, final, result, error, error_type, error_message,
         parent_id, wake_at, seen, hold)
--: steps ends whole
   where exists (select 1 from perdure_runners r where r.runner_id = $1 and not r.dead)
), fl as materialized (  -- the fence
  select b.*, f.entered_at
    from batch b
   cross join lateral (
     select f.entered_at from perdure_fences f
      where f.run_id = b.run_id and f.claim_id = b.claim_id and f.revision = b.revision
        and f.next_seq = coalesce(b.first_seq, f.next_seq)
        for no key update skip locked) f
--: steps
), done as materialized (
  select * from fl
--: ends
), wl as materialized (  -- finishes: the own wake row
  select f.*, o.mine, o.wake_seq
    from fl f
    left join lateral (
      select true as mine, w.wake_seq from perdure_wakes w
       where f.outcome is not null and w.run_id = f.run_id for no key update skip locked) o on true
), done as materialized (  -- set aside are those whose wake row is locked, and those over mail that came after this statement's snapshot
  select * from wl l
   where l.outcome is null
      or (l.mine and l.wake_seq = (select w.wake_seq from perdure_wakes w where w.run_id = l.run_id))
--: whole
), wl as materialized (  -- parks and finishes: the own wake row; a child's finish: its parent's too
  select f.*, o.mine, o.wake_seq, p.theirs, p.parent_seq
--: careful
         , c.cold
--: whole
    from fl f
    left join lateral (
      select true as mine, w.wake_seq from perdure_wakes w
       where f.outcome is not null and w.run_id = f.run_id for no key update skip locked) o on true
    left join lateral (
      select true as theirs, w.wake_seq as parent_seq from perdure_wakes w
       where f.outcome = 'finish' and w.run_id = f.parent_id for no key update skip locked) p on true
--: careful
    left join lateral (
      select true as cold from perdure_runs r
       where f.outcome = 'finish' and r.run_id = f.run_id for no key update skip locked) c on true
--: whole
), ok as materialized (  -- a finish or a hold whose wake row is locked is set aside whole; so is a finish over mail that came after
  -- this statement's snapshot, which would stay behind; no parent wake row: the parent has ended
  select * from wl l
   where l.outcome is null or (l.outcome = 'park' and not l.hold)
      or (l.mine and (l.hold or l.wake_seq = (select w.wake_seq from perdure_wakes w where w.run_id = l.run_id))
          and (l.parent_id is null or l.theirs or not exists (select 1 from perdure_wakes p where p.run_id = l.parent_id))
--: careful
          and (l.hold or l.cold)
--: whole
         )
), note as materialized (
  select parent_id as run_id, run_id as child, final, coalesce(result, error) as body,
         parent_seq + row_number() over (partition by parent_id order by run_id) as wake_seq
    from ok where theirs and parent_id not in (select run_id from ok where outcome = 'finish')
), bumped as materialized (
  select run_id, count(*) as n from note group by run_id
), done as materialized (  -- a park is refused if a message came after `seen` or its wake row is locked; a forced hold never is
  select o.*, o.outcome is not distinct from 'park'
              and (o.hold or coalesce(o.wake_seq = o.seen and o.run_id not in (select run_id from bumped), false)) as parked
    from ok o
--: steps ends whole
), upd as (
  update perdure_fences f
     set revision = f.revision + 1, next_seq = f.next_seq + d.entries, last_batch = $2,
         reclaim_count = case when d.entries > 0 then 0 else f.reclaim_count end
--: whole
       , status = case when d.parked then 'suspended' else f.status end, reason = case when d.parked then d.reason else f.reason end,
         claim_id = case when d.parked then null else f.claim_id end, runner_id = case when d.parked then null else f.runner_id end
--: steps ends whole
    from done d
   where f.run_id between d.run_id and d.run_id
--: ends whole
     and d.outcome is distinct from 'finish'
--: whole
), wk as (  -- one write per row: a statement cannot write a row twice
  update perdure_wakes w
     set wake_seq = w.wake_seq + x.n, hold = coalesce(x.hold, w.hold),
         wake_at = case when coalesce(x.hold, w.hold) is not null then null
                        when x.parked then case when x.wake_at < clock_timestamp() then clock_timestamp() else x.wake_at end  -- low-water marks
                        else least(w.wake_at, clock_timestamp()) end
    from (select run_id, sum(n) as n, max(wake_at) as wake_at, max(hold) as hold, bool_or(parked) as parked
            from (select run_id, 0 as n, wake_at, case when hold or reason = 'operator' then reason end as hold, true as parked from done where parked
                  union all
                  select run_id, n, null, null, false from bumped) each_one
           group by run_id) x
   where w.run_id between x.run_id and x.run_id
--: steps ends whole
), journal as (
  insert into perdure_steps (run_id, seq, step_key, kind, attempt, status, input_hash, input, output, error, at, started_at, format, claim_id)
  select u.run_id, u.seq, u.step_key, coalesce(u.kind, 'step'), coalesce(u.attempt, 1), coalesce(u.status, 'ok'), u.input_hash, u.input,
         u.output, u.error, to_timestamp(u.at), to_timestamp(u.started_at), coalesce(u.format, 1), d.claim_id
    from unnest($8::text::text[], $9::text::bigint[], $10::text::text[], $11::text::text[], $12::text::int[], $13::text::text[], $14::text::bigint[], $15::text[], $16::text[],
                $17::text[], $18::text::float8[], $19::text::float8[], $20::text::smallint[])
      as u(run_id, seq, step_key, kind, attempt, status, input_hash, input, output, error, at, started_at, format)
    join done d on d.run_id = u.run_id
--: whole
), consumed as (
  update perdure_messages m set consumed_seq = u.seq, body = null
    from unnest($33::text::text[], $34::text::text[], $35::text::bigint[]) as u(run_id, message_id, seq)
    join done d on d.run_id = u.run_id
   where d.outcome is distinct from 'finish' and m.run_id between u.run_id and u.run_id and m.message_id = u.message_id
), event as (
  insert into perdure_run_events (run_id, type, at, detail)
  select u.* from unnest($36::text::text[], $37::text::text[], $38::timestamptz[], $39::text[]) as u(run_id, type, at, detail)
    join done d on d.run_id = u.run_id
), tell as (
  insert into perdure_messages (run_id, message_id, wake_seq, kind, name, body)
  select run_id, 'child:' || child, wake_seq, 'child', final, body from note
  on conflict (run_id, message_id) do nothing
--: ends whole
), fin as (
  update perdure_runs r
     set status = d.final, result = d.result, result_format = case when d.result is not null then $28::smallint end,
         error = d.error, error_type = d.error_type, error_message = d.error_message, reason = d.reason,
         started_at = d.entered_at, finished_at = now(), last_claim = d.claim_id, last_batch = $2, last_revision = d.revision + 1
    from done d
   where r.run_id between d.run_id and d.run_id and d.outcome = 'finish'
), df as (
  delete from perdure_fences f using done d where f.run_id between d.run_id and d.run_id and d.outcome = 'finish'
), dw as (
  delete from perdure_wakes w using done d where w.run_id between d.run_id and d.run_id and d.outcome = 'finish'
), dm as (
  delete from perdure_messages m using done d where m.run_id between d.run_id and d.run_id and d.outcome = 'finish'
--: steps ends whole
)
select exists (select 1 from perdure_runners r where r.runner_id = $1 and not r.dead) as alive,
       (select array_agg(run_id) from batch where run_id not in (select run_id from done)) as missing,
--: steps ends
       null::text[] as refused
--: whole
       (select array_agg(run_id) from done where outcome = 'park' and not parked) as refused
