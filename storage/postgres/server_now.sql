-- name: server_now
select clock_timestamp();
