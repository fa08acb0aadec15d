-- name: examine_workflows
select workflow, count(*) as n from perdure_fences group by workflow order by workflow;
