# `make demo` and `make test` create the virtual environment on first use.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test soak ray lint docs dist bench clean

help:
	@echo "make demo    fill blanks in stories with the bundled model (seconds)"
	@echo "make test    linters, type checker and tests"
	@echo "make soak    long tests: interrupted training, training against exact conditionals"
	@echo "make docs    the documentation site, in docs/_build/html; warnings are errors"
	@echo "make dist    the wheel and source archive of a release, checked"
	@echo "make ray     long tests with Ray, which is installed first (100 MB)"
	@echo "make bench   speed and memory of attention, training and generation (half an hour)"
	@echo "make clean   remove the virtual environment and caches"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $@

demo: $(READY)
	$(BIN)/python examples/fill_stories.py

# One thread per process: the models are tiny, and some tests run several processes, which read
# compiled modules if Python may write them. Neighbouring tests run in one worker, as far as the
# work is balanced, and share their fixtures.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
IN_PARALLEL := -n auto --dist worksteal

test: lint
	$(PYTEST) $(IN_PARALLEL)

soak: $(READY)
	$(PYTEST) $(IN_PARALLEL) -m soak

ray: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,ray]"
	$(PYTEST) -m soak tests/test_ray.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "open docs/_build/html/index.html"

dist: $(READY)
	rm -rf build dist
	$(BIN)/python -m build --installer pip
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python tools/check_wheel.py dist

bench: $(READY)
	$(BIN)/tracformer bench
	$(BIN)/python -m benchmarks.loader

clean:
	rm -rf $(VENV) build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
