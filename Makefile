# The whole of the project's chores. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -euc
.DEFAULT_GOAL := help
PYTHON ?= python3
SCALE ?= mini
BIN := .venv/bin
PIP = $(BIN)/pip install --quiet --disable-pip-version-check
export PYTHONUNBUFFERED := 1

help: ## print this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The stamps are written last, so an interrupted install starts over.
.venv/.ready: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "gma_bench needs Python 3.11 or newer; try: make PYTHON=python3.11 ..." >&2; exit 2; }
	@echo "Installing into .venv (about 2 GB, more with CUDA; a few minutes, once)"
	@test -f .venv/.ready || $(PYTHON) -m venv --clear .venv
	@rm -f .venv/.ready .venv/.ready-dev
	@$(PIP) -r requirements.lock
	@$(PIP) --no-deps --editable .
	@touch .venv/.ready

.venv/.ready-dev: .venv/.ready requirements-dev.lock
	@echo "Adding what the tests need"
	@$(PIP) -r requirements.lock -r requirements-dev.lock
	@touch .venv/.ready-dev

reproduce: .venv/.ready ## run what is missing of the paper's grid and report (SCALE=smoke|mini|paper)
	@$(BIN)/gma-bench reproduce scale=$(SCALE)

report: .venv/.ready ## tables, plots, verdicts and page from the records (SCALE=…)
	@$(BIN)/gma-bench report scale=$(SCALE)

scaling: .venv/.ready ## memory and time against length and K, and their figures (SCALE=…)
	@$(BIN)/gma-bench reproduce scale=$(SCALE) --only task=memory,throughput

test: .venv/.ready-dev ## the tests, without the slow ones
	@$(BIN)/python -m pytest -n auto

test-all: .venv/.ready-dev ## the tests, slow ones too
	@$(BIN)/python -m pytest -m "not timing"

test-timing: .venv/.ready-dev ## the tests that compare times; on a quiet machine only
	@$(BIN)/python -m pytest -m timing

lint: .venv/.ready-dev ## ruff, mypy, and an audit of the dependencies
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@bash .ci/audit

bench: .venv/.ready-dev ## speed, as ratios measured in one run
	@$(BIN)/python -m benchmarks

lock: .venv/.ready-dev ## pin what is installed in .venv now
	@$(BIN)/python .ci/lock.py

clean: ## remove caches and build products; results and .venv stay
	@rm -rf .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find gma_bench tasks baselines tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help reproduce report scaling test test-all test-timing lint bench lock clean
