"""Files that tests write: folds, shards of entries, and the folders of runs."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml


def write_folds(folder: Path, name: str, seed: int, largest: int) -> None:
    random = np.random.default_rng(seed)
    cells = np.array([(i, j, k) for i in range(6) for j in range(5) for k in range(4)])
    for fold in range(2):
        rows = np.column_stack([cells, random.integers(0, largest + 1, len(cells))])[random.permutation(len(cells))]
        (folder / name).mkdir(exist_ok=True)
        np.savez(folder / name / f"fold-{fold}.npz", train=rows[:90], test=rows[90:])


def table(n: int, start: int = 0) -> np.ndarray:
    """Rows that can be told apart by their value and by their index."""
    number = np.arange(start, start + n)
    return np.column_stack([number, number % 7, number])


def write(folder: Path, rows: np.ndarray, shards: int = 1, form: str = "npy", group: int = 7) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(np.array_split(rows, shards)):
        if form == "npy":
            np.save(folder / f"{number}.npy", part)
        else:
            columns = {f"c{d}": column for d, column in enumerate(part.T)}
            pq.write_table(pa.table(columns), folder / f"{number}.parquet", row_group_size=group)
    return folder


def write_run(root: Path, dataset: str, fold: int, metrics: dict, model: str = "ented", seconds: float = 1.5) -> Path:
    run = root / dataset / f"{model}/rank=3/fold={fold}/seed=0"
    run.mkdir(parents=True)
    about = {"dataset": dataset, "model": model, "rank": 3, "fold": fold, "seed": 0, "protocol": "paper"}
    spent = {"epochs": 5, "steps": 50, "train_seconds": seconds, "missing": "masked", "command": "x", "version": "1"}
    (run / "metrics.json").write_text(json.dumps({**about, "metrics": metrics, **spent}))
    return run


def fail_run(root: Path, dataset: str, fold: int, model: str) -> None:
    run = root / dataset / f"{model}/rank=3/fold={fold}/seed=0"
    run.mkdir(parents=True)
    (run / "error.txt").write_text("RuntimeError: no room\n\nTraceback ...\n")
    config = {"dataset": {"name": dataset}, "model": {"name": model, "rank": 3}, "fold": fold, "seed": 0}
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"protocol": {"name": "paper"}}))
