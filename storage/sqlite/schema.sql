-- The tables of perdure on SQLite, schema version 1; the same as on PostgreSQL, see there for what they mean.
-- Statements end with a semicolon at the end of a line. Frozen: what a later version adds is in `schema_2.sql` and so on,
-- executed after this one (R16).
--
-- Instants are whole microseconds since 1970, truth values 0 and 1, lists and maps JSON text. The views show instants
-- as text (UTC). Text compares byte for byte, which is SQLite's own rule.

create table perdure_meta (
  key text primary key,
  value text
) without rowid;

create table perdure_runs (
  run_id text primary key not null,
  slot integer not null,
  workflow text not null,
  version integer not null default 1,
  patches text,
  status text not null default 'open',  -- 'open' while there is a fence row, whose status then counts
  reason text,
  source text not null default 'app',
  tenant text,
  subject text,
  tags text,
  trace text,
  parent_id text,
  parent_close text,
  seed integer not null,
  generation integer not null default 0,
  created_at integer not null,
  started_at integer,
  finished_at integer,
  discarded_at integer,
  payload text not null,
  payload_codec text,
  payload_format integer not null default 1,
  result text,
  result_codec text,
  result_format integer,
  error text,
  error_type text,
  error_message text,
  start_token integer not null,
  last_claim integer,
  last_batch integer,
  last_revision integer
);
create index perdure_runs_by_workflow on perdure_runs (workflow, status, created_at);
create index perdure_runs_by_status on perdure_runs (status, created_at);
create index perdure_runs_by_age on perdure_runs (created_at);
create index perdure_runs_by_tenant on perdure_runs (tenant, created_at) where tenant is not null;
create index perdure_runs_by_parent on perdure_runs (parent_id) where parent_id is not null;
create index perdure_runs_by_end on perdure_runs (finished_at) where finished_at is not null;

create table perdure_fences (
  run_id text primary key not null,
  slot integer not null,
  workflow text not null,
  version integer not null default 1,
  status text not null default 'pending',
  reason text,
  claim_id integer,  -- NULL: nobody has it
  epoch integer not null default 0,
  revision integer not null default 0,
  runner_id integer,
  last_batch integer,
  next_seq integer not null default 1,
  entered_at integer,  -- entry 0 of the journal: when the body was first entered
  claimed_at integer,
  reclaim_count integer not null default 0,  -- involuntary changes of claim since the last entry
  generation integer not null default 0,
  pinned integer not null default 0
) without rowid;
create index perdure_fences_running on perdure_fences (slot) where status = 'running';

create table perdure_wakes (
  run_id text primary key not null,
  slot integer not null,
  wake_at integer,  -- NULL: not due by itself, on hold, or claimed
  wake_seq integer not null default 0,
  hold text  -- why no user code may run until an operator acts
) without rowid;
create index perdure_wakes_due on perdure_wakes (slot >> 8, wake_at) where wake_at is not null;

create table perdure_steps (
  run_id text not null,
  seq integer not null,
  step_key text not null,
  parent_key text,  -- of the step around a nested step
  kind text not null,
  attempt integer not null default 1,
  status text not null,
  input_hash integer,
  input text,
  output text,
  error text,
  codec text,
  format integer not null default 1,
  generation integer not null default 0,
  superseded_by integer,  -- seq of the redrive that took this entry out of force
  claim_id integer not null,  -- who wrote it: evidence for checkers
  at integer not null,  -- run time of the delivery (R14)
  started_at integer,
  finished_at integer not null,
  primary key (run_id, seq)
) without rowid;

create table perdure_messages (
  run_id text not null,
  message_id text not null,
  wake_seq integer not null,  -- order of arrival
  kind text not null,
  name text not null default '',
  body text,
  codec text,
  format integer not null default 1,
  generation integer not null default 0,
  sent_at integer not null,
  consumed_seq integer,  -- the entry that took it; the row stays, without its body, so that its id is known
  primary key (run_id, message_id)
) without rowid;
create index perdure_messages_open on perdure_messages (run_id, wake_seq) where consumed_seq is null;

create table perdure_run_events (
  event_id integer primary key,
  run_id text not null,
  type text not null,
  at integer not null,
  detail text,
  generation integer not null default 0
);
create index perdure_run_events_by_run on perdure_run_events (run_id, event_id);

create table perdure_runners (
  runner_id integer primary key,
  replica_id text not null,
  address text not null,
  started_at integer not null,
  expires_at integer not null,
  renew_count integer not null default 0,
  dead integer not null default 0,
  draining integer not null default 0,
  workflows text not null default '[]',  -- JSON array of the names it knows
  placement_version integer not null default 1,
  info text not null default '{}'  -- JSON object, facts of its boot line
);

create table perdure_shards (
  shard_id integer primary key,
  slot_lo integer not null,
  slot_hi integer not null,
  runner_id integer,
  epoch integer not null default 0
);

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
       r.error_type, r.error_message
  from perdure_runs r
  left join perdure_fences f on f.run_id = r.run_id
  left join perdure_wakes w on w.run_id = r.run_id;

create view perdure_step_list as
select run_id, seq,
       case when tail glob '*#[0-9]*' then substr(tail, 1, length(rtrim(tail, '0123456789')) - 1) end as step_name,
       step_key, kind, attempt, status,
       strftime('%Y-%m-%d %H:%M:%S', started_at / 1000000, 'unixepoch') || printf('.%06dZ', started_at % 1000000) as started_at,
       strftime('%Y-%m-%d %H:%M:%S', finished_at / 1000000, 'unixepoch') || printf('.%06dZ', finished_at % 1000000) as finished_at,
       (finished_at - started_at) / 1000.0 as duration_ms,
       case when kind = 'attempt' then strftime('%Y-%m-%d %H:%M:%S', output / 1000000, 'unixepoch') || printf('.%06dZ', output % 1000000) end
         as next_retry_at,
       input, output, error, superseded_by, generation
  from (select *, replace(step_key, rtrim(step_key, replace(step_key, '/', '')), '') as tail  -- after the last "/"
          from perdure_steps);

-- What happened to a run, by time. Events that rows of other tables already say are read from there.
create view perdure_run_timeline as
select run_id, strftime('%Y-%m-%d %H:%M:%S', at / 1000000, 'unixepoch') || printf('.%06dZ', at % 1000000) as at,
       type, detail, seq, event_id
  from (
    select run_id, at, type, detail, null as seq, event_id from perdure_run_events
    union all
    select r.run_id, coalesce(r.started_at, f.entered_at), 'run-started', null, 0, 0
      from perdure_runs r left join perdure_fences f on f.run_id = r.run_id
     where r.started_at is not null or f.entered_at is not null
    union all
    select run_id, finished_at, 'run-' || status, coalesce(error_message, reason), null, null
      from perdure_runs where finished_at is not null
    union all
    select run_id, at, case kind when 'timer' then 'timer-fired' else 'signal-received' end, step_key, seq, null
      from perdure_steps where kind in ('timer', 'signal')
    union all
    select run_id, sent_at, 'signal-sent', name, consumed_seq, null from perdure_messages where kind = 'signal'
    union all  -- the mailbox is deleted with the end of the run; its journal keeps when a message was sent
    select s.run_id, s.started_at, 'signal-sent', s.step_key, s.seq, null from perdure_steps s
     where s.kind = 'signal' and s.started_at is not null
       and not exists (select 1 from perdure_messages m where m.run_id = s.run_id and m.consumed_seq = s.seq)
  );
