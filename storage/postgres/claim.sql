-- name: claim
-- Take due runs of my shards, and orphans where $8; mark as strays those whose workflow I do not know (R15). Nothing waits
-- for a row lock. BETWEEN and OFFSET 0: see commit.
--   $1 me  $2 shards, in the order to look into them  $3 their epochs  $4 workflows I know  $5 claims in my memory
--   $6 most candidates per bucket  $7 fresh random claim ids, as many as runs wanted  $8 orphans too
--   $9 seconds ahead of time  $10 low-water mark or null  $11 seconds by which it has to be past
--   $12 places for suspects, runs that fell with a runner before and have written nothing since
-- Where no run is wanted ($7 empty) only those are looked at whose workflow I do not know: a backlog hides none of them.
-- One line always comes back: the database's clock, whether I am alive, what was left; then the runs.
with mine as materialized (  -- a line for each bucket of 256 slots of each shard that is still mine
  select m.place, greatest(s.slot_lo, b.n << 8) as slot_lo, least(s.slot_hi, (b.n << 8) + 255) as slot_hi, s.epoch
    from unnest($2::text::int[], $3::text::bigint[]) with ordinality as m(shard_id, epoch, place)
    join perdure_shards s on s.shard_id = m.shard_id and s.epoch = m.epoch and s.runner_id = $1
   cross join lateral generate_series(s.slot_lo >> 8, s.slot_hi >> 8) as b(n)
   where exists (select 1 from perdure_runners r where r.runner_id = $1 and not r.dead)
   order by m.place, b.n
), found as materialized (  -- read only as far as `picked` asks
  select o.run_id, o.claim_id, o.known, o.suspect, m.epoch, m.slot_lo
    from mine m
   cross join lateral (
     select f.run_id, f.claim_id, f.workflow = any($4::text[]) as known, f.reclaim_count > 0 as suspect
       from perdure_fences f
      where f.slot between m.slot_lo and m.slot_hi and f.status = 'running' and f.claim_id <> all($5::bigint[])
        and f.epoch <= m.epoch
        and (f.runner_id = $1 or exists (select 1 from perdure_runners r where r.runner_id = f.runner_id and r.dead))
        and case when f.workflow = any($4::text[]) then cardinality($7::bigint[]) > 0 and (f.reclaim_count = 0 or $12::int > 0)
                 else (select w.stray_revision is distinct from f.revision from perdure_wakes w where w.run_id = f.run_id) end
      limit $6) o
   where $8::boolean
  union all
  select d.run_id, d.claim_id, d.known, d.suspect, m.epoch, m.slot_lo
    from mine m
   cross join lateral (
     select w.run_id, f.claim_id, f.workflow = any($4::text[]) as known, f.reclaim_count > 0 as suspect
       from perdure_wakes w
      cross join lateral (
        select claim_id, status, workflow, epoch, reclaim_count from perdure_fences where run_id = w.run_id offset 0) f
      where w.slot >> 8 = m.slot_lo >> 8 and w.slot between m.slot_lo and m.slot_hi
        and w.wake_at is not null and w.wake_at <= now() + $9::float8 * interval '1 second'
        and w.wake_at >= case when $10::timestamptz is null then '-infinity'
                              else least($10::timestamptz, now() - $11::float8 * interval '1 second') end
        and w.hold is null
        and f.status in ('pending', 'suspended') and f.epoch <= m.epoch
        and (cardinality($7::bigint[]) > 0 and (f.reclaim_count = 0 or $12::int > 0) or f.workflow <> all($4::text[]))
      order by w.wake_at limit $6) d
), picked as materialized (  -- one more than wanted, to know whether there is more
  select p.*, row_number() over () as place
    from (select * from found limit greatest(cardinality($7::bigint[]), 50) + 1) p
), chosen as materialized (  -- of suspects as many as have a place
  select c.*, row_number() over (order by place) as turn
    from (select p.*, count(*) filter (where suspect) over (order by place) as suspects from picked p where known) c
   where not suspect or suspects <= $12::int
), fl as materialized (  -- the predicate again: SKIP LOCKED evaluates it anew on the newest version of f. A run that
  -- another claim has got meanwhile is left alone, also if that is mine and newer than $5
  select c.run_id, f.status, f.runner_id, c.epoch
    from (select * from chosen where turn <= cardinality($7::bigint[]) order by run_id) c
   cross join lateral (
     select f.status, f.runner_id from perdure_fences f
      where f.run_id = c.run_id and f.workflow = any($4::text[]) and f.epoch <= c.epoch
        and f.claim_id is not distinct from c.claim_id
        and (f.status in ('pending', 'suspended')
             or f.status = 'running' and f.claim_id <> all($5::bigint[])
                and (f.runner_id = $1 or exists (select 1 from perdure_runners r where r.runner_id = f.runner_id and r.dead)))
        for no key update of f skip locked) f
), wl as materialized (
  select fl.*, w.wake_at, w.wake_seq, w.hold
    from fl
   cross join lateral (
     select w.wake_at, w.wake_seq, w.hold from perdure_wakes w where w.run_id = fl.run_id for no key update skip locked) w
), got as materialized (  -- by the newest wake row: a run that parked for later meanwhile stays parked
  select wl.*, ($7::bigint[])[row_number() over (order by run_id)] as claim_id,
         status = 'running' and runner_id is distinct from $1 as taken_over
    from wl
   where hold is null and (status in ('pending', 'running') or wake_at <= now() + $9::float8 * interval '1 second')
), upd as (
  update perdure_fences f
     set claim_id = g.claim_id, epoch = g.epoch, revision = f.revision + 1, runner_id = $1, status = 'running', reason = null,
         entered_at = coalesce(f.entered_at, now()), claimed_at = now(), reclaim_count = f.reclaim_count + g.taken_over::int
    from got g
   where f.run_id between g.run_id and g.run_id
  returning f.run_id, f.claim_id, f.epoch, f.revision, f.last_batch, f.next_seq, f.entered_at, f.reclaim_count, g.wake_seq,
            g.taken_over
), wk as (
  update perdure_wakes w set wake_at = null, stray = null, stray_revision = null, stray_since = null from got g
   where w.run_id between g.run_id and g.run_id
     and (w.wake_at <= now() + $9::float8 * interval '1 second' or w.stray is not null)
), ul as materialized (  -- those I do not know: locked like a claim's, since a mark is for the revision it was made at
  select c.run_id, f.workflow, f.revision, f.status
    from (select * from picked where not known order by run_id) c
   cross join lateral (
     select f.workflow, f.revision, f.status from perdure_fences f
      where f.run_id = c.run_id and c.claim_id is not distinct from f.claim_id
        and (f.status in ('pending', 'suspended')
             or f.status = 'running'
                and (f.runner_id = $1 or exists (select 1 from perdure_runners r where r.runner_id = f.runner_id and r.dead)))
        for no key update of f skip locked) f
), um as materialized (
  select ul.*, case when w.stray_revision = ul.revision then w.stray_since else now() end as since
    from ul
   cross join lateral (
     select w.wake_at, w.hold, w.stray_revision, w.stray_since from perdure_wakes w
      where w.run_id = ul.run_id for no key update skip locked) w
   where w.hold is null and (ul.status = 'running' or w.wake_at <= now() + $9::float8 * interval '1 second')
), marked as (  -- out of the way of claims, the longer the longer nobody has taken it; spread, since many may have come at once
  update perdure_wakes w
     set stray = m.workflow, stray_revision = m.revision, stray_since = m.since,
         wake_at = case when m.status = 'running' then w.wake_at
                        else now() + least(greatest(4 * (now() - m.since), interval '60 s'), interval '1 hour')
                                     * (0.5 + w.slot % 256 / 256.0) end
    from um m
   where w.run_id between m.run_id and m.run_id
  returning w.stray
)
select now() as db_now, head.*, u.*,
       r.slot, r.workflow, r.version, r.payload, r.payload_format, r.seed, r.created_at, r.source, r.parent_id, r.trace,
       r.tenant
  from (select h.alive, h.full as more, h.suspects_left, h.strays, not h.full and h.candidates = h.settled as complete
          from (select exists (select 1 from perdure_runners r where r.runner_id = $1 and not r.dead) as alive,
                       (select count(*) from picked) > greatest(cardinality($7::bigint[]), 50)
                         or (select count(*) from chosen) > cardinality($7::bigint[])
                         or exists (select 1 from picked group by slot_lo having count(*) >= $6) as full,
                       (select count(*) from picked where known) > (select count(*) from chosen) as suspects_left,
                       (select count(*) from chosen) + (select count(*) from picked where not known) as candidates,
                       (select count(*) from upd) + (select count(*) from marked) as settled,
                       (select array_agg(distinct stray) from marked) as strays) h) head
  left join (upd u cross join lateral (select * from perdure_runs where run_id = u.run_id offset 0) r) on true;
