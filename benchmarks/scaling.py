"""How the time of a training step grows with each size of the problem, beside the least that its arithmetic takes.

    python benchmarks/scaling.py --csv results/scaling.csv           all sizes; started again, what is missing of them
    python benchmarks/scaling.py --variables batch points --rounds 3

Each size is changed alone, from those of Enron, rank 3, a batch of 128 and 100 inducing points; single precision, one
thread, not compiled. The values of a variable take turns, see step.py. A step here includes reading its minibatch from
all entries. The tables of results/scaling.md are printed at the end.

`floor_milliseconds` is the time of the products, factorisations and solves at the rate of a large matrix product in the
same process, `arithmetic_milliseconds`, and of the passes over features and factors at the rate of a copy.
"""

import argparse
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from common import ENTRIES, RANK, SHAPE, Table, random_entries, take_turns, timed, training_step

from ented.factors import FactorTable
from ented.likelihoods import Bernoulli
from ented.model import ENTED

BASE = {"entries": ENTRIES, "batch": 128, "points": 100, "rank": RANK, "modes": len(SHAPE), "rows": sum(SHAPE)}
VALUES = {
    "entries": [ENTRIES, 100_000, 1_000_000],
    "batch": [32, 128, 512, 2048, 8192, 16_384],
    "points": [16, 50, 100, 256, 512, 1024, 2048],
    "rank": [1, 3, 10, 32, 64, 256],
    "modes": [2, 3, 4, 6, 8],
    "rows": [sum(SHAPE), 10_000, 100_000, 1_000_000, 4_000_000],  # of all factor matrices together
    "sparse rows": [sum(SHAPE), 10_000, 100_000, 1_000_000, 10_000_000],  # the same with sparse gradients
}
BLOCKS = 2
STEPS = 100  # minibatches that a turn can have


def sizes(variable: str, value: int) -> dict[str, int]:
    """Those of the base, but for one."""
    return BASE | {"rows" if variable == "sparse rows" else variable: value}


def products(S: int, P: int, Q: int) -> int:
    """Floating-point operations of the matrix products of a step with S entries, P points and inputs of size Q."""
    p = P // BLOCKS
    counts = [
        2 * (P + S) * P * (Q + 2),  # k(XM, X)
        2 * 2 * S * P * p,  # D_i phi_in, for theta and again after the step on q(u)
        2 * 2 * S * P,  # and the means
        2 * S * P * P,  # G
        2 * S * P,  # r
        BLOCKS * 2 * p**3,  # S_i = L_i^-T L_i^-1
        BLOCKS**2 * 2 * p**2,  # G_ij m_j, and S_i eta_i
        2 * S * P * P,  # phi_bar' Phi
        2 * 2 * (P + S) * P * (Q + 1),  # W y and W' x
    ]
    return sum(counts)


def factorisations(S: int, P: int) -> float:
    """Floating-point operations of the Cholesky factorisations and triangular solves of a step."""
    p = P // BLOCKS
    counts = [
        P**3 / 3,  # k(X, X) = L L'
        S * P**2,  # Phi
        BLOCKS * p**3 / 3,  # Lambda_i = L_i L_i'
        BLOCKS * p**3,  # L_i^-1
        2 * P**3,  # K_XX_bar, from both sides
        S * P**2,  # K_MX_bar
    ]
    return sum(counts)


def passes(S: int, P: int, factors: int) -> list[tuple[int, int]]:
    """Numbers in a matrix, and how often all of them are read or written outside of products and solves.

    Of `factors` all are, the numbers of Z; none with sparse gradients.
    """
    return [
        ((P + S) * P, 2 + 2),  # k: its bound from above, exp
        ((P + S) * P, 2 + 3),  # K_bar: put together, times K
        (S * P, 2 * (2 + 3 + 1)),  # D_i phi_in twice: put together, times phi_in, summed
        (S * P, 2 + 2),  # what the solves for Phi and K_MX_bar copy
        (S * P, 2 + 4),  # theta phi, phi_bar
        (factors, 1 + 3),  # the gradient of Z: zeros, plus Z
        (factors, 4 + 3),  # Adam: reads Z, its gradient and two moments, writes three of them
    ]


def fastest(call: Callable[[], object], times: int) -> float:
    """Seconds of the fastest of several calls."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@cache
def product_rate() -> float:
    """Floating-point operations a second of a large matrix product."""
    A, B, C = torch.randn(3, 2048, 2048)
    return 2 * len(A) ** 3 / fastest(lambda: torch.mm(A, B, out=C), 10)


@cache
def copy_rate(numbers: int) -> float:
    """Numbers read or written in a second when a matrix of this size is copied: a small one stays in the cache."""
    numbers = max(numbers, 2**16)  # below, the call takes the time
    source, target = torch.randn(2, numbers)
    return 2 * numbers / fastest(lambda: target.copy_(source), 30)


def floors(batch: int, points: int, rank: int, modes: int, rows: int, sparse: bool) -> tuple[float, float]:
    """Milliseconds of a step's arithmetic, and of this and its passes over memory."""
    arithmetic = (products(batch, points, modes * rank) + factorisations(batch, points)) / product_rate()
    factors = 0 if sparse else rank * rows
    memory = sum(times * numbers / copy_rate(numbers) for numbers, times in passes(batch, points, factors))
    return 1e3 * arithmetic, 1e3 * (arithmetic + memory)


