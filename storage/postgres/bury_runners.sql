-- name: bury_runners
update perdure_runners set dead = true where not dead and expires_at <= clock_timestamp();
