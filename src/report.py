"""Collect finished runs: a table for each metric's mean and deviation over folds, a CSV of all numbers, a figure.

python src/report.py                              table of all runs below runs/
python src/report.py --csv results/runs.csv       and every number, one row a fold and metric
python src/report.py results/baselines.csv --compare results/paper.csv
                                                  means beside published ones, from such a CSV or from run folders
python src/report.py results/ented.csv --compare results/paper.csv --rivals results/baselines.csv
                                                  each mean beside the method's published one and the best of the rivals
python src/report.py runs/ablation --variants     a folder of such folders: the table has a column with their names
python src/report.py --figure RUN.png --run runs/flights/ented/rank=3/fold=0/seed=0
"""

import argparse
import math
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import yaml
from scipy.stats import ttest_rel

from ented.runs import read_json

RUN = ["dataset", "model", "rank", "protocol", "missing"]
BINARY = ["auc", "nll", "nll_plugin"]
COUNTS = ["rmse", "mape", "nll", "nll_plugin", "rmse_plugin", "mape_plugin"]


def collect(source: Path) -> pd.DataFrame:
    """Every number of every finished run below a folder, one row a fold and metric; or such a table from its file."""
    if not source.is_dir():
        return read_table(source, [*RUN, "fold", "seed", "metric", "value"]).astype({"rank": "Int64"})
    rows, folders = [], {}
    for file in sorted(source.rglob("metrics.json")):
        try:
            run = read_json(file)
            about = {key: run[key] for key in ("dataset", "model", "rank", "fold", "seed", "protocol", "missing")}
            spent = {"epochs": run["epochs"], "seconds": run["train_seconds"]}
            made = {"command": run["command"], "version": run["version"]}
            metrics = run["metrics"].items()
        except KeyError as error:
            raise ValueError(f"{file} has no {error}: remove it, and start its run again") from None
        twin = folders.setdefault(tuple(about.values()), file.parent)
        if twin != file.parent:
            raise ValueError(
                f"{twin} and {file.parent} hold the same run: name a folder that has one of them, or --variants"
            )
        rows += [{**about, "metric": name, "value": value, **spent, **made} for name, value in metrics]
    if not rows:
        raise ValueError(f"no finished run below {source}")
    return pd.DataFrame(rows).astype({"rank": "Int64"})


def collect_variants(source: Path) -> pd.DataFrame:
    """The same of each folder in a folder that has a finished run, with the folder's name as `variant`."""
    if not source.is_dir():
        raise ValueError(f"--variants: {source} is no folder of folders")
    folders = [folder for folder in sorted(source.iterdir()) if any(folder.rglob("metrics.json"))]
    if not folders:
        raise ValueError(f"no folder with a finished run in {source}")
    parts = [collect(folder).assign(variant=folder.name) for folder in folders]
    return pd.concat(parts)


def read_table(file: Path, columns: list[str]) -> pd.DataFrame:
    """A CSV that must have these columns."""
    try:
        table = pd.read_csv(file)
    except ValueError as error:  # pandas' own
        raise ValueError(f"{file} is not a CSV ({error})") from None
    if missing := [column for column in columns if column not in table]:
        raise ValueError(f"{file} has no column {missing[0]}: it needs {', '.join(columns)}")
    return table


def tables(numbers: pd.DataFrame) -> str:
    """Mean ± standard deviation over folds and seeds as Markdown: a table of binary datasets, a table of counts."""
    keys = [*RUN, "variant"] if "variant" in numbers else RUN
    text = numbers.groupby([*keys, "metric"], dropna=False).value.agg(spread).unstack()
    runs = numbers.drop_duplicates([*keys, "fold", "seed"]).groupby(keys, dropna=False).size()
    parts = []
    for metrics in (BINARY, COUNTS):
        part = text.reindex(columns=metrics)
        part = part[part[metrics[0]].notna()].astype(object).fillna("–").join(runs.rename("runs")).reset_index()
        if len(part):
            parts.append(markdown(part))
    return "\n\n".join(parts)


