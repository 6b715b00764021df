# Everything runs in a virtual environment inside the checkout; the first target that needs it builds it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help quickstart test test-all test-clients pytest test-gpu lint format docs clean chromium

help:
	@echo "make quickstart   data, training, evaluation and a server, on this machine"
	@echo "make test         format, lint, types and tests"
	@echo "make test-all     all tests: also whole fleets and long variants (marked slow)"
	@echo "make test-clients clients of other projects against a server; needs Node 20 and npm"
	@echo "make test-gpu     all tests that need a GPU"
	@echo "make lint         format check, lint and types"
	@echo "make format       rewrite files in the project style"
	@echo "make docs         the documentation site in site/; warnings are errors"
	@echo "make clean        remove the environment and caches"

# Every package is pinned, so three pips install them in parallel, one mostly waiting for the network, and resolve
# nothing; the last one resolves, with everything at hand but triton.
# Python 3.11's own pip takes twice as long as this one. setuptools is among the pins: without it pip makes an
# environment to build ours.
# Without --no-compile pip compiles every module of every package for 40 s; most are never imported, the others are
# compiled on import.
# Our pip is installed by that of $(PYTHON): ensurepip would take 4 s to install another one first.
INSTALL := install --quiet --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
PIP := $(BIN)/python -m pip $(INSTALL)
PIP_ITSELF := pip==26.3
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "saccade needs Python 3.11 or newer: make PYTHON=python3.11 ..."; exit 2; }
	$(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -m pip --python $(BIN)/python $(INSTALL) $(PIP_ITSELF) || { $(BIN)/python -m ensurepip >/dev/null && $(PIP) $(PIP_ITSELF); }
	sed '/^# The documentation/,$$d; /^#/d' constraints.txt | sort -r | xargs -P 3 -n 20 $(PIP) --no-deps --ignore-installed
	$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $(READY)

# The quickstart has an environment of its own, without what only developers need.
QUICKSTART_VENV := .venv-quickstart
QUICKSTART_READY := $(QUICKSTART_VENV)/.ready

$(QUICKSTART_READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "saccade needs Python 3.11 or newer: make PYTHON=python3.11 ..."; exit 2; }
	$(PYTHON) -m venv $(QUICKSTART_VENV)
	$(QUICKSTART_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(QUICKSTART_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[quickstart]'
	@touch $(QUICKSTART_READY)

# Resumes what an earlier one has made in ./quickstart; make quickstart ARGS=--no-serve and the like pass options on.
quickstart: $(QUICKSTART_READY)
	@$(QUICKSTART_VENV)/bin/saccade quickstart $(ARGS)

lint: $(READY)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

# Lint runs concurrently with the first tests: it needs one core, and many tests wait for processes.
test:
	@$(MAKE) --no-print-directory --jobs 2 $(READY) chromium
	@$(MAKE) --no-print-directory --jobs 2 lint pytest

# The browser of the page's tests, which are skipped without it. Installing it takes root and apt.
chromium:
	@command -v chromium >/dev/null \
	|| { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq \
	&& DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends chromium >/dev/null; } \
	|| echo "chromium cannot be installed here: the tests of the page are skipped"

# Four workers on two cores, since many tests wait for processes and timeouts.
PYTEST := $(BIN)/python -m pytest --workers 4 --durations 25

pytest: $(READY)
	$(PYTEST)

test-all: $(READY) chromium
	$(PYTEST) -m ''

# Clients of other projects have environments of their own: they pin packages that are also ours.
CLIENTS_VENV := .venv-clients
CLIENTS := tests/clients
$(CLIENTS_VENV)/.ready: $(CLIENTS)/requirements.txt
	$(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/python -m pip install --quiet --quiet --no-deps --disable-pip-version-check --requirement $<
	@touch $@

$(CLIENTS)/node_modules/.ready: $(CLIENTS)/package.json $(CLIENTS)/package-lock.json
	npm ci --prefix $(CLIENTS) --no-audit --no-fund --loglevel=error
	@touch $@

test-clients: $(READY) $(CLIENTS_VENV)/.ready $(CLIENTS)/node_modules/.ready
	$(BIN)/python $(CLIENTS)/run.py $(abspath $(CLIENTS_VENV)/bin/python)

test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu

format: $(READY)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# The site reads docstrings without importing them, so its environment has neither torch nor the package.
DOCS_VENV := .venv-docs
DOCS_EXTRA := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")
$(DOCS_VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	@$(PYTHON) -c '$(DOCS_EXTRA)' > $(DOCS_VENV)/requirements.txt
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --requirement $(DOCS_VENV)/requirements.txt
	@touch $@

docs: $(DOCS_VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) $(DOCS_VENV) $(CLIENTS_VENV) $(CLIENTS)/node_modules site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache quickstart
