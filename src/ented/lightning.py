"""Lightning modules: validation and test for every method, and ENTED's training step."""

import logging

import lightning as L
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ented.likelihoods import PolyaGamma, Predictive
from ented.metrics import CompletionMetrics
from ented.model import ENTED
from ented.tensor import InputError

log = logging.getLogger("ented")

Batch = tuple[Int[Tensor, "S D"], Float[Tensor, "S"]]


class CompletionModule(L.LightningModule):
    """What every method shares: it answers `predictive(indices)`, and is validated and tested by it.

    Parameters
    ----------
    kind : "binary" or "count", which decides the metrics.
    """

    def __init__(self, kind: str):
        super().__init__()
        self.metrics = CompletionMetrics(kind)

    def predictive(self, indices: Int[Tensor, "S D"]) -> Predictive:
        """Predictive distribution of the entries at `indices`."""
        raise NotImplementedError

    def _evaluate(self, batch: Batch) -> None:
        indices, values = batch
        self.metrics.update(self.predictive(indices), values)

    def _log_metrics(self, prefix: str, **options) -> None:
        self.log_dict({prefix + name: value for name, value in self.metrics.compute().items()}, **options)
        self.metrics.reset()

    def validation_step(self, batch: Batch, _) -> None:
        self._evaluate(batch)

    def on_validation_epoch_end(self) -> None:
        self._log_metrics("val_", prog_bar=True)

    def test_step(self, batch: Batch, _) -> None:
        self._evaluate(batch)

    def on_test_epoch_end(self) -> None:
        self._log_metrics("test_")

    def predict_step(self, batch: Batch, _) -> dict[str, Float[Tensor, "S"]]:
        """The columns of predictions.csv."""
        indices, values = batch
        return self.predictive(indices).columns(values)


class ENTEDModule(CompletionModule):
    """ENTED under manual optimisation: a natural-gradient step on q(u), then an Adam step on Z and X, every batch.

    Parameters
    ----------
    shape, likelihood, rank, inducing, blocks, init_std, jitter : see `ented.model.ENTED`.
    lr : Adam's learning rate.
    rho : natural gradient step size in (0, 1].
    milestones : shares of the epochs, each of them multiplies lr by 0.3.
    """

    automatic_optimization = False

    def __init__(
        self,
        shape: tuple[int, ...],
        likelihood: PolyaGamma,
        rank: int,
        inducing: int,
        blocks: int,
        init_std: float,
        jitter: float,
        lr: float,
        rho: float,
        milestones: tuple[float, ...] = (),
    ):
        super().__init__(likelihood.kind)
        self.model = ENTED(shape, likelihood, rank, inducing, blocks, init_std, jitter)
        self.lr, self.rho, self.milestones = lr, rho, milestones
        # sums over the epoch's entries, read once at its end
        self.register_buffer("data_sum", torch.zeros((), dtype=torch.float64), persistent=False)
        self.register_buffer("log_prob_sum", torch.zeros((), dtype=torch.float64), persistent=False)

    def predictive(self, indices: Int[Tensor, "S D"]) -> Predictive:
        return self.model.predictive(indices)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.model.parameters(), lr=self.lr)
        epochs = [max(1, round(share * self.trainer.max_epochs)) for share in self.milestones]
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, epochs, gamma=0.3)]

    def training_step(self, batch: Batch, _) -> None:
        indices, values = batch
        scale = len(self.trainer.datamodule.train) / len(values)
        features = self.model.features(indices)
        self.model.natural_gradient_step(features, values, scale, self.rho)
        surrogate, data, mean = self.model.surrogate(features, values, scale)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(-surrogate)
        optimizer.step()
        self.data_sum += data
        self.log_prob_sum += self.model.likelihood.log_prob(values, mean).sum()

    def on_train_start(self) -> None:
        points, entries = len(self.model.inducing.X), len(self.trainer.datamodule.train)
        if points > entries:
            log.warning("inducing=%d is more than the %d training entries", points, entries)

    def on_train_epoch_start(self) -> None:
        self.data_sum.zero_()
        self.log_prob_sum.zero_()

    def on_validation_start(self) -> None:
        self._check_numbers()

    def on_train_epoch_end(self) -> None:
        """Log the epoch's bound and plug-in NLL.

        Both sum what each minibatch gave when its turn came, so they lag behind the model at the end of the epoch.
        """
        self._check_numbers()
        with torch.no_grad():
            elbo = self.data_sum - self.model.q.kl() + self.model.log_prior()
        nll = -self.log_prob_sum / len(self.trainer.datamodule.train)
        self.log_dict({"elbo": elbo, "train_nll_plugin": nll}, prog_bar=True)
        self.lr_schedulers().step()

    def _check_numbers(self) -> None:
        """The one place where the host waits for the device, once an epoch or twice."""
        if self.model.failures:
            raise InputError(
                f"a Cholesky factorisation failed in epoch {self.current_epoch + 1}: "
                f"raise model.jitter (now {self.model.inducing.jitter:g}) or use dtype=float64"
            )
        if not torch.isfinite(self.data_sum):
            raise InputError(f"the bound is not finite in epoch {self.current_epoch + 1}: lower lr= or rho=")
