"""Figures of the numbers of runs, readable in grey: methods differ by the line's kind and the marker too."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from ented.runs import needs
from results import collect_calibration, read_run, read_table
from tables import DATASETS, METHODS, in_order

NAMED = 200  # points of a figure that can have a name each
STYLES = {
    "ented": dict(color="black", linestyle="-", marker="o", linewidth=1.8),
    "gptf_pg": dict(color="#0072b2", linestyle="--", marker="s", zorder=3),  # dashes above ENTED's line
    "gptf": dict(color="#d55e00", linestyle="-.", marker="^"),
    "gcp": dict(color="#999999", linestyle="-", marker="v"),
    "bcp": dict(color="#56b4e9", linestyle=":", marker="D"),
    "sbtr": dict(color="#009e73", linestyle=(0, (5, 1)), marker="P"),
    "costco": dict(color="#cc79a7", linestyle=(0, (3, 1, 1, 1)), marker="X"),
}


def of_run(run: Path) -> dict[str, Figure]:
    """What the test of a finished run looks like; nothing of counts without predicted quantiles."""
    bins = collect_calibration(run)
    if bins.empty:
        return {}
    return {"observed": observed(run)} if bins.kind.iloc[0] == "count" else {"calibration": calibration(bins)}


def save(figure: Figure, file: Path) -> None:
    """In the format that the file's name ends with."""
    if not file.suffix:  # Matplotlib would add one
        raise ValueError(f"{file} says no format: let its name end with .png, .pdf or .svg")
    figure.savefig(file, dpi=150)
    plt.close(figure)


def convergence(epochs: pd.DataFrame) -> Figure:
    """Test AUC against epoch, of the lowest rank: mean and standard deviation over folds.

    Each fold counts until the last has ended, with its last value where it has ended before.
    """
    epochs = epochs[epochs["rank"] == epochs["rank"].min()]
    datasets = in_order(epochs.dataset, DATASETS)
    figure, axes = panels(len(datasets))
    for panel, dataset in zip(axes, datasets, strict=True):
        part = epochs[epochs.dataset == dataset]
        for model in in_order(part.model, METHODS):
            runs = part[part.model == model].pivot(index="epoch", columns=["fold", "seed"], values="test_auc").ffill()
            mean, std = runs.mean(axis=1), runs.std(axis=1).fillna(0)
            marked = np.unique(np.geomspace(1, len(runs), 8).round().astype(int)) - 1
            look = style(model)
            panel.plot(runs.index, mean, label=METHODS.get(model, model), markevery=marked, markersize=4, **look)
            panel.fill_between(runs.index, mean - std, mean + std, color=look["color"], alpha=0.12, linewidth=0)
        panel.set(xscale="log", xlabel="epoch", ylabel="AUC of the test entries", title=dataset)
        panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        panel.xaxis.set_minor_formatter(NullFormatter())
    lines = {line.get_label(): line for panel in axes for line in panel.lines}
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=len(lines), fontsize=8, frameon=False)
    return figure


def inducing(numbers: pd.DataFrame) -> Figure:
    """Plug-in RMSE, and seconds of an epoch, against the number of inducing points, which is the column `variant`."""
    points = pd.to_numeric(numbers.variant, errors="coerce")
    if points.isna().any():
        name = numbers.variant[points.isna()].iloc[0]
        raise ValueError(f"{name} is no number of inducing points, by which the folders of such a study are named")
    numbers = numbers.assign(points=points.astype(int))[numbers.metric == "rmse_plugin"]
    if len(numbers[["dataset", "rank"]].drop_duplicates()) != 1:
        raise ValueError("the figure of inducing points is of runs of counts on one dataset at one rank")
    numbers = numbers.assign(epoch_seconds=numbers.seconds / numbers.epochs)
    figure, (error, time) = panels(2)
    for model in in_order(numbers.model, METHODS):
        part = numbers[numbers.model == model].groupby("points")
        look = {"label": METHODS.get(model, model), "markersize": 5, **style(model)}
        mean = part.value.mean()
        error.errorbar(mean.index, mean, part.value.std().fillna(0), capsize=2, **look)
        time.plot(part.epoch_seconds.mean(), **look)
    epochs = " or ".join(f"{epochs:.0f}" for epochs in sorted(numbers.epochs.unique()))
    title = f"{numbers.dataset.iloc[0]}, rank {numbers['rank'].iloc[0]}, after {epochs} epochs"
    error.set(xscale="log", xlabel="inducing points", ylabel="relative RMSE", title=title)
    time.set(xscale="log", yscale="log", xlabel="inducing points", ylabel="seconds of an epoch", title=title)
    for panel in (error, time):
        panel.set_xticks(points := sorted(numbers.points.unique()), map(str, points))
        panel.xaxis.minorticks_off()
    time.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    time.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    time.yaxis.set_minor_formatter(NullFormatter())
    error.legend(fontsize=8, frameon=False)
    return figure


