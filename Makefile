PYTHON ?= python3
VENV := .venv

.PHONY: train test lint report

train: $(VENV)/installed
	$(VENV)/bin/python src/train.py $(ARGS)

test: $(VENV)/installed
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n auto $(ARGS)

# report/, and the tables in the texts and the notebook, from results/
report: $(VENV)/installed
	$(VENV)/bin/python src/report.py results/baselines.csv results/ented.csv --calibration results/calibration.csv \
		--convergence results/convergence.csv --inducing results/inducing.csv
	$(VENV)/bin/python src/report.py --renew README.md results/baselines.md results/ented.md results/ablation.md
	$(VENV)/bin/jupyter nbconvert --log-level ERROR --execute --inplace --ExecutePreprocessor.record_timing=False notebooks/benchmark.ipynb

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable ".[dev]"
	touch $@
