# Everything lives in .venv, which the first target that needs it creates. `make help` lists the targets.

VENV := .venv
PY   := $(VENV)/bin/python
PIP  := $(PY) -m pip --disable-pip-version-check

# The interpreter that .venv is made from: the first of these that is 3.10-3.13 and has venv.
# PYTHON=/path/to/python overrides the search. Each is run, not only looked up: a pyenv shim
# exists for versions that are not active too.
PYTHON     ?=
CANDIDATES := $(or $(PYTHON),python3 python3.11 python3.12 python3.13 python3.10 python)
USABLE     := import sys, ensurepip, venv; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check format clean format-check lint types layers chromium

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.installed ## install what is needed and serve the page
	@$(PY) app.py || [ $$? = 130 ]

test: format-check lint types layers chromium ## install the test tools too, run every check and every test
	@if command -v chromium >/dev/null; then set -x; $(PY) -m pytest; \
	else echo "Chromium is missing: the browser tests are left out."; $(PY) -m pytest -m "not browser"; fi

check: format-check lint types layers ## the checks and the fast tests: what to run before a commit
	$(PY) -m pytest -m "not gloo and not slow and not browser"

format: $(VENV)/.installed-test ## rewrite the code in the project's format
	$(PY) -m ruff check --fix-only --select I .
	$(PY) -m ruff format .

clean: ## remove .venv, build results and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

format-check: $(VENV)/.installed-test
	$(PY) -m ruff format --check .

lint: $(VENV)/.installed-test
	$(PY) -m ruff check .

types: $(VENV)/.installed-test
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(VENV)/bin/pyright --pythonpath $(PY)

# The cache knows a file by its date, and so misses that a module it imports came or went.
layers: $(VENV)/.installed-test
	$(VENV)/bin/lint-imports --no-cache

# The only part that can need root. Where it can't be had, the tests say so and go on without it.
chromium:
	@command -v chromium >/dev/null || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && apt-get install -y -qq chromium >/dev/null; \
	else echo "To run the browser tests: sudo apt-get install chromium"; fi || true

$(PY):
	@for python in $(CANDIDATES); do \
	    if $$python -c '$(USABLE)' >/dev/null 2>&1; then \
	        echo "$$python -m venv $(VENV)"; \
	        exec $$python -m venv --clear $(VENV); \
	    fi; \
	done; \
	echo "No usable Python: tried $(CANDIDATES)." >&2; \
	echo "USP Viz needs Python 3.10 to 3.13 with the venv module (on Debian: python3-venv)." >&2; \
	echo "Install one, or name it: make $(or $(MAKECMDGOALS),demo) PYTHON=/path/to/python3.11" >&2; \
	exit 1

$(VENV)/.installed: $(PY) requirements.txt pyproject.toml
	$(PIP) install -r requirements.txt
	$(PIP) install --quiet --no-deps --editable .
	@touch $@

$(VENV)/.installed-test: requirements-test.txt $(VENV)/.installed
	$(PIP) install --quiet -r requirements-test.txt
	$(PIP) check
	@touch $@
