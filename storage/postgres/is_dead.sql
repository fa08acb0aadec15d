-- name: is_dead
select dead from perdure_runners where runner_id = $1;
