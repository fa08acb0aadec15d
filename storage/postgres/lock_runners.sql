-- name: lock_runners
-- Until the end of the transaction nobody registers or renews; those that are at it are waited for.
lock table perdure_runners in share row exclusive mode;
