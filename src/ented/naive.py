"""Two predictors that every model should beat, under the same likelihood."""

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.optimize import minimize
from torch import Tensor

from ented.likelihoods import LatentGaussian, PolyaGamma
from ented.tensor import COOTensor


def overall_mean(train: COOTensor, likelihood: PolyaGamma, indices: Int[Tensor, "S D"]) -> LatentGaussian:
    """Every entry has the mean of the training entries."""
    f = torch.full((len(indices),), likelihood.intercept(train.values), dtype=torch.float64)
    return LatentGaussian(likelihood, f, torch.zeros_like(f))


def main_effects(
    train: COOTensor, likelihood: PolyaGamma, indices: Int[Tensor, "S D"], penalty: float = 0.1
) -> LatentGaussian:
    """f is a constant and one number for each row of each mode: log-linear for counts, logistic for binary entries.

    Fitted by maximum likelihood, with `penalty` / 2 times the squared effects taken off so that rows whose entries
    are all zero keep a finite effect.
    """
    offsets = torch.tensor([0, *np.cumsum(train.shape)[:-1]])

    def f(weights: Float[Tensor, "W"], indices: Int[Tensor, "S D"]) -> Float[Tensor, "S"]:
        return weights[0] + weights[1:][indices + offsets].sum(-1)

    def loss(array: np.ndarray) -> tuple[float, np.ndarray]:
        weights = torch.from_numpy(array).requires_grad_()
        effects = weights[1:]
        value = 0.5 * penalty * effects.square().sum()
        value = value - likelihood.log_prob(train.values, f(weights, train.indices)).sum()
        (gradient,) = torch.autograd.grad(value, weights)
        return value.item(), gradient.numpy()

    start = np.zeros(1 + sum(train.shape))
    start[0] = likelihood.intercept(train.values)
    weights = torch.from_numpy(minimize(loss, start, jac=True, method="L-BFGS-B").x)
    f_mean = f(weights, indices)
    return LatentGaussian(likelihood, f_mean, torch.zeros_like(f_mean))
