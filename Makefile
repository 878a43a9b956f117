PYTHON ?= python3
VENV := .venv

.PHONY: train test lint

train: $(VENV)/installed
	$(VENV)/bin/python src/train.py $(ARGS)

test: $(VENV)/installed
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n auto $(ARGS)

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable ".[dev]"
	touch $@
