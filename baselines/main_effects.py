"""Main effects: a constant and a number for each row of each mode, log-linear for counts, logistic for binary entries.

The additive model that every table needs beside the multiplicative ones (McCullagh and Nelder 1989).
"""

from itertools import accumulate
from math import exp, log

import torch
from jaxtyping import Float, Int
from scipy.optimize import minimize_scalar
from torch import Tensor

from baselines.lbfgs import maximise
from ented.lightning import SweepModule
from ented.likelihoods import NegativeBinomial, PolyaGamma
from ented.predictive import LatentGaussian


class MainEffects(SweepModule):
    """Regression by penalised maximum likelihood; a sweep is ten iterations of L-BFGS.

    Parameters
    ----------
    shape : sizes of the tensor's modes.
    likelihood : of the entries.
    regression : what is maximised for counts. "poisson": Poisson regression, whose estimate of the mean holds whatever
        the variance is, and then the negative binomial shape that is most likely at those means; "likelihood": the
        given likelihood with its own shape. Binary entries always have the given likelihood.
    penalty : N `penalty` / 2 times the squared effects is taken off for N training entries, so that rows whose entries
        are all zero keep a finite effect.
    tolerance : see `SweepModule`.
    """

    likelihood_settings = ("zeta", "smallest")

    def __init__(
        self,
        shape: tuple[int, ...],
        likelihood: PolyaGamma,
        regression: str = "poisson",
        penalty: float = 1e-3,
        tolerance: float = 1e-10,
    ):
        super().__init__(likelihood.kind, tolerance)
        self._likelihood, self.penalty = likelihood.known(), penalty  # a learned shape as a number
        self.poisson = regression == "poisson" and likelihood.kind == "count"
        self.register_buffer("weights", torch.zeros(1 + sum(shape)))  # the constant, then the effects
        if self.poisson:
            self.register_buffer("zeta", torch.tensor(self._likelihood.zeta))
        self.register_buffer("offsets", torch.tensor([*accumulate(shape, initial=1)][:-1]), persistent=False)

    @property
    def likelihood(self) -> PolyaGamma:
        return NegativeBinomial(self.zeta.item(), self._likelihood.smallest) if self.poisson else self._likelihood

    def f(self, weights: Float[Tensor, "W"], indices: Int[Tensor, "S D"]) -> Float[Tensor, "S"]:
        """The additive predictor: under Poisson regression the log mean above the smallest count, else f."""
        return weights[0] + weights[indices + self.offsets].sum(-1)

    def initialise(self, indices: Int[Tensor, "N D"], values: Float[Tensor, "N"]) -> None:
        self.weights[0] = self._likelihood.intercept(values)
        if self.poisson:
            self.weights[0] += log(self._likelihood.zeta)
            self.zeta.fill_(most_likely_shape(values - self._likelihood.smallest, self.weights[0].expand(len(values))))

    def sweep(self, indices: Int[Tensor, "N D"], values: Float[Tensor, "N"]) -> Float[Tensor, ""]:
        above = values - self._likelihood.smallest if self.poisson else values

        def objective(weights):
            f = self.f(weights, indices)
            fit = above * f - f.exp() if self.poisson else self._likelihood.log_prob(values, f)
            return fit.sum() - 0.5 * self.penalty * len(values) * weights[1:].square().sum()

        weights, value = maximise(objective, self.weights)
        self.weights.copy_(weights)
        if self.poisson:
            self.zeta.fill_(most_likely_shape(above, self.f(weights, indices)))
        return value

    def predictive(self, indices: Int[Tensor, "S D"]) -> LatentGaussian:
        f = self.f(self.weights, indices).double()
        if self.poisson:
            f = f - self.zeta.log()  # the mean is zeta exp(f)
        return LatentGaussian(self.likelihood, f, torch.zeros_like(f))


def most_likely_shape(values: Float[Tensor, "N"], log_mean: Float[Tensor, "N"]) -> float:
    """The shape between 0.01 and 10000 under which counts with the given means are most likely."""
    values, log_mean = values.double(), log_mean.double()  # the terms of a large shape nearly cancel

    def loss(log_zeta: float) -> float:
        likelihood = NegativeBinomial(exp(log_zeta))
        return -likelihood.log_prob(values, log_mean - log_zeta).sum().item()

    return exp(minimize_scalar(loss, bounds=(log(1e-2), log(1e4)), method="bounded").x)
