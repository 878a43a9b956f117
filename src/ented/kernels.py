"""Covariance functions of the Gaussian process over concatenated factor rows."""

import torch
from jaxtyping import Float
from torch import Tensor


class RBF:
    """k(m, m') = variance * exp(-|m - m'|^2 / (2 lengthscale^2)).

    The paper's "bandwidth 1.0" is lengthscale = variance = 1.
    """

    def __init__(self, lengthscale: float = 1.0, variance: float = 1.0):
        self.lengthscale = lengthscale
        self.variance = variance

    def __call__(self, x: Float[Tensor, "... P Q"], y: Float[Tensor, "... S Q"]) -> Float[Tensor, "... P S"]:
        """Covariance of every row of `x` with every row of `y`."""
        # |x - y|^2 = |x|^2 + |y|^2 - 2 x'y; rounding may leave it slightly below zero
        x_norm = x.square().sum(-1)[..., :, None]
        y_norm = y.square().sum(-1)[..., None, :]
        distance = (x_norm + y_norm - 2 * x @ y.mT).clamp_min(0)
        return self.variance * torch.exp(distance * (-0.5 / self.lengthscale**2))

    def diagonal(self, x: Float[Tensor, "... S Q"]) -> Float[Tensor, "... S"]:
        """k(m, m) of every row: constant, so no gradient flows through it."""
        return x.new_full(x.shape[:-1], self.variance)
