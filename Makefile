# Two commands do everything on a fresh machine: `make demo` and `make test`; both set up first.
PYTHON ?= python3
VENV ?= .venv
SINCE ?= HEAD
TORCH ?= # another torch than the tested one, for instance: make test VENV=.venv-2.14 TORCH=2.14.1; it asks for its own Triton
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# A process takes up to 2 GiB. Each gets a stretch of the tests in their order, so that a module's fixtures are made once.
SPREAD := -n auto --maxprocesses 8 --dist worksteal
export TOKENIZERS_PARALLELISM := false
# What one process has compiled, the next one reads, also where containers say otherwise.
export PYTHONDONTWRITEBYTECODE :=

# A GPU that is lent for minutes may reach no package index: Python is the one that is asked for, or else what is there.
MINUTES ?= 60
OUT ?= runs/lease
LEASE ?= # further options, such as: --packed DIR
GPU_PYTHON = $(if $(filter file,$(origin PYTHON)),$(or $(wildcard $(BIN)/python),$(PYTHON)),$(PYTHON))

# Its theme prints notices of its own otherwise.
SITE = NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-traced test-all test-changed test-deepspeed check docs release format gpu-check bench clean

help: ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## ?(.*)/\1\t\2/' | expand -t 16

setup: $(READY) ## Virtual environment in .venv with the tested versions (constraints.txt)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 10) and "lowmem_ft needs Python 3.10 or newer, $(PYTHON) is %d.%d. Name another: make setup PYTHON=python3.12" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	sed '$(if $(strip $(TORCH)),s/^torch==.*/torch==$(strip $(TORCH))/; /^triton==/d)' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c $(VENV)/constraints.txt -e '.[dev]'
	@touch $@

demo: setup ## Fine-tune SmolLM2-135M on the project's own examples; shows answers before and after
	$(BIN)/python scripts/demo/demo.py

test: setup ## One case of each test that takes long and all others but slow and gpu, on every core up to eight
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SPREAD) -m 'not slow and not gpu and not traced'

test-traced: setup ## The further cases of tests that take long
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SPREAD) -m traced

test-all: setup ## All tests but those marked gpu
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SPREAD) -m 'not gpu'

test-changed: setup ## The tests that reach what differs from the last commit, by their imports (SINCE=main: from there)
	$(BIN)/python -m pytest -m 'not slow and not gpu' $$($(BIN)/python tests/support/reached_tests.py --since $(SINCE))

test-deepspeed: setup ## Install DeepSpeed beside the rest (it compiles with g++ at first use), and run its tests
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet -c $(VENV)/constraints.txt -e '.[dev,deepspeed]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/training/test_deepspeed*.py tests/docs/test_launch_lines.py -k 'deepspeed or zero'

check: setup ## Format, lint and docstrings (ruff), types (pyright), import layers (import-linter), English, the site
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python scripts/lint_english.py
	$(SITE) --quiet --site-dir $(VENV)/site

docs: setup ## The pages of docs/ as a site, in site/; every link is checked
	$(SITE)

release: setup ## Build sdist and wheel in dist/, check them, try the wheel in an empty folder; TAG=v0.1.0: for that tag
	$(BIN)/python scripts/release.py $${TAG:+--tag "$$TAG"}

format: setup ## Format, and fix what the linter can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

gpu-check: ## On a GPU, in MINUTES=60: rates, steps, a layer, the tests for a GPU, memory of real runs. Installs nothing
	$(GPU_PYTHON) scripts/lease.py --minutes $(MINUTES) --out $(OUT) $(LEASE)

bench: setup ## Step time and kept bytes beside the stock Trainer; host memory at load; seconds of an estimate
	$(BIN)/python scripts/bench step
	$(BIN)/python scripts/bench ladder
	$(BIN)/python scripts/calibrate load
	$(BIN)/python scripts/bench estimator

clean: ## Remove the virtual environment, caches and runs
	rm -rf $(VENV) site .cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache runs build dist
