-- name: hold_lock
-- $1 the runner's key. A lock of the session: it ends with the connection.
select pg_try_advisory_lock($1::bigint) as held, pg_backend_pid() as session;
