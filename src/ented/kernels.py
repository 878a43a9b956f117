"""Covariance functions of the Gaussian process over concatenated factor rows."""

from math import log

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad


class RBF(nn.Module):
    """k(m, m') = variance * exp(-sum_q (m_q - m'_q)^2 / (2 lengthscale_q^2)).

    The paper's "bandwidth 1.0" is lengthscale = variance = 1.

    Parameters
    ----------
    lengthscale, variance : their initial values. If they are learned there may be a lengthscale for each input
        (automatic relevance determination).
    learned : whether they are parameters, whose logarithms an optimiser moves; constants otherwise.
    """

    def __init__(self, lengthscale: float | Float[Tensor, "Q"] = 1.0, variance: float = 1.0, learned: bool = False):
        super().__init__()
        self.learned = learned
        if learned:
            self.log_lengthscale = nn.Parameter(torch.as_tensor(lengthscale).log().reshape(-1))
            self.log_variance = nn.Parameter(torch.tensor([log(variance)]))
        else:  # numbers, which cost a step nothing
            self.lengthscale, self.variance = lengthscale, variance

    @property
    def precision(self) -> float | Float[Tensor, "... 1 _"]:
        """1 / lengthscale^2, a number or a row that goes with the inputs."""
        return (-2 * self.log_lengthscale).exp()[..., None, :] if self.learned else self.lengthscale**-2

    def forward(self, x: Float[Tensor, "... P Q"], y: Float[Tensor, "... S Q"]) -> Float[Tensor, "... P S"]:
        """Covariance of every row of `x` with every row of `y`."""
        # -|x - y|^2 / 2 = x'y - |x|^2 / 2 - |y|^2 / 2 as one product, [x, -|x|^2 / 2, 1] [y, 1, -|y|^2 / 2]'
        precision = self.precision
        log_variance = self.log_variance[..., None, :] if self.learned else log(self.variance)
        scaled = precision * x
        x_half = (scaled * x).sum(-1, keepdim=True).mul(-0.5) + log_variance
        y_half = (precision * y.square()).sum(-1, keepdim=True).mul(-0.5)
        left = torch.cat([scaled, x_half, torch.ones_like(x_half)], -1)
        right = torch.cat([y, torch.ones_like(y_half), y_half], -1)
        # rounding may leave it slightly above that of x = y
        return (left @ right.mT).clamp_max_(log_variance).exp_()

    def backward(
        self,
        x: Float[Tensor, "... P Q"],
        y: Float[Tensor, "... S Q"],
        K: Float[Tensor, "... P S"],
        K_bar: Float[Tensor, "... P S"],
    ) -> tuple[Float[Tensor, "... P Q"], Float[Tensor, "... S Q"], dict[nn.Parameter, Tensor]]:
        """The derivative in x, y and the parameters of a function whose derivative in k(x, y) is K_bar, overwritten.

        With W = K_bar * K, entry by entry, x_bar = (W y - diag(W 1) x) / lengthscale^2, and the same for y with W'. The
        derivatives in the logarithms of learned lengthscales and variance are

            log lengthscale_q: sum_ij W_ij (x_iq - y_jq)^2 / lengthscale_q^2,    log variance: sum_ij W_ij.
        """
        W = K_bar.mul_(K)
        W_y, W_1 = (W @ pad(y, (0, 1), value=1.0)).tensor_split([-1], -1)
        W_x, W_1_mT = (W.mT @ pad(x, (0, 1), value=1.0)).tensor_split([-1], -1)
        precision, of_parameters = self.precision, {}
        if self.learned:
            squares = (W_1 * x.square() - 2 * W_y * x).sum(-2) + (W_1_mT * y.square()).sum(-2)
            of_inputs = squares * precision.squeeze(-2)
            of_parameters[self.log_lengthscale] = of_inputs.sum_to_size(self.log_lengthscale.shape)
            of_parameters[self.log_variance] = W_1.sum(-2)
        return (W_y - W_1 * x) * precision, (W_x - W_1_mT * y) * precision, of_parameters

    def diagonal(self, x: Float[Tensor, "... S Q"]) -> Float[Tensor, "... S"]:
        """k(m, m) of every row."""
        if self.learned:
            return self.log_variance.exp().expand(x.shape[:-1])
        return x.new_full(x.shape[:-1], self.variance)
