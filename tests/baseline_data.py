"""Small tensors that are drawn from a method's own model, half of their cells for training and half for the test."""

import numpy as np
import torch

from ented.tensor import COOTensor


def cells(shape) -> np.ndarray:
    """Indices of all cells of a tensor, in the order in which a dense array stores them."""
    return np.indices(shape).reshape(len(shape), -1).T


def tensor(indices: np.ndarray, values: np.ndarray, shape) -> COOTensor:
    return COOTensor(torch.from_numpy(np.ascontiguousarray(indices)), torch.from_numpy(values).double(), tuple(shape))


def halves(values: np.ndarray, rng: np.random.Generator) -> tuple[COOTensor, COOTensor, np.ndarray]:
    """Train and test of a dense array, and the cells of the test as an index of its flat form."""
    order = rng.permutation(values.size)
    first, second = np.split(order, [values.size // 2])
    train, test = (
        tensor(cells(values.shape)[part], values.reshape(-1)[part], values.shape) for part in (first, second)
    )
    return train, test, second


def cp(factors) -> np.ndarray:
    """Dense CP tensor."""
    letters = "abcdef"[: len(factors)]
    return np.einsum(",".join(letter + "r" for letter in letters) + "->" + letters, *factors)
