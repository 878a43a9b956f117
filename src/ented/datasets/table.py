"""A table of events in a file, as users have it: with names in place of indices."""

import hashlib
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import torch

from ented.datasets.dataset import Dataset
from ented.tensor import COOTensor, InputError

log = logging.getLogger("ented")


class Table(Dataset):
    """A CSV or Parquet file with a row for each observed cell: a column for each mode, and one of values.

    What stands in the column of a mode, a word or a number, names a row of that mode.

    Parameters
    ----------
    name : str
        Of the dataset.
    file : str
        The table.
    test : str or None
        Another file with the rows to test by, of the same columns; then there is one fold.
    folds : int
        Without `test`, into how many parts the rows are divided at random, each of which is tested by once.
    value : str or None
        The column of values; the last one otherwise.
    modes : sequence of str or None
        The columns of the modes; all but that of values otherwise.
    kind : "binary" or "count"

    Raises
    ------
    InputError
        If the description is inconsistent; or a file is missing or malformed, has an empty name, a value that is not
        a count, or two rows of one cell.
    """

    def __init__(
        self,
        name: str,
        file: str,
        test: str | None = None,
        folds: int = 5,
        value: str | None = None,
        modes: Sequence[str] | None = None,
        kind: Literal["binary", "count"] = "count",
    ):
        files = [Path(str(path)).expanduser() for path in (file, test) if path is not None]
        tables = [read_text(path) for path in files]
        value = tables[0].columns[-1] if value is None else str(value)
        modes = [column for column in tables[0] if column != value] if modes is None else modes
        if value in modes or not modes:
            raise InputError(f"{file}: column {value} holds the values; the modes need columns of their own")
        if any(str(mode).startswith("Unnamed: ") for mode in modes):  # pandas' name of it
            raise InputError(f"{file} has a column without a name: say by dataset.source.modes= which are the modes")
        self.describe(name, [1] * len(modes), modes, kind, 1 if test is not None else folds)  # the shape comes below
        cells = [columns_of(path, table, self.modes) for path, table in zip(files, tables, strict=True)]
        self.labels = {mode: in_order(names) for mode, names in pd.concat(cells).items()}
        self.shape = tuple(map(len, self.labels.values()))
        self.tensors = []
        for path, table in zip(files, tables, strict=True):
            values = numbers_of(path, columns_of(path, table, [value])[value])
            self.tensors.append(self.tensor(path, table[self.modes], values))
        if test is None and not (type(folds) is int and 2 <= folds <= len(values)):
            raise InputError(f"{file}: folds is {folds}; give a whole number from 2 to {len(values)}, that of the rows")
        content = self.labels, [tensor.fingerprint() for tensor in self.tensors]
        self.content = hashlib.sha256(repr(content).encode()).hexdigest()[:16]
        sizes = " × ".join(f"{size} {mode}" for mode, size in zip(self.modes, self.shape, strict=True))
        log.info("%s: %s by %s", file, value, sizes)

    def tensor(self, file: Path, cells: pd.DataFrame, values: np.ndarray) -> COOTensor:
        """The entries of a file; raises InputError where two are of one cell, or a value is not a count."""
        if (twice := cells.duplicated()).any():
            row = twice.idxmax()
            first = (cells == cells.loc[row]).all(axis=1).idxmax()
            raise InputError(
                f"{file}: rows {first} and {row} are of the same cell ({', '.join(cells.loc[row])}); add up their "
                "values, or keep one of them"
            )
        rows = [indices_of(file, cells[mode], names) for mode, names in self.labels.items()]
        try:
            return COOTensor.from_rows(np.column_stack([*rows, values]), self.shape)
        except InputError as error:
            raise InputError(f"{file}, {error}") from None

    def read(self, fold: int) -> tuple[COOTensor, COOTensor]:
        if len(self.tensors) == 2:
            return self.tensors[0], self.tensors[1]
        (tensor,) = self.tensors
        # The stream of RandomState is frozen; that of default_rng may change between versions of numpy.
        order = torch.from_numpy(np.random.RandomState(0).permutation(len(tensor)))
        parts = list(order.tensor_split(self.folds))
        test = parts.pop(fold)
        return tensor.subset(torch.cat(parts)), tensor.subset(test)


def read_text(file: Path) -> pd.DataFrame:
    """A CSV or Parquet file as text, as it stands there; what is missing is empty.

    Raises
    ------
    InputError
        If the file is missing or malformed, or has no rows.
    """
    try:
        if file.suffix == ".parquet":
            table = pd.read_parquet(file)
            table = table.reset_index(drop=table.index.names == [None])  # an index with names has columns of the table
            table = table.astype("string").fillna("").astype(object)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("error", pd.errors.ParserWarning)  # of rows that are longer than the header
                table = pd.read_csv(file, dtype=object, keep_default_na=False, index_col=False)
    except OSError as error:
        raise InputError(f"{file}: {error.strerror or error}") from None
    except Exception as error:  # pandas and pyarrow raise many kinds of it on a malformed file
        raise InputError(f"{file} is not a CSV or Parquet file ({' '.join(str(error).split())})") from None
    if table.empty:
        raise InputError(f"{file} has no rows")
    return table


def columns_of(file: Path, table: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """The columns of a table from a file.

    Raises
    ------
    InputError
        If one of them is not there, or is empty in some row.
    """
    for column in columns:
        if column not in table:
            raise InputError(f"{file} has no column {column}; it has {', '.join(map(str, table))}")
        if (empty := table[column] == "").any():
            raise InputError(f"{file}, row {empty.idxmax()}: {column} is empty; fill it in, or leave the row out")
    return table[list(columns)]


def in_order(names: pd.Series) -> list[str]:
    """Each name once, numbers by their size and before words."""
    distinct = pd.DataFrame({"name": names.unique()})
    distinct["number"] = pd.to_numeric(distinct["name"], errors="coerce")
    return distinct.sort_values(["number", "name"])["name"].tolist()


def indices_of(file: Path, column: pd.Series, names: list[str]) -> np.ndarray:
    """The place of each name among the names; raises InputError where it is not there."""
    indices = pd.Index(names).get_indexer(column)
    if (unknown := indices < 0).any():
        row = unknown.argmax()
        some = f"{', '.join(names[:20])}, and {len(names) - 20} more" if len(names) > 20 else ", ".join(names)
        raise InputError(f"{file}, row {row}: there is no {column.name} {column[row]}; there are {some}")
    return indices


def numbers_of(file: Path, column: pd.Series) -> np.ndarray:
    """Raises InputError where the text is not a number."""
    numbers = pd.to_numeric(column, errors="coerce")
    if (wrong := numbers.isna()).any():
        row = wrong.idxmax()
        raise InputError(f"{file}, row {row}: {column.name} is {column[row]}, which is no number")
    return numbers.to_numpy(np.float64)
