"""Lightning modules of the methods with a Gaussian process, ENTED's among them; training over several devices."""

import logging
from math import cos, pi, sqrt
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from ented.adam import RowAdam
from ented.datamodule import NOISE, generator
from ented.distributed import all_reduce
from ented.errors import InputError
from ented.factors import FactorTable
from ented.kernels import RBF
from ented.lightning import Batch, CompletionModule
from ented.likelihoods import PolyaGamma
from ented.model import ENTED, FactorProcess, mixture
from ented.predictive import Predictive
from ented.tensor import TrainingEntries

log = logging.getLogger("ented")

MILESTONE_FACTOR = 0.3


class SummedStrategy(DDPStrategy):
    """One process a device, and no wrapper around the module: `GaussianProcessModule` sums over them by itself."""

    def configure_ddp(self) -> None:
        pass


def milestone_epochs(milestones: tuple[float, ...], epochs: int) -> list[int]:
    """The epochs after which the learning rate falls, from the shares of all epochs."""
    return [max(1, round(share * epochs)) for share in milestones]


@torch.no_grad()
def check_numbers(
    model: FactorProcess, bound_sum: Float[Tensor, "..."], lr: float | Float[Tensor, "B"], epoch: int
) -> None:
    """Here the host waits for the device, once an epoch or twice; all processes come to the same end.

    Raises
    ------
    InputError : a factorisation failed in this epoch, or the bound or a parameter is not finite.
    """
    leading = bound_sum.ndim
    # the last step may have left parameters whose squares, which the next bound needs, are beyond all numbers
    infinite = sum((~parameter.square().isfinite()).flatten(leading).sum(leading) for parameter in model.parameters())
    failures, bound, infinite = all_reduce(model.failures.double(), bound_sum, infinite.to(bound_sum))

    def where(failed: Bool[Tensor, "..."]) -> str:
        failed = failed.flatten(leading).any(-1) if failed.ndim > leading else failed  # one of the components
        rates = torch.as_tensor(lr, dtype=torch.float64, device=failed.device).expand(failed.shape)
        return f"in epoch {epoch + 1} with lr={rates[failed][0]:g}"

    if failures.any():
        raise InputError(
            f"a Cholesky factorisation failed {where(failures > 0)}: "
            f"lower lr=, raise model.jitter (now {model.inducing.jitter:g}) or use dtype=float64"
        )
    for what, failed in {"the bound is": ~bound.isfinite(), "the parameters are": infinite > 0}.items():
        if failed.any():
            raise InputError(f"{what} not finite {where(failed)}: lower lr= or rho=")


def warn_of_many_points(points: int, entries: int) -> None:
    if points > entries:
        log.warning("inducing=%d is more than the %d training entries", points, entries)


