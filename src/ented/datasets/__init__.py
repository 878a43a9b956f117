"""Where tensors come from: one file per source."""

from ented.datasets.dataset import Dataset
from ented.datasets.dblp import DBLP
from ented.datasets.flights import Flights
from ented.datasets.folds import NpzFolds
from ented.datasets.stream import Stream
from ented.datasets.table import Table

__all__ = ["DBLP", "Dataset", "Flights", "NpzFolds", "Stream", "Table"]
