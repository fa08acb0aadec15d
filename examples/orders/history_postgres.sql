-- One line per claim of a run and per committed step; nobody can change or delete a line.
create table demo_history (
  id bigserial primary key, what text not null, run_id text not null,
  claim_id bigint, runner_id bigint, step_key text, attempt integer);

create function demo_commit() returns trigger language plpgsql as $$ begin
  insert into demo_history (what, run_id, claim_id, step_key, attempt)
  values ('commit', new.run_id, new.claim_id, new.step_key, new.attempt);
  return null;
end $$;

create trigger demo_commit after insert on perdure_steps
for each row when (new.kind = 'step') execute function demo_commit();

create function demo_claim() returns trigger language plpgsql as $$ begin
  insert into demo_history (what, run_id, claim_id, runner_id)
  values ('claim', new.run_id, new.claim_id, new.runner_id);
  return null;
end $$;

create trigger demo_claim after update on perdure_fences
for each row when (new.claim_id is not null and new.claim_id is distinct from old.claim_id)
execute function demo_claim();

create function demo_refuse() returns trigger language plpgsql as $$ begin
  raise exception 'append only';
end $$;

create trigger demo_append_only before update or delete on demo_history
for each row execute function demo_refuse();