class GaussianProcessModule(CompletionModule):
    """What the methods with a `FactorProcess` share: Adam under manual optimisation, and what is read once an epoch.

    Parameters
    ----------
    kind : see `CompletionModule`.
    model : the factors and the process.
    lr : Adam's learning rate.
    milestones : shares of the epochs, each of them multiplies lr by MILESTONE_FACTOR.
    """

    automatic_optimization = False  # the model sets the gradients

    def __init__(self, kind: str, model: FactorProcess, lr: float, milestones: tuple[float, ...]):
        super().__init__(kind)
        self.model, self.lr, self.milestones = model, lr, milestones
        # sum over the epoch's entries, read once at its end
        self.register_buffer("bound_sum", torch.zeros((), dtype=torch.float64), persistent=False)

    def configure_optimizers(self):
        if self.model.table.sparse_gradients:
            others = [parameter for parameter in self.parameters() if parameter is not self.model.Z]
            optimizers = [torch.optim.Adam(others, self.lr, fused=True), RowAdam([self.model.Z], self.lr)]
        else:
            optimizers = [torch.optim.Adam(self.parameters(), self.lr, fused=True)]
        epochs = self.trainer.max_epochs
        return optimizers, [
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: self.decay(epoch, epochs))
            for optimizer in optimizers
        ]

    def decay(self, epoch: int, epochs: int) -> float:
        """What lr is multiplied by in an epoch, from 0, of so many."""
        return MILESTONE_FACTOR ** sum(epoch >= milestone for milestone in milestone_epochs(self.milestones, epochs))

    def adam_step(self, indices: Int[Tensor, "S D"]) -> None:
        """Move all parameters by their gradients; with sparse gradients, those factor rows that the entries have."""
        if not self.model.table.sparse_gradients:
            self.optimizers().step()
            return
        others, of_rows = self.optimizers()
        others.step()
        of_rows.step(rows=self.model.table.rows(indices).flatten())

    def add_new_rows(self) -> None:
        self.model.table.add_new_rows()

    def start(self, train: TrainingEntries) -> None:
        if self.model.table.needs_degrees and not self.started:
            self.model.table.set_degrees(train.degrees())
        super().start(train)

    def on_train_start(self) -> None:
        super().on_train_start()
        warn_of_many_points(self.model.inducing.X.shape[-2], len(self.trainer.datamodule.train))

    def on_train_epoch_start(self) -> None:
        self.bound_sum.zero_()

    def on_validation_start(self) -> None:
        check_numbers(self.model, self.bound_sum, self.lr, self.current_epoch)

    def on_train_epoch_end(self) -> None:
        check_numbers(self.model, self.bound_sum, self.lr, self.current_epoch)
        for config in self.trainer.lr_scheduler_configs:
            config.scheduler.step()

    def bound(self) -> Float[Tensor, ""]:
        """Sum of the bounds of the epoch's entries in all processes, without the KL."""
        (bound,) = all_reduce(self.bound_sum)
        return bound


def initial_lengthscales(modes: int, rank: int, ratio: float) -> Float[Tensor, "Q"]:
    """A lengthscale for each input, that of a factor `ratio` times that of the one before; sum_q 1 / l_q^2 = 1.

    With a ratio of 1 all are sqrt(D R). With a larger one the first factors decide at first, and a later one joins in
    as far as it pays: few inducing points see no more than a smooth trend where all of many inputs start alike.
    """
    squares = float(ratio) ** (2 * torch.arange(rank, dtype=torch.get_default_dtype()))
    return (squares * (modes / squares).sum()).sqrt().repeat(modes)


