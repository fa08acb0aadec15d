-- name: set_draining
update perdure_runners set draining = true where runner_id = $1;
