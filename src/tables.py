"""Tables of the numbers of runs: means over folds, beside published ones, paired comparisons, ranks, and times.

Each is a data frame of texts, in which ** stands around the best; `markdown` and `latex` write it down.
"""

import math
import re
from collections.abc import Iterable

import pandas as pd
from scipy.stats import ttest_rel

from ented.metrics import METRICS
from results import failed, finished

RUN = ["dataset", "model", "rank", "protocol", "missing"]
PLUGIN = {"binary": ["auc", "nll_plugin"], "count": ["rmse_plugin", "mape_plugin", "nll_plugin"]}
PUBLISHED = {  # the paper's tables, in its definition of the metrics, which are the plug-in ones
    "binary": ["auc", "nll_plugin"],
    "count": ["rmse_plugin", "mape_plugin"],
    "count_nll": ["nll_plugin"],
}
DATASETS = {"digg": 5, "enron": 5, "dblp": 1, "jhu": 5, "article": 5, "ems": 5}  # of the paper, and their folds
METHODS = {
    "gcp": "GCP",
    "bcp": "BCP",
    "sbtr": "SBTR",
    "ncpd": "NCPD",
    "bpcp": "BPCP",
    "vbgcp": "VBGCP",
    "mdtf": "MDTF",
    "costco": "CoSTCo",
    "main_effects": "main effects",
    "gptf": "GPTF",
    "gptf_pg": "GPTF-PG",
    "ented": "ENTED",
}


def means(numbers: pd.DataFrame) -> list[pd.DataFrame]:
    """Mean ± standard deviation over folds and seeds: a table of binary datasets, a table of counts."""
    keys = [*RUN, "variant"] if "variant" in numbers else RUN
    text = numbers.groupby([*keys, "metric"], dropna=False).value.agg(spread).unstack()
    runs = numbers.drop_duplicates([*keys, "fold", "seed"]).groupby(keys, dropna=False).size()
    parts = []
    for metrics in METRICS.values():
        part = text.reindex(columns=metrics)
        part = part[part[metrics[0]].notna()].astype(object).fillna("–").join(runs.rename("runs")).reset_index()
        if len(part):
            parts.append(part)
    return parts


