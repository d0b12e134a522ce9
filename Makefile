# Everything here runs in an environment of its own, .venv, which the first target makes; nothing is installed by hand.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OLDEST := .venv-oldest
COMPARE := .venv-compare
COUNTERS := deepspeed==0.19.8 calflops==0.3.2 thop==0.1.1.post2209072238 ptflops==0.7.5
TYPING := build/typing
# One thread each: two test workers on two cores, and timings that do not depend on a thread pool.
TEST_ENV := OMP_NUM_THREADS=1 MPLBACKEND=Agg
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help env demo test lint format types check wheel gpu-check compare bench-diagnosis bench-overhead bench-alerts test-oldest clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(STAMP) ## Make the environment in .venv

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than Python 3.11; give a newer one: make PYTHON=python3.11 ..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,lint]'
	@touch $@

demo: $(STAMP) ## Train the byte-level GPT for a minute and write TensorBoard logs
	$(BIN)/python examples/lightning_gpt.py $(DEMO_ARGS)

test: $(STAMP) ## Run the tests
	$(PYTEST) -n 2 -m "not gpu" $(TEST_ARGS)

lint: $(STAMP) ## Check style, formatting and spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell $$(git ls-files '*.py' '*.md' '*.toml' '*.yaml' '*.yml' Makefile)

format: $(STAMP) ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The tree as a wheel lays it out: in an editable install no type checker finds mfu_monitor.callbacks.
types: $(STAMP) ## Check the types, strictly
	rm -rf $(TYPING) && mkdir -p $(TYPING)
	cp -R mfu_monitor examples $(TYPING)/ && cp -R callbacks $(TYPING)/mfu_monitor/callbacks
	cd $(TYPING) && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml \
	  --cache-dir $(CURDIR)/.mypy_cache/installed mfu_monitor examples

check: lint types test ## Everything that a change must pass

wheel: $(STAMP) ## Build the wheel and check its contents
	rm -rf dist build/lib
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/check-wheel-contents --toplevel mfu_monitor dist/*.whl

gpu-check: $(STAMP) ## Run what only a CUDA device can show
	@$(BIN)/python -c 'import torch; raise SystemExit(not torch.cuda.is_available())' || \
	  { echo "gpu-check: torch sees no CUDA device here, so nothing was run and nothing is shown." >&2; exit 1; }
	$(PYTEST) -m gpu $(TEST_ARGS)

compare: $(COMPARE)/.installed ## Our counts and peaks beside those of other tools, in an environment of its own
	$(TEST_ENV) $(COMPARE)/bin/python tests/benchmarks/compare.py

# One tool at a time: what cannot be installed here is listed as such, with what its import says.
$(COMPARE)/.installed: pyproject.toml constraints.txt
	test -x $(COMPARE)/bin/python || $(PYTHON) -m venv $(COMPARE)
	$(COMPARE)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(COMPARE)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  -e '.[crosscheck,lightning,transformers]'
	for tool in $(COUNTERS); do \
	  $(COMPARE)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $$tool || true; \
	done
	@touch $@

bench-diagnosis: $(STAMP) ## Injected faults against the diagnosis that comes out
	$(TEST_ENV) $(BIN)/python tests/benchmarks/diagnosis.py

bench-overhead: $(STAMP) ## What watching costs, against the bare loop and torch's own counter
	$(TEST_ENV) $(BIN)/python tests/benchmarks/overhead.py

bench-alerts: $(STAMP) ## Injected slowdowns against the cause that the alert names
	$(TEST_ENV) $(BIN)/python tests/benchmarks/alerts.py

test-oldest: ## Run the tests with the oldest torch that is supported
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	grep -v '^torch==' constraints.txt > $(OLDEST)/constraints.txt && echo 'torch==2.9.*' >> $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet -c $(OLDEST)/constraints.txt torch
	$(OLDEST)/bin/python -m pip install --quiet -c $(OLDEST)/constraints.txt -e '.[test]'
	$(TEST_ENV) $(OLDEST)/bin/python -m pytest -n 2 -m "not gpu" $(TEST_ARGS)

clean: ## Remove everything that the targets above made
	rm -rf $(VENV) $(OLDEST) $(COMPARE) build dist runs lightning_logs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
