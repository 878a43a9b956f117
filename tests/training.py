"""A fit as `src/train.py` makes it, without its settings."""

from pathlib import Path

import lightning as L

from ented.recorder import History, Recorder


def fit(module, data, epochs: int, folder: Path, *callbacks: L.Callback, patience: int | None = None) -> History:
    """Train, or go on from the checkpoint that an interrupted fit left in the folder."""
    history = History(folder, epochs, patience)
    train(module, data, [history], folder, *callbacks)
    return history


def train(module, data, histories: list[History], folder: Path, *callbacks: L.Callback) -> None:
    """The same for a module with several histories."""
    recorder = Recorder(histories, folder, checkpoint_seconds=0)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=max(history.epochs for history in histories),
        logger=False,
        callbacks=[*callbacks, recorder],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
    trainer.fit(module, data, ckpt_path=recorder.checkpoint if recorder.checkpoint.exists() else None)
