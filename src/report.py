"""Collect finished runs: a table for each metric's mean and deviation over folds, a CSV of all numbers, a figure.

python src/report.py                              table of all runs below runs/
python src/report.py --csv results/runs.csv       and every number, one row a fold and metric
python src/report.py --figure RUN.png --run runs/flights/ented/rank=3/fold=0/seed=0
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import yaml

RUN = ["dataset", "model", "rank", "protocol"]
BINARY = ["auc", "nll", "nll_plugin"]
COUNTS = ["rmse", "mape", "nll", "nll_plugin", "rmse_plugin", "mape_plugin"]


def collect(runs_dir: Path) -> pd.DataFrame:
    """Every number of every finished run below a folder, one row a fold and metric."""
    rows = []
    for file in sorted(runs_dir.rglob("metrics.json")):
        run = json.loads(file.read_text())
        about = {key: run[key] for key in ("dataset", "model", "rank", "fold", "seed", "protocol")}
        spent = {"epochs": run["epochs"], "seconds": run["train_seconds"], "version": run["version"]}
        rows += [{**about, "metric": name, "value": value, **spent} for name, value in run["metrics"].items()]
    return pd.DataFrame(rows)


def tables(numbers: pd.DataFrame) -> str:
    """Mean ± standard deviation over folds and seeds as Markdown: a table of binary datasets, a table of counts."""
    values = numbers.groupby([*RUN, "metric"]).value
    text = values.agg(lambda v: f"{v.mean():.3f} ± {v.std():.3f}" if len(v) > 1 else f"{v.mean():.3f}").unstack()
    runs = numbers.drop_duplicates([*RUN, "fold", "seed"]).groupby(RUN).size()
    parts = []
    for metrics in (BINARY, COUNTS):
        part = text.reindex(columns=metrics)
        part = part[part[metrics[0]].notna()].fillna("–").join(runs.rename("runs")).reset_index()
        if len(part):
            lines = [part.columns, ["---"] * len(part.columns), *part.to_numpy()]
            parts.append("\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines))
    return "\n\n".join(parts)


def figure(run: Path, file: Path) -> None:
    """Observed values of a run's test entries against the predicted mean, with the predictive interval."""
    if run is None or not (run / "metrics.json").exists():
        raise ValueError(f"--figure needs --run, the folder of a finished run; {run} is none")
    if "auc" in json.loads((run / "metrics.json").read_text())["metrics"]:
        raise ValueError(f"{run} is a run of binary entries; the figure is one of counts")
    title = yaml.safe_load((run / "config.yaml").read_text())["dataset"]["name"]
    test = pd.read_csv(run / "predictions.csv").sort_values("mean")
    inside = ((test.value >= test.lower) & (test.value <= test.upper)).mean()
    bins = test.groupby(np.arange(len(test)) * 25 // len(test))
    mean = bins["mean"].mean()
    fig, axes = plt.subplots(figsize=(5.5, 4), layout="constrained")
    axes.fill_between(
        mean, bins.lower.mean(), bins.upper.mean(), color="0.85", label="5% to 95% quantile, mean of each bin"
    )
    axes.scatter(test["mean"], test.value, s=4, color="0.55", linewidths=0, label=f"test entry ({inside:.0%} inside)")
    axes.plot(mean, bins.value.mean(), "o", color="C0", markersize=5, label="mean observed, 25 bins of equal size")
    limits = [mean.min(), mean.max()]
    axes.plot(limits, limits, color="black", linewidth=0.8, label="observed = predicted")
    axes.set(xscale="log", xlabel="predicted mean count", ylabel="observed count", title=title)
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(0)
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    fig.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs_dir", nargs="?", type=Path, default=Path("runs"), help="root of the run folders")
    parser.add_argument("--csv", type=Path, help="file for all numbers")
    parser.add_argument("--figure", type=Path, help="file for the figure of one run of counts")
    parser.add_argument("--run", type=Path, help="folder of that run")
    arguments = parser.parse_args()
    try:
        if arguments.figure:
            figure(arguments.run, arguments.figure)
            return
        numbers = collect(arguments.runs_dir)
        if numbers.empty:
            sys.exit(f"error: no finished run below {arguments.runs_dir}")
        if arguments.csv:
            numbers.to_csv(arguments.csv, index=False)
        print(tables(numbers))
    except (OSError, ValueError, KeyError) as error:  # files that cannot be written, or are not what a run leaves
        sys.exit(f"error: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
