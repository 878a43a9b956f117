"""Covariance functions of the Gaussian process over concatenated factor rows."""

from math import log

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
        # -|x - y|^2 / 2 = x'y - |x|^2 / 2 - |y|^2 / 2; rounding may leave it slightly above zero
        precision, log_variance = self.lengthscale**-2, log(self.variance)
        x_half = x.square().sum(-1) * (precision / 2) - log_variance
        y_half = y.square().sum(-1) * (precision / 2)
        exponent = ((precision * x) @ y.mT).sub_(x_half[..., :, None]).sub_(y_half[..., None, :])
        return exponent.clamp_max_(log_variance).exp_()

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
        x_bar = W @ y - W.sum(-1)[..., None] * x
        y_bar = W.mT @ x - W.sum(-2)[..., None] * y
        return x_bar * self.lengthscale**-2, y_bar * self.lengthscale**-2

    def diagonal(self, x: Float[Tensor, "... S Q"]) -> Float[Tensor, "... S"]:
        """k(m, m) of every row: constant, so no gradient flows through it."""
        return x.new_full(x.shape[:-1], self.variance)
