"""Expectations over a normal f by dense sums, and the likelihoods and Gaussians to take them for."""

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import expit

from ented.likelihoods import Bernoulli, NegativeBinomial
from ented.predictive import LatentGaussian

ZETA = 20.0
NB = NegativeBinomial(ZETA)
# (mean, variance) of f
GAUSSIANS = [(0.0, 1.0), (-1.3, 0.2), (0.8, 0.5), (2.5, 0.05), (-3.0, 1.0)]


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def log_pmf(likelihood, x, f):
    """log p(x | f) by SciPy."""
    if likelihood.kind == "binary":
        return stats.bernoulli.logpmf(x, expit(f))
    return stats.nbinom.logpmf(x, likelihood.zeta, expit(-f))


def values_of(likelihood):
    return (0, 1) if likelihood.kind == "binary" else (0, 1, 7, 20, 150)


def expectation(function, mean, variance):
    """E[function(f)] for f ~ N(mean, variance), by the trapezoidal rule: exact to rounding for smooth functions."""
    t = np.linspace(-12, 12, 801)
    return (function(mean + np.sqrt(variance) * t) * stats.norm.pdf(t)).sum(-1) * (t[1] - t[0])


def predictive(likelihood, mean, variance):
    """Of one entry."""
    return LatentGaussian(likelihood, tensor(mean), tensor(variance))


both = pytest.mark.parametrize("likelihood", [Bernoulli(), NB, NegativeBinomial(3.5)], ids=["binary", "20", "3.5"])
gaussian = pytest.mark.parametrize(("mean", "variance"), GAUSSIANS)
