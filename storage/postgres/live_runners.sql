-- name: live_runners
select replica_id, address from perdure_runners where not dead and expires_at > clock_timestamp() order by replica_id;