def comparison(numbers: pd.DataFrame, published: pd.DataFrame) -> str:
    """Means beside published ones as Markdown, a table for each dataset.

    `published` has the columns dataset, method, rank, metric, mean and std; its metrics are plug-in ones. A mean of
    protocol=paper that is further than two published standard deviations away is marked: + where it is better,
    - where it is worse.
    """
    published, parts = by_cell(published), []
    for dataset in numbers.dataset.unique():
        part = numbers[numbers.dataset == dataset].sort_values(["model", "rank"], kind="stable")
        metrics = ["auc", "nll"] if (part.metric == "auc").any() else ["rmse", "mape", "nll"]
        rows = []
        for (model, rank), cell in part.groupby(["model", "rank"], dropna=False, sort=False):
            if cell.groupby("protocol").missing.nunique().max() > 1:
                raise ValueError(
                    f"{dataset}, {model}, rank {rank}: runs with both settings of missing: name a folder with one"
                )
            row = {"model": model, "rank": "" if pd.isna(rank) else rank}
            for metric in metrics:
                key = (dataset, model, rank, metric)
                paper = published.loc[key] if key in published.index else None
                row[f"{metric}: published"] = "–" if paper is None else plus_minus(paper["mean"], paper["std"])
                values = cell[cell.metric == (metric if metric == "auc" else f"{metric}_plugin")]
                for protocol in ("paper", "holdout"):
                    ours = values[values.protocol == protocol].value
                    text = "–" if ours.empty else spread(ours)
                    if protocol == "paper" and paper is not None and len(ours):
                        text += mark(metric, ours.mean(), paper["mean"], paper["std"])
                    row[f"{metric}: {protocol}"] = text
            row["missing"] = "/".join(cell.sort_values("protocol", ascending=False).missing.unique())
            runs = cell.drop_duplicates(["protocol", "fold", "seed"]).protocol.value_counts()
            row["runs"] = f"{runs.get('paper', 0)}/{runs.get('holdout', 0)}"
            rows.append(row)
        parts.append(f"### {dataset}\n\n{markdown(pd.DataFrame(rows))}")
    return "\n\n".join(parts)


def beside(numbers: pd.DataFrame, published: pd.DataFrame, rivals: pd.DataFrame) -> str:
    """A line for each dataset, rank and metric: the published mean of the method, ours, and the best rival's.

    Only runs with absent cells masked count, and of the rivals' those of the same protocol. nll is the plug-in one, as
    published; rmse and mape are those of the best summary of the predictive distribution, and the plug-in one stands
    beside them. p is that of a paired t-test over the folds that both have.
    """
    published, rows = by_cell(published), []
    numbers, rivals = (table[table.missing == "masked"] for table in (numbers, rivals))
    cells = numbers.sort_values("rank", kind="stable").groupby(["dataset", "rank", "model", "protocol"], dropna=False)
    for (dataset, rank, model, protocol), cell in cells:
        others = rivals[(rivals.dataset == dataset) & (rivals.protocol == protocol) & (rivals.model != model)]
        others = others[others["rank"].isna() | (others["rank"] == rank)]
        for metric in ["auc", "nll_plugin"] if (cell.metric == "auc").any() else ["rmse", "mape", "nll_plugin"]:
            name, sign = metric.removesuffix("_plugin"), -1 if metric == "auc" else 1
            of_metric = cell[cell.metric == metric]
            ours = of_metric.value.mean()
            key = (dataset, model, rank, name)
            paper = published.loc[key] if key in published.index else None
            ahead = ["published"] if paper is not None and sign * ours < sign * paper["mean"] else []
            means = (sign * others[others.metric == metric].groupby("model").value.mean()).sort_values()
            rival = p = None
            if len(means):
                best = others[(others.model == means.index[0]) & (others.metric == metric)]
                rival = f"{means.index[0]} {spread(best.value)}"
                pairs = [table.groupby("fold").value.mean() for table in (of_metric, best)]
                pairs = pd.concat(pairs, axis=1).dropna()
                p = f"{ttest_rel(*pairs.to_numpy().T).pvalue:.2g}" if len(pairs) > 1 else None
                ahead += ["rivals"] if sign * ours < means.iloc[0] else []
            rows.append(
                {
                    **{"dataset": dataset, "rank": rank, "metric": name},
                    "published": None if paper is None else plus_minus(paper["mean"], paper["std"]),
                    model: spread(of_metric.value),
                    "plug-in": None if metric == "auc" else spread(cell[cell.metric == f"{name}_plugin"].value),
                    **{"best rival": rival, "p": p, "ahead of": " and ".join(ahead) or "none", "runs": len(of_metric)},
                }
            )
    return markdown(pd.DataFrame(rows).fillna("–"))


