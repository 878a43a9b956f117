"""Writes what a fit needs to be followed and resumed: epochs.csv and last.ckpt."""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import lightning as L
import pandas as pd
from lightning.pytorch.callbacks import Checkpoint

from ented.runs import replacing, write


@dataclass
class History:
    """The epochs of a fit, as in `folder`/epochs.csv; the folder is made where there is none. None writes nothing."""

    folder: Path | None
    epochs: int  # at most
    patience: int | None = None  # epochs without a lower held-out score after which training ends; None to train all
    rows: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self):
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def ended(self) -> bool:
        """Whether training has come to its end."""
        rows = self.rows
        if self.patience is not None and rows and len(rows) >= best_epoch(rows, self.patience) + self.patience:
            return True
        return len(rows) >= self.epochs

    def add(self, metrics: dict[str, float], seconds: float) -> None:
        """Add an epoch that took `seconds`."""
        self.seconds += seconds
        self.rows.append({"epoch": len(self.rows) + 1, **metrics, "seconds": round(self.seconds, 3)})

    def write(self) -> None:
        if self.folder:
            write(self.folder / "epochs.csv", pd.DataFrame(self.rows).to_csv(index=False))


class Recorder(Checkpoint):
    """Add the metrics of each epoch to the history, or to that of each replica, and keep the state in last.ckpt.

    The histories are part of the checkpoint, so a resumed fit goes on as if it had not stopped. Files are replaced in
    one step: a kill leaves the old one or the new one. It is a `Checkpoint` because Lightning calls those last, after
    the module has logged its epoch, and then adds no checkpoint callback of its own.

    Parameters
    ----------
    histories : of the module, or of each of its replicas; these share the seconds of an epoch evenly.
    folder : where last.ckpt goes.
    checkpoint_seconds : the least time between two checkpoints; the last epoch always has one.
    """

    def __init__(self, histories: list[History], folder: Path, checkpoint_seconds: float):
        self.histories, self.checkpoint_seconds = histories, checkpoint_seconds
        self.checkpoint = folder / "last.ckpt"
        folder.mkdir(parents=True, exist_ok=True)
        self._saved = time.monotonic()

    @property
    def running(self) -> list[bool]:
        """Which of the histories have not come to their end."""
        return [not history.ended for history in self.histories]

    def state_dict(self) -> dict:
        return {"histories": [{"rows": history.rows, "seconds": history.seconds} for history in self.histories]}

    def load_state_dict(self, state_dict: dict) -> None:
        for history, state in zip(self.histories, state_dict["histories"], strict=True):
            history.rows, history.seconds = state["rows"], state["seconds"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.should_stop |= not any(self.running)  # in a fit that is resumed after its end

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._started = time.monotonic()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        running = self.running
        seconds = (time.monotonic() - self._started) / max(1, sum(running))
        for history, metrics, on in zip(self.histories, pl_module.epoch_metrics(), running, strict=True):
            if on:
                history.add(metrics, seconds)
        trainer.should_stop |= not any(self.running)
        due = trainer.should_stop or time.monotonic() - self._saved >= self.checkpoint_seconds
        if trainer.strategy.broadcast(due):  # all processes take part, when the first one's clock says so
            self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        # the tables first: where they are ahead of the checkpoint, the resumed fit writes them again
        for history in self.histories:
            history.write()
        with replacing(self.checkpoint) as partial:
            trainer.save_checkpoint(partial)  # all processes have a part in it
        self._saved = time.monotonic()


def held_out_score(rows: list[dict[str, float]]) -> str:
    """The metric of the held-out entries that decides: the RMSE of a method that has no NLL."""
    return "val_nll" if "val_nll" in rows[0] else "val_rmse"


def ascending(score: float) -> tuple[bool, float]:
    """The key by which scores are ordered: a nan is larger than every number."""
    return math.isnan(score), score


def best_epoch(rows: list[dict[str, float]], patience: int | None) -> int:
    """Number of epochs, from 1, with the lowest held-out score before `patience` epochs passed without a lower one.

    Without patience, all.
    """
    if patience is None:
        return len(rows)
    best, score = 0, held_out_score(rows)
    for epoch, row in enumerate(rows):
        if ascending(row[score]) < ascending(rows[best][score]):
            best = epoch
        if epoch - best >= patience:
            break
    return best + 1
