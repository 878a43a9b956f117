"""A run is a folder: <runs_dir>/<dataset>/<model>/rank=R/fold=K/seed=S/.

config.yaml      all settings, written first
train.log        what was done
holdout/         the fit that chose the number of epochs (protocol=holdout): epochs.csv, last.ckpt, chosen.json
epochs.csv       metrics of each epoch
last.ckpt        state after the last epoch, or the state to resume from
predictions.csv  predictive distribution of every test entry
metrics.json     written last: a run that has it is finished
"""

import json
import logging
import os
import shutil
from contextlib import contextmanager
from importlib.metadata import version
from logging.handlers import MemoryHandler
from pathlib import Path

import pandas as pd
import torch
import yaml

from ented.likelihoods import Predictive
from ented.tensor import COOTensor, InputError

log = logging.getLogger("ented")

# settings that say where and how a run is done, and cannot change its numbers
IMMATERIAL = (
    "runs_dir",
    "data_dir",
    "dataset.source.data_dir",
    "force",
    "checkpoint_seconds",
    "logger",
    "callbacks",
)


class RunFolder:
    """The folder of one run.

    Parameters
    ----------
    config : all settings of the run, resolved, with its own fold.
    """

    def __init__(self, config: dict):
        self.config = config
        self.path = model_folder(config) / f"fold={config['fold']}" / f"seed={config['seed']}"

    def check(self) -> None:
        """Raise InputError if the folder holds a run with other settings."""
        stored = self.path / "config.yaml"
        if not stored.exists():
            return
        ours, theirs = flat(self.config), flat(yaml.safe_load(stored.read_text()))
        for key in sorted(ours.keys() | theirs.keys()):
            if not key.startswith(IMMATERIAL) and ours.get(key) != theirs.get(key):
                raise InputError(
                    f"{self.path} holds a run with {key}={theirs.get(key)}, asked for is {key}={ours.get(key)}: "
                    "choose another runs_dir=, or force=true to replace it"
                )

    @property
    def metrics(self) -> dict | None:
        """What metrics.json holds, None if the run is not finished."""
        file = self.path / "metrics.json"
        return json.loads(file.read_text()) if file.exists() else None

    @contextmanager
    def logging(self):
        """Collect the log's lines; they go to train.log from the moment that `open` has made the folder."""
        self._lines = MemoryHandler(capacity=10**6, flushLevel=logging.CRITICAL)
        log.addHandler(self._lines)
        try:
            yield
        finally:
            log.removeHandler(self._lines)
            self._lines.close()

    def open(self, force: bool) -> None:
        """Make the folder, or go on in the one that an earlier start left; `force` empties it first."""
        if force:
            shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True, exist_ok=True)
        write(self.path / "config.yaml", yaml.safe_dump(self.config, sort_keys=False))
        file = logging.FileHandler(self.path / "train.log")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._lines.setTarget(file)
        self._lines.flush()
        self._lines.flushLevel = logging.NOTSET  # from here on line by line

    def write_predictions(self, modes: list[str], test: COOTensor, predictive: Predictive) -> None:
        """Write predictions.csv: a row for each test entry, in the order of the test set.

        `lower` and `upper` are the 5% and 95% quantiles: of the count, or of the probability of a one.
        """
        table = pd.DataFrame(test.indices.numpy(), columns=modes)
        columns = {
            "value": test.values.long(),
            "mean": predictive.mean,
            "std": predictive.variance.sqrt(),
            "lower": predictive.quantile(0.05),
            "upper": predictive.quantile(0.95),
            "log_prob": predictive.log_prob(test.values),
            "f_mean": predictive.f_mean,
            "f_std": predictive.f_variance.sqrt(),
        }
        table = table.assign(**{name: column.numpy() for name, column in columns.items()})
        write(self.path / "predictions.csv", table.to_csv(index=False, float_format="%.6g"))

    def finish(self, metrics: dict[str, float], epochs: int, steps: int, train_seconds: float) -> dict:
        """Write metrics.json, which marks the run as finished, and return its content."""
        config = self.config
        result = {
            "dataset": config["dataset"]["name"],
            "model": config["model"]["name"],
            "rank": config["rank"],
            "fold": config["fold"],
            "seed": config["seed"],
            "protocol": config["protocol"]["name"],
            "metrics": metrics,
            "epochs": epochs,
            "steps": steps,
            "train_seconds": round(train_seconds, 3),
            "version": version("ented"),
        }
        write(self.path / "metrics.json", json.dumps(result, indent=2) + "\n")
        return result


def model_folder(config: dict) -> Path:
    """Folder of all folds and seeds of one dataset, model and rank."""
    return Path(config["runs_dir"]) / config["dataset"]["name"] / config["model"]["name"] / f"rank={config['rank']}"


def write_summary(config: dict, results: list[dict]) -> dict[str, dict[str, float]]:
    """Write the mean and standard deviation over folds to summary.json, beside the folds, and return them.

    The file holds a summary for each seed; the others stay.
    """
    table = pd.DataFrame([result["metrics"] for result in results])
    metrics = {
        name: {"mean": column.mean(), "std": column.std(ddof=1) if len(column) > 1 else 0.0}
        for name, column in table.items()
    }
    file = model_folder(config) / "summary.json"
    summary = json.loads(file.read_text()) if file.exists() else {"seeds": {}}
    first = results[0]
    summary |= {key: first[key] for key in ("dataset", "model", "rank")}
    summary["seeds"][str(first["seed"])] = {
        "protocol": first["protocol"],
        "folds": [result["fold"] for result in results],
        "metrics": metrics,
    }
    write(file, json.dumps(summary, indent=2) + "\n")
    return metrics


def write(file: Path, text: str) -> None:
    """Replace a file in one step: a kill leaves the old one or the new one."""
    partial = file.with_name(file.name + ".partial")
    partial.write_text(text)
    os.replace(partial, file)


def flat(tree: dict, prefix: str = "") -> dict[str, object]:
    """Nested settings with dotted names: {"a": {"b": 1}} -> {"a.b": 1}."""
    leaves = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves |= flat(value, f"{prefix}{key}.")
        else:
            leaves[prefix + str(key)] = value
    return leaves


def join(batches: list[Predictive]) -> Predictive:
    """The predictive distributions of several batches as one."""
    return Predictive(
        batches[0].likelihood,
        torch.cat([batch.f_mean for batch in batches]).cpu(),
        torch.cat([batch.f_variance for batch in batches]).cpu(),
    )
