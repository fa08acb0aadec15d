-- name: declare_others_dead
update perdure_runners set dead = true where runner_id <> $1 and not dead returning runner_id;
