"""The numbers of all runs as one table, a row for each run and metric."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from ented.runs import CONTENT, about, read_json

ABOUT = ["dataset", "model", "rank", "fold", "seed", "protocol", "missing"]
FAILED = "failed"  # stands for the metric of a run that failed; then there is no value, and `error` says why


def collect(source: Path) -> pd.DataFrame:
    """All numbers of every finished run below a folder, and a row for each failed one; or such a table from its CSV."""
    if not source.is_dir():
        if not source.exists() and not source.suffix:
            raise ValueError(f"there is no folder {source}: train something first, or name the folder of the runs")
        return of_table(source)
    rows, folders, contents = [], {}, {}
    for file in sorted(source.rglob("metrics.json")):
        run = read_run(file)
        cell = {key: run[key] for key in ABOUT}
        made = {"epochs": run["epochs"], "seconds": run["train_seconds"]}
        made |= {"command": run["command"], "version": run["version"]}
        content, other = contents.setdefault(run["dataset"], (run[CONTENT], file.parent))
        if content != run[CONTENT]:
            raise ValueError(
                f"{other} and {file.parent} are of different tables, or folds, of one name: give each a dataset.name="
            )
        twin = folders.setdefault(tuple(cell.values()), file.parent)
        if twin != file.parent:
            raise ValueError(
                f"{twin} and {file.parent} hold the same run: name a folder that has one of them, or --variants"
            )
        rows += [{**cell, "metric": name, "value": value, **made} for name, value in run["metrics"].items()]
    for file in sorted(source.rglob("error.txt")):
        try:
            cell = about(yaml.safe_load((file.parent / "config.yaml").read_text(encoding="utf-8")))
        except (OSError, KeyError, TypeError, yaml.YAMLError):
            raise ValueError(f"{file.parent / 'config.yaml'} is lost or damaged: remove the folder") from None
        rows.append({**cell, "metric": FAILED, "error": file.read_text(encoding="utf-8").partition("\n")[0]})
    if not rows:
        raise ValueError(f"no finished run below {source}: train something first, or name the folder of the runs")
    return with_columns(pd.DataFrame(rows))


def read_run(file: Path) -> dict:
    """What a run's metrics.json says of it, with nan for a metric that is not defined."""
    run = read_json(file)
    try:
        kept = {key: run[key] for key in (*ABOUT, "epochs", "train_seconds", "command", "version")}
        metrics = {name: math.nan if value is None else float(value) for name, value in run["metrics"].items()}
        return kept | {CONTENT: run.get(CONTENT), "metrics": metrics}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{file} is damaged ({error!r}): remove it, and start its run again") from None


def of_table(file: Path, *also: str) -> pd.DataFrame:
    """The numbers in a CSV, which must have the columns of all tables of numbers, and some `also`."""
    numbers = read_table(file, [*ABOUT, "metric", "value", *also])
    if numbers.empty:
        raise ValueError(f"{file} holds no run: make it again, from the folders of runs")
    for column in ("rank", "value"):
        wrong = numbers[column].notna() & pd.to_numeric(numbers[column], errors="coerce").isna()
        if wrong.any():
            row = wrong.idxmax()
            raise ValueError(f"{file}: {column} is {numbers[column][row]} in row {row}, which is no number")
    metrics = finished(numbers).groupby([*ABOUT, *also], dropna=False).metric.agg(lambda names: " ".join(sorted(names)))
    of_cells = metrics.groupby([key for key in metrics.index.names if key not in ("fold", "seed")], dropna=False)
    if (of_cells.nunique() > 1).any():
        cell = "  ".join(map(str, of_cells.nunique().idxmax()))
        raise ValueError(f"{file}: the runs of {cell} have different metrics: is it cut off?")
    return with_columns(numbers)


def with_columns(numbers: pd.DataFrame) -> pd.DataFrame:
    """All columns of a table of numbers, empty where there is nothing, and those that it has besides."""
    columns = [*ABOUT, "metric", "value", "epochs", "seconds", "command", "version", "error"]
    others = [column for column in numbers if column not in columns]
    return numbers.reindex(columns=columns + others).astype({"rank": "Int64"})


def save(numbers: pd.DataFrame, file: Path) -> None:
    """As CSV; where no run failed, without the column that says why."""
    numbers.drop(columns=[] if len(failed(numbers)) else "error").to_csv(file, index=False)


