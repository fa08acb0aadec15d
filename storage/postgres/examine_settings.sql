-- name: examine_settings
select name, setting from pg_settings
 where name in ('fsync', 'synchronous_commit', 'full_page_writes', 'autovacuum', 'max_connections',
                'superuser_reserved_connections', 'reserved_connections');
