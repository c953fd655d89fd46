# Each target works on a machine with only Python 3.11+ and make: it makes .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests run side by side, a file to a process; the processes' own threads would only get in each other's way.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: report test slow lint bench docs clean

MODELS ?= lm-layernorm lm-none

report: $(VENV)/.installed      ## reports/index.html about two bundled models; make report MODELS=lm-scaling_only
	$(BIN)/ln-probe report $(MODELS) --out reports

test: $(VENV)/.installed-dev    ## the fast tests
	$(PYTEST)

slow: $(VENV)/.installed-dev    ## the others
	$(PYTEST) -m slow

lint: $(VENV)/.installed-dev    ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.installed-docs   ## docs/_build/index.html, the site; warnings are errors
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build

bench: $(VENV)/.installed-dev   ## performance, medians side by side
	$(BIN)/python bench/geometry.py
	$(BIN)/python bench/attribution.py
	$(BIN)/python bench/entering.py
	$(BIN)/python bench/whole.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e ".[dev,gguf]"
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed-dev
	$(PIP) -e ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info reports docs/_build docs/.jupyter_cache docs/_extra docs/notebooks
