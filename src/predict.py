"""Predict cells of a tensor with a finished run.

python src/predict.py runs/flights/ented/rank=3/fold=0/seed=0 cells.csv predicted.csv

cells.csv, or cells.parquet, has a column for each mode of the tensor, with the names of its rows where the dataset has
them, as dataset=table and flights do, and with zero-based indices otherwise. predicted.csv has the columns of
cells.csv, of which one named like a prediction is replaced, and the predictive distribution of each cell: for ENTED
mean, standard deviation, 5% and 95% quantile (of the count, or of the probability of a one), and mean and standard
deviation of f.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from ented.datamodule import EVALUATION_BATCH
from ented.datasets.table import columns_of, indices_of, numbers_of, read_text
from ented.errors import InputError, one_line
from ented.lightning import CompletionModule
from ented.runs import as_table, write
from ented.tensor import COOTensor, Layout
from modules import load


def read_cells(file: Path, layout: Layout) -> tuple[pd.DataFrame, COOTensor]:
    """The table as it is, and its columns of the tensor's modes as indices."""
    table = read_text(file)
    columns = columns_of(file, table, layout.modes)
    indices = [
        indices_of(file, column, layout.labels[mode]) if mode in layout.labels else numbers_of(file, column)
        for mode, column in columns.items()
    ]
    try:
        return table, COOTensor.from_rows(np.column_stack([*indices, np.zeros(len(table))]), layout.shape)
    except InputError as error:
        raise InputError(f"{file}, {error}") from None


@torch.no_grad()
def predict(module: CompletionModule, cells: COOTensor) -> pd.DataFrame:
    """The predictive distribution of each cell, see `ented.predictive.Predictive.columns`."""
    return as_table([module.predictive(indices).columns() for indices in cells.indices.split(EVALUATION_BATCH)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("cells", type=Path, help="CSV or Parquet file with a column for each mode")
    parser.add_argument("predicted", type=Path, help="CSV to write")
    arguments = parser.parse_args()
    try:
        module, layout = load(arguments.run)
        table, cells = read_cells(arguments.cells, layout)
        predicted = predict(module, cells)
        table = table.drop(columns=predicted.columns, errors="ignore").join(predicted)
        write(arguments.predicted, table.to_csv(index=False, float_format="%.6g"))
    except (OSError, ValueError) as error:  # an InputError is one
        sys.exit(f"error: {one_line(error)}")


if __name__ == "__main__":
    main()
