-- name: signal
-- Store a message and bump the wake row, in the order in which senders get that row (R6). Waits for the row.
--   $1 run  $2 message  $3 kind  $4 name  $5 body  $6 format  $7 mailbox limit
--   $8 its limit in bytes
-- given null: no wake row, the run has ended or never was. stored null: a known id, or a full mailbox; nothing was bumped.
with l as materialized (  -- returns the newest version of the row
  select run_id, slot, wake_seq from perdure_wakes where run_id = $1 for no key update
), known as materialized (
  select exists (select 1 from perdure_messages where run_id = $1 and message_id = $2) as yes
), room as materialized (  -- of this statement's snapshot: senders that waited for each other may exceed it by their number
  select n < $7::bigint as yes, n >= $7::bigint or bytes + coalesce(octet_length($5::text), 0) <= $8::bigint as light
    from (select count(*) as n, coalesce(sum(octet_length(body)), 0) as bytes  -- of large texts without reading them
            from (select body from perdure_messages where run_id = $1 and consumed_seq is null limit $7) unread) mailbox
), m as (
  insert into perdure_messages (run_id, message_id, wake_seq, kind, name, body, format)
  select run_id, $2, wake_seq + 1, $3, $4, $5, $6 from l where (select yes and light from room)
  on conflict (run_id, message_id) do nothing
  returning wake_seq
), w as (
  update perdure_wakes w
     set wake_seq = m.wake_seq, wake_at = case when w.hold is null then least(w.wake_at, clock_timestamp()) end
    from m where w.run_id = $1
)
select (select wake_seq from l) + 1 as given, (select wake_seq from m) as stored, (select slot from l) as slot,
       (select yes from known) as known, (select yes from room) as room,
       (select light from room) as light;
