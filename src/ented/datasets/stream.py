"""A table too large for memory: a folder of shards that users add."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ented.datasets.dataset import Dataset
from ented.errors import InputError
from ented.shards import Shards, StreamDataModule
from ented.tensor import COOTensor


class Stream(Dataset):
    """A folder with train/ and test/, each with shards *.npy or *.parquet; see `ented.shards`.

    The test entries are read into memory. Cells that stand in several rows of train, or in train and in test, are not
    looked for, since that takes all entries at once.

    Parameters
    ----------
    name : str
        Of the dataset.
    folder : str
        Where train/ and test/ are.
    shape : sequence of int
        Size of each mode.
    modes : sequence of str or None
        Name of each mode; mode-0, mode-1, ... otherwise.
    kind : "binary" or "count"
    workers : int
        Processes that read the minibatches, for each process that trains; 0 for none.

    Raises
    ------
    InputError
        If the description is inconsistent.
    """

    streamed = True

    def __init__(
        self,
        name: str,
        folder: str,
        shape: Sequence[int],
        modes: Sequence[str] | None = None,
        kind: Literal["binary", "count"] = "count",
        workers: int = 0,
    ):
        if isinstance(shape, str) or not isinstance(shape, Sequence):
            raise InputError(f"dataset.source.shape={shape}: give the size of each mode, as in [1000,2000,50]")
        self.describe(name, shape, [f"mode-{d}" for d in range(len(shape))] if modes is None else modes, kind, folds=1)
        self.folder, self.workers = Path(str(folder)).expanduser(), workers

    def read(self, fold: int) -> tuple[Shards, COOTensor]:
        train, test = (Shards.open(self.folder / split, self.shape) for split in ("train", "test"))
        return train, test.load()

    def clean(self, fold: int, train: Shards, test: COOTensor) -> Shards:
        """Return train as it is."""
        return train

    def data_module(self, train: Shards, test: COOTensor, *settings) -> StreamDataModule:
        return StreamDataModule(train, test, *settings, workers=self.workers)
