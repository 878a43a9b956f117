"""Predict cells of a tensor with a finished run.

python src/predict.py runs/flights/ented/rank=3/fold=0/seed=0 cells.csv predicted.csv --above 10

cells.csv, or cells.parquet, has a column for each mode of the tensor, with the names of its rows where the dataset has
them, as dataset=table and flights do, and with zero-based indices otherwise. A name that the run does not have is
predicted as one without training entries, by model=ented, gptf_pg and gptf.

predicted.csv, or predicted.parquet, has the columns of cells.csv, of which one named like a prediction is replaced, and
the predictive distribution of each cell. For ENTED on counts, and, in brackets, on zeros and ones:

mean          expected count (probability of a one)
std           standard deviation of the count (of that probability, as f is not known for sure)
lower, upper  5% and 95% quantile of the count (of the probability)
f_mean f_std  mean and standard deviation of f, the log odds of a one or the log of the expected count up to a constant
above_10      probability that the count is above 10, with --above 10
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from ented.datamodule import EVALUATION_BATCH
from ented.datasets.table import as_text, columns_of, indices_of, numbers_of, read_table, tidy
from ented.errors import InputError, one_line
from ented.lightning import CompletionModule
from ented.runs import as_table, replacing, write
from ented.tensor import COOTensor, Layout
from modules import load


def cells_of(file: Path, table: pd.DataFrame, layout: Layout) -> COOTensor:
    """The table's columns of the tensor's modes as indices; a new name has the one after the last of its mode."""
    indices = [
        indices_of(column, [*map(tidy, layout.labels[mode])]) if mode in layout.labels else numbers_of(file, column)
        for mode, column in columns_of(file, as_text(table), layout.modes).items()
    ]
    shape = tuple(size + (mode in layout.labels) for mode, size in zip(layout.modes, layout.shape, strict=True))
    try:
        return COOTensor.from_rows(np.column_stack([*indices, np.zeros(len(table))]), shape)
    except InputError as error:
        raise InputError(f"{file}, {error}") from None


def take_new_names(module: CompletionModule, file: Path, table: pd.DataFrame, cells: COOTensor, layout: Layout) -> None:
    """Let the module predict names that the run does not have, where there are some, and say so.

    Raises
    ------
    InputError : the method cannot.
    """
    is_new = cells.indices.numpy() == np.array(layout.shape)
    if not is_new.any():
        return
    row, mode = np.argwhere(is_new)[0]
    name = f"{layout.modes[mode]} {table[layout.modes[mode]].iloc[row]}"
    try:
        module.add_new_rows()
    except InputError as error:
        raise InputError(f"{file}, row {row}: there is no {name} in the run ({error}): leave it out") from None
    new = f"{is_new.any(1).sum()} of {len(cells)} cells have a name that the run does not have"
    print(f"{new}, {name} in row {row} first", file=sys.stderr)


@torch.no_grad()
def predict(module: CompletionModule, cells: COOTensor, above: list[int]) -> pd.DataFrame:
    """The predictive distribution of each cell, see `ented.predictive.Predictive.columns`."""
    batches = []
    for indices in cells.indices.split(EVALUATION_BATCH):
        predictive = module.predictive(indices)
        batches.append(predictive.columns() | {f"above_{count}": predictive.above(count) for count in above})
    return as_table(batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("cells", type=Path, help="CSV or Parquet file with a column for each mode")
    parser.add_argument("predicted", type=Path, help="CSV or Parquet file to write")
    parser.add_argument("--above", type=int, action="append", default=[], metavar="K", help="add P(count > K)")
    arguments = parser.parse_args()
    run, file, predicted = arguments.run, arguments.cells, arguments.predicted
    try:
        module, layout = load(run)
        if predicted.resolve() == file.resolve() or predicted.resolve().parent == run.resolve():
            raise InputError(f"{predicted} would replace the cells or a part of the run: choose another file to write")
        if not predicted.resolve().parent.is_dir():
            raise InputError(f"{predicted}: there is no folder {predicted.parent}")
        table = read_table(file)
        cells = cells_of(file, table, layout)
        take_new_names(module, file, table, cells, layout)
        columns = predict(module, cells, arguments.above)
        if taken := set(columns) & set(layout.modes):
            raise InputError(f"{file}: {taken.pop()} is a mode, and would be the name of a prediction: leave it out")
        if replaced := [name for name in table if name in columns]:
            print(f"the predictions take the place of {file}'s own {', '.join(replaced)}", file=sys.stderr)
        table = table.drop(columns=replaced).join(columns)
        if predicted.suffix == ".parquet":
            with replacing(predicted) as partial:
                table.to_parquet(partial, index=False)
        else:
            write(predicted, table.to_csv(index=False, float_format="%.6g"))
    except (OSError, ValueError) as error:  # an InputError is one
        sys.exit(f"error: {one_line(error)}")


if __name__ == "__main__":
    main()
