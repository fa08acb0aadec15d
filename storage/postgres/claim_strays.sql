-- name: claim_strays
-- Take strays of workflows I know, in whatever shard, under that shard's epoch (R15); where $7, also what is running under
-- me and not in my memory. Nothing waits for a row lock. BETWEEN and OFFSET 0: see commit.
--   $1 me  $2 workflows I know  $3 claims in my memory  $4 fresh random claim ids, as many as runs wanted
--   $5 places for suspects  $6 the slot to begin at  $7 lost ones too
-- One line always comes back, as from claim; then the runs.
with found as materialized (  -- read only as far as `picked` asks
  select l.run_id, l.slot, l.claim_id, false as suspect
    from (select f.run_id, f.slot, f.claim_id from perdure_fences f
           where $7::boolean and f.slot >= 0 and f.status = 'running' and f.runner_id = $1
             and f.claim_id <> all($3::bigint[]) and f.workflow = any($2::text[])
           limit cardinality($4::bigint[]) + 1) l
  union all
  select s.*
    from unnest($2::text[]) as k(workflow)
   cross join (values ($6::int, 2147483647), (0, $6::int - 1)) as part(lo, hi)
   cross join lateral (
     select w.run_id, w.slot, f.claim_id, f.reclaim_count > 0 as suspect
       from perdure_wakes w
      cross join lateral (
        select claim_id, status, revision, runner_id, reclaim_count from perdure_fences where run_id = w.run_id offset 0) f
      where w.stray = k.workflow and w.slot between part.lo and part.hi and w.stray_revision = f.revision and w.hold is null
        and (f.reclaim_count = 0 or $5::int > 0)
        and (f.status in ('pending', 'suspended')
             or exists (select 1 from perdure_runners r where r.runner_id = f.runner_id and r.dead))
      order by w.slot limit cardinality($4::bigint[]) + 1) s
), picked as materialized (
  select p.*, row_number() over () as place
    from (select * from found where exists (select 1 from perdure_runners r where r.runner_id = $1 and not r.dead)
           limit cardinality($4::bigint[]) + 1) p
), chosen as materialized (
  select c.*, row_number() over (order by place) as turn
    from (select p.*, count(*) filter (where suspect) over (order by place) as suspects from picked p) c
   where not suspect or suspects <= $5::int
), fl as materialized (  -- the predicate again, on the newest version: another lender may have come first
  select c.run_id, f.status, f.runner_id, f.revision, s.epoch
    from (select * from chosen where turn <= cardinality($4::bigint[]) order by run_id) c
   cross join lateral (  -- found by arithmetic, and by looking should the shards ever be cut in another way
     select coalesce((select s.epoch from perdure_shards s
                       where s.shard_id = ((c.slot + 1)::bigint * (select max(x.shard_id) + 1 from perdure_shards x) - 1) / 65536
                         and c.slot between s.slot_lo and s.slot_hi),
                     (select s.epoch from perdure_shards s where c.slot between s.slot_lo and s.slot_hi limit 1)) as epoch offset 0) s
   cross join lateral (
     select f.status, f.runner_id, f.revision from perdure_fences f
      where f.run_id = c.run_id and f.workflow = any($2::text[]) and f.epoch <= s.epoch
        and f.claim_id is not distinct from c.claim_id
        and (f.status in ('pending', 'suspended')
             or f.status = 'running'
                and (f.runner_id = $1 or exists (select 1 from perdure_runners r where r.runner_id = f.runner_id and r.dead)))
        for no key update of f skip locked) f
), wl as materialized (
  select fl.*, w.wake_seq, w.stray_revision, w.hold
    from fl
   cross join lateral (
     select w.wake_seq, w.stray_revision, w.hold from perdure_wakes w where w.run_id = fl.run_id for no key update skip locked) w
), got as materialized (  -- by the newest wake row: a mark that no longer counts is nobody's invitation
  select wl.*, ($4::bigint[])[row_number() over (order by run_id)] as claim_id,
         status = 'running' and runner_id is distinct from $1 as taken_over
    from wl
   where hold is null and (stray_revision = revision or status = 'running' and runner_id = $1)
), upd as (
  update perdure_fences f
     set claim_id = g.claim_id, epoch = g.epoch, revision = f.revision + 1, runner_id = $1, status = 'running', reason = null,
         entered_at = coalesce(f.entered_at, now()), claimed_at = now(), reclaim_count = f.reclaim_count + g.taken_over::int
    from got g
   where f.run_id between g.run_id and g.run_id
  returning f.run_id, f.claim_id, f.epoch, f.revision, f.next_seq, f.entered_at, f.reclaim_count, f.last_batch, g.wake_seq, g.taken_over
), wk as (
  update perdure_wakes w set wake_at = null, stray = null, stray_revision = null, stray_since = null from got g
   where w.run_id between g.run_id and g.run_id
)
select now() as db_now, head.*, u.*,
       r.slot, r.workflow, r.version, r.payload, r.payload_format, r.seed, r.created_at, r.source, r.parent_id, r.trace,
       r.tenant
  from (select exists (select 1 from perdure_runners r where r.runner_id = $1 and not r.dead) as alive,
               (select count(*) from chosen) > cardinality($4::bigint[]) as more,
               (select count(*) from picked) > (select count(*) from chosen) as suspects_left,
               false as complete, null::text[] as strays) head
  left join (upd u cross join lateral (select * from perdure_runs where run_id = u.run_id offset 0) r) on true;
