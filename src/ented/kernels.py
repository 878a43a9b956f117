"""Covariance functions of the Gaussian process over concatenated factor rows."""

from math import log

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad


class RBF:
    """k(m, m') = variance * exp(-|m - m'|^2 / (2 lengthscale^2)).

    The paper's "bandwidth 1.0" is lengthscale = variance = 1.
    """

    def __init__(self, lengthscale: float = 1.0, variance: float = 1.0):
        self.lengthscale = lengthscale
        self.variance = variance

    def __call__(self, x: Float[Tensor, "... P Q"], y: Float[Tensor, "... S Q"]) -> Float[Tensor, "... P S"]:
        """Covariance of every row of `x` with every row of `y`."""
        # -|x - y|^2 / 2 = x'y - |x|^2 / 2 - |y|^2 / 2 as one product, [x, -|x|^2 / 2, 1] [y, 1, -|y|^2 / 2]'
        precision, log_variance = self.lengthscale**-2, log(self.variance)
        x_half = log_variance - x.square().sum(-1, keepdim=True) * (precision / 2)
        y_half = -y.square().sum(-1, keepdim=True) * (precision / 2)
        left = torch.cat([precision * x, x_half, torch.ones_like(x_half)], -1)
        right = torch.cat([y, torch.ones_like(y_half), y_half], -1)
        # rounding may leave it slightly above that of x = y
        return (left @ right.mT).clamp_max_(log_variance).exp_()

    def backward(
        self,
        x: Float[Tensor, "... P Q"],
        y: Float[Tensor, "... S Q"],
        K: Float[Tensor, "... P S"],
        K_bar: Float[Tensor, "... P S"],
    ) -> tuple[Float[Tensor, "... P Q"], Float[Tensor, "... S Q"]]:
        """The derivative in x and y of a function whose derivative in K = k(x, y) is K_bar, which is overwritten.

        With W = K_bar * K / lengthscale^2, entry by entry, x_bar = W y - diag(W 1) x, and the same for y with W'.
        """
        W = K_bar.mul_(K)
        W_y, W_1 = (W @ pad(y, (0, 1), value=1.0)).tensor_split([-1], -1)
        W_x, W_1_mT = (W.mT @ pad(x, (0, 1), value=1.0)).tensor_split([-1], -1)
        return (W_y - W_1 * x) * self.lengthscale**-2, (W_x - W_1_mT * y) * self.lengthscale**-2

    def diagonal(self, x: Float[Tensor, "... S Q"]) -> Float[Tensor, "... S"]:
        """k(m, m) of every row: constant, so no gradient flows through it."""
        return x.new_full(x.shape[:-1], self.variance)
