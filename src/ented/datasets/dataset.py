"""The contract of every dataset: what it is, and clean train and test tensors for each fold."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int64
from torch import Tensor

from ented.datamodule import COODataModule
from ented.errors import InputError
from ented.predictive import COLUMNS
from ented.tensor import COOTensor, Layout, TrainingEntries

log = logging.getLogger("ented")


def check_names(name: str, modes: Sequence[str]) -> None:
    """Raise InputError where these cannot be the names of the modes of a dataset."""
    if isinstance(modes, str) or not all(isinstance(mode, str) and mode for mode in modes):
        raise InputError(f"{name}: modes are {modes}; give a list of names, as in [user,item,week]")
    if len(set(modes)) < len(modes) or COLUMNS.intersection(modes):
        raise InputError(
            f"{name}: modes are {', '.join(modes)}; give each its own name, none that of a column of "
            f"predictions.csv ({', '.join(sorted(COLUMNS))})"
        )


def shuffled(n: int) -> Int64[Tensor, "n"]:
    """The numbers below n in an order that is always the same."""
    # the stream of RandomState is frozen; that of default_rng may change between versions of numpy
    return torch.from_numpy(np.random.RandomState(0).permutation(n))


class Dataset(ABC):
    """A tensor with fixed splits. A new source defines the attributes and `read`.

    Attributes
    ----------
    name : str
        Also the name of its folder of files.
    shape : tuple of int
        Size of each mode.
    modes : list of str
        Name of each mode.
    kind : "binary" or "count"
    folds : int
        Number of train and test splits.
    labels : dict of str to list of str
        For each mode, what its indices stand for, where that is known.
    content : str or None
        Text that differs where the content of its files does, for a source that has read them.
    streamed : bool
        Whether the training entries stay in their files, as `TrainingEntries` that are no `COOTensor`.
    """

    name: str
    shape: tuple[int, ...]
    modes: list[str]
    kind: Literal["binary", "count"]
    folds: int
    labels: Mapping[str, list[str]] = MappingProxyType({})
    content: str | None = None
    streamed = False

    def describe(self, name: str, shape: Sequence[int], modes: Sequence[str], kind: str, folds: int) -> None:
        """Set the attributes, for a source whose user names them.

        Raises
        ------
        InputError
            If they do not fit together.
        """
        if not all(type(size) is int and size >= 1 for size in shape):
            raise InputError(f"{name}: the sizes of the modes are {list(shape)}; give whole numbers from 1")
        check_names(name, modes)
        if len(modes) != len(shape):
            raise InputError(f"{name}: {len(modes)} modes for {len(shape)} sizes; name each mode once")
        if kind not in ("binary", "count"):
            raise InputError(f"{name}: kind {kind!r} is unknown; choose from binary, count")
        self.name, self.shape, self.modes, self.kind, self.folds = name, tuple(shape), list(modes), kind, folds

    @abstractmethod
    def read(self, fold: int) -> tuple[TrainingEntries, COOTensor]:
        """Return train and test of one fold as the source has them."""

    def load(self, fold: int) -> tuple[TrainingEntries, COOTensor]:
        """Return train and test of one fold, with no cell twice in train and none in both.

        A cell that the source has in both stays in test. The log says what was dropped.

        Parameters
        ----------
        fold : int
            From 0 to `folds` - 1.

        Raises
        ------
        InputError
            If there is no such fold, its files are missing or malformed, train gives one cell two values, a
            split is empty, or a binary dataset holds values above 1.
        """
        if fold not in range(self.folds):
            choices = ", ".join(map(str, range(self.folds)))
            raise InputError(f"{self.name} has no fold {fold}; choose from {choices}")
        train, test = self.read(fold)
        largest = max(train.range[1], test.range[1])
        if self.kind == "binary" and largest > 1:
            raise InputError(
                f"{self.name}, fold {fold}: a binary dataset holds the value {largest:g}; set dataset.source.kind=count"
            )
        return self.clean(fold, train, test), test

    def clean(self, fold: int, train: COOTensor, test: COOTensor) -> COOTensor:
        """Return train with no cell twice, and none of those of test; see `load`."""
        try:
            distinct = train.distinct()
            clean = distinct.without(test)
        except InputError as error:
            raise InputError(f"{self.name}, fold {fold}, train: {error}") from None

        repeats, shared = len(train) - len(distinct), len(distinct) - len(clean)
        if repeats or shared:
            log.info(
                "%s, fold %s: dropped from train %d repeated and %d also in test",
                self.name,
                fold,
                repeats,
                shared,
            )
        return clean

    @property
    def layout(self) -> Layout:
        return Layout(self.shape, self.modes, dict(self.labels))

    def cells(self, indices: Int64[Tensor, "N D"]) -> pd.DataFrame:
        """A column for each mode: what the indices stand for, or the indices where that is not known."""
        columns = dict(zip(self.modes, indices.numpy().T, strict=True))
        named = {mode: np.array(names, dtype=object)[columns[mode]] for mode, names in self.labels.items()}
        return pd.DataFrame(columns | named)

    def data_module(self, train: TrainingEntries, test: COOTensor, *settings) -> COODataModule:
        """Return what gives the entries to a model; the settings are those of `COODataModule`."""
        return COODataModule(train, test, *settings)
