-- name: read_hint_key
select value from perdure_meta where key = 'hint_key';
