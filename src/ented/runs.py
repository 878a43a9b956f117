"""A run is a folder: <runs_dir>/<dataset>/<model>/rank=R/fold=K/seed=S/, without rank=R for a model that has none.

config.yaml      all settings, written first
modes.json       the shape of the tensor, the names of its modes, and what their indices stand for
train.log        what was done
holdout/         the fit that chose the number of epochs, where one did: epochs.csv, last.ckpt, chosen.json;
                 of several learning rates, each has a folder lr=... for the first two
replicas-.../    last.ckpt of all runs of a command with replicas=folds, in the first of their folders, until it is done
epochs.csv       metrics of each epoch
last.ckpt        state after the last epoch, or the state to resume from
predictions.csv  predictive distribution of every test entry
metrics.json     written last: a run that has it is finished
error.txt        why it failed, and where in the code, until it is started again

and, beside the folds, summary-seed=S.json has their mean and standard deviation.
"""

import json
import logging
import math
import os
import shutil
import subprocess
from contextlib import contextmanager, suppress
from importlib.metadata import version
from logging.handlers import MemoryHandler
from pathlib import Path

import pandas as pd
import yaml
from filelock import FileLock, Timeout
from torch import Tensor

from ented.distributed import is_first
from ented.errors import InputError
from ented.tensor import Layout

log = logging.getLogger("ented")

# settings that change a run's numbers by no more than rounding
WITHOUT_EFFECT = {"runs_dir", "data_dir", "force", "checkpoint_seconds", "compile", "threads", "replicas"}
WITHOUT_EFFECT |= {"logger", "trainer", "callbacks", "methods", "launcher", "jobs"}
# settings at the top that a model takes, if it has one of the same name; that one counts
TAKEN_BY_MODEL = {"rank", "lr", "rho", "inducing", "missing", "compile"}
IMMATERIAL = WITHOUT_EFFECT | TAKEN_BY_MODEL | {"training_entries", "smallest_entry", "version"}
# what a method says of training counts at the top, where it can be overridden, of the likelihood in that, and what
# protocol.ented says in the model
IMMATERIAL_BELOW = ("model.training", "model.likelihood", "model.compile", "protocol.ented", "dataset.source.data_dir")
# a dataset's settings count where the top, the likelihood or an experiment has taken them
IMMATERIAL_BELOW += ("dataset.source.workers", "dataset.paper", "dataset.holdout", "dataset.zeta")
IMMATERIAL_BELOW += ("dataset.seeds", "dataset.replicas")

CONTENT = "content_of_files"  # in config.yaml, beside the settings: `Dataset.content`
FILES = "dataset.source.file", "dataset.source.test"  # whose names do not matter where the content is known


def code_version(checkout: Path) -> str:
    """The package's version, and in a checkout its commit: 0.1.0+1a2b3c4d, with .changed where files differ."""
    describe = ["git", "-C", str(checkout), "describe", "--always", "--exclude=*", "--abbrev=8", "--dirty=.changed"]
    if not (checkout / ".git").exists() or shutil.which("git") is None:
        return version("ented")
    commit = subprocess.run(describe, capture_output=True, text=True).stdout.strip()
    return version("ented") + (f"+{commit}" if commit else "")


VERSION = code_version(Path(__file__).parents[2])  # of the code that this process runs, whatever becomes of the files


class Busy(InputError):
    """Another command works on the run."""


