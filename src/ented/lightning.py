"""Lightning modules: validation and test of every method, and training by sweeps or by the gradient of a loss."""

import lightning as L
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ented.errors import InputError
from ented.metrics import CompletionMetrics
from ented.predictive import Predictive
from ented.tensor import COOTensor, TrainingEntries

Batch = tuple[Int[Tensor, "S D"], Float[Tensor, "S"]]


class CompletionModule(L.LightningModule):
    """What every method shares: it answers `predictive(indices)`, and is validated and tested by it.

    Parameters
    ----------
    kind : "binary" or "count", which decides the metrics.

    Raises
    ------
    InputError : the method does not take entries of this kind.
    """

    kinds = ("binary", "count")  # what the method takes
    all_entries = False  # whether a batch must hold them all
    likelihood_settings = ("zeta", "learned", "smallest", "quadrature")  # of counts, those that the method reads

    def __init__(self, kind: str):
        if kind not in self.kinds:
            raise InputError(
                f"{type(self).__name__} is for {self.kinds[0]} entries, these are {kind}: choose another model="
            )
        super().__init__()
        self.metrics = CompletionMetrics(kind)
        self.register_buffer("started", torch.tensor(False))

    def initialise(self, indices: Int[Tensor, "N D"], values: Float[Tensor, "N"]) -> None:
        """Set what depends on the training entries. Called once, before the first epoch.

        Of entries that are streamed, these are a sample that fits in memory.
        """

    @torch.no_grad()
    def start(self, train: TrainingEntries) -> None:
        """Initialise, unless a checkpoint holds what came of it."""
        if not self.started:
            self.initialise(*self.entries(train.sample()))
            self.started.fill_(True)

    def entries(self, train: COOTensor) -> Batch:
        """All entries as one batch, in the module's dtype and on its device."""
        return train.indices.to(self.device), train.values.to(self.device, self.dtype)

    def on_train_start(self) -> None:
        self.start(self.trainer.datamodule.train)

    def predictive(self, indices: Int[Tensor, "S D"]) -> Predictive:
        """Predictive distribution of the entries at `indices`."""
        raise NotImplementedError

    def add_new_rows(self) -> None:
        """Give each mode of a trained module one more row, its last, for entries of rows that training did not see.

        Raises
        ------
        InputError : the method does not say what such a row is like.
        """
        raise InputError(f"{type(self).__name__} predicts no rows that the run does not have")

    def _evaluate(self, batch: Batch, **options) -> None:
        indices, values = batch
        self.metrics.update(self.predictive(indices), values, **options)

    def _log_metrics(self, prefix: str, **options) -> None:
        self.log_dict({prefix + name: value for name, value in self.metrics.compute().items()}, **options)
        self.metrics.reset()

    def epoch_metrics(self) -> list[dict[str, float]]:
        """What epochs.csv says of the epoch that has just ended: one item, since there is one fit."""
        return [{name: float(value) for name, value in self.trainer.callback_metrics.items()}]

    def validation_step(self, batch: Batch, _) -> None:
        self._evaluate(batch, mape=False)

    def on_validation_epoch_end(self) -> None:
        self._log_metrics("val_", prog_bar=True)

    def test_step(self, batch: Batch, _) -> None:
        self._evaluate(batch)

    def on_test_epoch_end(self) -> None:
        self._log_metrics("test_")

    def predict_step(self, batch: Batch, _) -> dict[str, Float[Tensor, "S"]]:
        """The columns of predictions.csv beside the indices and the value."""
        indices, values = batch
        predictive = self.predictive(indices)
        log_prob = predictive.log_prob(values)
        return predictive.columns() | ({} if log_prob is None else {"log_prob": log_prob})


class SweepModule(CompletionModule):
    """A method that is trained by sweeps over all training entries; an epoch is a sweep.

    A subclass keeps its state in buffers, which are the checkpoint.

    Parameters
    ----------
    kind : as above.
    tolerance : training ends when a sweep changes the objective by less than this part of it.
    """

    automatic_optimization = False
    all_entries = True

    def __init__(self, kind: str, tolerance: float):
        super().__init__(kind)
        self.tolerance = tolerance
        self.register_buffer("objective", torch.tensor(-torch.inf, dtype=torch.float64))
        self.register_buffer("converged", torch.tensor(False))

    def sweep(self, indices: Int[Tensor, "N D"], values: Float[Tensor, "N"]) -> Float[Tensor, ""]:
        """Update the state once, and return the objective, which grows from sweep to sweep."""
        raise NotImplementedError

    def is_converged(self, before: Float[Tensor, ""]) -> Bool[Tensor, ""]:
        """Whether the sweep that changed the objective from `before` was the last."""
        return (self.objective - before).abs() <= self.tolerance * self.objective.abs()

    @torch.no_grad()
    def step(self, indices: Int[Tensor, "N D"], values: Float[Tensor, "N"]) -> None:
        """One sweep, and what is kept of it."""
        before = self.objective.clone()
        self.objective.copy_(self.sweep(indices, values))
        self.converged.copy_(self.is_converged(before))
        if not self.objective.isfinite():
            raise InputError(
                f"the objective of {type(self).__name__} is not finite: use dtype=float64 or a lower rank="
            )

    def fit(self, train: COOTensor, epochs: int) -> "SweepModule":
        """Sweep until convergence, at most `epochs` times, without a trainer."""
        self.start(train)
        for _ in range(epochs):
            self.step(*self.entries(train))
            if self.converged:
                break
        return self

    def configure_optimizers(self) -> None:
        """None: the sweep is the optimiser."""

    def training_step(self, batch: Batch, _) -> None:
        self.step(*batch)

    def on_train_start(self) -> None:
        super().on_train_start()
        self._stop_if_converged()  # in a fit that is resumed after its end

    def on_train_epoch_end(self) -> None:
        self.log("objective", self.objective, prog_bar=True)
        self._stop_if_converged()

    def _stop_if_converged(self) -> None:
        if self.converged:
            self.trainer.should_stop = True


class GradientModule(CompletionModule):
    """A method that is trained by an optimiser on the gradient of `loss`, one step a batch.

    Parameters
    ----------
    kind : as above.
    lr : learning rate, Adam's unless a subclass has another optimiser.
    """

    def __init__(self, kind: str, lr: float):
        super().__init__(kind)
        self.lr = lr
        self.register_buffer("loss_sum", torch.zeros((), dtype=torch.float64), persistent=False)

    def loss(self, indices: Int[Tensor, "S D"], values: Float[Tensor, "S"]) -> Float[Tensor, ""]:
        """What a step lowers."""
        raise NotImplementedError

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.lr, fused=True)

    def on_train_epoch_start(self) -> None:
        self.loss_sum.zero_()

    def training_step(self, batch: Batch, _) -> Float[Tensor, ""]:
        loss = self.loss(*batch)
        self.loss_sum += loss.detach()
        return loss

    def on_validation_start(self) -> None:
        self._check_loss()

    def on_train_epoch_end(self) -> None:
        self._check_loss()
        self.log("loss", self.loss_sum / self.trainer.num_training_batches, prog_bar=True)

    def _check_loss(self) -> None:
        """The one place where the host waits for the device, once an epoch or twice."""
        if not self.loss_sum.isfinite():
            raise InputError(f"the loss is not finite in epoch {self.current_epoch + 1}: lower lr=")
