-- name: agree
-- What is not agreed on yet becomes what this process asks for; what is stays. Read with `read_meta` afterwards.
insert into perdure_meta (key, value) values ('shard_count', $1), ('lock_mode', $2) on conflict (key) do nothing;
