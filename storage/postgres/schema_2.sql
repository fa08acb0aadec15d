-- What schema version 2 adds on PostgreSQL. It is applied while runners of version 1 and 2 work on the same tables: all
-- of it together, under a short lock_timeout, and code of version 1 goes on without knowing of it (R16).

-- The view is locked before the table under it, in the order in which readers lock them: no deadlock.
alter view perdure_run_list alter column run_id drop default;

-- A stray run is due, but the holder of its shard does not know its workflow: another runner may have it (R15). The mark
-- counts as long as the fence has the revision beside it, so whatever a runner of version 1 does with the run ends it.
alter table perdure_wakes add column stray text collate "C", add column stray_revision bigint, add column stray_since timestamptz;
create index perdure_wakes_stray on perdure_wakes (stray, slot) where stray is not null;

create or replace view perdure_run_list as
select r.run_id, r.workflow, r.version, coalesce(f.status, r.status) as status, coalesce(f.reason, r.reason) as reason,
       w.wake_at, w.hold, f.runner_id, f.claim_id, f.epoch, coalesce(f.reclaim_count, 0) as reclaim_count, f.next_seq,
       r.slot, r.source, r.tenant, r.subject, r.tags, r.trace, r.parent_id, r.patches, r.generation, r.created_at,
       coalesce(f.entered_at, r.started_at) as started_at, r.finished_at, r.discarded_at, r.error_type, r.error_message,
       case when w.stray_revision = f.revision then w.stray end as stray
  from perdure_runs r
  left join perdure_fences f on f.run_id = r.run_id
  left join perdure_wakes w on w.run_id = r.run_id;