class Cell:
    """A model of the given sizes, and minibatches for it."""

    def __init__(self, entries: int, batch: int, points: int, rank: int, modes: int, rows: int, sparse: bool):
        shape = tuple(rows // modes + (mode < rows % modes) for mode in range(modes))
        # inputs stay as far apart as at the base: k would underflow at a high rank
        std = 0.5 * (BASE["modes"] * BASE["rank"] / (modes * rank)) ** 0.5
        self.model = ENTED(FactorTable(shape, rank, std, sparse_gradients=sparse), Bernoulli(), points, BLOCKS)
        self.ascend, data = training_step(self.model, entries), random_entries(shape, entries)
        self.indices, self.values = data.indices, data.values.to(torch.float32)
        self.chosen = torch.randint(entries, (STEPS, batch))

    def step(self, i: int) -> None:
        """Read minibatch i and learn from it."""
        self.ascend(self.indices[self.chosen[i]], self.values[self.chosen[i]])


def measure(variable: str, values: list[int], rounds: int, seconds: float) -> dict[str, float]:
    """Median milliseconds a step at each value; a turn takes about `seconds`."""
    torch.manual_seed(0)
    sparse = variable == "sparse rows"
    cells = {str(value): Cell(**sizes(variable, value), sparse=sparse) for value in values}
    turns = {value: timed(cell.step) for value, cell in cells.items()}
    times = take_turns(turns, [(i,) for i in range(STEPS)], rounds, seconds)
    if any(cell.model.failures for cell in cells.values()):
        raise RuntimeError("a Cholesky factorisation failed, and took less time than it should")
    return times


def tables(rows: list[dict[str, str]]) -> str:
    """The times, and what they and the floor say together, in Markdown."""
    rows = sorted(rows, key=lambda row: (list(VALUES).index(row["variable"]), int(row["value"])))
    times = ["| variable | value | ms | floor, ms | of it arithmetic | time / floor |", "| --- " * 6 + "|"]
    for row in rows:
        floor, ratio = float(row["floor_milliseconds"]), float(row["milliseconds"]) / float(row["floor_milliseconds"])
        share = float(row["arithmetic_milliseconds"]) / floor
        cells = [row["variable"], row["value"], row["milliseconds"], row["floor_milliseconds"], f"{share:.0%}"]
        times.append(f"| {' | '.join(cells)} | {ratio:.1f} |")
    fits = ["| variable | overhead, ms | slope | work takes as long as overhead at |", "| --- " * 4 + "|"]
    for variable in VALUES:
        of_variable = [row for row in rows if row["variable"] == variable]
        values, milliseconds, floor = (
            np.array([float(row[name]) for row in of_variable])
            for name in ("value", "milliseconds", "floor_milliseconds")
        )
        if not len(floor) or floor[-1] < 2 * floor[0]:
            continue  # too little of the time changes
        # time = overhead + slope * floor, by least squares on the relative error
        A = np.column_stack([np.ones(len(values)), floor]) / milliseconds[:, None]
        overhead, slope = np.linalg.lstsq(A, np.ones(len(values)), rcond=None)[0]
        # where slope * floor = overhead, on the line between two measured sizes; both axes logarithmic
        crossing = np.exp(np.interp(np.log(overhead / slope), np.log(floor), np.log(values)))
        sign = "<" if crossing == values[0] else ">" if crossing == values[-1] else ""
        fits.append(f"| {variable} | {overhead:.2f} | {slope:.1f} | {sign}{float(f'{crossing:.2g}'):.0f} |")
    return "\n".join([*times, "", *fits])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variables", nargs="+", default=list(VALUES), choices=VALUES)
    parser.add_argument("--values", type=int, nargs="+", help="of the variables, in place of the published ones")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--turn", type=float, default=0.2, help="seconds of a round")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)
    table = Table(arguments.csv, ["variable", "value"], ["torch"])
    for variable in arguments.variables:
        values = arguments.values or VALUES[variable]
        missing = [value for value in values if {"variable": variable, "value": value} not in table]
        for value, milliseconds in measure(variable, missing, arguments.rounds, arguments.turn).items():
            of_step = {name: size for name, size in sizes(variable, int(value)).items() if name != "entries"}
            arithmetic, floor = floors(**of_step, sparse=variable == "sparse rows")
            row = {
                "variable": variable,
                "value": value,
                "milliseconds": f"{milliseconds:.3f}",
                "floor_milliseconds": f"{floor:.4f}",
                "arithmetic_milliseconds": f"{arithmetic:.4f}",
                "product_gflops": f"{product_rate() / 1e9:.1f}",
            }
            table.add(row)
    print("\n" + tables(list(table.rows.values())))


if __name__ == "__main__":
    main()
