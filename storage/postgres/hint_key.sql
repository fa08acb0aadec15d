-- name: hint_key
-- The first to come sets it. Whoever comes at the same moment waits for that one's row and gets what is in it.
insert into perdure_meta as m (key, value) values ('hint_key', $1)
on conflict (key) do update set value = m.value
returning value;
