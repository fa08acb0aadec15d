-- name: count_runs
select status, count(*) as n from perdure_fences group by status;
