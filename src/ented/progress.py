"""A progress bar over epochs."""

import lightning as L
from tqdm import tqdm


class Progress(L.Callback):
    """One bar for a fit, with the bound and the metrics of the last finished epoch. Only a terminal shows it."""

    bar: tqdm | None = None  # until the first epoch: what goes wrong before has none to close

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.bar = tqdm(
            total=trainer.max_epochs, initial=trainer.current_epoch, unit="epoch", leave=False, disable=None
        )

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.bar.update(trainer.current_epoch - self.bar.n)
        self.bar.set_postfix(trainer.progress_bar_metrics, refresh=False)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.bar.close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self.bar is not None:
            self.bar.close()
