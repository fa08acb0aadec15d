-- name: mailbox
-- The wake row and the unread messages in one snapshot: the only source of `seen` (R6). now() is before the snapshot.
select w.run_id, w.wake_seq, now() as db_now, m.message_id, m.wake_seq as given, m.kind, m.name, m.body, m.sent_at, m.format
  from unnest($1::text[]) as i(run_id)
 cross join lateral (select run_id, wake_seq from perdure_wakes where run_id = i.run_id offset 0) w
  left join lateral (
    select * from perdure_messages where run_id = i.run_id and consumed_seq is null order by wake_seq
  ) m on true
 order by w.run_id, m.wake_seq;
