"""What the benchmarks share: the entries, ENTED's training step, taking turns, and the CSV file of a grid."""

import csv
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from ented.adam import RowAdam
from ented.model import ENTED
from ented.runs import write
from ented.tensor import COOTensor

SHAPE, RANK, ENTRIES = (203, 203, 200), 3, 6_206  # Enron's
LR, RHO = 1e-3, 0.1

Batches = list[tuple]
Step = Callable[..., None]  # takes what a batch holds
Turn = Callable[[Batches], float]  # some steps of a method, and the seconds that one took


def random_entries(shape: tuple[int, ...] = SHAPE, number: int = ENTRIES) -> COOTensor:
    """Zeros and ones at random cells: the time of a step does not depend on what they are."""
    random = torch.Generator().manual_seed(0)
    indices = torch.stack([torch.randint(size, (number,), generator=random) for size in shape], 1)
    return COOTensor(indices, torch.randint(2, (number,), generator=random).double(), shape)


def training_step(model: ENTED, entries: int = ENTRIES, mode: str | None = None) -> Step:
    """The model's step and Adam's; `mode` is that of torch.compile, which is left out where there is none."""
    rows = RowAdam([model.Z], LR) if model.table.sparse_gradients else None
    others = [parameter for parameter in model.parameters() if not (rows and parameter is model.Z)]
    adam = torch.optim.Adam(others, LR, fused=True)
    ascend = torch.compile(model.step, mode=mode) if mode else model.step
    rho = torch.tensor(RHO, dtype=torch.float64)  # as `ENTEDModule` has it: on the model's device

    def step(indices: Tensor, values: Tensor) -> None:
        ascend(indices, values, entries / len(values), rho)
        adam.step()
        if rows:
            rows.step(rows=model.table.rows(indices).flatten())

    return step


def timed(step: Step) -> Turn:
    def turn(batches: Batches) -> float:
        start = time.perf_counter()
        for batch in batches:
            step(*batch)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the calls have returned before the device is done
        return (time.perf_counter() - start) / len(batches)

    return turn


def take_turns(turns: dict[str, Turn], batches: Batches, rounds: int, seconds: float) -> dict[str, float]:
    """Median milliseconds a step of each method; a turn takes about `seconds`."""
    counts = {}
    for name, turn in turns.items():
        turn(batches[:3])  # warm, and compiled
        counts[name] = max(1, min(len(batches), round(seconds / turn(batches[:3]))))
    times: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            times[name].append(turn(batches[: counts[name]]))
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


class Table:
    """The rows of a CSV file, each known by the columns `key`: what is there need not be measured again.

    Parameters
    ----------
    path : of the file; without one, rows are only printed.
    key : columns that say what a row is about.
    packages : whose versions a new row ends with.
    """

    def __init__(self, path: Path | None, key: list[str], packages: list[str]):
        self.path, self.key = path, key
        self.versions = {name: version(name) for name in packages}
        self.rows: dict[tuple[str, ...], dict] = {}
        if path and path.exists():
            with path.open(newline="") as file:
                self.rows = {self._key(row): row for row in csv.DictReader(file)}

    def _key(self, row: dict) -> tuple[str, ...]:
        return tuple(str(row[name]) for name in self.key)

    def __contains__(self, row: dict) -> bool:
        return self._key(row) in self.rows

    def add(self, row: dict) -> None:
        """Print a row and write it, in place of one with the same key."""
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        self.rows[self._key(row)] = {name: str(value) for name, value in (row | self.versions).items()}
        if self.path:
            write(self.path, pd.DataFrame(self.rows.values()).to_csv(index=False))

    def wide(self, column: str, value: str) -> str:
        """A Markdown table of one value, with a column for each of the values of `column`."""
        index = [name for name in self.key if name != column]
        names = list(dict.fromkeys(key[self.key.index(column)] for key in self.rows))
        lines: dict[tuple[str, ...], dict[str, str]] = {}
        for row in self.rows.values():
            lines.setdefault(tuple(row[name] for name in index), {})[row[column]] = f"{float(row[value]):.1f}"
        table = [[*index, *names], ["---"] * (len(index) + len(names))]
        for line in sorted(lines, key=order):
            table.append([*line, *(lines[line].get(name, "–") for name in names)])
        return "\n".join(f"| {' | '.join(map(str, line))} |" for line in table)


def order(line: tuple[str, ...]) -> list[tuple]:
    """Numbers by their size, before words."""
    return [(0, int(cell), "") if cell.isdigit() else (1, 0, cell) for cell in line]
