"""Bayesian Poisson CP decomposition (Schein, Paisley, Blei, Wallach 2015) by coordinate ascent.

    A_d[i, r] ~ Gamma(alpha, alpha beta_d)        mean 1 / beta_d
    x_n ~ Poisson(sum_r prod_d A_d[i_nd, r])

The posterior of every element is a gamma distribution with shape gamma and rate delta. A count is divided among the
components in proportion to the products of geometric means, G[A] = exp(E[log A]) = exp(digamma(gamma)) / delta.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributions import Gamma, Poisson, kl_divergence
from torch.nn.functional import embedding

from baselines.cp import FLOOR, Missing, components, exposure, sum_by_row, total
from ented.lightning import SweepModule
from ented.likelihoods import PolyaGamma
from ented.predictive import Known, Predictive

SMOOTHNESS = 100.0  # the posterior means start with a relative deviation of SMOOTHNESS^-1/2


class BPCP(SweepModule):
    """Mean-field posterior of the factors; a sweep updates q(A_d) and beta_d of each mode once.

    Parameters
    ----------
    shape : sizes of the tensor's modes.
    likelihood : says of which kind the entries are.
    rank : number of components.
    missing : what cells without an entry are, see `baselines.cp`.
    alpha : shape of the prior; below 1 it favours sparse factors.
    estimate : "arithmetic", predictions average over the posterior; "geometric", they use a rate made of the factors'
        geometric means, which is lower.
    tolerance : see `SweepModule`.
    """

    kinds = ("count",)
    likelihood_settings = ()

    def __init__(
        self,
        shape: tuple[int, ...],
        likelihood: PolyaGamma,
        rank: int,
        missing: Missing = "masked",
        alpha: float = 0.1,
        estimate: str = "arithmetic",
        tolerance: float = 1e-4,
    ):
        super().__init__(likelihood.kind, tolerance)
        self.shape, self.missing, self.alpha, self.estimate = tuple(shape), missing, alpha, estimate
        size = torch.Size([sum(shape), rank])  # the elements of all modes, one matrix below the other
        self.register_buffer("gamma", Gamma(SMOOTHNESS, 1.0).sample(size))
        self.register_buffer("delta", torch.full(size, SMOOTHNESS))
        self.register_buffer("beta", torch.ones(len(shape)))

    def arithmetic(self) -> tuple[Float[Tensor, "I R"], ...]:
        """E[A] of each mode."""
        return (self.gamma / self.delta).split(self.shape)

    def log_geometric(self, indices: Int[Tensor, "S D"]) -> Float[Tensor, "S R"]:
        """log prod_d G[A_d[i_nd, r]] of each entry and component; G itself underflows where gamma is small."""
        log_A = (self.gamma.digamma() - self.delta.log()).split(self.shape)
        return sum(embedding(indices[:, mode], factor) for mode, factor in enumerate(log_A))

    def sweep(self, indices: Int[Tensor, "N D"], values: Float[Tensor, "N"]) -> Float[Tensor, ""]:
        for mode in range(len(self.shape)):
            self.update(mode, indices, values)
        return self.elbo(indices, values)

    def update(self, mode: int, indices: Int[Tensor, "N D"], values: Float[Tensor, "N"]) -> None:
        """Coordinate ascent in the division of the counts, q(A_mode) and beta_mode."""
        share = self.log_geometric(indices).softmax(-1)
        counts = sum_by_row(values[:, None] * share, indices[:, mode], self.shape[mode])
        known = exposure(self.arithmetic(), indices, mode, self.missing)
        # views, written in place
        gamma, delta = self.gamma.split(self.shape)[mode], self.delta.split(self.shape)[mode]
        gamma.copy_(self.alpha + counts)
        delta.copy_(self.alpha * self.beta[mode] + known)
        self.beta[mode] = 1 / (gamma / delta).mean()

    def elbo(self, indices: Int[Tensor, "N D"], values: Float[Tensor, "N"]) -> Float[Tensor, ""]:
        """The bound on log p(x) at the optimal division of the counts."""
        log_rate = self.log_geometric(indices).logsumexp(-1)
        fit = (values * log_rate - (values + 1).lgamma()).sum() - total(self.arithmetic(), indices, self.missing)
        prior = torch.cat([self.alpha * beta.expand(size) for beta, size in zip(self.beta, self.shape, strict=True)])
        return fit - kl_divergence(Gamma(self.gamma, self.delta), Gamma(self.alpha, prior[:, None])).sum()

    def predictive(self, indices: Int[Tensor, "S D"]) -> Predictive:
        if self.estimate == "geometric":
            return Known(Poisson(self.log_geometric(indices).logsumexp(-1).double().exp() + FLOOR))
        mean = components(self.arithmetic(), indices).double()
        # E[A^2] = E[A]^2 (1 + 1 / gamma), and elements are independent
        excess = components([1 + 1 / gamma for gamma in self.gamma.split(self.shape)], indices).double()
        return GammaPoisson(mean.sum(-1), (mean.square() * (excess - 1)).sum(-1))


@dataclass
class GammaPoisson(Predictive):
    """Poisson counts whose rate is uncertain, taken as gamma distributed with the given mean and variance."""

    rate_mean: Float[Tensor, "S"]
    rate_variance: Float[Tensor, "S"]

    @property
    def mean(self) -> Float[Tensor, "S"]:
        return self.rate_mean

    def log_prob(self, values: Float[Tensor, "S"]) -> Float[Tensor, "S"]:
        return self._distribution.log_prob(values)

    def plugin(self) -> Known:
        return Known(Poisson(self.rate_mean))

    def columns(self) -> dict[str, Float[Tensor, "S"]]:
        """Also the standard deviation."""
        return super().columns() | {"std": self._distribution.stddev}

    @property
    def _distribution(self) -> torch.distributions.NegativeBinomial:
        shape = self.rate_mean.square() / self.rate_variance
        return torch.distributions.NegativeBinomial(shape, logits=(self.rate_variance / self.rate_mean).log())
