-- One line per claim of a run and per committed step; nobody can change or delete a line.
begin immediate;

create table demo_history (
  id integer primary key autoincrement, what text not null, run_id text not null,
  claim_id bigint, runner_id bigint, step_key text, attempt integer);

create trigger demo_commit after insert on perdure_steps when new.kind = 'step' begin
  insert into demo_history (what, run_id, claim_id, step_key, attempt)
  values ('commit', new.run_id, new.claim_id, new.step_key, new.attempt);
end;

create trigger demo_claim after update on perdure_fences
when new.claim_id is not null and new.claim_id is not old.claim_id begin
  insert into demo_history (what, run_id, claim_id, runner_id)
  values ('claim', new.run_id, new.claim_id, new.runner_id);
end;

create trigger demo_no_update before update on demo_history begin
  select raise(abort, 'append only');
end;

create trigger demo_no_delete before delete on demo_history begin
  select raise(abort, 'append only');
end;

commit;
