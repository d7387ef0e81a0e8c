# `make` alone lists the targets. Everything runs in a virtual environment that the targets set up themselves.

PYTHON ?= python3
VENV ?= .venv
# Further arguments for every pip install, for example the index of the torch build you want.
PIP_ARGS ?=
# Arguments for `strata serve` and for pytest.
ARGS ?=
BIN := $(VENV)/bin

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

.PHONY: run
run: $(VENV)/.run ## set up and serve the demo model; MODEL=/path/to/model.gguf serves another
	$(BIN)/strata serve $(MODEL) $(ARGS)

.PHONY: test
test: $(VENV)/.test ## set up and run every test
	$(BIN)/python -m pytest $(ARGS)

.PHONY: lint
lint: $(VENV)/.lint ## check format, style, types and import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: fmt
fmt: $(VENV)/.lint ## format the code and mend what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: score-demo
score-demo: $(VENV)/.run ## serve the demo model and print its exact match per skill
	$(BIN)/python -m tools.demo_model.score --serve

.PHONY: clean
clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build *.egg-info

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Strata needs Python 3.11 or newer; name one with make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "Python's venv module is incomplete; on Debian and Ubuntu: apt install python3-venv"; exit 1; }

# One stamp per set of requirements, renewed when pyproject.toml changes.
$(VENV)/.run: $(BIN)/python pyproject.toml
	$(BIN)/pip install $(PIP_ARGS) -e .
	@touch $@

$(VENV)/.test: $(VENV)/.run
	$(BIN)/pip install $(PIP_ARGS) -e '.[test]'
	@touch $@

$(VENV)/.lint: $(VENV)/.run
	$(BIN)/pip install $(PIP_ARGS) -e '.[lint]'
	@touch $@
