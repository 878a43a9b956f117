"""Predict cells of a tensor with a finished run.

python src/predict.py runs/flights/ented/rank=3/fold=0/seed=0 cells.csv predictions.csv

cells.csv has a column for each mode of the tensor, with zero-based indices, or with the names of what they stand for
where the dataset has them. predictions.csv has the same columns and the predictive distribution of each cell: for ENTED
mean, standard deviation, 5% and 95% quantile (of the count, or of the probability of a one), and mean and standard
deviation of f.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from ented.datasets import Dataset
from ented.lightning import CompletionModule
from ented.runs import write
from ented.tensor import COOTensor, InputError
from experiment import Run

BATCH = 4096


def load(folder: Path) -> tuple[CompletionModule, Dataset]:
    """The trained module of a finished run, and its dataset, whose entries are not read."""
    for name in ("metrics.json", "config.yaml", "last.ckpt"):
        if not (folder / name).exists():
            raise InputError(f"{folder} has no {name}: name the folder of a finished run")
    cfg = OmegaConf.load(folder / "config.yaml")
    if "smallest_entry" not in cfg:
        raise InputError(f"{folder} was made by an older version: run its command again with force=true")
    dataset = instantiate(cfg.dataset.source)
    run = Run(cfg, OmegaConf.to_container(cfg), dataset, command="")
    run.smallest = cfg.smallest_entry
    module = run.module(run.rates[0])
    module.load_state_dict(torch.load(folder / "last.ckpt", map_location="cpu", weights_only=True)["state_dict"])
    return module.eval(), dataset


def read_cells(file: Path, dataset: Dataset) -> tuple[pd.DataFrame, COOTensor]:
    """The table's columns of the tensor's modes, as they are and as indices."""
    try:
        table = pd.read_csv(file)
    except ValueError as error:  # pandas' own
        raise InputError(f"{file} is not a CSV ({error})") from None
    if missing := [mode for mode in dataset.modes if mode not in table]:
        raise InputError(f"{file} has no column {missing[0]}: it needs {', '.join(dataset.modes)}")
    table, indices = table[dataset.modes], {}
    for mode in dataset.modes:
        column, names = table[mode], getattr(dataset, "labels", {}).get(mode)
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
    parts = [module.predictive(indices).columns() for indices in cells.indices.split(BATCH)]
    return pd.concat(
        [pd.DataFrame({name: column.numpy() for name, column in part.items()}) for part in parts], ignore_index=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("cells", type=Path, help="CSV with a column for each mode")
    parser.add_argument("predictions", type=Path, help="CSV to write")
    arguments = parser.parse_args()
    try:
        module, dataset = load(arguments.run)
        table, cells = read_cells(arguments.cells, dataset)
        write(arguments.predictions, table.join(predict(module, cells)).to_csv(index=False, float_format="%.6g"))
    except OSError as error:
        sys.exit(f"error: {error.filename}: {error.strerror}")
    except InputError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
