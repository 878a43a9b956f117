"""A small ENTED, and entries for it."""

import numpy as np
import pytest
import torch

from ented.factors import FactorTable
from ented.kernels import RBF
from ented.likelihoods import Bernoulli, NegativeBinomial
from ented.model import ENTED

SHAPE, RANK, ENTRIES = (4, 3, 5), 2, 12
LENGTHSCALE, VARIANCE, JITTER = 1.3, 0.8, 1e-2  # none of them such that leaving it out goes unseen
ZETA = 6.0
LIKELIHOODS = {"binary": Bernoulli(), "count": NegativeBinomial(ZETA)}

blocks_1_2_3 = pytest.mark.parametrize("blocks", [1, 2, 3])
kinds = pytest.mark.parametrize("kind", ["binary", "count"])


def side_by_side(Z, indices):
    """Factor rows of each entry."""
    modes = torch.split(Z, SHAPE)
    return torch.stack([torch.cat([mode[i] for mode, i in zip(modes, row, strict=True)]) for row in indices])


def eye(n):
    return torch.eye(n, dtype=torch.float64)


def make_model(kind, blocks, seed=0, inducing=6, jitter=JITTER, at_prior=False):
    """A model away from its initial values."""
    torch.manual_seed(seed)
    kernel = RBF(LENGTHSCALE, VARIANCE)
    model = ENTED(FactorTable(SHAPE, RANK, 1.0), LIKELIHOODS[kind], inducing, blocks, kernel, jitter).double()
    if not at_prior:
        q, p = model.q, inducing // blocks
        A = torch.randn(blocks, p, p, dtype=torch.float64)
        q.covariance = A @ A.mT / p + 0.2 * eye(p)
        q.mean = torch.randn(blocks, p, dtype=torch.float64)
        q.precision = q.covariance.inverse()
        q.eta = (q.precision @ q.mean[..., None]).squeeze(-1)
    return model


def make_entries(kind, n=ENTRIES, seed=0):
    rng = np.random.default_rng(seed)
    indices = torch.from_numpy(rng.integers(0, SHAPE, size=(n, len(SHAPE))))
    values = rng.integers(0, 2, n) if kind == "binary" else rng.negative_binomial(2, 0.2, n)
    return indices, torch.from_numpy(values).double()
