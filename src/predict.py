"""Predict cells of a tensor with a finished run.

python src/predict.py runs/flights/ented/rank=3/fold=0/seed=0 cells.csv predictions.csv

cells.csv has a column for each mode of the tensor, with the names of what its indices stand for where the dataset has
them, as flights has, and with zero-based indices otherwise. predictions.csv has the columns of cells.csv, of which one
named like a prediction is replaced, and the predictive distribution of each cell: for ENTED mean, standard deviation,
5% and 95% quantile (of the count, or of the probability of a one), and mean and standard deviation of f.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from ented.datasets import Dataset
from ented.lightning import CompletionModule
from ented.runs import as_table, write
from ented.tensor import COOTensor, InputError
from modules import load
from results import one_line, read_table

BATCH = 4096


def read_cells(file: Path, dataset: Dataset) -> tuple[pd.DataFrame, COOTensor]:
    """The table as it is, and its columns of the tensor's modes as indices."""
    table, indices = read_table(file, dataset.modes), {}
    for mode in dataset.modes:
        column, names = table[mode], dataset.labels.get(mode)
        if names:
            codes = column.astype(str).map({name: i for i, name in enumerate(names)})
            if codes.isna().any():
                row = codes.isna().idxmax()
                raise InputError(f"{file}, row {row}: there is no {mode} {column[row]}; there are {', '.join(names)}")
            column = codes
        elif not pd.api.types.is_numeric_dtype(column):
            raise InputError(f"{file}: column {mode} holds {column.dtype}; give zero-based indices")
        indices[mode] = column
    rows = np.column_stack([*indices.values(), np.zeros(len(table))])
    try:
        return table, COOTensor.from_rows(rows, dataset.shape)
    except InputError as error:
        raise InputError(f"{file}: {error}") from None


@torch.no_grad()
def predict(module: CompletionModule, cells: COOTensor) -> pd.DataFrame:
    """The predictive distribution of each cell, see `ented.predictive.Predictive.columns`."""
    return as_table([module.predictive(indices).columns() for indices in cells.indices.split(BATCH)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("cells", type=Path, help="CSV with a column for each mode")
    parser.add_argument("predictions", type=Path, help="CSV to write")
    arguments = parser.parse_args()
    try:
        module, dataset = load(arguments.run)
        table, cells = read_cells(arguments.cells, dataset)
        predicted = predict(module, cells).map("{:.6g}".format)
        table = table.drop(columns=predicted.columns, errors="ignore").join(predicted)
        write(arguments.predictions, table.to_csv(index=False))
    except (OSError, ValueError) as error:  # InputError, or that of `read_table`
        sys.exit(f"error: {one_line(error)}")


if __name__ == "__main__":
    main()
