-- name: declare_dead
-- R2: one conditional update, by the database's clock and the count the observer saw unchanged.
update perdure_runners set dead = true
 where runner_id = $1 and renew_count = $2 and not dead and expires_at < clock_timestamp()
returning runner_id;