class ENTEDModule(GaussianProcessModule):
    """ENTED under manual optimisation: every batch a natural-gradient step on q(u), then an Adam step on all else.

    Parameters
    ----------
    shape, rank, init_std, mean, sparse_gradients : see `ented.factors.FactorTable`.
    likelihood, inducing, blocks, jitter : see `ented.model.ENTED`.
    factors, posterior_std : whether Z has a posterior, and the standard deviations that it starts from.
    components : models in a mixture, see `ented.model`.
    kernel : "fixed", RBF with lengthscale and variance 1; "rbf" learns them, "ard" a lengthscale for each input.
    lengthscale, lengthscale_ratio : what learned ones start from, see `initial_lengthscales`.
    inducing_inputs : where they start, "gaussian" noise or near the factors of training entries, "data".
    lr, milestones : of Adam, see `GaussianProcessModule`.
    rho : natural gradient step size in (0, 1].
    annealing : whether lr and rho fall to zero over the epochs, along half a cosine.
    compile : whether `torch.compile` makes one program of the model's part of a step, in the first of them.

    Raises
    ------
    InputError : components below 1, or what the table and the model refuse.
    """

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
        compile: bool = False,
        sparse_gradients: bool = False,
        factors: Literal["map", "variational"] = "map",
        posterior_std: float = 0.1,
        components: int = 1,
        kernel: Literal["fixed", "rbf", "ard"] = "fixed",
        lengthscale: float = 1.0,
        lengthscale_ratio: float = 2.0,
        mean: Literal["zero", "constant", "effects", "degrees"] = "zero",
        inducing_inputs: Literal["gaussian", "data"] = "gaussian",
        annealing: bool = False,
    ):
        std = posterior_std if factors == "variational" else None
        if components < 1:
            raise InputError(f"model.components={components}: it must be at least 1")
        if kernel == "fixed":
            covariance = RBF()
        elif kernel == "rbf":
            covariance = RBF(lengthscale * sqrt(len(shape) * rank), learned=True)
        else:
            lengthscales = lengthscale * initial_lengthscales(len(shape), rank, lengthscale_ratio)
            covariance = RBF(lengthscales, learned=True)
        models = []
        for _ in range(components):
            table = FactorTable(shape, rank, init_std, std, mean, sparse_gradients)
            models.append(ENTED(table, likelihood, inducing, blocks, covariance, jitter))
        model = mixture(models)
        super().__init__(likelihood.kind, model, lr, milestones)
        self.step = torch.compile(model.step) if compile else model.step
        self.rho, self.annealing = rho, annealing
        # where each inducing input starts, as a place in the list of training entries, from 0 to 1
        self.inducing_places = torch.rand(model.inducing.X.shape[:-1]) if inducing_inputs == "data" else None
        self.register_buffer("rho_now", torch.tensor(rho, dtype=torch.float64), persistent=False)
        self.register_buffer("log_prob_sum", torch.zeros((), dtype=torch.float64), persistent=False)

    def predictive(self, indices: Int[Tensor, "S D"]) -> Predictive:
        return self.model.predictive(indices)

    def initialise(self, indices: Int[Tensor, "N D"], values: Float[Tensor, "N"]) -> None:
        model = self.model
        if model.table.constant is not None:
            model.table.constant.copy_(model.likelihood.intercept(values) - model.likelihood.offset)
        if self.inducing_places is not None:
            model.start_inducing_at(indices[(self.inducing_places * len(values)).long()])

    def anneal(self, epoch: int, epochs: int) -> float:
        """What lr and rho are multiplied by in an epoch, from 0, of so many."""
        return 0.5 + 0.5 * cos(pi * epoch / epochs) if self.annealing else 1.0

    def decay(self, epoch: int, epochs: int) -> float:
        return super().decay(epoch, epochs) * self.anneal(epoch, epochs)

    def noise(self, batch_index: int) -> Float[Tensor, "... S D R"] | None:
        """For the draw of the factors: this process's part of what one process would draw for the whole minibatch."""
        data = self.trainer.datamodule
        process, processes = data.process_and_count
        noise = self.model.table.noise(data.sizes[batch_index], self.random)
        return None if noise is None else noise.tensor_split(processes, -3)[process].to(self.device, non_blocking=True)

    def training_step(self, batch: Batch, batch_index: int) -> None:
        indices, values = batch
        scale = self.trainer.datamodule.scale(batch_index)
        bound, log_prob = self.step(indices, values, scale, self.rho_now, self.noise(batch_index))
        self.adam_step(indices)
        self.bound_sum += bound.sum()
        self.log_prob_sum += log_prob.sum()

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self.log_prob_sum.zero_()
        self.rho_now.fill_(self.rho * self.anneal(self.current_epoch, self.trainer.max_epochs))
        self.random = generator(self.trainer.datamodule.seed, self.current_epoch, NOISE)

    def on_train_epoch_end(self) -> None:
        """Log the epoch's bound and plug-in NLL.

        Both sum what each minibatch gave when its turn came, so they lag behind the model at the end of the epoch.
        """
        super().on_train_epoch_end()
        with torch.no_grad():
            elbo = self.bound() + self.model.prior_terms()
        (log_prob_sum,) = all_reduce(self.log_prob_sum)
        nll = -log_prob_sum / len(self.trainer.datamodule.train)
        self.log_dict({"elbo": elbo, "train_nll_plugin": nll}, prog_bar=True)
        if self.model.likelihood.learned:
            zeta = self.model.likelihood.known().zeta
            self.log("zeta", torch.tensor(zeta, dtype=torch.float64))
