"""The contract of every dataset: what it is, and clean train and test tensors for each fold."""

import logging
from abc import ABC, abstractmethod
from typing import Literal

from ented.tensor import COOTensor, InputError

log = logging.getLogger("ented")


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
    """

    name: str
    shape: tuple[int, ...]
    modes: list[str]
    kind: Literal["binary", "count"]
    folds: int

    @abstractmethod
    def read(self, fold: int) -> tuple[COOTensor, COOTensor]:
        """Return train and test of one fold as the source has them."""

    def load(self, fold: int) -> tuple[COOTensor, COOTensor]:
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
        if self.kind == "binary" and not (train.is_binary and test.is_binary):
            largest = max(train.values.max(), test.values.max())
            raise InputError(f"{self.name}, fold {fold}: a binary dataset holds the value {largest:g}; set kind: count")
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
        return clean, test