def collect_all(sources: list[Path]) -> pd.DataFrame:
    """The numbers of several sources, none of which may have a run of another."""
    numbers = pd.concat(map(collect, sources), ignore_index=True)
    of_row = [*ABOUT, "metric", *(["variant"] if "variant" in numbers else [])]
    if (twice := numbers.duplicated(of_row)).any():
        run = "  ".join(f"{key} {value}" for key, value in numbers.loc[twice.idxmax(), ABOUT].items())
        raise ValueError(f"{', '.join(map(str, sources))}: two of these hold the same run ({run}): name one of them")
    return numbers


def collect_variants(source: Path) -> pd.DataFrame:
    """The same of each folder in a folder that has a finished run, with the folder's name as `variant`; or the CSV."""
    if not source.is_dir():
        return of_table(source, "variant")
    folders = [folder for folder in sorted(source.iterdir()) if any(folder.rglob("metrics.json"))]
    if not folders:
        raise ValueError(f"no folder with a finished run in {source}: train something first, or name another folder")
    return pd.concat([collect(folder).assign(variant=folder.name) for folder in folders], ignore_index=True)


def collect_epochs(source: Path) -> pd.DataFrame:
    """The test AUC after each epoch of the runs of experiment=convergence below a folder; or such a table's CSV."""
    columns = ["dataset", "model", "rank", "fold", "seed", "epoch", "test_auc"]
    if not source.is_dir():
        return read_table(source, columns)
    parts = []
    for file in sorted(source.rglob("metrics.json")):
        epochs, run = read_table(file.parent / "epochs.csv", ["epoch"]), read_run(file)
        if "test_auc" in epochs:
            parts.append(epochs.assign(**{key: run[key] for key in columns[:5]})[columns])
    if not parts:
        raise ValueError(f"no finished run with callbacks=convergence on binary entries below {source}")
    return pd.concat(parts)


def collect_calibration(source: Path, bins: int = 20) -> pd.DataFrame:
    """Whether predictions mean what they say: in bins of equal size of the test entries of all folds together.

    Of binary entries, the mean predicted probability and the share of ones. Of counts, the mean predicted count and the
    share that lies between the predicted 5% and 95% quantiles. Of the finished runs below a folder; or the table's CSV.
    """
    columns = ["dataset", "kind", "model", "rank", "protocol", "predicted", "observed", "entries"]
    if not source.is_dir():
        return read_table(source, columns)
    of_cells = {}
    for file in sorted(source.rglob("metrics.json")):
        run, predictions = read_run(file), file.with_name("predictions.csv")
        if not predictions.exists():
            continue
        test = read_table(predictions, ["value", "mean"])
        kind = "binary" if "auc" in run["metrics"] else "count"
        if kind == "binary" or "lower" in test:
            observed = test.value if kind == "binary" else (test.value >= test.lower) & (test.value <= test.upper)
            predicted = test.assign(observed=observed)[["mean", "observed"]]
            cell = run["dataset"], kind, run["model"], run["rank"], run["protocol"]
            of_cells.setdefault(cell, []).append(predicted)
    parts = []
    for cell, predictions in of_cells.items():
        test = pd.concat(predictions).sort_values("mean")
        binned = test.groupby(np.arange(len(test)) * bins // len(test))
        table = binned.agg(predicted=("mean", "mean"), observed=("observed", "mean"), entries=("mean", "size"))
        parts.append(table.assign(**dict(zip(columns, cell, strict=False)))[columns])
    return (pd.concat(parts) if parts else pd.DataFrame(columns=columns)).astype({"rank": "Int64"})


def read_table(file: Path, columns: list[str]) -> pd.DataFrame:
    """A CSV that must have these columns."""
    try:
        table = pd.read_csv(file)
    except ValueError as error:  # pandas' own
        raise ValueError(f"{file} is not a CSV ({error})") from None
    if missing := [column for column in columns if column not in table]:
        raise ValueError(f"{file} has no column {missing[0]}: it needs {', '.join(columns)}")
    return table


def finished(numbers: pd.DataFrame) -> pd.DataFrame:
    return numbers[numbers.metric != FAILED]


def failed(numbers: pd.DataFrame) -> pd.DataFrame:
    """A row for each run that failed, with the reason as `error`."""
    return numbers[numbers.metric == FAILED]
