# Every habit of the project is one command. Each target sets up what it needs by itself: Python 3.10 or newer and make are enough.
#
#   make run     the demo: 4 ranks under torchrun, stopped, resumed on 2 and on 1; every global step the same
#   make test    unit, integration and short chaos tests          make soak   the same at full length
#   make lint    ruff and mypy                                     make bench  benchmarks, as ratios
#   make bench-compare BASE=<commit>    two commits, measured in turn
#   make docs    the documentation, into docs/_build               make clean  removes everything that make made
#
#   PYTHON=/path/to/python3 chooses the interpreter;  TESTS="tests/unit -k pack" and ARGS="…" narrow a run.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TESTS ?= tests/unit tests/integration tests/chaos
ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
# Containers often forbid bytecode files; then every process that a test starts would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install -qq --no-input --no-compile --progress-bar off --constraint constraints.txt

.PHONY: run test lint bench bench-compare docs soak clean help
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#  *make/make/p' Makefile

run: $(VENV)/.demo
	@$(BIN)/zephon demo $(ARGS)

test: $(VENV)/.test
	@$(BIN)/python -m pytest -n 2 --dist worksteal $(TESTS) $(ARGS)

soak: $(VENV)/.test
	@$(BIN)/python -m pytest --soak --timeout 3600 $(TESTS) $(ARGS)

bench: $(VENV)/.test
	@$(BIN)/python -m tests.benchmarks $(ARGS)

bench-compare: $(VENV)/.test
	@test -n "$(BASE)" || { echo "make: name the commit to compare with: make bench-compare BASE=main~1" >&2; exit 1; }
	@$(BIN)/python -m tests.benchmarks.compare $(BASE) $(ARGS)

lint: $(VENV)/.lint
	@$(BIN)/ruff check .
	@$(BIN)/mypy

docs: $(VENV)/.docs
	@$(BIN)/python -m sphinx --fail-on-warning --keep-going --nitpicky -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

clean:
	rm -rf $(VENV) build dist *.egg-info docs/_build benchmarks.json zephon-demo .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find zephon daemon client tests docs -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment. A stamp file stands for each set of extras, and pyproject.toml renews them.

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "make: Zephon needs Python 3.10 or newer; '$(PYTHON)' is older or missing." >&2; \
	  echo "make: name another one: make PYTHON=/path/to/python3 …" >&2; exit 1; }
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 \
	  || { rm -rf $(VENV); $(PYTHON) -m venv --without-pip $(VENV) >/dev/null 2>&1 \
	       && $(PYTHON) -m pip --python $(BIN)/python install -qq --no-input pip >/dev/null 2>&1; } \
	  || { rm -rf $(VENV); $(PYTHON) -m virtualenv -q $(VENV) >/dev/null 2>&1; } \
	  || { rm -rf $(VENV); \
	       echo "make: '$(PYTHON)' cannot make a virtual environment: it lacks venv or ensurepip, and has no pip or virtualenv." >&2; \
	       echo "make: install them (Debian, Ubuntu: apt-get install python3-venv) or name another: make PYTHON=/path/to/python3 …" >&2; \
	       exit 1; }
	@touch $@

# torch comes first and alone: its exact version decides which build is taken, and constraints.txt keeps it there.
$(VENV)/.torch: $(VENV)/.python constraints.txt
	@echo "make: installing into $(VENV) (a few minutes the first time)"
	@$(PIP) torch==2.13.0
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.test: $(VENV)/.demo pyproject.toml
	@$(PIP) -e '.[demo,test]'
	@touch $@

# Types are checked against numpy and the libraries of the field as they are installed, so lint has the daemon's extras too.
$(VENV)/.lint: $(VENV)/.python pyproject.toml
	@$(PIP) -e '.[daemon,lint]'
	@touch $@

$(VENV)/.docs: $(VENV)/.python pyproject.toml
	@$(PIP) -e '.[docs]'
	@touch $@
