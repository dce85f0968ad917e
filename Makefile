# Targets that need .venv create it first.
.DEFAULT_GOAL := help
PYTHON ?= python3
PY := .venv/bin/python
READY := .venv/ready
DEMO := .venv/demo
OLDEST := .venv-oldest/ready
WING := common core check methods flatness integrations
LIBRARY := tests/test_contract.py $(WING:%=tests/%) $(WING:%=src/bsam/%)
PYTEST := -m pytest -m "not gpu and not browser" -n 2 --dist worksteal

.PHONY: help demo test lint docs bench test-library test-oldest test-gpu test-browser clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(DEMO): pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet -c constraints.txt -e '.[demo]'
	touch $@

$(READY): $(DEMO) tests/peers.txt
	$(PY) -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(PY) -m pip install --quiet --no-deps -r tests/peers.txt
	touch $@

$(OLDEST): pyproject.toml constraints-oldest.txt tests/peers.txt
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet -c constraints-oldest.txt -e '.[test]'
	.venv-oldest/bin/python -m pip install --quiet --no-deps -r tests/peers.txt
	touch $@

demo: $(DEMO)  ## compare SGD, SAM and BSAM on digits with wrong labels (about a minute, plus the set-up)
	$(PY) -m bsam demo

test: lint  ## run everything that CI checks: lint, types, layers, tests
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) $(PYTEST)

lint: $(READY)  ## check style, types and layers
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

docs: $(READY)  ## build the documentation in docs/_build/html
	OMP_NUM_THREADS=1 $(PY) -m sphinx -q -W --keep-going -n -E docs docs/_build/html
	@echo "Open docs/_build/html/index.html"

bench: $(READY)  ## measure time and memory of a step relative to its gradient passes
	$(PY) benchmarks/step_time.py
	$(PY) benchmarks/memory.py

test-library: $(READY)  ## run the tests of the library (optimizers, flatness, integrations) only
	OMP_NUM_THREADS=1 $(PY) $(PYTEST) $(LIBRARY)

test-oldest: $(OLDEST)  ## run the tests of the library with the oldest supported torch and NumPy, in .venv-oldest
	OMP_NUM_THREADS=1 .venv-oldest/bin/python $(PYTEST) $(LIBRARY)

test-gpu:  ## run the tests that need a CUDA device, with the python3 in PATH
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu tests --ignore tests/docs

test-browser: $(READY)  ## run the tests of the report's page, in Chromium
	OMP_NUM_THREADS=1 $(PY) -m pytest -m browser tests/browser

clean:  ## remove .venv, .venv-oldest, caches and runs
	rm -rf docs/_build docs/methods docs/reference/settings.md docs/reference/command-line.md docs/reference/examples.md
	rm -rf .venv .venv-oldest runs build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
