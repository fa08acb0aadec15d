# Every target prepares what it needs: the virtual environment, and PostgreSQL's programs where used.
VENV ?= .venv
DB ?= sqlite
PYTEST_ARGS ?=

PY := $(VENV)/bin/python
export VENV

.PHONY: help setup demo test test-all pytest pytest-all soak bench requirements lint format clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo [DB=postgres]   three pods, one killed half-way, all orders done'
	@echo 'make test                 lint and the default tier (PYTEST_ARGS="-k name" narrows it)'
	@echo 'make test-all             lint and both tiers'
	@echo 'make bench [PEERS=folder] speed, as JSON lines; other systems beside it, by a harness of yours (STRICT=1: fail'
	@echo '                          where a goal is missed)'
	@echo 'make soak [MINUTES=30]    10,000 simulated worlds, a snapshot of 10 minutes under load, and pods under load, one'
	@echo '                          killed each minute (or HOURS=n)'
	@echo 'make requirements         released requirement rows without a test'
	@echo 'make lint | format        check | rewrite the style; lint also checks types and floors'
	@echo 'make clean                remove the virtual environment and caches'

setup:
	@bash .ci/setup test postgres

demo:
	@bash .ci/setup run $(filter postgres,$(DB))
	@$(PY) -m examples.orders.demo --db $(DB)

test: setup lint pytest

test-all: setup lint pytest-all

pytest: setup
	@.ci/tests default $(PYTEST_ARGS)

pytest-all: setup
	@.ci/tests all $(PYTEST_ARGS)

soak: setup
	@SIMULATED_SEEDS=10000 $(PY) -m pytest -m "slow or not slow" tests/simulation/test_simulation.py -k many_seeds $(PYTEST_ARGS)
	@SNAPSHOT_MINUTES=10 $(PY) -m pytest -m "slow or not slow" tests/integration/test_claim_costs.py -k snapshot_of_some $(PYTEST_ARGS)
	@$(PY) -m benchmarks.soak

bench: setup
	@$(PY) -m benchmarks $(if $(STRICT),--strict) $(if $(PEERS),--peers $(PEERS))
	@$(PY) -m benchmarks.body_loop
	@$(PY) -m benchmarks.parked

requirements: setup
	@$(PY) tests/requirements_report.py

lint: setup
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy src/perdure tests $(wildcard examples benchmarks)
	@$(VENV)/bin/lint-imports --no-logo --cache-dir .import_linter_cache

format: setup
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist src/perdure.egg-info
