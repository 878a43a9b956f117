"""Writes what a fit needs to be followed and resumed: epochs.csv and last.ckpt."""

import os
import time
from pathlib import Path

import lightning as L
import pandas as pd
from lightning.pytorch.callbacks import Checkpoint

from ented.runs import write


class Recorder(Checkpoint):
    """After each epoch, add its metrics to `folder`/epochs.csv and keep the state in `folder`/last.ckpt.

    The rows and the seconds spent are part of the checkpoint, so a resumed fit goes on as if it had not stopped.
    Files are replaced in one step: a kill leaves the old one or the new one. It is a `Checkpoint` because Lightning
    calls those last, after the module has logged its epoch, and then adds no checkpoint callback of its own.

    Parameters
    ----------
    folder : where the two files go; made where it does not exist.
    checkpoint_seconds : the least time between two checkpoints; the last epoch always has one.
    patience : epochs without a lower held-out score after which training stops; None to train all epochs.
    """

    def __init__(self, folder: Path, checkpoint_seconds: float, patience: int | None = None):
        self.folder, self.checkpoint_seconds, self.patience = folder, checkpoint_seconds, patience
        folder.mkdir(parents=True, exist_ok=True)
        self.rows: list[dict[str, float]] = []
        self.seconds = 0.0
        self._saved = time.monotonic()

    @property
    def checkpoint(self) -> Path:
        return self.folder / "last.ckpt"

    def state_dict(self) -> dict:
        return {"rows": self.rows, "seconds": self.seconds}

    def load_state_dict(self, state_dict: dict) -> None:
        self.rows, self.seconds = state_dict["rows"], state_dict["seconds"]

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._started = time.monotonic()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.seconds += time.monotonic() - self._started
        self.rows.append({"epoch": trainer.current_epoch + 1, **metrics, "seconds": round(self.seconds, 3)})
        if self.patience is not None and len(self.rows) >= best_epoch(self.rows, self.patience) + self.patience:
            trainer.should_stop = True
        last = trainer.should_stop or trainer.current_epoch + 1 == trainer.max_epochs
        due = last or time.monotonic() - self._saved >= self.checkpoint_seconds
        if trainer.strategy.broadcast(due):  # all processes take part, when the first one's clock says so
            self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        # the table first: where it is ahead of the checkpoint, the resumed fit writes it again
        write(self.folder / "epochs.csv", pd.DataFrame(self.rows).to_csv(index=False))
        partial = self.folder / "last.ckpt.partial"
        trainer.save_checkpoint(partial)
        if trainer.is_global_zero:
            os.replace(partial, self.checkpoint)
        self._saved = time.monotonic()


def held_out_score(rows: list[dict[str, float]]) -> str:
    """The metric of the held-out entries that decides: the RMSE of a method that has no NLL."""
    return "val_nll" if "val_nll" in rows[0] else "val_rmse"


def best_epoch(rows: list[dict[str, float]], patience: int) -> int:
    """Number of epochs, from 1, with the lowest held-out score before `patience` epochs passed without a lower one.

    Rows after that do not count: a search that is resumed when it had just ended trains one epoch more.
    """
    best, score = 0, held_out_score(rows)
    for epoch, row in enumerate(rows):
        if row[score] < rows[best][score]:
            best = epoch
        if epoch - best >= patience:
            break
    return best + 1
