"""Test metrics after each epoch."""

import lightning as L
import torch

from ented.lightning import CompletionModule
from ented.metrics import CompletionMetrics


class Convergence(L.Callback):
    """Test the model after each epoch, so that epochs.csv shows how far training has come; nothing is chosen by it."""

    @torch.no_grad()
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: CompletionModule) -> None:
        metrics = CompletionMetrics(pl_module.metrics.kind).to(pl_module.device)
        pl_module.eval()
        for batch in trainer.datamodule.test_dataloader():
            indices, values = (part.to(pl_module.device) for part in batch)
            metrics.update(pl_module.predictive(indices), values, mape=False)
        pl_module.train()
        self.log_dict({f"test_{name}": value for name, value in metrics.compute().items()})
