# `make demo` and `make test` create the virtual environment on first use.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test soak lint bench clean

help:
	@echo "make demo    fill blanks in stories with the bundled model (seconds)"
	@echo "make test    linters, type checker and tests"
	@echo "make soak    long tests: interrupted training, training against exact conditionals"
	@echo "make bench   speed and memory of attention, training and generation (half an hour)"
	@echo "make clean   remove the virtual environment and caches"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $@

demo: $(READY)
	$(BIN)/python examples/fill_stories.py

# One thread per process: the models are tiny, and some tests run several processes.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

soak: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m soak

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/tracformer bench
	$(BIN)/python -m benchmarks.loader

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
