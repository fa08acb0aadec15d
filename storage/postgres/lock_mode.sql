-- name: lock_mode
-- Held until the end of the transaction: who agrees on a mode meanwhile waits.
select value from perdure_meta where key = 'lock_mode' for update;
