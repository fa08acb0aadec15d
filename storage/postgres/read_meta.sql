-- name: read_meta
select key, value from perdure_meta;
