# make run     set everything up, start the service, show that it works, keep serving
# make test    run the tests (all but those marked slow, gpu or docker); TESTS= chooses some
# make lint    check format, style, types and layers
# make check   what continuous integration runs: make lint, and the tests, with the coverage of unit tests
# make bench   measure the service against its bars; BARS="V1 V4" chooses some
# make chaos   a service under ten minutes of chaos; MINUTES=1 makes it shorter
# make docker-test  build the image, start it by docker-compose.yml and test it; DOCKER= and
#              DOCKER_BUILD= choose the program and options of its build, such as --network=host
# make format  put the code into shape
# make clean   remove what the others made
# PYTHON=, HOST= and PORT= choose the interpreter and the address; TORCH_INDEX= names another index
# of packages for torch, such as PyTorch's of CPU builds.

PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
DOCKER ?= docker
BIN := .venv/bin
# Python compiles what is imported, once; pip would compile all 14,000 modules of PyTorch and others.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --no-compile --constraint constraints.txt

MINUTES ?= 10

.PHONY: run test lint check bench chaos docker-engine docker-test format clean
.DELETE_ON_ERROR:

# Only errors are logged here: what a person wants to see is the table that --demo prints.
run: .venv/run.stamp
	@echo "Starting landmarkd on http://$(HOST):$(PORT)"
	@LANDMARKD_LOG_FORMAT=$${LANDMARKD_LOG_FORMAT:-text} LANDMARKD_LOG_LEVEL=$${LANDMARKD_LOG_LEVEL:-error} \
	  exec $(BIN)/landmarkd serve --host $(HOST) --port $(PORT) --demo

test: .venv/dev.stamp .venv/run.stamp
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal $(COVERAGE) $(TESTS)

lint: .venv/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --num-workers auto
	$(BIN)/lint-imports --no-logo

# Loops are compiled by one core, while the other installs and runs the tools.
check:
	$(MAKE) --no-print-directory --jobs 2 .venv/run.stamp lint
	$(MAKE) --no-print-directory test COVERAGE='--cov --cov-report=term'

bench: .venv/bench.stamp .venv/run.stamp
	$(BIN)/python -m tests.benchmarks $(BARS)

chaos: .venv/dev.stamp .venv/run.stamp
	$(BIN)/python -m tests.benchmarks chaos --minutes $(MINUTES)

docker-test: docker-engine .venv/dev.stamp
	$(DOCKER) build $(DOCKER_BUILD) --build-arg TORCH_INDEX --tag landmarkd:cpu .
	DOCKER=$(DOCKER) $(BIN)/python -m pytest -m docker tests/integration/test_docker.py

docker-engine:
	@$(DOCKER) info >/dev/null || { \
	  echo "expected a running Docker engine, got none from '$(DOCKER) info';" \
	  "install one as https://docs.docker.com/engine/install/ says, or name another with DOCKER="; exit 1; }

format: .venv/dev.stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv/bin/python:
	@command -v $(PYTHON) >/dev/null || \
	  { echo "expected Python 3.11 or newer as $(PYTHON), found none; name one with PYTHON="; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "expected Python 3.11 or newer, got $$($(PYTHON) --version); name one with PYTHON="; exit 1; }
	$(PYTHON) -m venv .venv

# torch goes first, by its exact version: a range may fetch another build, gigabytes larger.
.venv/app.stamp: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing landmarkd into .venv (a few minutes the first time)"
	$(PIP) $(TORCH_INDEX:%=--extra-index-url %) torch setuptools
	$(PIP) --no-build-isolation --editable '.[page]'
	@touch $@

.venv/run.stamp: .venv/app.stamp
	@$(BIN)/python -c "from app.inference import compile_loops; compile_loops()"
	@touch $@

.venv/dev.stamp: .venv/app.stamp
	@echo "Installing the tools for tests and checks into .venv"
	$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@

.venv/bench.stamp: .venv/dev.stamp
	@echo "Installing what landmarkd is measured against into .venv"
	$(PIP) --no-build-isolation --editable '.[dev,bench,ray]'
	@touch $@

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage
