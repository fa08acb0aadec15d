-- name: hints.data_version
-- Changes when another connection has committed, and only then.
pragma data_version

-- name: read_meta.present
select 1 from sqlite_schema where type = 'table' and name = 'perdure_meta'
