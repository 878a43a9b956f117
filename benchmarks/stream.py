"""Minibatches from files beside minibatches from memory, for a tensor larger than memory.

    python benchmarks/stream.py --csv results/stream.csv
    python benchmarks/stream.py --entries 1e6 --format parquet --workers 2

Writes shards with so many entries of a tensor of 1024 x 1024 x 1024, all cells distinct, and reads epochs of them. A
cell tells the number of its entry, so that each is known to come once. For each batch size it prints how many entries a
second come from the files and from memory (of a part of the entries, which fits there), and the most memory that the
streaming process held until it had also trained ENTED for 200 steps. Linux only.
"""

import argparse
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from importlib.metadata import version
from pathlib import Path

import lightning as L
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ented.datamodule import COODataModule
from ented.datasets import Stream
from ented.gaussian_process import ENTEDModule
from ented.likelihoods import NegativeBinomial
from ented.tensor import COOTensor

SHAPE = (1024, 1024, 1024)
CELLS = 2**30
FACTOR = 0x9E3779B1  # odd, so that multiplication modulo 2^30 is a permutation
SHARD, ROW_GROUP, TEST = 2**22, 2**16, 1000


def entries(start: int, stop: int) -> np.ndarray:
    """Rows of entries start..stop: the cell is the number times FACTOR."""
    keys = np.arange(start, stop, dtype=np.int64) * FACTOR % CELLS
    return np.column_stack([keys >> 20, keys >> 10 & 1023, keys & 1023, (keys >> 3) % 5]).astype(np.int32)


def numbers(indices: torch.Tensor) -> np.ndarray:
    """The numbers of entries, from their cells."""
    i, j, k = indices.numpy().T
    return (i << 20 | j << 10 | k) * pow(FACTOR, -1, CELLS) % CELLS


def write(folder: Path, start: int, stop: int, form: str) -> None:
    folder.mkdir()
    for number, first in enumerate(range(start, stop, SHARD)):
        rows = entries(first, min(first + SHARD, stop))
        file = folder / f"{number:05d}.{form}"
        if form == "npy":
            np.save(file, rows)
        else:
            table = pa.table(dict(zip(["i", "j", "k", "value"], rows.T, strict=True)))
            pq.write_table(table, file, row_group_size=ROW_GROUP)
        with file.open() as shard:
            os.fsync(shard.fileno())


def seconds(data: COODataModule) -> float:
    """Time of an epoch."""
    start = time.perf_counter()
    count = sum(len(values) for _, values in data.train_dataloader())
    assert count == len(data.train)
    return time.perf_counter() - start


def stream(folder: Path, batch: int, seed: int, workers: int) -> COODataModule:
    dataset = Stream("benchmark", folder, SHAPE, workers=workers)
    train, test = dataset.load(0)
    return dataset.data_module(train, test, batch, seed)


def measure_memory(count: int, batch: int) -> dict:
    train, test = (
        COOTensor.from_rows(entries(start, stop), SHAPE) for start, stop in ((TEST, count + TEST), (0, TEST))
    )
    return {"memory_per_second": count / seconds(COODataModule(train, test, batch, 0))}


def measure_stream(folder: Path, batch: int, workers: int) -> dict:
    start = time.perf_counter()
    data = stream(folder, batch, 0, workers)  # checks all entries
    load_seconds = time.perf_counter() - start
    for file in Path(folder, "train").iterdir():  # so that the epoch comes from the disk, as it does for more entries
        with file.open() as shard:
            os.posix_fadvise(shard.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    per_second = len(data.train) / seconds(data)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=200,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(ENTEDModule(SHAPE, NegativeBinomial(20), 3, 100, 2, 0.5, 1e-4, 1e-3, 0.1), data)
    (peak,) = (line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    return {"per_second": per_second, "load_seconds": load_seconds, "peak_mb": int(peak) / 1024}


def fingerprint(folder: Path, batch: int, seed: int, workers: int) -> dict:
    """A hash of an epoch's order, and whether each entry came exactly once."""
    data = stream(folder, batch, seed, workers)
    seen, count, order = np.zeros(len(data.train), bool), 0, hashlib.sha256()
    for indices, values in data.train_dataloader():
        n = numbers(indices)
        assert (values.numpy() == (n * FACTOR % CELLS >> 3) % 5).all()
        seen[n - TEST] = True
        count += len(n)
        order.update(n.tobytes())
    return {"order": order.hexdigest(), "each_once": bool(seen.all()) and count == len(seen)}


def in_a_process(function: str, *arguments) -> dict:
    """What a function here returns, from a process of its own: so that its memory is its own."""
    command = [sys.executable, __file__, "--call", json.dumps([function, *arguments])]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=float, default=1e8)
    parser.add_argument("--memory-entries", type=float, default=1e7, help="of the stream from memory, at most")
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 4096])
    parser.add_argument("--format", default="npy", choices=["npy", "parquet"])
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3, help="from memory and from files in turn; medians are written")
    parser.add_argument("--folder", type=Path, help="for the shards, which are removed at the end; /tmp otherwise")
    parser.add_argument("--csv", type=Path, help="rows are added to it")
    parser.add_argument("--call", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if arguments.call:
        function, *given = json.loads(arguments.call)
        print(json.dumps(globals()[function](*given)))
        return
    count, memory_count = int(arguments.entries), int(min(arguments.entries, arguments.memory_entries))
    made = {name: version(name) for name in ("torch", "numpy", "pyarrow", "lightning")}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        write(Path(folder) / "test", 0, TEST, arguments.format)
        write(Path(folder) / "train", TEST, TEST + count, arguments.format)
        first, again, other = (
            in_a_process("fingerprint", folder, max(arguments.batch), seed, arguments.workers) for seed in (0, 0, 1)
        )
        checks = {
            "each_once": first["each_once"] and other["each_once"],
            "same_order": first == again and first["order"] != other["order"],
        }
        print("  ".join(f"{name} {value}" for name, value in checks.items()), flush=True)
        rows = []
        for batch in arguments.batch:
            turns = []
            for _ in range(arguments.rounds):
                memory = in_a_process("measure_memory", memory_count, batch)
                turns.append(memory | in_a_process("measure_stream", folder, batch, arguments.workers))
            median = pd.DataFrame(turns).median()
            row = {"entries": count, "format": arguments.format, "workers": arguments.workers, "batch": batch}
            row["per_second"] = round(median["per_second"])
            row |= {"memory_entries": memory_count, "memory_per_second": round(median["memory_per_second"])}
            row["ratio"] = round(median["per_second"] / median["memory_per_second"], 3)
            row["peak_mb"] = round(max(turn["peak_mb"] for turn in turns), 1)
            row |= {"load_seconds": round(median["load_seconds"], 1), "rounds": arguments.rounds}
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            rows.append(row | checks | made)
    if arguments.csv:
        before = [pd.read_csv(arguments.csv)] if arguments.csv.exists() else []
        pd.concat([*before, pd.DataFrame(rows)]).to_csv(arguments.csv, index=False)


if __name__ == "__main__":
    main()
