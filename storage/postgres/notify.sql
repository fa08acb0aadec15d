-- name: notify
select pg_notify($1, payload) from unnest($2::text[]) as p(payload);