@contextmanager
def writing(path: Path):
    """Raise InputError where the place cannot be written to."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write to {path} ({error.strerror or error}): choose another runs_dir=") from None


class RunFolder:
    """The folder of one run.

    Parameters
    ----------
    config : all settings of the run, resolved, with its own fold and seed.
    """

    def __init__(self, config: dict):
        self.config = config
        self.path = model_folder(config) / f"fold={config['fold']}" / f"seed={config['seed']}"
        self._lock = FileLock(self.path.with_name(f".{self.path.name}.lock"))
        self._lines = MemoryHandler(capacity=10**6, flushLevel=logging.CRITICAL)

    def difference(self, fingerprint: str | None = None) -> str | None:
        """The first setting in which the run that the folder holds differs from this one, None if there is none.

        With the fingerprint of its training entries, also whether these are others.
        """
        if not self.path.exists():
            return None
        config = self._saved_config()
        if config is None:
            return "no readable config.yaml"
        ours, theirs = material(self.config), material(config)
        same_files = ours.pop(CONTENT, None) == theirs.pop(CONTENT, None)
        for key in ["protocol.name", *sorted(ours.keys() | theirs.keys())]:
            if ours.get(key) != theirs.get(key):
                return f"{as_typed(key, theirs.get(key))}, asked for is {as_typed(key, ours.get(key))}"
        if not same_files:
            return "another content of its files"
        others = fingerprint and config.get("training_entries", fingerprint) != fingerprint
        return "other training entries" if others else None

    def _saved_config(self) -> dict | None:
        try:
            config = yaml.safe_load((self.path / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError, UnicodeDecodeError):
            return None
        return config if isinstance(config, dict) else None

    @property
    def metrics(self) -> dict | None:
        """What metrics.json holds, None if the run is not finished.

        Raises
        ------
        InputError : the folder holds a finished run with other settings.
        """
        file = self.path / "metrics.json"
        if not file.exists():
            return None
        if difference := self.difference():
            raise InputError(
                f"{self.path} holds a run with {difference}: choose another runs_dir=, or force=true to replace it"
            )
        return read_json(file)

    @contextmanager
    def logging(self):
        """Collect the log's lines; they go to train.log, from the moment that `open` has made the folder."""
        log.addHandler(self._lines)
        try:
            yield
        finally:
            log.removeHandler(self._lines)

    def lock(self) -> None:
        """Keep other commands from the folder until `unlock`, or the end of this process.

        Raises
        ------
        InputError : another command has it (Busy), or the place cannot be written to.
        """
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire(timeout=0)
            except Timeout:  # which is an OSError too
                raise Busy(f"{self.path}: another command works on this run; wait for its end, or end it") from None

    def unlock(self) -> None:
        """Let go of the folder and of its train.log."""
        self._lock.release(force=True)
        if file := self._lines.target:
            self._lines.setTarget(None)
            file.close()

    def disown(self) -> None:
        """Make what the folder holds neither a finished run nor one to go on with, whatever a kill leaves of it."""
        with writing(self.path):
            for name in ("metrics.json", "error.txt", "config.yaml"):
                (self.path / name).unlink(missing_ok=True)
            summary_file(self.config).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove what the folder holds."""
        self.disown()
        with writing(self.path), suppress(FileNotFoundError):
            shutil.rmtree(self.path)

    def open(self, fingerprint: str, smallest: float, layout: Layout) -> dict | None:
        """Make the folder, or go on in the one that an earlier start with the same settings and entries left.

        What another start left there is removed. config.yaml tells of the training entries their fingerprint and their
        smallest value, and of the code the version that began; modes.json tells of the tensor's layout. Returns the
        metrics where another command has finished the run since they were asked for.

        Raises
        ------
        InputError : it has, with other settings; another command has the folder; or it cannot be written to.
        """
        self.lock()
        if metrics := self.metrics:
            return metrics
        if difference := self.difference(fingerprint):
            log.warning("an unfinished run with %s, is started afresh", difference)
            self.clear()
        begun = self._saved_config()
        begun_by = VERSION if begun is None else begun.get("version", "unknown")
        if begun_by != VERSION:
            log.warning("begun by another version of the code (%s), goes on with %s", begun_by, VERSION)
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            config = self.config | {"training_entries": fingerprint, "smallest_entry": smallest, "version": begun_by}
            write(self.path / "config.yaml", yaml.safe_dump(config, sort_keys=False))
            write(self.path / "modes.json", json.dumps(layout._asdict(), indent=1, ensure_ascii=False) + "\n")
            file = logging.FileHandler(self.path / "train.log", encoding="utf-8")
            (self.path / "error.txt").unlink(missing_ok=True)
            summary_file(self.config).unlink(missing_ok=True)  # one of its folds is about to change
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._lines.setTarget(file)
        self._lines.flush()
        self._lines.flushLevel = logging.NOTSET  # from here on line by line

    def fail(self, reason: str, trace: str) -> None:
        """Write error.txt: the reason in the first line, and below it where in the code that was."""
        with suppress(OSError):  # of a full disk, say
            write(self.path / "error.txt", f"{reason}\n\n{trace}")

    def write_predictions(self, cells: pd.DataFrame, values: Tensor, batches: list[dict[str, Tensor]]) -> None:
        """Write predictions.csv: a row for each test entry, in the order of the test set.

        `cells` has a column for each mode, and `batches` holds the other columns of consecutive parts of the test set,
        see `ented.predictive.Predictive.columns`.
        """
        table = cells.assign(value=values.long().numpy())
        write(self.path / "predictions.csv", table.join(as_table(batches)).to_csv(index=False, float_format="%.6g"))

    def write_metrics(
        self, metrics: dict[str, float], epochs: int, steps: int, train_seconds: float, command: str
    ) -> dict:
        """Write metrics.json, which marks the run as finished, and return its content."""
        result = {
            **about(self.config),
            "metrics": {name: finite(value) for name, value in metrics.items()},
            "epochs": epochs,
            "steps": steps,
            "train_seconds": round(train_seconds, 3),
            "command": command,
            "version": VERSION,
        }
        if content := self.config.get(CONTENT):
            result[CONTENT] = content
        write(self.path / "metrics.json", json.dumps(result, indent=2) + "\n")
        return result


def as_table(batches: list[dict[str, Tensor]]) -> pd.DataFrame:
    """The columns of consecutive parts of a tensor's entries as one table."""
    parts = [pd.DataFrame({name: column.numpy() for name, column in batch.items()}) for batch in batches]
    return pd.concat(parts, ignore_index=True)


