# Each target works on a machine with only Python 3.11+ and make: it makes .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: report test slow lint bench clean

report: $(VENV)/.installed      ## reports/index.html about the bundled checkpoints
	$(BIN)/ln-probe report --out reports

test: $(VENV)/.installed-dev    ## the fast tests
	$(BIN)/python -m pytest tests

slow: $(VENV)/.installed-dev    ## the others
	$(BIN)/python -m pytest tests -m slow

lint: $(VENV)/.installed-dev    ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed-dev   ## performance, medians side by side
	$(BIN)/python bench/geometry.py
	$(BIN)/python bench/decomposition.py
	$(BIN)/python bench/probe.py
	$(BIN)/python bench/scale.py --quick
	$(BIN)/python bench/scale.py --seven-b
	$(BIN)/python bench/batch.py
	$(BIN)/python bench/lab.py
	$(BIN)/python bench/recurrence.py
	$(BIN)/python bench/page.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e ".[dev,gguf]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info reports
