# Everything here runs in an environment of its own, .venv, which the first target makes; nothing is installed by hand.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The versions that the tests are run with beside the pinned ones; docs/versions.md shows what came of it.
OLDEST_TORCH := 2.9.1
NEWEST_TORCH := 2.14.1
NEWEST_TESTS := tests/conformance tests/counting tests/callbacks tests/examples
TORCH ?= $(NEWEST_TORCH)
LIGHTNING ?=
TRANSFORMERS ?=
TORCH_ENV := .venv-torch-$(TORCH)$(addprefix -lightning-,$(LIGHTNING))$(addprefix -transformers-,$(TRANSFORMERS))$(patsubst %,-%,$(filter python3.%,$(PYTHON)))
COMPARE := .venv-compare
COUNTERS := deepspeed==0.19.8 calflops==0.3.2 thop==0.1.1.post2209072238 ptflops==0.7.5
TYPING := build/typing
EXAMPLES ?= 500
# One thread each: two test workers on two cores, and timings that do not depend on a thread pool.
TEST_ENV := OMP_NUM_THREADS=1 MPLBACKEND=Agg
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help env demo test lint format types check wheel gpu-check compare faults soak fuzz bench bench-diagnosis bench-alerts mutants env-torch show-env test-torch test-newest test-newest-ci test-oldest versions clean

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

faults: $(STAMP) ## Errors, Ctrl-C and time limits at every function and line of ours; the tests take a sample of them
	status=0; MFU_MONITOR_ALL_FAULTS=1 $(PYTEST) -n 2 --junitxml=build/faults.xml tests/faults $(TEST_ARGS) || status=$$?; \
	  $(BIN)/python tests/benchmarks/reliability.py faults build/faults.xml; exit $$status

soak: $(STAMP) ## 200,000 replayed steps, 2,000 counted ones and 10,000 shapes: memory, descriptors and threads stay flat
	$(TEST_ENV) $(BIN)/python tests/benchmarks/reliability.py soak

fuzz: $(STAMP) ## Ever new files, command lines, names, batches and figures: make fuzz EXAMPLES=2000
	status=0; MFU_MONITOR_FUZZ=$(EXAMPLES) $(PYTEST) -n 2 --junitxml=build/fuzz.xml tests/fuzz $(TEST_ARGS) || status=$$?; \
	  MFU_MONITOR_FUZZ=$(EXAMPLES) $(BIN)/python tests/benchmarks/reliability.py fuzz build/fuzz.xml; exit $$status

bench-diagnosis: $(STAMP) ## Injected faults against the diagnosis that comes out
	$(TEST_ENV) $(BIN)/python tests/benchmarks/diagnosis.py

bench: $(STAMP) ## What watching costs, against the bare loop and other tools; writes docs/overhead.md
	$(TEST_ENV) $(BIN)/python tests/benchmarks/overhead.py

bench-alerts: $(STAMP) ## Injected slowdowns against the cause that the alert names
	$(TEST_ENV) $(BIN)/python tests/benchmarks/alerts.py

mutants: $(STAMP) ## Plant small faults and write docs/proof.md: which of them a test notices
	$(TEST_ENV) $(BIN)/python tests/benchmarks/mutants.py $(MUTANTS_ARGS)

env-torch: $(TORCH_ENV)/.installed ## Make the environment of TORCH=..., of LIGHTNING= and TRANSFORMERS= too

show-env:
	@echo $(TORCH_ENV)

# The pinned versions with the asked-for lines in the place of theirs; older torch and trainers ask for older helpers.
$(TORCH_ENV)/.installed: pyproject.toml constraints.txt
	test -x $(TORCH_ENV)/bin/python || $(PYTHON) -m venv $(TORCH_ENV)
	sed -e 's/^torch==.*/torch==$(TORCH)/' -e '/^setuptools==/d' \
	  $(if $(LIGHTNING)$(TRANSFORMERS),-e '/^\(fsspec\|packaging\|torchmetrics\|lightning-utilities\|accelerate\|jsonargparse\|rich\)==/d') \
	  $(if $(LIGHTNING),-e 's/^lightning==.*/lightning==$(LIGHTNING)/' -e 's/^pytorch-lightning==.*/pytorch-lightning==$(LIGHTNING)/') \
	  $(if $(TRANSFORMERS),-e '/^\(huggingface_hub\|tokenizers\)==/d' -e 's/^transformers==.*/transformers==$(TRANSFORMERS)/') \
	  constraints.txt > $(TORCH_ENV)/constraints.txt
	$(TORCH_ENV)/bin/python -m pip install --quiet --disable-pip-version-check -c $(TORCH_ENV)/constraints.txt torch
	$(TORCH_ENV)/bin/python -m pip install --quiet --disable-pip-version-check -c $(TORCH_ENV)/constraints.txt -e '.[test]'
	@touch $@

test-torch: $(TORCH_ENV)/.installed ## Run the tests with another torch: make test-torch TORCH=2.14.1
	$(TEST_ENV) $(TORCH_ENV)/bin/python -m pytest -n 2 -m "not gpu" $(TEST_ARGS)

test-newest: ## Run the tests with the newest torch that they were run with
	$(MAKE) test-torch TORCH=$(NEWEST_TORCH)

test-oldest: ## Run the tests with the oldest torch that is supported
	$(MAKE) test-torch TORCH=$(OLDEST_TORCH)

# What moves with torch, on the newest one; where it cannot be installed that is said and nothing is claimed.
test-newest-ci:
	@if $(MAKE) env-torch TORCH=$(NEWEST_TORCH); then \
	  $(MAKE) test-torch TORCH=$(NEWEST_TORCH) TEST_ARGS='$(NEWEST_TESTS)'; \
	else \
	  echo "torch $(NEWEST_TORCH) cannot be installed here (see above): nothing was tested with it, and nothing is shown." >&2; \
	fi

versions: $(STAMP) ## Write docs/versions.md from the runs kept beside it
	$(BIN)/python tests/benchmarks/versions.py table

clean: ## Remove everything that the targets above made
	rm -rf $(VENV) .venv-torch-* $(COMPARE) build dist runs lightning_logs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
