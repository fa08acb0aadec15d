-- name: server_identity
select system_identifier from pg_control_system();
