"""A table of events in a file, as users have it: with names in place of indices."""

import hashlib
import logging
import unicodedata
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64, Int64

from ented.datasets.dataset import Dataset, check_names, shuffled
from ented.errors import InputError
from ented.tensor import COOTensor

log = logging.getLogger("ented")


class Table(Dataset):
    """A CSV or Parquet file with a row for each observed cell: a column for each mode, and one of values.

    What stands in the column of a mode, a word or a number, is a name of that mode, and compared as text, see `tidy`.

    Parameters
    ----------
    name : str
        Of the dataset.
    file : str
        The table.
    test : str or None
        Another file with the rows to test by, of the same columns; then there is one fold.
    folds : int or None
        Without `test`, into how many parts the rows are divided at random, each of which is tested by once; else 5.
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
        folds: int | None = None,
        value: str | None = None,
        modes: Sequence[str] | None = None,
        kind: Literal["binary", "count"] = "count",
    ):
        if test and folds is not None:
            raise InputError(f"dataset.source.folds={folds}: with dataset.source.test= there is one fold")
        files = [Path(str(path)).expanduser() for path in (file, test) if path is not None]
        tables = [as_text(read_table(path)) for path in files]
        value = tables[0].columns[-1] if value is None else tidy(str(value))
        modes = [column for column in tables[0] if column != value] if modes is None else modes
        check_names(name, modes)
        modes = [tidy(mode) for mode in modes]
        if value in modes or not modes:
            raise InputError(f"{file}: column {value} holds the values; the modes need columns of their own")
        if any(column.startswith("Unnamed: ") for column in (*modes, value)):  # pandas' name of it
            raise InputError(
                f"{file} has a column without a name: dataset.source.modes= and dataset.source.value= choose others"
            )
        tables = [columns_of(path, table, [*modes, value]) for path, table in zip(files, tables, strict=True)]
        self.labels = {mode: sorted(names.unique()) for mode, names in pd.concat(tables)[list(modes)].items()}
        self.describe(name, [len(names) for names in self.labels.values()], modes, kind, 1 if test else folds or 5)
        self.entries, *self.test_entries = map(self.tensor, files, tables)
        if not test and len(self.entries) < 2:
            raise InputError(f"{file} has one row: a fit and its test need one each, and should have many")
        if not test and not (type(self.folds) is int and 2 <= self.folds <= len(self.entries)):
            raise InputError(
                f"{file}: dataset.source.folds is {folds or 5}; "
                f"give a whole number from 2 to {len(self.entries)}, that of the rows"
            )
        tensors = [self.entries, *self.test_entries]
        content = repr([self.labels, self.folds, *(tensor.fingerprint() for tensor in tensors)])
        self.content = hashlib.sha256(content.encode()).hexdigest()[:16]
        sizes = " × ".join(f"{size} {mode}" for mode, size in zip(self.modes, self.shape, strict=True))
        self.about = f"{file}: {value} by {sizes}"

    def tensor(self, file: Path, table: pd.DataFrame) -> COOTensor:
        """The entries of a file, whose last column is that of the values.

        Raises
        ------
        InputError
            If a value is not a count, or two rows are of one cell, be they equal: they may be two events, and in two
            folds.
        """
        indices = np.column_stack([indices_of(table[mode], names) for mode, names in self.labels.items()])
        cells = pd.DataFrame(indices)
        if (twice := cells.duplicated()).any():
            row = twice.idxmax()
            first = (cells == cells.loc[row]).all(axis=1).idxmax()
            raise InputError(
                f"{file}: rows {first} and {row} are of the same cell ({', '.join(table.loc[row, self.modes])}); "
                "add up their values, or keep one of them"
            )
        values = numbers_of(file, table.iloc[:, -1])
        try:
            return COOTensor(torch.from_numpy(indices), torch.from_numpy(values), self.shape)
        except InputError as error:
            raise InputError(f"{file}, {error}") from None

    def read(self, fold: int) -> tuple[COOTensor, COOTensor]:
        log.info("%s", self.about)
        if self.kind == "count" and self.entries.is_binary:
            log.warning("of zeros and ones only: dataset.source.kind=binary likelihood=bernoulli is for such a table")
        if self.test_entries:
            return self.entries, self.test_entries[0]
        parts = list(shuffled(len(self.entries)).tensor_split(self.folds))
        test = parts.pop(fold)
        return self.entries.subset(torch.cat(parts)), self.entries.subset(test)


def read_table(file: Path) -> pd.DataFrame:
    """A table from a CSV or Parquet file, with tidy names of its columns: that from a CSV holds texts.

    Raises
    ------
    InputError
        If the file is missing or malformed, has no rows, or has two columns of one name.
    """
    try:
        with file.open("rb") as content:
            is_parquet = content.read(4) == b"PAR1"
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # of rows that are longer than the header
            table = pd.read_parquet(file) if is_parquet else read_csv(file)
    except OSError as error:
        raise InputError(f"{file}: {error.strerror or error}") from None
    except MemoryError:
        raise InputError(f"{file} does not fit in memory: use dataset=stream") from None
    except UnicodeDecodeError:
        raise InputError(f"{file} is neither a CSV file in UTF-8 nor a Parquet file: save it as one of these") from None
    except InputError:
        raise
    except pd.errors.ParserWarning:
        raise InputError(f"{file} has longer rows than its first one, which has to hold the columns' names") from None
    except Exception as error:  # pandas and pyarrow raise many kinds of it on a malformed file
        raise InputError(f"{file} is not a CSV or Parquet file ({' '.join(str(error).split())})") from None
    if table.empty:
        raise InputError(f"{file} has no rows")
    # an index with names has columns of the table
    columns = [name for name in table.index.names if name is not None and name not in table]
    table = table.reset_index(level=columns).reset_index(drop=True).rename(columns=lambda name: tidy(str(name)))
    refuse_twins(file, table.columns)
    return table


def as_text(table: pd.DataFrame) -> pd.DataFrame:
    """Its texts and numbers as text; what is missing is empty."""
    return table.astype("string").fillna("").astype(object)


def refuse_twins(file: Path, names: pd.Index) -> None:
    """Raise InputError where two columns have the same name."""
    if (twice := names.duplicated()).any():
        raise InputError(f"{file} has two columns {names[twice][0]}: rename one of them")


def read_csv(file: Path) -> pd.DataFrame:
    """A table whose columns are separated by commas, or by semicolons or tabs where there are no commas."""
    first, *others = pd.read_csv(file, nrows=0).columns
    separator = next((sign for sign in ";\t" if sign in first and not others), ",")
    text = {"sep": separator, "dtype": object, "keep_default_na": False, "skipinitialspace": True}
    names = pd.Index(pd.read_csv(file, nrows=1, header=None, **text).loc[0].map(tidy))
    refuse_twins(file, names[names != ""])  # pandas would number them
    return pd.read_csv(file, index_col=False, **text)


def tidy(text: str) -> str:
    """Without spaces at the ends, and in one Unicode form: names that look the same are the same."""
    return unicodedata.normalize("NFC", text).strip()


def columns_of(file: Path, table: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """The columns of a table from a file, their texts `tidy`.

    Raises
    ------
    InputError
        If one of them is not there, or is empty in some row.
    """
    for column in columns:
        if column not in table:
            raise InputError(f"{file} has no column {column}; it has {', '.join(map(str, table))}")
    table = table[list(columns)].apply(lambda column: column.map({text: tidy(text) for text in column.unique()}))
    for column in columns:
        if (empty := table[column] == "").any():
            raise InputError(f"{file}, row {empty.idxmax()}: {column} is empty; fill it in, or leave the row out")
    return table


def indices_of(column: pd.Series, names: list[str]) -> Int64[np.ndarray, "N"]:
    """The place of each text among the names, and of one that is not there the place after the last."""
    indices = pd.Index(names).get_indexer(column)
    return np.where(indices < 0, len(names), indices)


def numbers_of(file: Path, column: pd.Series) -> Float64[np.ndarray, "N"]:
    """True is one, and false zero; raises InputError where another text is not a number."""
    text = column.str.lower().replace({"true": "1", "false": "0"})
    numbers = pd.to_numeric(text, errors="coerce").astype("float64")
    if (wrong := numbers.isna()).any():
        row = wrong.idxmax()
        raise InputError(
            f"{file}, row {row}: {column.name} is {column[row]}, which is no number; correct it, or leave the row out"
        )
    return numbers.to_numpy(copy=True)