def about(config: dict) -> dict[str, object]:
    """What tells a run from the others in a table."""
    return {
        "dataset": config["dataset"]["name"],
        "model": config["model"]["name"],
        "rank": config["model"].get("rank"),
        "fold": config["fold"],
        "seed": config["seed"],
        "protocol": config["protocol"]["name"],
        "missing": config["model"].get("missing", "masked"),
    }


def needs(folder: Path, *names: str) -> None:
    """Raise InputError where the folder of a finished run lacks one of these files."""
    if not (folder / "metrics.json").exists():
        if (folder / "config.yaml").exists():
            raise InputError(f"{folder} holds a run that is not finished: start its command again")
        below = sorted(folder.rglob("metrics.json"))
        one = f": name the folder of one, such as {below[0].parent}" if below else ""
        raise InputError(f"{folder} is not the folder of a finished run{one}")
    for name in names:
        if not (folder / name).exists():
            raise InputError(
                f"{folder} has no {name} (lost, or of an older version): run its command again with force=true"
            )


def clear(folders: list[RunFolder]) -> None:
    """Remove what the folders hold, if no other command has one of them."""
    for step in (RunFolder.lock, RunFolder.disown, RunFolder.clear):
        for folder in folders:
            step(folder)


def model_folder(config: dict) -> Path:
    """Folder of all folds and seeds of one dataset, model and rank."""
    model = config["model"]
    names = [config["dataset"]["name"], model["name"]] + ([f"rank={model['rank']}"] if "rank" in model else [])
    return Path(str(config["runs_dir"])).joinpath(*names)


def summary_file(config: dict) -> Path:
    """Where the summary of all folds with one seed is; each seed has its own, since commands may run side by side."""
    return model_folder(config) / f"summary-seed={config['seed']}.json"


def write_summary(config: dict, results: list[dict]) -> dict[str, dict[str, float | None]]:
    """Write the mean and standard deviation over folds beside the folds, and return them.

    Both are null for a metric that is not defined in each fold.
    """
    table = pd.DataFrame([result["metrics"] for result in results]).astype(float)
    metrics = {
        name: {
            "mean": finite(column.mean(skipna=False)),
            "std": finite(column.std(ddof=1, skipna=False)) if len(column) > 1 else 0.0,
        }
        for name, column in table.items()
    }
    about = {key: results[0][key] for key in ("dataset", "model", "rank", "seed", "protocol")}
    summary = about | {"folds": [result["fold"] for result in results], "metrics": metrics}
    file, text = summary_file(config), json.dumps(summary, indent=2) + "\n"
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        # another cell may have moved the same to its place: all ranks of main_effects are one
        with writing(file), suppress(FileNotFoundError):
            write(file, text)
    return metrics


def finite(value: float) -> float | None:
    """JSON has no nan and no infinity; null stands for a metric that is not defined."""
    return value if math.isfinite(value) else None


def read_json(file: Path) -> dict:
    """Raises InputError where the file is damaged."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{file} is damaged ({error}): remove it, and start again") from None


def write(file: Path, text: str) -> None:
    """Replace a file in one step: a kill leaves the old one or the new one. Of several processes, the first writes."""
    if not is_first():
        return
    if file.exists() and not file.is_file():  # a pipe or a device
        file.write_text(text, encoding="utf-8")
        return
    with replacing(file.resolve()) as partial:  # what a link stands for
        partial.write_text(text, encoding="utf-8")


@contextmanager
def replacing(file: Path):
    """Another name to write to, which takes the file's place when all is written."""
    partial = file.with_name(file.name + ".partial")
    yield partial
    if is_first():
        os.replace(partial, file)


def material(settings: dict) -> dict[str, object]:
    """The settings that decide a run's numbers, by their dotted names."""
    leaves = flat({key: value for key, value in settings.items() if key not in IMMATERIAL})
    below = IMMATERIAL_BELOW + (FILES if settings.get(CONTENT) else ())
    return {key: value for key, value in leaves.items() if not any(f"{key}.".startswith(f"{name}.") for name in below)}


def as_typed(key: str, value) -> str:
    """A setting as it stands on a command line, where None is null."""
    return f"{key}={value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}"


def flat(tree: dict, prefix: str = "") -> dict[str, object]:
    """Nested settings with dotted names: {"a": {"b": 1}} -> {"a.b": 1}."""
    leaves = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves |= flat(value, f"{prefix}{key}.")
        else:
            leaves[prefix + str(key)] = value
    return leaves
