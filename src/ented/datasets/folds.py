"""Datasets stored as one npz file a fold: five of the benchmark tensors, and those that users add."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from ented.datasets.dataset import Dataset
from ented.datasets.source import fetch
from ented.errors import InputError
from ented.tensor import COOTensor


class NpzFolds(Dataset):
    """A folder of files fold-0.npz, fold-1.npz, ..., each with arrays `train` and `test`.

    The arrays hold rows of D zero-based indices and a value.

    Parameters
    ----------
    name : str
        The folder, below the data folder.
    shape : sequence of int
        Size of each mode.
    modes : sequence of str
        Name of each mode.
    kind : "binary" or "count"
    folds : int
        Number of files.
    url : str or None
        Public home of the files, that of fold 0 being <url>/<name>/fold-0.npz.
    data_dir : str or None
        Local data folder, searched first; see `ented.datasets.source.fetch`.

    Raises
    ------
    InputError
        If the description is inconsistent.
    """

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        modes: Sequence[str],
        kind: Literal["binary", "count"],
        folds: int,
        url: str | None = None,
        data_dir: str | None = None,
    ):
        self.describe(name, shape, modes, kind, folds)
        if folds < 1:
            raise InputError(f"{name}: folds is {folds}; give the number of fold-K.npz files, at least 1")
        self.url = url
        self.data_dir = data_dir

    def read(self, fold: int) -> tuple[COOTensor, COOTensor]:
        path = f"{self.name}/fold-{fold}.npz"
        file = fetch(path, self.url and f"{self.url}/{path}", self.data_dir)
        try:
            with np.load(file, allow_pickle=False) as arrays:
                splits = {split: arrays[split] for split in ("train", "test")}
        except Exception as error:  # numpy, zipfile and zlib raise many kinds of it on a malformed file
            reason = " ".join(str(error).split())
            raise InputError(f"{file} is not an npz file with arrays train and test ({reason})") from None
        tensors = []
        for split, rows in splits.items():
            try:
                tensors.append(COOTensor.from_rows(rows, self.shape))
            except InputError as error:
                raise InputError(f"{file}, {split}: {error}") from None
        return tensors[0], tensors[1]
