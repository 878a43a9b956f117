"""Time of a training step: this project's methods beside GPyTorch's SVGP with natural gradients, in one process.

    python benchmarks/step.py --csv results/speed.csv           the whole grid; started again, what is missing of it
    python benchmarks/step.py --points 100 --batch 128 --dtype float32 --threads 1

Every method gets the same entries, factors and total number of inducing points, and all take turns: a few steps of one,
a few of the next, and around again. What is written is the median over the rounds, in milliseconds a step, and how many
times as fast as gpytorch that is. gpytorch is always measured too, because a ratio is of two times from the same turns.
The table of results/speed.md is printed at the end.

ented            ENTED with two blocks, and Adam
ented compiled   the same through torch.compile
ented trainer    the same in Lightning's loop, with its data loader and logging
gptf_pg          one block
gptf             q(u) by Adam too
gpytorch         VariationalStrategy, NaturalVariationalDistribution, NGD and Adam; its Bernoulli likelihood (probit)
"""

import argparse
import logging
import time
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path

import gpytorch
import lightning as L
import torch
from common import ENTRIES, LR, RANK, RHO, SHAPE, Batches, Table, Turn, random_entries, take_turns, timed, training_step
from torch import Tensor
from torch.nn.functional import embedding

from baselines.gptf import GPTF
from ented.datamodule import COODataModule
from ented.factors import FactorTable
from ented.gaussian_process import ENTEDModule
from ented.likelihoods import Bernoulli
from ented.model import ENTED


def ented(points: int, blocks: int = 2, mode: str | None = None) -> Turn:
    return timed(training_step(ENTED(FactorTable(SHAPE, RANK), Bernoulli(), points, blocks), mode=mode))


def gptf(points: int) -> Turn:
    module = GPTF(SHAPE, Bernoulli(), RANK, points)
    adam = torch.optim.Adam(module.parameters(), LR, fused=True)

    @timed
    def step(indices: Tensor, values: Tensor) -> None:
        module.step(indices, values, ENTRIES / len(values))
        adam.step()

    return step


class SVGP(gpytorch.models.ApproximateGP):
    """Whitened inducing values with natural parameters, learned inducing inputs, the RBF kernel with bandwidth one."""

    def __init__(self, points: int):
        q = gpytorch.variational.NaturalVariationalDistribution(points)
        inputs = 0.5 * torch.randn(points, RANK * len(SHAPE))
        super().__init__(gpytorch.variational.VariationalStrategy(self, inputs, q, learn_inducing_locations=True))
        self.mean, self.kernel = gpytorch.means.ZeroMean(), gpytorch.kernels.RBFKernel()
        self.kernel.lengthscale = 1.0
        self.kernel.raw_lengthscale.requires_grad_(False)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))


def gpytorchs(points: int) -> Turn:
    model, likelihood = SVGP(points), gpytorch.likelihoods.BernoulliLikelihood()
    Z = torch.nn.Parameter(0.5 * torch.randn(sum(SHAPE), RANK))
    offsets = torch.tensor([0, SHAPE[0], SHAPE[0] + SHAPE[1]])
    elbo = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=ENTRIES)
    ngd = gpytorch.optim.NGD(model.variational_parameters(), num_data=ENTRIES, lr=RHO)
    others = [parameter for parameter in model.hyperparameters() if parameter.requires_grad]
    adam = torch.optim.Adam([Z, *others], LR, fused=True)

    @timed
    def step(indices: Tensor, values: Tensor) -> None:
        ngd.zero_grad()
        adam.zero_grad()
        loss = -elbo(model(embedding(indices + offsets, Z).flatten(-2)), values) + Z.square().sum() / (2 * ENTRIES)
        loss.backward()
        ngd.step()
        adam.step()

    return step


class Stopwatch(L.Callback):
    """Time from the first step's start to the last one's end, in all epochs but the first."""

    def on_train_epoch_start(self, trainer, pl_module) -> None:
        if trainer.current_epoch == 1:
            self.start, self.steps = time.perf_counter(), trainer.global_step

    def on_train_end(self, trainer, pl_module) -> None:
        self.seconds = (time.perf_counter() - self.start) / (trainer.global_step - self.steps)


def in_trainer(points: int) -> Turn:
    """ENTED in Lightning's loop, with all that src/train.py does in an epoch but its checkpoint."""

    def turn(batches: Batches) -> float:
        values = batches[0][1]
        module = ENTEDModule(SHAPE, Bernoulli(), RANK, points, 2, 0.5, 1e-4, LR, RHO)
        steps = ENTRIES // len(values)  # of an epoch, in which all minibatches have this size
        data = random_entries().subset(torch.arange(steps * len(values)))
        stopwatch, epochs = Stopwatch(), 1 + max(1, round(len(batches) / steps))
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=epochs,
            logger=False,
            callbacks=[stopwatch],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            log_every_n_steps=10**9,
        )
        trainer.fit(module, COODataModule(data, data, len(values), 0, dtype=values.dtype))
        return stopwatch.seconds

    return turn


METHODS: dict[str, Callable[[int], Turn]] = {
    "ented": ented,
    "ented compiled": lambda points: ented(points, mode="default"),
    "ented trainer": in_trainer,
    "gptf_pg": lambda points: ented(points, blocks=1),
    "gptf": gptf,
    "gpytorch": gpytorchs,
}


KEY = ["threads", "dtype", "batch", "points", "method"]


def measure(methods: list[str], points: int, batch: int, dtype: torch.dtype, rounds: int, seconds: float) -> dict:
    """Median milliseconds a step of each method; a turn takes about `seconds`."""
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    data = random_entries()
    order = torch.randperm(ENTRIES).split(batch)
    batches = [(data.indices[rows], data.values[rows].to(dtype)) for rows in order if len(rows) == batch]
    batches = batches * (1 + 100 // len(batches))
    return take_turns({name: METHODS[name](points) for name in methods}, batches, rounds, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, nargs="+", default=[8, 16, 32, 64, 100, 128, 256, 512, 1024])
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 4096])
    parser.add_argument("--dtype", nargs="+", default=["float32", "float64"], choices=["float32", "float64"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--turn", type=float, default=0.2, help="seconds that a method has in a round")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    table = Table(arguments.csv, KEY, ["torch", "gpytorch", "lightning"])
    for threads, dtype, batch, points in product(arguments.threads, arguments.dtype, arguments.batch, arguments.points):
        cell = {"points": points, "batch": batch, "dtype": dtype, "threads": threads}
        missing = [name for name in arguments.methods if {"method": name} | cell not in table]
        if not missing:
            continue
        methods = [name for name in METHODS if name in missing or name == "gpytorch"]
        torch.set_num_threads(threads)
        torch._dynamo.reset()
        times = measure(methods, points, batch, getattr(torch, dtype), arguments.rounds, arguments.turn)
        for name, milliseconds in times.items():
            ratio = times["gpytorch"] / milliseconds
            row = {"milliseconds": round(milliseconds, 4), "gpytorch_ratio": round(ratio, 3)}
            table.add({"method": name} | cell | row)
    print("\n" + table.wide("method", "gpytorch_ratio"))


if __name__ == "__main__":
    main()