def calibration(bins: pd.DataFrame) -> Figure:
    """Of binary entries, the share of ones; of counts, the share between the predicted 5% and 95% quantiles.

    Of one method at each dataset's lowest rank, under protocol=holdout where there are such runs, in bins with equally
    many test entries.
    """
    bins = bins.assign(rank=bins["rank"].fillna(0))  # of a method without one
    bins = bins[bins["rank"] == bins.groupby("dataset")["rank"].transform("min")]
    bins = bins[bins.protocol == bins.groupby("dataset").protocol.transform("min")]  # holdout is before paper
    kinds = in_order(bins.kind, ["binary", "count"])
    model = bins.model.iloc[0]
    figure, axes = panels(len(kinds))
    for panel, kind in zip(axes, kinds, strict=True):
        for i, dataset in enumerate(in_order(bins[bins.kind == kind].dataset, DATASETS)):
            part = bins[bins.dataset == dataset]
            look = {
                "color": ("black", "C0", "0.5", "C1")[i % 4],
                "marker": "os^D"[i % 4],
                "linestyle": ("-", "--", ":")[i % 3],
            }
            panel.plot(part.predicted, part.observed, label=dataset, markersize=4, **look)
        if kind == "binary":
            panel.plot([0, 1], [0, 1], color="0.7", linewidth=0.8)
            panel.set(xlabel="predicted probability of a one", ylabel="share of ones")
        else:
            panel.axhline(0.9, color="0.7", linewidth=0.8)
            panel.set(xscale="log", xlabel="predicted mean count", ylabel="share inside the 5% to 95% quantiles")
            panel.set_ylim(min(0.5, bins[bins.kind == kind].observed.min() - 0.02), 1.01)
        panel.set_title(METHODS.get(model, model))
        panel.legend(fontsize=8, frameon=False)
    return figure


def observed(run: Path) -> Figure:
    """Observed values of a run's test entries against the predicted mean, with the predictive interval."""
    test, dataset = predictions(run)
    test = test.sort_values("mean")
    inside = ((test.value >= test.lower) & (test.value <= test.upper)).mean()
    bins = test.groupby(np.arange(len(test)) * 25 // len(test))
    mean = bins["mean"].mean()
    figure, axes = plt.subplots(figsize=(5.5, 4), layout="constrained")
    axes.fill_between(
        mean, bins.lower.mean(), bins.upper.mean(), color="0.85", label="5% to 95% quantile, mean of each bin"
    )
    axes.scatter(test["mean"], test.value, s=4, color="0.55", linewidths=0, label=f"test entry ({inside:.0%} inside)")
    axes.plot(mean, bins.value.mean(), "o", color="C0", markersize=5, label="mean observed, 25 bins of equal size")
    limits = [mean.min(), mean.max()]
    axes.plot(limits, limits, color="black", linewidth=0.8, label="observed = predicted")
    axes.set(xscale="log", xlabel="predicted mean count", ylabel="observed count", title=dataset)
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(0)
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    return figure


def factors(run: Path, mode: str) -> Figure:
    """The factor means of one mode's rows in the two directions in which they differ most.

    Of a mixture the first component's, each factor in units of the kernel's lengthscale, so that rows that are close
    act alike. The rows have names where the dataset has them, numbers otherwise, and neither where they are too many to
    be read.
    """
    from ented.gaussian_process import GaussianProcessModule  # Lightning takes seconds to import
    from modules import load

    module, layout = load(run)
    if mode not in layout.modes:
        raise ValueError(f"there is no mode {mode}: the modes of {run} are {', '.join(layout.modes)}")
    if not isinstance(module, GaussianProcessModule):
        raise ValueError(f"{run} is a run of a method without such factors: name one of ented, gptf_pg or gptf")
    model, d = module.model, layout.modes.index(mode)
    rank = model.table.rank
    if min(rank, layout.shape[d]) < 2:
        raise ValueError(f"{run} has rank {rank} and {layout.shape[d]} of {mode}: the figure needs two directions")
    Z = model.table.Z.detach().double()
    Z = Z.reshape(-1, *Z.shape[-2:])  # components, rows, columns
    precision = torch.as_tensor(model.kernel.precision).detach().expand(len(Z), 1, rank * len(layout.shape))
    means = model.table.columns(Z[0]).factors.split(layout.shape)[d] * precision[0, 0].split(rank)[d].sqrt()
    centred = means - means.mean(0)
    directions = torch.linalg.svd(centred, full_matrices=False)[2][:2]
    xy = centred @ directions.T
    figure, axes = plt.subplots(figsize=(5.5, 4.5), layout="constrained")
    axes.plot(*xy.T, "o", color="0.6", markersize=3)
    if len(xy) <= NAMED:
        names = layout.labels.get(mode, range(len(xy)))
        for point, name in zip(xy.tolist(), names, strict=True):
            axes.annotate(str(name), point, xytext=(3, 3), textcoords="offset points", fontsize=7, parse_math=False)
    axes.set(xlabel="first direction, in lengthscales", ylabel="second direction, in lengthscales")
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_title(f"{read_run(run / 'metrics.json')['dataset']}: factors of {mode}", parse_math=False)
    return figure


def predictions(run: Path) -> tuple[pd.DataFrame, str]:
    """The predictions of a run of counts, and its dataset's name."""
    needs(run, "predictions.csv")
    about = read_run(run / "metrics.json")
    if "auc" in about["metrics"]:
        raise ValueError(f"{run} is a run of binary entries; the figure is one of counts")
    test = read_table(run / "predictions.csv", ["value", "mean"])
    if "lower" not in test:
        raise ValueError(f"{run} is a run of a method without quantiles; the figure shows them")
    return test, about["dataset"]


def panels(number: int) -> tuple[Figure, list[Axes]]:
    """A figure with panels side by side."""
    figure, axes = plt.subplots(1, number, figsize=(4.2 * number, 3.4), layout="constrained", squeeze=False)
    return figure, list(axes[0])


def style(model: str) -> dict:
    return STYLES.get(model, {"color": "0.4", "linestyle": ":", "marker": "."})
