"""DBLP: author x conference x keyword, 0/1, with the split of Zhe et al. (2016)."""

import logging
import math
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int64
from scipy.io import loadmat

from ented.datasets.dataset import Dataset
from ented.datasets.source import fetch
from ented.errors import InputError
from ented.tensor import COOTensor

log = logging.getLogger("ented")

URL = (
    "https://raw.githubusercontent.com/yishuaidu/POST/f7ee2fd3fe21b8046f852dfb9f54bb8dac8ff802/"
    "code/DBLP/tensor-data-large/dblp.mat"
)


class DBLP(Dataset):
    """The large binary benchmark, from dblp/dblp.mat.

    Train is the 155185 ones of `nzind`, and zeros. If the authors' text file dblp-large-tensor.txt lies
    beside dblp.mat, its zeros are taken. Otherwise as many zeros as ones are drawn uniformly, the same each
    time, from the cells that are neither ones of train nor in test.

    Test is the 50 test cells of the file stacked, 200 ones and 1800 zeros each. A cell may stand in several.

    Parameters
    ----------
    data_dir : str or None
        Local data folder, searched first; see `ented.datasets.source.fetch`.
    """

    name = "dblp"
    shape = (10000, 200, 10000)
    modes = ["author", "conference", "keyword"]
    kind = "binary"
    folds = 1

    def __init__(self, data_dir: str | None = None):
        self.data_dir = data_dir

    def read(self, fold: int) -> tuple[COOTensor, COOTensor]:
        file = fetch("dblp/dblp.mat", URL, self.data_dir)
        data = loadmat(file, simplify_cells=True)["data"]
        # MATLAB counts from 1, in uint16.
        ones = data["nzind"].astype(np.int64) - 1
        test_cells = np.concatenate([cell["subs"] for cell in data["test"]]).astype(np.int64) - 1
        test_values = np.concatenate([cell["Ymiss"] for cell in data["test"]])

        text_file = file.with_name("dblp-large-tensor.txt")
        if text_file.is_file():
            log.info("dblp: the zeros of train are those of %s", text_file)
            zeros = self._read_zeros(text_file)
        else:
            zeros = self._draw_zeros(len(ones), np.concatenate([ones, test_cells]))
        train_cells = np.concatenate([ones, zeros])
        train_values = np.repeat([1.0, 0.0], [len(ones), len(zeros)])
        return self._tensor(train_cells, train_values), self._tensor(test_cells, test_values)

    def _tensor(self, cells: Int64[np.ndarray, "N 3"], values: np.ndarray) -> COOTensor:
        return COOTensor(torch.from_numpy(cells), torch.from_numpy(values.astype(np.float64)), self.shape)

    def _read_zeros(self, file: Path) -> Int64[np.ndarray, "N 3"]:
        """Return the zeros of a text file: tab-separated zero-based indices, and 0 or 1 last."""
        try:
            tensor = COOTensor.from_rows(np.loadtxt(file, delimiter="\t", ndmin=2), self.shape)
        except ValueError as error:  # loadtxt's, or an InputError
            raise InputError(f"{file}: {error}") from None
        if not tensor.is_binary:
            raise InputError(f"{file}: the last column holds {tensor.values.max():g}; it must be 0 or 1")
        zeros = tensor.indices[tensor.values == 0].numpy()
        if not len(zeros):
            raise InputError(f"{file} has no zeros; remove it to have zeros drawn")
        return zeros

    def _draw_zeros(self, count: int, taken: Int64[np.ndarray, "N 3"]) -> Int64[np.ndarray, "count 3"]:
        """Draw distinct cells uniformly from those that are not taken."""
        taken_keys = np.ravel_multi_index(taken.T, self.shape)
        # The stream of RandomState is frozen; that of default_rng may change between versions of numpy.
        random = np.random.RandomState(0)
        zeros = np.empty(0, dtype=np.int64)
        while len(zeros) < count:
            drawn = random.randint(math.prod(self.shape), size=count - len(zeros), dtype=np.int64)
            zeros = np.setdiff1d(np.concatenate([zeros, drawn]), taken_keys)
        return np.stack(np.unravel_index(zeros, self.shape), axis=1)
