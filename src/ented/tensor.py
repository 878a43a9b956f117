"""Sparse tensors in coordinate form, and the one place where a user's data are validated."""

import hashlib
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Num
from torch import Tensor

from ented.errors import InputError

# Stored counts may carry rounding noise: the zeros of the JHU files are 8.9e-16.
ROUNDING = 1e-6


class Layout(NamedTuple):
    """The size and the name of each mode, and what the indices of a mode stand for, where that is known."""

    shape: tuple[int, ...]
    modes: list[str]
    labels: dict[str, list[str]]


class TrainingEntries(Protocol):
    """What a fit asks of its training entries, be they in memory, `COOTensor`, or in files, `ented.shards.Shards`."""

    shape: tuple[int, ...]

    def __len__(self) -> int: ...

    @property
    def range(self) -> tuple[float, float]:
        """Smallest and largest value."""

    def sample(self) -> "COOTensor":
        """As many entries as fit in memory."""

    def degrees(self) -> Int64[Tensor, "I"]:
        """Number of entries with each index: of mode 0, then of mode 1, and so on; I is the sum of the sizes."""

    def fingerprint(self) -> str:
        """Text that differs where the entries do."""


@dataclass(frozen=True, eq=False)
class COOTensor:
    """Observed entries of a count or binary tensor with D modes, on the CPU.

    A cell may stand in several rows, as in the stacked test cells of DBLP; see `distinct`.

    Parameters
    ----------
    indices : Int64[Tensor, "N D"]
        Zero-based index of each entry in each mode.
    values : Float[Tensor, "N"]
        Counts, or zeros and ones, as float64. Values within 1e-6 of an integer are rounded to it.
    shape : tuple of int
        Size of each of the D modes.

    Raises
    ------
    InputError
        If dtypes or dimensions do not fit, there is no entry, a size is below 1, an index is outside the
        shape, or a value is not finite, negative, not an integer or above 2^53.
    """

    indices: Int64[Tensor, "N D"]
    values: Float[Tensor, "N"]
    shape: tuple[int, ...]

    def __post_init__(self):
        self._check_layout()
        self._check_indices()
        object.__setattr__(self, "values", self._rounded_values())

    @classmethod
    def from_rows(cls, rows: Num[np.ndarray, "N columns"], shape: tuple[int, ...]) -> "COOTensor":
        """Make a tensor from rows of D zero-based indices and a value.

        Parameters
        ----------
        rows : Num[np.ndarray, "N D+1"]
            One entry a row; the indices may be stored as floats.
        shape : tuple of int
            Size of each of the D modes.

        Raises
        ------
        InputError
            If the rows are not a table of numbers with D + 1 columns, an index is not an integer, or the
            tensor is invalid.
        """
        if rows.dtype.kind not in "biuf":
            raise InputError(f"rows hold {rows.dtype}; give numbers")
        if rows.ndim != 2 or rows.shape[1] != len(shape) + 1:
            raise InputError(
                f"rows have shape {rows.shape}; give {len(shape) + 1} columns: "
                f"one index for each of {len(shape)} modes, then the value"
            )
        cells = rows[:, :-1]
        if cells.dtype.kind == "f":
            fractional = ~(np.isfinite(cells) & (cells == np.rint(cells)))
            if fractional.any():
                row, mode = np.argwhere(fractional)[0]
                raise InputError(f"row {row}, mode {mode}: index {cells[row, mode]} is not an integer")
        return cls(torch.from_numpy(cells.astype(np.int64)), torch.from_numpy(rows[:, -1].astype(np.float64)), shape)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def order(self) -> int:
        """Number of modes D."""
        return len(self.shape)

    @property
    def is_binary(self) -> bool:
        """Whether all values are 0 or 1."""
        return self.range[1] <= 1

    @property
    def range(self) -> tuple[float, float]:
        return self.values.min().item(), self.values.max().item()

    def fingerprint(self) -> str:
        content = hashlib.sha256(repr(self.shape).encode())
        for array in self.indices, self.values:
            content.update(array.contiguous().numpy())
        return content.hexdigest()[:16]

    def sample(self) -> "COOTensor":
        return self

    def degrees(self) -> Int64[Tensor, "I"]:
        return degrees(self.indices, self.shape)

    def subset(self, rows: Int64[Tensor, "M"] | Bool[Tensor, "N"]) -> "COOTensor":
        """Return the entries in the given rows, in that order.

        Raises
        ------
        InputError
            If no row is left.
        """
        return COOTensor(self.indices[rows], self.values[rows], self.shape)

    def distinct(self) -> "COOTensor":
        """Return the tensor without repeats: of the rows of a cell, the first stays.

        Raises
        ------
        InputError
            If two rows give one cell different values.
        """
        (keys,) = _cell_keys(self.shape, self.indices)
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        first_row = torch.from_numpy(first[inverse])
        conflict = self.values != self.values[first_row]
        if conflict.any():
            row = _first(conflict)
            raise InputError(
                f"row {row}: cell {tuple(self.indices[row].tolist())} has the value {self.values[row]:g}, "
                f"but {self.values[first_row[row]]:g} in row {first_row[row]}; keep one of them"
            )
        return self.subset(torch.from_numpy(np.sort(first)))

    def without(self, other: "COOTensor") -> "COOTensor":
        """Return the rows whose cell does not stand in `other`, such as the other split of the same tensor.

        Raises
        ------
        InputError
            If no row is left.
        """
        keys, other_keys = _cell_keys(self.shape, self.indices, other.indices)
        kept = ~np.isin(keys, other_keys)
        if not kept.any():
            raise InputError("no entry is left, as every cell stands in the other split too; keep them apart")
        return self.subset(torch.from_numpy(kept))

    def _check_layout(self):
        if not self.shape or any(not isinstance(size, int) or size < 1 for size in self.shape):
            raise InputError(f"shape {self.shape} is invalid; give one size of at least 1 for each mode")
        for name, tensor, dtype, ndim in (
            ("indices", self.indices, torch.int64, 2),
            ("values", self.values, torch.float64, 1),
        ):
            if (tensor.dtype, tensor.ndim, tensor.device.type) != (dtype, ndim, "cpu"):
                raise InputError(
                    f"{name} are {tensor.dtype} with {tensor.ndim} dimensions on {tensor.device}; "
                    f"give {dtype} with {ndim} on the CPU"
                )
        if self.indices.shape != (len(self.values), self.order):
            raise InputError(
                f"indices have shape {tuple(self.indices.shape)}; give {len(self.values)} rows, one a value, "
                f"and {self.order} columns, one a mode"
            )
        if not len(self):
            raise InputError("the tensor has no entries; give at least one row")

    def _check_indices(self):
        outside = (self.indices < 0) | (self.indices >= torch.tensor(self.shape))
        if outside.any():
            row, mode = outside.nonzero()[0].tolist()
            size = self.shape[mode]
            raise InputError(
                f"row {row}, mode {mode}: index {self.indices[row, mode]} is outside 0..{size - 1} "
                f"(size {size}); correct the index or the shape"
            )

    def _rounded_values(self) -> Float[Tensor, "N"]:
        rounded = self.values.round()
        for bad, fault in (
            (~self.values.isfinite(), "is not finite"),
            (rounded < 0, "is negative"),
            ((self.values - rounded).abs() > ROUNDING, "is not an integer"),
            (rounded > 2**53, "is above 2^53, where float64 no longer tells counts apart"),
        ):
            if bad.any():
                row = _first(bad)
                raise InputError(
                    f"row {row}: value {self.values[row]:.8g} {fault}; give counts 0, 1, 2, ... or binary 0 and 1"
                )
        return rounded.abs()  # -0 becomes 0


def degrees(indices: Int64[Tensor, "N D"], shape: tuple[int, ...]) -> Int64[Tensor, "I"]:
    """See `TrainingEntries.degrees`."""
    return torch.cat([indices[:, mode].bincount(minlength=size) for mode, size in enumerate(shape)])


def _first(bad: Bool[Tensor, "N"]) -> int:
    return int(bad.nonzero()[0])


def _cell_keys(shape: tuple[int, ...], *indices: Int64[Tensor, "_ D"]) -> list[Int64[np.ndarray, "_"]]:
    """Return one integer a row, equal exactly where two cells are equal, within and between the arrays."""
    try:
        return [np.ravel_multi_index(cells.numpy().T, shape) for cells in indices]
    except ValueError:  # the tensor has more cells than int64 can number
        lengths = [len(cells) for cells in indices]
        _, keys = np.unique(torch.cat(indices).numpy(), axis=0, return_inverse=True)
        return np.split(keys.reshape(-1), np.cumsum(lengths)[:-1])
