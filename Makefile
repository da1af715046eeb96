# make run     set everything up, start the service, show that it works, keep serving
# make test    run the tests (all but those marked slow or gpu)
# make check   what continuous integration runs: format, lint, types, layers, tests
# make format  put the code into shape
# PYTHON=, HOST= and PORT= choose the interpreter and the address.

PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: run test check format clean

run: .venv/run.stamp
	@exec $(BIN)/landmarkd serve --host $(HOST) --port $(PORT) --demo

test: .venv/dev.stamp
	$(BIN)/python -m pytest

check: .venv/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory test

format: .venv/dev.stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "expected Python 3.11 or newer, got $$($(PYTHON) --version); name one with PYTHON="; exit 1; }
	$(PYTHON) -m venv .venv

# torch goes first: only a version that is named may choose between its builds.
.venv/run.stamp: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing landmarkd into .venv (a few minutes the first time)"
	$(PIP) torch setuptools
	$(PIP) --no-build-isolation --editable .
	@touch $@

.venv/dev.stamp: .venv/run.stamp
	$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
