# The Python to make the environment from, and where the environment is.
PYTHON ?= python3
VENV ?= .venv
# More extras of pyproject.toml, such as cuda13; arguments of the main commands.
EXTRAS ?=
PYTEST_ARGS ?=
PARITY_ARGS ?=
FUZZ_ARGS ?= --fuzz 600 --seed 0
BENCH_ARGS ?=
STATIC_ARGS ?=

PY := $(VENV)/bin/python
SETUP = @$(PYTHON) tools/setup_env.py --venv $(VENV) $(EXTRAS)

# Both frameworks share one card in one process; XLA would otherwise take most of its memory.
export XLA_PYTHON_CLIENT_PREALLOCATE := false
# Container images often set it; without bytecode every process compiles the frameworks' sources.
unexport PYTHONDONTWRITEBYTECODE
# Asked by the shell, once the environment is there.
WORKERS = $$($(PY) -c 'import xdist' 2>/dev/null && printf -- '-n auto --maxprocesses 8 --dist worksteal')

.PHONY: help parity conformance fuzz test bench mine sm80 sm90 docs lint types imports check clean

help: ## this list
	@grep -E '^[a-z0-9]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9]+):[^#]*## /\1|/' | awk -F'|' '{ printf "  make %-11s %s\n", $$1, $$2 }'

parity: ## compare both sides with the oracle and with each other; PARITY_ARGS="--suite full"
	$(SETUP) parity
	$(PY) -m twin_attention.interop.parity $(PARITY_ARGS)

conformance: ## other libraries' attention against float64; PARITY_ARGS="--fuzz 600"
	$(SETUP) parity
	$(PY) -m twin_attention.interop.parity --suite small --subject all $(PARITY_ARGS)

fuzz: ## ten minutes of random problems; FUZZ_ARGS="--fuzz 60 --seed 7"
	$(SETUP) parity
	$(PY) -m twin_attention.interop.parity $(FUZZ_ARGS)

test: ## run the test suite; PYTEST_ARGS="-k softcap"
	$(SETUP) test
	@$(PY) -m pytest $(WORKERS) $(PYTEST_ARGS)

bench: ## time both sides beside their peers, on a GPU; BENCH_ARGS="--resume"
	$(SETUP) bench
	$(PY) -m bench all $(BENCH_ARGS)

mine: ## five minutes on your card, into one file to send; EXTRAS=cuda13 installs JAX for CUDA
	$(SETUP) bench
	$(PY) -m bench mine $(BENCH_ARGS)

sm80: ## compile every kernel for SM80, no GPU needed, and check its resources; STATIC_ARGS="--every 4"
	$(SETUP) bench
	$(PY) -m tuning static --target sm80 $(STATIC_ARGS)

sm90: ## the same for SM90
	$(SETUP) bench
	$(PY) -m tuning static --target sm90 $(STATIC_ARGS)

docs: ## the documentation site, in build/site
	$(SETUP) docs
	$(PY) -m sphinx --fail-on-warning --keep-going --quiet -b html -c docs . build/site

lint: ## ruff: style and format
	$(SETUP) dev
	$(PY) -m ruff check
	$(PY) -m ruff format --check

types: ## pyright
	$(SETUP) dev
	$(PY) -m pyright

imports: ## import-linter: who may import whom
	$(SETUP) dev
	$(PY) -c 'import importlinter.cli as cli; cli.lint_imports_command()'

check: lint types imports test parity sm80 ## all of the above that needs no GPU

clean: ## remove the environment, caches and reports
	rm -rf $(VENV) build dist reports .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
