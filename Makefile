# Needs Python 3.10 to 3.13 and make, nothing else:
#   make demo    a graph, its program, the compiler's choices, times, a search; about a minute
#   make test    every check and every test not marked slow
#   make docs    the site, in build/docs/index.html
#   make clean   remove what the others made
# Another Python:            make clean, then make PYTHON=python3.12 test
# More options for pip:      make PIP_FLAGS="..." test
# Tests in one process:      make PYTEST_FLAGS= test
PYTHON ?= python3
PIP_FLAGS ?=
PYTEST_FLAGS ?= -n auto --dist loadfile --no-loadscope-reorder
VENV := .venv
BIN := $(VENV)/bin
# Tests start many processes, which import torch and TVM in half the time from bytecode.
export PYTHONDONTWRITEBYTECODE :=
STAMP := $(VENV)/.stamp
PYRIGHT := $(BIN)/pyright --pythonpath $(BIN)/python

.PHONY: demo test quick check docs clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# The type checker, one process that takes half a minute, runs beside the tests.
test: quick
	@$(PYRIGHT) >$(VENV)/pyright.txt 2>&1 & checker=$$!; \
	$(BIN)/python -m pytest -q --durations=10 $(PYTEST_FLAGS); tests=$$?; \
	wait $$checker; types=$$?; cat $(VENV)/pyright.txt; exit $$((tests | types))

check: quick
	$(PYRIGHT)

quick: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

# Warnings are errors; tests build it too.
docs: $(STAMP)
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs
	@echo "build/docs/index.html"

# Brought up to date when a requirement changes; `make clean` for one from scratch. Bytecode is made
# of what is imported, when it is: most of torch never is.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 10) <= v < (3, 14) else "sparsetir needs Python 3.10 to 3.13, but $(PYTHON) is %d.%d: run make PYTHON=python3.12 (or another of these)" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --no-compile --disable-pip-version-check -c constraints.txt $(PIP_FLAGS) -e '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache .grimp_cache
	rm -rf python/sparsetir.egg-info
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