def comparison(numbers: pd.DataFrame, published: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Means under both protocols beside published ones, a table for each dataset.

    `published` has the columns dataset, method, rank, metric, mean and std; its metrics are plug-in ones. A mean of
    protocol=paper that is further than two published standard deviations away is marked: + where it is better,
    - where it is worse.
    """
    refuse_both_missing(numbers)
    published, parts = by_cell(published), {}
    for dataset in numbers.dataset.unique():
        part = numbers[numbers.dataset == dataset].sort_values(["model", "rank"], kind="stable")
        metrics = ["auc", "nll"] if (part.metric == "auc").any() else ["rmse", "mape", "nll"]
        rows = []
        for (model, rank), cell in part.groupby(["model", "rank"], dropna=False, sort=False):
            row = {"model": model, "rank": "" if pd.isna(rank) else rank}
            for metric in metrics:
                paper = lookup(published, dataset, model, rank, metric)
                row[f"{metric}: published"] = "–" if paper is None else plus_minus(paper["mean"], paper["std"])
                values = cell[cell.metric == plugin(metric)]
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
        parts[dataset] = pd.DataFrame(rows)
    return parts


def beside(numbers: pd.DataFrame, published: pd.DataFrame, rivals: pd.DataFrame) -> pd.DataFrame:
    """A line for each dataset, rank and metric: the published mean of the method, ours, and the best rival's.

    Only runs with absent cells masked count, and of the rivals those of the same protocol that have all our folds. nll
    is the plug-in one, as published; rmse and mape are those of the best summary of the predictive distribution, and
    the plug-in one stands beside them. p is that of a paired t-test over the folds.
    """
    published, rows = by_cell(published), []
    numbers, rivals = (table[table.missing == "masked"] for table in (numbers, rivals))
    if numbers.empty:
        raise ValueError("there is no run with missing=masked to compare")
    if numbers.model.nunique() > 1:
        methods = ", ".join(numbers.model.unique())
        raise ValueError(f"rivals are those of one method, and here are {methods}: name a folder with one")
    groups = numbers.sort_values("rank", kind="stable").groupby(["dataset", "rank", "model", "protocol"], dropna=False)
    for (dataset, rank, model, protocol), cell in groups:
        others = rivals[(rivals.dataset == dataset) & (rivals.protocol == protocol) & (rivals.model != model)]
        others = others[others["rank"].isna() | (others["rank"] == rank)]
        for metric in ["auc", "nll_plugin"] if (cell.metric == "auc").any() else ["rmse", "mape", "nll_plugin"]:
            name = metric.removesuffix("_plugin")
            of_metric = cell[cell.metric == metric]
            ours = of_metric.value.mean()
            paper = lookup(published, dataset, model, rank, name)
            ahead = ["published"] if paper is not None and better(metric, ours, paper["mean"]) else []
            of_rivals = others[others.metric == metric].groupby("model")
            whole = of_rivals.filter(lambda runs, folds=set(of_metric.fold): folds <= set(runs.fold))
            by_model = whole.groupby("model").value.mean().sort_values(ascending=metric != "auc")
            rival = p = None
            if len(by_model):
                best = others[(others.model == by_model.index[0]) & (others.metric == metric)]
                rival = f"{by_model.index[0]} {spread(best.value)}"
                p = paired(of_metric, best)[2]
                ahead += ["rivals"] if better(metric, ours, by_model.iloc[0]) else []
            rows.append(
                {
                    "dataset": dataset,
                    "rank": rank,
                    "metric": name,
                    "published": None if paper is None else plus_minus(paper["mean"], paper["std"]),
                    model: spread(of_metric.value),
                    "plug-in": None if metric == "auc" else spread(cell[cell.metric == f"{name}_plugin"].value),
                    "best rival": rival,
                    "p": p,
                    "ahead of": " and ".join(ahead) or "none",
                    "runs": len(of_metric),
                }
            )
    return pd.DataFrame(rows).fillna("–")


def cells(numbers: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """Our mean and standard deviation of every cell of the paper's tables, beside the published ones.

    A cell is a dataset, a method, a rank and a plug-in metric; a method without a rank has one for each rank of its
    dataset. `folds` are those that are finished, of the `of` that the dataset has (or, where it is none of the paper's,
    some method), and `failed` counts the runs that failed. `numbers` are those of one protocol.
    """
    keys = ["dataset", "model", "rank"]
    published = by_cell(published)
    refuse_both_missing(finished(numbers))
    published = published[published.index.isin(numbers.dataset, level="dataset")]
    known = pd.concat([numbers[keys], published.reset_index()[keys]]).drop_duplicates()
    ranks_of = known.dropna().groupby("dataset")["rank"].unique()
    numbers = numbers.assign(
        rank=[
            ranks_of.get(dataset, ["all"]) if pd.isna(rank) else rank
            for dataset, rank in zip(numbers.dataset, numbers["rank"], strict=True)
        ]
    ).explode("rank")
    binary = {*numbers[numbers.metric == "auc"].dataset, *published.query("metric == 'auc'").index.unique("dataset")}
    rows = pd.concat([numbers[keys], published.reset_index()[keys]]).drop_duplicates()
    rows["metric"] = [PLUGIN["binary" if dataset in binary else "count"] for dataset in rows.dataset]
    rows = rows.explode("metric").set_index([*keys, "metric"])
    ours = numbers.groupby([*keys, "metric"]).agg(
        mean=("value", lambda values: values.mean(skipna=False)), std=("value", "std"), folds=("fold", "nunique")
    )
    failures = failed(numbers).groupby(keys).size().rename("failed")
    rows = rows.join(ours).join(published.rename(index=plugin, level="metric").add_prefix("published_"))
    rows = rows.reset_index().join(failures, on=keys).fillna({"folds": 0, "failed": 0})
    rows = rows.astype({"folds": int, "failed": int})
    most = rows.groupby("dataset").folds.transform("max")
    return rows.assign(of=rows.dataset.map(DATASETS).fillna(most).astype(int))


def published_tables(cells: pd.DataFrame, marked: bool = False) -> dict[str, pd.DataFrame]:
    """The paper's tables: a row for each dataset and method, a column for each metric and rank.

    A table cell has our mean ± standard deviation, and the published ones in square brackets. The best of our means
    is bold where there are several; with `marked`, one that is further than two published standard deviations away has
    a + where it is better and a - where it is worse. Only means over all folds are bold or marked. "failed" stands
    where all runs failed, "–" where there is none.
    """
    signed = (cells["mean"] * cells.metric.map(sign)).where(all_folds(cells))
    alike = signed.groupby([cells.dataset, cells["rank"], cells.metric])
    best = (alike.transform("min") == signed) & (alike.transform("count") > 1)
    cells = cells.assign(whole=all_folds(cells), best=best)
    cells["text"] = [cell_text(cell, marked) for cell in cells.itertuples()]
    binary, parts = set(cells[cells.metric == "auc"].dataset), {}
    for name, metrics in PUBLISHED.items():
        part = cells[cells.metric.isin(metrics) & (cells.dataset.isin(binary) == (name == "binary"))]
        part = part[part.groupby(["dataset", "model"]).text.transform(lambda texts: (texts != "–").any())]
        if part.empty:
            continue
        wide = part.pivot(index=["dataset", "model"], columns=["metric", "rank"], values="text").fillna("–")
        order = in_order(part.dataset, DATASETS), in_order(part.model, METHODS)
        wide = wide.reindex([(d, m) for d in order[0] for m in order[1] if (d, m) in wide.index])
        ranks = sorted(part["rank"].unique(), key=lambda rank: (isinstance(rank, str), rank))
        wide = wide[[(metric, rank) for metric in metrics for rank in ranks]]
        wide.columns = [f"{metric.removesuffix('_plugin').upper()}, rank {rank}" for metric, rank in wide.columns]
        parts[name] = wide.reset_index().replace({"model": METHODS}).rename(columns={"model": "method"})
    return parts


def all_folds(cells: pd.DataFrame) -> pd.Series:
    """Whether a cell's mean is one over all folds."""
    return (cells.folds == cells.of) & (cells.failed == 0) & (cells.of > 0)


def cell_text(cell, marked: bool) -> str:
    """A row of `cells`, with `whole` and `best`, as it stands in a table."""
    ours, note, published = "failed" if cell.failed else "–", "", ""
    if cell.folds:
        ours = "undefined" if math.isnan(cell.mean) else plus_minus(cell.mean, cell.std)
        ours = f"**{ours}**" if cell.best else ours
        if not cell.whole:
            note = f" ({cell.folds} of {cell.of} folds" + (f", {cell.failed} failed)" if cell.failed else ")")
        elif marked:
            note = mark(cell.metric, cell.mean, cell.published_mean, cell.published_std)
    if not math.isnan(cell.published_mean):
        published = f" [{plus_minus(cell.published_mean, cell.published_std)}]"
    return ours + note + published


def paired_table(numbers: pd.DataFrame) -> pd.DataFrame:
    """Every other method against ENTED, over the folds that both have: means, the mean difference, and a paired t-test.

    A difference above 0 means that ENTED is better, whichever way the metric goes.
    """
    rows = []
    metrics = finished(numbers)
    metrics = metrics[metrics.metric.isin([*PLUGIN["binary"], *PLUGIN["count"]])]
    for (dataset, rank, metric), ours in metrics[metrics.model == "ented"].groupby(["dataset", "rank", "metric"]):
        others = metrics[(metrics.dataset == dataset) & (metrics.metric == metric) & (metrics.model != "ented")]
        others = others[others["rank"].isna() | (others["rank"] == rank)]
        for model, theirs in others.groupby("model"):
            both = set(ours.fold) & set(theirs.fold)
            folds, difference, p = paired(ours, theirs)
            rows.append(
                {
                    "dataset": dataset,
                    "rank": rank,
                    "metric": metric.removesuffix("_plugin"),
                    "method": METHODS.get(model, model),
                    "method's mean": spread(theirs[theirs.fold.isin(both)].value) if both else "–",
                    "ENTED's mean": spread(ours[ours.fold.isin(both)].value) if both else "–",
                    "difference": f"{sign(metric) * difference:.3f}",
                    "p": p or "–",
                    "folds": folds,
                }
            )
    return pd.DataFrame(rows)


def rank_table(cells: pd.DataFrame) -> pd.DataFrame:
    """A method's mean place, 1 for the best, over the datasets and ranks where it has a number over all folds.

    In brackets how many these are. Where a method has none, those behind it move up; where it stands alone, it has no
    place.
    """
    cells = cells[all_folds(cells) & cells["mean"].notna()]
    groups = [cells.dataset, cells["rank"], cells.metric]
    cells = cells[cells.model.groupby(groups).transform("size") > 1]
    if cells.empty:
        return pd.DataFrame()
    signed = cells["mean"] * cells.metric.map(sign)
    place = signed.groupby(groups).rank()
    kind = cells.dataset.isin(cells[cells.metric == "auc"].dataset).map({True: "binary", False: "counts"})
    name = cells.metric.str.removesuffix("_plugin").str.upper() + ", " + kind
    text = place.groupby([cells.model, name]).agg(lambda places: f"{places.mean():.1f} ({len(places)})")
    wide = text.unstack().fillna("–")
    wide = wide.loc[in_order(wide.index, METHODS)]
    return wide.reset_index().replace({"model": METHODS}).rename(columns={"model": "method"})


def time_table(numbers: pd.DataFrame) -> pd.DataFrame:
    """Mean seconds of the final fit of a run, for each method, dataset and rank."""
    runs = finished(numbers).drop_duplicates(["dataset", "model", "rank", "fold", "seed"])
    runs = runs[runs.seconds.notna()]
    if runs.empty:
        return pd.DataFrame()
    text = runs.groupby(["dataset", "rank", "model"], dropna=False).seconds.agg(lambda seconds: f"{seconds.mean():.2f}")
    wide = text.unstack().fillna("–")
    wide = wide[in_order(wide.columns, METHODS)].loc[in_order(wide.index.unique(0), DATASETS)].reset_index()
    return wide.astype({"rank": object}).fillna({"rank": "all"}).rename(columns=METHODS)


def failure_table(numbers: pd.DataFrame) -> pd.DataFrame:
    """The runs that failed, and why."""
    return failed(numbers)[["dataset", "model", "rank", "fold", "seed", "protocol", "error"]]


def paired(ours: pd.DataFrame, theirs: pd.DataFrame) -> tuple[int, float, str | None]:
    """Of the folds that both have: their number, the mean difference theirs - ours, and a paired t-test's p."""
    pairs = pd.concat([table.groupby("fold").value.mean() for table in (ours, theirs)], axis=1).dropna().to_numpy()
    p = f"{ttest_rel(*pairs.T).pvalue:.2g}" if len(pairs) > 1 else None
    return len(pairs), (pairs[:, 1] - pairs[:, 0]).mean() if len(pairs) else math.nan, p


def by_cell(published: pd.DataFrame) -> pd.DataFrame:
    """The published means and standard deviations by dataset, model, rank and metric."""
    published = published.assign(model=published.method.str.lower())
    return published.set_index(["dataset", "model", "rank", "metric"])[["mean", "std"]]


def lookup(published: pd.DataFrame, *cell) -> pd.Series | None:
    return published.loc[cell] if cell in published.index else None


def refuse_both_missing(numbers: pd.DataFrame) -> None:
    """Raise ValueError where a mean would be one over runs with both settings of missing."""
    keys = ["dataset", "model", "rank", "protocol"]
    settings = numbers.groupby(keys, dropna=False).missing.nunique()
    if (settings > 1).any():
        dataset, model, rank, _ = settings.idxmax()
        raise ValueError(f"{dataset}, {model}, rank {rank}: runs with both settings of missing: name a folder with one")


def sign(metric: str) -> int:
    """Only the AUC is better if higher."""
    return -1 if metric == "auc" else 1


def better(metric: str, ours: float, theirs: float) -> bool:
    return sign(metric) * ours < sign(metric) * theirs


def plugin(metric: str) -> str:
    """The published metrics are plug-in ones; an AUC is the same either way."""
    return metric if metric == "auc" else f"{metric}_plugin"


def in_order(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """The names in the order of those that are known, then the others."""
    names = set(names)
    return [name for name in known if name in names] + sorted(names - set(known))


def mark(metric: str, ours: float, mean: float, std: float) -> str:
    """ " +" or " -" where two numbers are more than two standard deviations apart."""
    if not abs(ours - mean) > 2 * std:
        return ""
    return " +" if better(metric, ours, mean) else " -"


def spread(values: pd.Series) -> str:
    """Mean ± standard deviation, – where a run's test entries leave the metric undefined."""
    return "–" if values.isna().any() else plus_minus(values.mean(), values.std())


def plus_minus(mean: float, std: float) -> str:
    return f"{mean:.3f}" if math.isnan(std) else f"{mean:.3f} ± {std:.3f}"


def markdown(table: pd.DataFrame) -> str:
    rows = table.astype(object).where(table.notna(), "").to_numpy()
    lines = [table.columns, ["---"] * len(table.columns), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", r"\|") for cell in line) + " |" for line in lines)


def latex(table: pd.DataFrame) -> str:
    """For \\usepackage{booktabs}."""
    rows = table.astype(object).where(table.notna(), "").to_numpy()
    head, *body = [" & ".join(map(tex, line)) + r" \\" for line in [table.columns, *rows]]
    lines = [r"\toprule", head, r"\midrule", *body, r"\bottomrule"]
    return "\n".join([rf"\begin{{tabular}}{{{'l' * len(table.columns)}}}", *lines, r"\end{tabular}"])


def tex(text: object) -> str:
    """A cell's text, with what LaTeX reads in another way replaced."""
    text = re.sub(r"[&%#_{}$~^\\]", lambda sign: TEX.get(sign[0], "\\" + sign[0]), str(text))
    text = re.sub(r"\*\*(.*?)\*\*", r"\\textbf{\1}", text)
    text = re.sub(r" ([+-])(?= \[|$)", r" $\1$", text)  # the marks
    return text.replace("±", r"$\pm$").replace("–", "--")


TEX = {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}
