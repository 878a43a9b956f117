"""Minibatches of a sparse tensor's entries, in coordinate format."""

from typing import Literal

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ented.errors import InputError
from ented.tensor import COOTensor, TrainingEntries

EVALUATION_BATCH = 8192  # entries at once where no gradient is kept
# what the draws of a `generator` are for: its third number, after the seed and the epoch, which alone draw the order
HELD_OUT, PARTS_OF_BLOCKS, SAMPLE, NOISE = 1, 2, 3, 4
BUFFERS = 1  # of entries that are streamed, none of which is HELD_OUT


class Entries(Dataset):
    """Entries of a COO tensor, read a batch of rows at a time."""

    def __init__(self, tensor: COOTensor, dtype: torch.dtype):
        self.indices = tensor.indices
        self.values = tensor.values.to(dtype)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.indices.index_select(0, rows), self.values.index_select(0, rows)  # faster than [rows]


def batch_sizes(entries: int, batch_size: int) -> list[int]:
    """Entries of each minibatch of an epoch, in all processes together: no more batches than needed, nearly equal."""
    batches = -(-entries // batch_size)
    return [entries // batches + (batch < entries % batches) for batch in range(batches)]


class EpochBatches(Sampler):
    """Rows of each minibatch of an epoch; the order depends on the seed and the epoch alone.

    The batches of an epoch differ in size by one entry at most, so none of them weighs a few entries as if they were
    a whole batch.

    Parameters
    ----------
    entries : of an epoch.
    batch_size : entries of a batch, at most, in all processes together.
    seed : see above.
    process, processes : number of this process, and how many share each batch.
    """

    def __init__(self, entries: int, batch_size: int, seed: int, process: int = 0, processes: int = 1):
        self.entries, self.sizes = entries, batch_sizes(entries, batch_size)
        self.seed, self.process, self.processes = seed, process, processes
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self):
        # a generator, so that the epoch is read when the first batch is asked for: where a fit is resumed,
        # Lightning makes the iterator before it sets the epoch
        order = torch.randperm(self.entries, generator=generator(self.seed, self.epoch))
        for rows in order.split(self.sizes):
            yield rows.tensor_split(self.processes)[self.process]


class COODataModule(L.LightningDataModule):
    """Streams of (indices, values) for training, validation and test.

    Parameters
    ----------
    train, test : the two parts of the data.
    batch_size : entries in a training minibatch, at most; "all" for one batch with every entry, in the order of train.
    seed : decides the order of the minibatches and which entries are held out.
    held_out : share of the training entries for validation; 0 for none.
    dtype : of the values in a batch.

    Raises
    ------
    InputError : the share leaves nothing to train on or nothing to validate with.
    """

    def __init__(
        self,
        train: TrainingEntries,
        test: COOTensor,
        batch_size: int | Literal["all"],
        seed: int,
        held_out: float = 0.0,
        dtype: torch.dtype = torch.float64,
    ):
        super().__init__()
        self.batch_size, self.seed, self.dtype = batch_size, seed, dtype
        self.train, self.validation, self.test = train, None, test
        if held_out:
            size = round(held_out * len(train))
            if not 0 < size < len(train):
                raise InputError(
                    f"holding out {held_out:g} of {len(train)} training entries leaves an empty part: "
                    "set another protocol.held_out=, or give more data"
                )
            self.split(size)
        self.sizes = batch_sizes(len(self.train), len(self.train) if batch_size == "all" else batch_size)

    def split(self, size: int) -> None:
        """Take `size` of the training entries for validation."""
        order = torch.randperm(len(self.train), generator=generator(self.seed, 0, HELD_OUT))
        self.train, self.validation = self.train.subset(order[size:]), self.train.subset(order[:size])

    @property
    def process_and_count(self) -> tuple[int, int]:
        """This process, and how many the fit has."""
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def scale(self, batch: int) -> float:
        """N / S: how many training entries one entry of a minibatch stands for."""
        return len(self.train) / self.sizes[batch]

    def train_dataloader(self) -> DataLoader:
        if self.batch_size == "all":
            process, processes = self.process_and_count
            batches = [torch.arange(len(self.train)).tensor_split(processes)[process]]
        else:
            batches = EpochBatches(len(self.train), self.batch_size, self.seed, *self.process_and_count)
        pin = torch.cuda.is_available()  # so that the copy to the device does not wait
        return DataLoader(Entries(self.train, self.dtype), sampler=batches, batch_size=None, pin_memory=pin)

    def val_dataloader(self) -> DataLoader | list:
        return self._in_order(self.validation, *self.process_and_count) if self.validation else []

    def test_dataloader(self) -> DataLoader:
        return self._in_order(self.test, *self.process_and_count)

    def predict_dataloader(self) -> DataLoader:
        """All test entries, in each process."""
        return self._in_order(self.test)

    def _in_order(self, tensor: COOTensor, process: int = 0, processes: int = 1) -> DataLoader:
        """The part of the entries that a process evaluates, each entry in one process."""
        batches = torch.arange(len(tensor)).tensor_split(processes)[process].split(EVALUATION_BATCH)
        # float64 whatever the model's dtype: metrics are computed in double precision
        return DataLoader(Entries(tensor, torch.float64), sampler=batches, batch_size=None)


def generator(*seeds: int) -> torch.Generator:
    """Random generator that depends on all of the given numbers, but for zeros at their end."""
    state = np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> 1))