def by_cell(published: pd.DataFrame) -> pd.DataFrame:
    """The published means and standard deviations by dataset, model, rank and metric."""
    published = published.assign(model=published.method.str.lower())
    return published.set_index(["dataset", "model", "rank", "metric"])[["mean", "std"]]


def mark(metric: str, ours: float, mean: float, std: float) -> str:
    """ " +" or " -" where two numbers are more than two standard deviations apart; only the AUC is better if higher."""
    if not abs(ours - mean) > 2 * std:
        return ""
    return " +" if (ours > mean) == (metric == "auc") else " -"


def spread(values: pd.Series) -> str:
    """Mean ± standard deviation, – where a run's test entries leave the metric undefined."""
    return "–" if values.isna().any() else plus_minus(values.mean(), values.std())


def plus_minus(mean: float, std: float) -> str:
    return f"{mean:.3f}" if math.isnan(std) else f"{mean:.3f} ± {std:.3f}"


def markdown(table: pd.DataFrame) -> str:
    rows = table.astype(object).where(table.notna(), "").to_numpy()
    lines = [table.columns, ["---"] * len(table.columns), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def figure(run: Path, file: Path) -> None:
    """Observed values of a run's test entries against the predicted mean, with the predictive interval."""
    if run is None or not (run / "metrics.json").exists():
        raise ValueError(f"--figure needs --run, the folder of a finished run; {run} is none")
    if "auc" in read_json(run / "metrics.json")["metrics"]:
        raise ValueError(f"{run} is a run of binary entries; the figure is one of counts")
    if not (run / "predictions.csv").exists():
        raise ValueError(f"{run} has lost its predictions.csv: run its command again with force=true")
    title = yaml.safe_load((run / "config.yaml").read_text())["dataset"]["name"]
    test = pd.read_csv(run / "predictions.csv").sort_values("mean")
    if "lower" not in test:
        raise ValueError(f"{run} is a run of a method without quantiles; the figure shows them")
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
    parser.add_argument("source", nargs="?", type=Path, default=Path("runs"), help="root of the run folders, or a CSV")
    parser.add_argument("--variants", action="store_true", help="root holds a folder of run folders for each variant")
    parser.add_argument("--csv", type=Path, help="file for all numbers")
    parser.add_argument("--compare", type=Path, help="CSV of published means and standard deviations")
    parser.add_argument("--rivals", type=Path, help="with --compare: CSV or run folders of other methods")
    parser.add_argument("--figure", type=Path, help="file for the figure of one run of counts")
    parser.add_argument("--run", type=Path, help="folder of that run")
    arguments = parser.parse_args()
    try:
        if arguments.figure:
            figure(arguments.run, arguments.figure)
            return
        if arguments.rivals and not arguments.compare:
            raise ValueError("--rivals goes with --compare")
        if arguments.variants and arguments.compare:
            raise ValueError("--variants and --compare: name the folder of one variant and leave --variants out")
        numbers = (collect_variants if arguments.variants else collect)(arguments.source)
        if arguments.compare:
            published = read_table(arguments.compare, ["dataset", "method", "rank", "metric", "mean", "std"])
            if (numbers.protocol == "validation").any():
                raise ValueError(
                    f"{arguments.source} holds runs of protocol=validation, whose entries are not those of published "
                    "numbers: name a folder without them"
                )
        if arguments.csv:
            numbers.to_csv(arguments.csv, index=False)
        if arguments.compare and arguments.rivals:
            print(beside(numbers, published, collect(arguments.rivals)))
            return
        print(comparison(numbers, published) if arguments.compare else tables(numbers))
    except (OSError, ValueError) as error:  # files that cannot be written, or are not what a run leaves
        named = isinstance(error, OSError) and error.filename
        text = f"{error.filename}: {error.strerror}" if named else str(error)
        sys.exit(f"error: {' '.join(text.split())}")


if __name__ == "__main__":
    main()
