-- name: set_lock_mode
update perdure_meta set value = $1 where key = 'lock_mode';
