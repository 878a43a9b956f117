"""Time of a step of B replicas trained as one, beside B single steps one after the other, in one process.

    python benchmarks/replicas.py --csv results/replicas.csv           the whole grid; started again, what is missing
    python benchmarks/replicas.py --replicas 10 --points 100 --dtype float32 --methods ented

Both get the same entries and take turns: a few steps of one, a few of the other, and around again. `milliseconds` is
the median over the rounds of a whole step of all B, `alone_milliseconds` that of B single steps, and `ratio` the second
by the first. The single steps are all of one model, as when one fit is trained after the other. The table of
results/speed.md is printed at the end.

ented            ENTED with two blocks, and Adam
ented compiled   the same, both sides through torch.compile
"""

import argparse
import warnings
from itertools import product
from pathlib import Path

import torch
from common import ENTRIES, LR, RANK, RHO, SHAPE, Step, Table, random_entries, take_turns, timed, training_step
from torch import Tensor

from ented.adam import ReplicaAdam
from ented.factors import FactorTable
from ented.likelihoods import Bernoulli
from ented.model import ENTED, stack

KEY = ["method", "threads", "dtype", "batch", "points", "replicas"]
METHODS = {"ented": None, "ented compiled": "default"}  # and the mode of torch.compile


def together(models: list[ENTED], mode: str | None = None) -> Step:
    """A step of the models as one and of their Adam; `mode` as in `training_step`."""
    model = stack(models)
    adam = ReplicaAdam(model.parameters(), torch.full((len(models),), LR, dtype=torch.float64))
    ascend = torch.compile(model.step, mode=mode) if mode else model.step
    rho, active = torch.full((len(models),), RHO, dtype=torch.float64), torch.ones(len(models), dtype=torch.bool)

    def step(indices: Tensor, values: Tensor) -> None:
        ascend(indices, values, torch.full_like(values, ENTRIES / values.shape[-1]), rho)
        adam.step(active=active)

    return step


def one_after_the_other(model: ENTED, mode: str | None = None) -> Step:
    """As many single steps as a batch has replicas."""
    single = training_step(model, mode=mode)

    def steps(indices: Tensor, values: Tensor) -> None:
        for batch in zip(indices, values, strict=True):
            single(*batch)

    return steps


def measure(
    methods: list[str], replicas: int, points: int, batch: int, dtype: torch.dtype, rounds: int, seconds: float
) -> dict[str, float]:
    """Median milliseconds that B steps of each method take, together and alone; a turn takes about `seconds`."""
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    data = random_entries()
    rows = torch.randint(ENTRIES, (100, replicas, batch))
    batches = [(data.indices[of_step], data.values[of_step].to(dtype)) for of_step in rows]
    turns = {}
    for name in methods:
        models = [ENTED(FactorTable(SHAPE, RANK), Bernoulli(), points) for _ in range(replicas)]
        turns[name] = timed(together(models, METHODS[name]))
        turns[f"{name} alone"] = timed(one_after_the_other(models[0], METHODS[name]))
    return take_turns(turns, batches, rounds, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 5, 10, 20, 50, 100])
    parser.add_argument("--points", type=int, nargs="+", default=[16, 100, 256])
    parser.add_argument("--batch", type=int, nargs="+", default=[128])
    parser.add_argument("--dtype", nargs="+", default=["float32", "float64"], choices=["float32", "float64"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--turn", type=float, default=0.2, help="seconds that each side has in a round")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    table = Table(arguments.csv, KEY, ["torch", "lightning"])
    grid = (arguments.threads, arguments.dtype, arguments.batch, arguments.points, arguments.replicas)
    for threads, dtype, batch, points, replicas in product(*grid):
        cell = {"replicas": replicas, "points": points, "batch": batch, "dtype": dtype, "threads": threads}
        missing = [name for name in arguments.methods if {"method": name} | cell not in table]
        if not missing:
            continue
        torch.set_num_threads(threads)
        torch._dynamo.reset()
        times = measure(missing, replicas, points, batch, getattr(torch, dtype), arguments.rounds, arguments.turn)
        for name in missing:
            milliseconds, alone = times[name], times[f"{name} alone"]
            row = {"milliseconds": round(milliseconds, 4), "alone_milliseconds": round(alone, 4)}
            table.add({"method": name} | cell | row | {"ratio": round(alone / milliseconds, 3)})
    print("\n" + table.wide("replicas", "ratio"))


if __name__ == "__main__":
    main()
