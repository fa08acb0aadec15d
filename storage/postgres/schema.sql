-- The tables of perdure on PostgreSQL, schema version 1. Statements end with a semicolon at the end of a line.
-- Frozen: what a later version adds is in `schema_2.sql` and so on, executed after this one (R16).
--
-- Three rows describe a live run. `runs` is cold: written at start and finish. `fences` is hot and written by the
-- run's holder only (R1). `wakes` is hot and written by whoever wakes the run (R6). The two hot rows are deleted when
-- the run ends, so a run without a fence row has ended. Ids compare byte for byte: collate "C".
-- Payload columns are text with a codec (NULL: JSON) and the format number of the code that wrote them (R16).

create table perdure_meta (
  key text collate "C" primary key,
  value text
);

create table perdure_runs (
  run_id text collate "C" primary key,
  slot int not null,
  workflow text collate "C" not null,
  version int not null default 1,
  patches text,
  status text collate "C" not null default 'open',  -- 'open' while there is a fence row, whose status then counts
  reason text,
  source text collate "C" not null default 'app',
  tenant text collate "C",
  subject text,
  tags text,
  trace text,
  parent_id text collate "C",
  parent_close text,
  seed bigint not null,
  generation int not null default 0,
  created_at timestamptz not null default now(),
  started_at timestamptz,
  finished_at timestamptz,
  discarded_at timestamptz,
  payload text not null,
  payload_codec text,
  payload_format smallint not null default 1,
  result text,
  result_codec text,
  result_format smallint,
  error text,
  error_type text,
  error_message text,
  start_token bigint not null,
  last_claim bigint,
  last_batch bigint,
  last_revision bigint
) with (autovacuum_vacuum_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05);
create index perdure_runs_by_workflow on perdure_runs (workflow, status, created_at);
create index perdure_runs_by_status on perdure_runs (status, created_at);
create index perdure_runs_by_age on perdure_runs (created_at);
create index perdure_runs_by_tenant on perdure_runs (tenant, created_at) where tenant is not null;
create index perdure_runs_by_parent on perdure_runs (parent_id) where parent_id is not null;
create index perdure_runs_by_end on perdure_runs (finished_at) where finished_at is not null;

create table perdure_fences (
  run_id text collate "C" primary key,
  slot int not null,
  workflow text collate "C" not null,
  version int not null default 1,
  status text collate "C" not null default 'pending',
  reason text collate "C",
  claim_id bigint,  -- NULL: nobody has it
  epoch bigint not null default 0,
  revision bigint not null default 0,
  runner_id bigint,
  last_batch bigint,
  next_seq bigint not null default 1,
  entered_at timestamptz,  -- entry 0 of the journal: when the body was first entered
  claimed_at timestamptz,
  reclaim_count smallint not null default 0,  -- involuntary changes of claim since the last entry
  generation int not null default 0,
  pinned boolean not null default false
) with (fillfactor = 60, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000, autovacuum_analyze_scale_factor = 0.05);
create index perdure_fences_running on perdure_fences (slot) where status = 'running';

create table perdure_wakes (
  run_id text collate "C" primary key,
  slot int not null,
  wake_at timestamptz,  -- NULL: not due by itself, on hold, or claimed
  wake_seq bigint not null default 0,
  hold text collate "C"  -- why no user code may run until an operator acts
) with (fillfactor = 60, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000, autovacuum_analyze_scale_factor = 0.05);
create index perdure_wakes_due on perdure_wakes ((slot >> 8), wake_at) where wake_at is not null;

create table perdure_steps (
  run_id text collate "C",
  seq bigint,
  step_key text collate "C" not null,
  parent_key text collate "C",  -- of the step around a nested step
  kind text collate "C" not null,
  attempt int not null default 1,
  status text collate "C" not null,
  input_hash bigint,
  input text,
  output text,
  error text,
  codec text,
  format smallint not null default 1,
  generation int not null default 0,
  superseded_by bigint,  -- seq of the redrive that took this entry out of force
  claim_id bigint not null,  -- who wrote it: evidence for checkers
  at timestamptz not null,  -- run time of the delivery (R14)
  started_at timestamptz,
  finished_at timestamptz not null default now(),
  primary key (run_id, seq)
);

