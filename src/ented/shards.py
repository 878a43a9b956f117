"""Tensors larger than memory: their entries stand in files, the shards, and are read a block at a time.

A shard is an npy file with an array of rows, or a Parquet file; a row is D zero-based indices, then the value. A block
is at most `BLOCK` rows of an npy file, or a row group of a Parquet file: what has a length, and a `read(shape)` that
returns its entries.
"""

import hashlib
import signal
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import Float, Int64, Num
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ented.datamodule import (
    BUFFERS,
    EVALUATION_BATCH,
    PARTS_OF_BLOCKS,
    SAMPLE,
    COODataModule,
    EpochBatches,
    generator,
)
from ented.errors import InputError
from ented.tensor import COOTensor, degrees

BLOCK = 2**16
BUFFER = 2**20  # entries that are shuffled at once, or a block if that has more

Batch = tuple[Int64[Tensor, "S D"], Float[Tensor, "S"]]


class FileBlock(ABC):
    """Consecutive rows of a file. Its text says where they stand."""

    file: Path

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def rows(self) -> Num[np.ndarray, "S D+1"]: ...

    def read(self, shape: tuple[int, ...]) -> Batch:
        """Raises InputError where the file cannot be read, or the rows are not what `COOTensor` asks for."""
        try:
            entries = COOTensor.from_rows(self.rows(), shape)
        except InputError as error:
            raise InputError(f"{self}: {error}") from None
        except Exception as error:  # numpy and pyarrow raise many kinds of it on a damaged file
            raise InputError(f"{self}: it cannot be read ({' '.join(str(error).split())})") from None
        return entries.indices, entries.values


@dataclass(frozen=True)
class NpyBlock(FileBlock):
    file: Path
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.file}, in the rows from {self.start}"

    def rows(self) -> Num[np.ndarray, "S D+1"]:
        # mapped for this block only: the pages that were read stay in memory as long as the mapping
        return np.load(self.file, mmap_mode="r")[self.start : self.stop]


@dataclass(frozen=True)
class ParquetBlock(FileBlock):
    file: Path
    metadata: pq.FileMetaData  # so that it is not read again for each block
    group: int

    def __len__(self) -> int:
        return self.metadata.row_group(self.group).num_rows

    def __str__(self) -> str:
        return f"{self.file}, in row group {self.group}"

    def rows(self) -> Num[np.ndarray, "S D+1"]:
        with pq.ParquetFile(self.file, metadata=self.metadata) as file:
            table = file.read_row_group(self.group, use_threads=False)
        return np.column_stack([column.to_numpy() for column in table.columns])


def blocks(file: Path) -> list[FileBlock]:
    """The blocks of a shard.

    Raises
    ------
    InputError : it is not a file of its format, or a Parquet column does not hold numbers.
    """
    try:
        if file.suffix == ".npy":
            rows = len(np.load(file, mmap_mode="r"))
            return [NpyBlock(file, start, min(start + BLOCK, rows)) for start in range(0, rows, BLOCK)]
        with pq.ParquetFile(file) as parquet:
            schema, metadata = parquet.schema_arrow, parquet.metadata
    except Exception:  # numpy and pyarrow raise many kinds of it, and say of most files that they are pickles
        kind = {".npy": "an npy file with an array of rows", ".parquet": "a Parquet file"}[file.suffix]
        raise InputError(f"{file} is not {kind}, or it is damaged: write it again") from None
    for column in schema:
        if column.name.startswith("__index_level_"):
            raise InputError(f"{file}: {column.name} is the index of a pandas table: write it with index=False")
        if not any(holds(column.type) for holds in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)):
            raise InputError(f"{file}: column {column.name} holds {column.type}; give numbers")
    return [ParquetBlock(file, metadata, group) for group in range(metadata.num_row_groups)]


@dataclass(frozen=True)
class Part:
    """Entries `start` to `stop` of a block, once these are in the random order that the seeds decide."""

    block: FileBlock
    start: int
    stop: int
    seeds: tuple[int, ...]

    def __len__(self) -> int:
        return self.stop - self.start

    def read(self, shape: tuple[int, ...]) -> Batch:
        order = torch.randperm(len(self.block), generator=generator(*self.seeds))[self.start : self.stop]
        indices, values = self.block.read(shape)
        return indices.index_select(0, order), values.index_select(0, order)


