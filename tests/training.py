"""A fit as `src/train.py` makes it, without its settings."""

from pathlib import Path

import lightning as L

from ented.datamodule import COODataModule
from ented.recorder import Recorder


def fit(module: L.LightningModule, data: COODataModule, epochs: int, folder: Path, *callbacks: L.Callback) -> Recorder:
    """Train, or go on from the checkpoint that an interrupted fit left in the folder."""
    recorder = Recorder(folder, checkpoint_seconds=0)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        callbacks=[*callbacks, recorder],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
    trainer.fit(module, data, ckpt_path=recorder.checkpoint if recorder.checkpoint.exists() else None)
    return recorder