create table perdure_messages (
  run_id text collate "C",
  message_id text collate "C",
  wake_seq bigint not null,  -- order of arrival
  kind text collate "C" not null,
  name text collate "C" not null default '',
  body text,
  codec text,
  format smallint not null default 1,
  generation int not null default 0,
  sent_at timestamptz not null default clock_timestamp(),
  consumed_seq bigint,  -- the entry that took it; the row stays, without its body, so that its id is known
  primary key (run_id, message_id)
) with (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000);
create index perdure_messages_open on perdure_messages (run_id, wake_seq) where consumed_seq is null;

create table perdure_run_events (
  run_id text collate "C",
  event_id bigint generated always as identity,
  type text collate "C" not null,
  at timestamptz not null,
  detail text,
  generation int not null default 0,
  primary key (run_id, event_id)
);

create table perdure_runners (
  runner_id bigint primary key,
  replica_id text not null,
  address text not null,
  started_at timestamptz not null default now(),
  expires_at timestamptz not null,
  renew_count bigint not null default 0,
  dead boolean not null default false,
  draining boolean not null default false,
  workflows text not null default '[]',  -- JSON array of the names it knows
  placement_version int not null default 1,
  info text not null default '{}'  -- JSON object, facts of its boot line
) with (fillfactor = 50);

create table perdure_shards (
  shard_id int primary key,
  slot_lo int not null,
  slot_hi int not null,
  runner_id bigint,
  epoch bigint not null default 0
) with (fillfactor = 50);

create view perdure_run_list as
select r.run_id, r.workflow, r.version, coalesce(f.status, r.status) as status, coalesce(f.reason, r.reason) as reason,
       w.wake_at, w.hold, f.runner_id, f.claim_id, f.epoch, coalesce(f.reclaim_count, 0) as reclaim_count, f.next_seq,
       r.slot, r.source, r.tenant, r.subject, r.tags, r.trace, r.parent_id, r.patches, r.generation, r.created_at,
       coalesce(f.entered_at, r.started_at) as started_at, r.finished_at, r.discarded_at, r.error_type, r.error_message
  from perdure_runs r
  left join perdure_fences f on f.run_id = r.run_id
  left join perdure_wakes w on w.run_id = r.run_id;

create view perdure_step_list as
select run_id, seq, substring(step_key from '([^/]*)#[0-9]+$') as step_name, step_key, kind, attempt, status, started_at, finished_at,
       extract(epoch from finished_at - started_at)::float8 * 1000 as duration_ms,
       case when kind = 'attempt' and output ~ '^[0-9]{1,18}$' then to_timestamp(output::bigint / 1000000.0) end as next_retry_at,
       input, output, error, superseded_by, generation
  from perdure_steps;

-- What happened to a run, by time. Events that rows of other tables already say are read from there.
create view perdure_run_timeline as
select run_id, at, type, detail, null::bigint as seq, event_id from perdure_run_events
union all
select run_id, coalesce(started_at, entered_at), 'run-started', null, 0, 0
  from (select r.run_id, r.started_at, f.entered_at from perdure_runs r left join perdure_fences f on f.run_id = r.run_id) entered
 where started_at is not null or entered_at is not null
union all
select run_id, finished_at, 'run-' || status, coalesce(error_message, reason), null, null from perdure_runs where finished_at is not null
union all
select run_id, at, case kind when 'timer' then 'timer-fired' else 'signal-received' end, step_key, seq, null
  from perdure_steps where kind in ('timer', 'signal')
union all
select run_id, sent_at, 'signal-sent', name, consumed_seq, null from perdure_messages where kind = 'signal'
union all  -- the mailbox is deleted with the end of the run; its journal keeps when a message was sent
select s.run_id, s.started_at, 'signal-sent', s.step_key, s.seq, null from perdure_steps s
 where s.kind = 'signal' and s.started_at is not null
   and not exists (select 1 from perdure_messages m where m.run_id = s.run_id and m.consumed_seq = s.seq);