class Shards:
    """Observed entries of a tensor that stay in their files.

    Parameters
    ----------
    blocks : in their order.
    shape : size of each mode.
    """

    def __init__(self, blocks: Iterable[FileBlock | Part], shape: tuple[int, ...]):
        self.blocks, self.shape = [block for block in blocks if len(block)], shape
        self.entries = sum(map(len, self.blocks))

    @classmethod
    def open(cls, folder: Path, shape: tuple[int, ...]) -> "Shards":
        """The entries of all shards of a folder, in the order of the files' names.

        Raises
        ------
        InputError : there is no such folder, or in it no entry, shards of both kinds or in folders; or see `blocks`.
        """
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder: put *.parquet or *.npy files there, a row for each entry")
        suffixes = ".npy", ".parquet"
        files = sorted(file for file in folder.glob("[!.]*") if file.suffix in suffixes)
        if len({file.suffix for file in files}) > 1:
            raise InputError(f"{folder} has npy and Parquet files: keep one kind, both would be read")
        if below := [file for file in folder.glob("[!.]*/**/*") if file.suffix in suffixes]:
            raise InputError(f"{below[0].parent} has files that would not be read: put them into {folder} itself")
        shards = cls(chain.from_iterable(map(blocks, files)), shape)
        if not shards.entries:
            raise InputError(f"{folder} has no entries: put *.parquet or *.npy files there, a row for each entry")
        return shards

    def __len__(self) -> int:
        return self.entries

    @cached_property
    def range(self) -> tuple[float, float]:
        """Smallest and largest value. All entries are read for it, and so what is wrong in one of them is found."""
        of_blocks = [block.read(self.shape)[1].aminmax() for block in self.blocks]
        return min(found.min.item() for found in of_blocks), max(found.max.item() for found in of_blocks)

    def read(self, order: Iterable[int], start: int, stop: int) -> Iterator[Batch]:
        """Entries `start` to `stop` of the blocks in the given order, in one piece from each block."""
        end = 0
        for block in map(self.blocks.__getitem__, order):
            begin, end = end, end + len(block)
            if max(begin, start) < min(end, stop):
                rows = slice(max(start - begin, 0), stop - begin)
                indices, values = block.read(self.shape)
                yield indices[rows], values[rows]

    def fingerprint(self) -> str:
        """Of the names and sizes of the files; what stands in them is not looked at."""
        files = [(block.file.name, block.file.stat().st_size, len(block)) for block in self.blocks]
        return hashlib.sha256(repr([self.shape, files]).encode()).hexdigest()[:16]

    def degrees(self) -> Int64[Tensor, "I"]:
        """A pass over all entries."""
        counts = torch.zeros(sum(self.shape), dtype=torch.int64)
        for indices, _ in self.read(range(len(self.blocks)), 0, len(self)):
            counts += degrees(indices, self.shape)
        return counts

    def load(self) -> COOTensor:
        """All entries, in memory."""
        return self._tensor(range(len(self.blocks)), len(self))

    def sample(self) -> COOTensor:
        """At most `BUFFER` entries, from blocks drawn at random; all if there are not more. Always the same."""
        return self._tensor(torch.randperm(len(self.blocks), generator=generator(0, 0, SAMPLE)).tolist(), BUFFER)

    def _tensor(self, order: Iterable[int], entries: int) -> COOTensor:
        indices, values = zip(*self.read(order, 0, entries), strict=True)
        return COOTensor(torch.cat(indices), torch.cat(values), self.shape)

    def split(self, size: int, seed: int) -> tuple["Shards", "Shards"]:
        """Two parts: all entries but `size`, and these, which are drawn at random from each block in proportion."""
        ends = accumulate(map(len, self.blocks), initial=0)
        drawn = [size * end // len(self) - size * start // len(self) for start, end in pairwise(ends)]
        rest, held_out = [], []
        for number, (block, count) in enumerate(zip(self.blocks, drawn, strict=True)):
            seeds = (seed, 0, PARTS_OF_BLOCKS, number)
            rest.append(Part(block, count, len(block), seeds))
            held_out.append(Part(block, 0, count, seeds))
        return Shards(rest, self.shape), Shards(held_out, self.shape)


class Lane(IterableDataset):
    """The minibatches of an epoch that one worker of one process gives.

    The blocks are put in an order that depends on the seed and the epoch, and divided among all workers of all
    processes (a block at the border of two is read by both). A worker puts the entries of its blocks in a random order,
    `BUFFER` at a time; those left over when no batch can be filled are shuffled again with the next.

    Parameters
    ----------
    shards : to train on.
    batches : their sizes; the seed, the epoch and the process.
    dtype : of the values.
    """

    def __init__(self, shards: Shards, batches: EpochBatches, dtype: torch.dtype):
        self.shards, self.batches, self.dtype = shards, batches, dtype

    def sizes(self, number: int, workers: int) -> Int64[np.ndarray, "_"]:
        """Of the batches that a worker gives, where workers are counted over all processes.

        Of the epoch's batches, worker i of a process has i, i + workers, ...; all processes share each of them.
        """
        process, worker = divmod(number, workers)
        sizes, processes = np.array(self.batches.sizes), self.batches.processes
        return (sizes // processes + (process < sizes % processes))[worker::workers]  # as tensor_split divides

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        pin = torch.cuda.is_available() and not info  # so that the copy to the device does not wait
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        number = self.batches.process * workers + worker
        start = sum(int(self.sizes(before, workers).sum()) for before in range(number))
        sizes = self.sizes(number, workers)
        stop, enough = start + int(sizes.sum()), max(BUFFER, sizes.max(initial=0))
        sizes = deque(sizes.tolist())
        seeds = self.batches.seed, self.batches.epoch
        order = torch.randperm(len(self.shards.blocks), generator=generator(*seeds)).tolist()
        random = generator(*seeds, BUFFERS, number)
        buffer, held = [], 0
        end = torch.empty(0, len(self.shards.shape), dtype=torch.int64), torch.empty(0)
        for piece in chain(self.shards.read(order, start, stop), [end]):
            buffer.append(piece)
            held += len(piece[1])
            if held < enough and piece is not end:
                continue
            indices, values = map(torch.cat, zip(*buffer, strict=True))
            rows = torch.randperm(held, generator=random, dtype=torch.int32)
            indices, values = indices.index_select(0, rows), values.to(self.dtype).index_select(0, rows)
            if pin:
                indices, values = indices.pin_memory(), values.pin_memory()
            while sizes and sizes[0] <= len(values):
                size = sizes.popleft()
                yield indices[:size], values[:size]
                indices, values = indices[size:], values[size:]
            buffer, held = [(indices, values)], len(values)


def ignore_interrupt(_) -> None:
    """Leave Ctrl-C to the process that trains, which ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def copied(batch: Batch) -> list[Tensor]:
    """What a worker sends; without a copy it would be the whole buffer."""
    return [part.clone() for part in batch]


class Minibatches:
    """What Lightning reads the minibatches from, epoch after epoch.

    Parameters
    ----------
    shards, batches, dtype : see `Lane`.
    workers : processes that read while this one trains; 0 for none.
    """

    def __init__(self, shards: Shards, batches: EpochBatches, dtype: torch.dtype, workers: int):
        self.lane, self.workers = Lane(shards, batches, dtype), workers
        self.sampler = batches  # this is where Lightning sets the epoch

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        # a generator: the workers start, with the epoch they are told, when the first batch is asked for
        if self.workers:
            options = {"num_workers": self.workers, "pin_memory": torch.cuda.is_available()}
            options["worker_init_fn"] = ignore_interrupt
            yield from DataLoader(self.lane, batch_size=None, collate_fn=copied, **options)
        else:
            yield from self.lane


class InOrder:
    """The entries that a process evaluates, each entry in one process."""

    def __init__(self, shards: Shards, process: int, processes: int):
        self.shards, self.process, self.processes = shards, process, processes

    def __iter__(self) -> Iterator[Batch]:
        start, stop = (len(self.shards) * border // self.processes for border in (self.process, self.process + 1))
        for indices, values in self.shards.read(range(len(self.shards.blocks)), start, stop):
            yield from zip(indices.split(EVALUATION_BATCH), values.split(EVALUATION_BATCH), strict=True)


class StreamDataModule(COODataModule):
    """Minibatches and validation entries that are read from shards when their turn comes; the test is in memory.

    Parameters
    ----------
    train : the shards; the others are those of `COODataModule`.
    workers : processes that read the minibatches, for each process that trains.

    Raises
    ------
    InputError : as `COODataModule`, and for the batch_size "all".
    """

    def __init__(
        self,
        train: Shards,
        test: COOTensor,
        batch_size: int,
        seed: int,
        held_out: float = 0.0,
        dtype: torch.dtype = torch.float64,
        workers: int = 0,
    ):
        if batch_size == "all":
            raise InputError(
                "batch_size=all: entries that stay in files never are in memory all together; give a number"
            )
        self.workers = workers
        super().__init__(train, test, batch_size, seed, held_out, dtype)

    def split(self, size: int) -> None:
        self.train, self.validation = self.train.split(size, self.seed)

    def train_dataloader(self) -> Minibatches:
        batches = EpochBatches(len(self.train), self.batch_size, self.seed, *self.process_and_count)
        return Minibatches(self.train, batches, self.dtype, self.workers)

    def val_dataloader(self) -> InOrder | list:
        return InOrder(self.validation, *self.process_and_count) if self.validation else []
