-- What schema version 2 adds on SQLite; the same as on PostgreSQL, see there for what it means.

alter table perdure_wakes add column stray text;
alter table perdure_wakes add column stray_revision integer;
alter table perdure_wakes add column stray_since integer;
create index perdure_wakes_stray on perdure_wakes (stray, slot) where stray is not null;

drop view perdure_run_list;
create view perdure_run_list as
select r.run_id, r.workflow, r.version, coalesce(f.status, r.status) as status, coalesce(f.reason, r.reason) as reason,
       strftime('%Y-%m-%d %H:%M:%S', w.wake_at / 1000000, 'unixepoch') || printf('.%06dZ', w.wake_at % 1000000) as wake_at,
       w.hold, f.runner_id, f.claim_id, f.epoch, coalesce(f.reclaim_count, 0) as reclaim_count, f.next_seq,
       r.slot, r.source, r.tenant, r.subject, r.tags, r.trace, r.parent_id, r.patches, r.generation,
       strftime('%Y-%m-%d %H:%M:%S', r.created_at / 1000000, 'unixepoch') || printf('.%06dZ', r.created_at % 1000000) as created_at,
       strftime('%Y-%m-%d %H:%M:%S', coalesce(f.entered_at, r.started_at) / 1000000, 'unixepoch')
         || printf('.%06dZ', coalesce(f.entered_at, r.started_at) % 1000000) as started_at,
       strftime('%Y-%m-%d %H:%M:%S', r.finished_at / 1000000, 'unixepoch') || printf('.%06dZ', r.finished_at % 1000000) as finished_at,
       strftime('%Y-%m-%d %H:%M:%S', r.discarded_at / 1000000, 'unixepoch') || printf('.%06dZ', r.discarded_at % 1000000) as discarded_at,
       r.error_type, r.error_message,
       case when w.stray_revision = f.revision then w.stray end as stray
  from perdure_runs r
  left join perdure_fences f on f.run_id = r.run_id
  left join perdure_wakes w on w.run_id = r.run_id;
