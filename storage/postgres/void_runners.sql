-- name: void_runners
update perdure_runners set dead = true where not dead returning runner_id;
