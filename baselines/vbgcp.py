"""VBGCP: variational CP decomposition of counts (Soulat, Keshavarzi, Margrie, Sahani 2021).

    x_n - smallest ~ NB(zeta, f_n)     f_n = offset + sum_r prod_d A_d[i_nd, r]
    A_d[i, r] ~ N(0, 1 / alpha_r)     alpha_r ~ Gamma     offset ~ N(0, 1 / tau)

with q = q(offset) prod_r q(alpha_r) prod_{d, i} q(A_d[i]), where a row has q(A_d[i]) = N(mean, covariance), and
Polya-Gamma variables that make every update a closed form.
"""

from itertools import accumulate

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributions import Gamma, Normal, kl_divergence

from ented.lightning import SweepModule
from ented.likelihoods import NegativeBinomial
from ented.predictive import LatentGaussian


class VBGCP(SweepModule):
    """Coordinate ascent on the evidence lower bound, which is what a sweep returns.

    The publication lets the offset vary along chosen modes, and the authors' release has one for every cell unless told
    otherwise, which says nothing of new cells; here it is one number for all entries. The automatic relevance
    determination that the release can switch on is always on.

    Parameters
    ----------
    shape : sizes of the tensor's modes.
    likelihood : of the entries; only its smallest count is taken from it, for the shape is learned.
    rank : number of components; those that the data do not need are shrunk towards zero.
    ard_shape, ard_rate : of the Gamma prior of alpha_r, the precision of component r in every mode.
    offset_precision : tau, prior precision of the offset.
    tolerance : see `SweepModule`.
    """

    kinds = ("count",)
    likelihood_settings = ("smallest",)

    def __init__(
        self,
        shape: tuple[int, ...],
        likelihood: NegativeBinomial,
        rank: int,
        ard_shape: float = 100.0,
        ard_rate: float = 1.0,
        offset_precision: float = 1e-5,
        tolerance: float = 1e-5,
    ):
        super().__init__(likelihood.kind, tolerance)
        self.smallest = likelihood.smallest
        self.shape, self.ard_shape, self.ard_rate, self.offset_precision = shape, ard_shape, ard_rate, offset_precision
        # factors start as in the authors' release: uniform means, covariance E[G'G] of G with elements N(0, 0.1^2)
        self.register_buffer("mean", torch.rand(sum(shape), rank))  # rows of all modes, one mode after the other
        self.register_buffer("covariance", 0.01 * rank * torch.eye(rank).repeat(sum(shape), 1, 1))
        # q(alpha_r) = Gamma(shape, rate_r); until its first update E[alpha_r] = 0.01, as in the release
        self.register_buffer("alpha_rate", torch.full((rank,), self.alpha_shape / 0.01))
        self.register_buffer("offset_mean", torch.zeros(()))
        self.register_buffer("offset_variance", torch.zeros(()))
        self.register_buffer("zeta", torch.ones(()))
        self.register_buffer("starts", torch.tensor([0, *accumulate(shape)][:-1]), persistent=False)

    @property
    def likelihood(self) -> NegativeBinomial:
        return NegativeBinomial(self.zeta.item(), self.smallest)

    @property
    def alpha_shape(self) -> float:
        return self.ard_shape + sum(self.shape) / 2

    @property
    def alpha(self) -> Float[Tensor, "R"]:
        """E[alpha]."""
        return self.alpha_shape / self.alpha_rate

    def second_moment(self) -> Float[Tensor, "I R R"]:
        """E[a a'] of every row a."""
        return self.covariance + self.mean[:, :, None] * self.mean[:, None, :]

    def product(self, rows: Int[Tensor, "S K"]) -> tuple[Float[Tensor, "S R"], Float[Tensor, "S R R"]]:
        """E[w] and E[w w'] of w = a_1 * ... * a_K, elementwise over K independent rows."""
        moment = self.second_moment()
        first, second = 1, 1
        for row in rows.T:
            first, second = first * self.mean[row], second * moment[row]
        return first, second

    def sum_moments(
        self, first: Float[Tensor, "S R"], second: Float[Tensor, "S R R"], row: Int[Tensor, "S"]
    ) -> tuple[Float[Tensor, "S"], Float[Tensor, "S"]]:
        """Mean and variance of f - offset = w'a, for a row a and the product w of the others."""
        mean = (first * self.mean[row]).sum(-1)
        square = torch.einsum("srt,srt->s", second, self.second_moment()[row])
        return mean, (square - mean.square()).clamp_min(0)

    def f_moments(self, indices: Int[Tensor, "S D"]) -> tuple[Float[Tensor, "S"], Float[Tensor, "S"]]:
        """Mean and variance of f at the given entries."""
        rows = indices + self.starts
        mean, variance = self.sum_moments(*self.product(rows[:, 1:]), rows[:, 0])
        return mean + self.offset_mean, variance + self.offset_variance

    def initialise(self, indices: Int[Tensor, "N D"], values: Float[Tensor, "N"]) -> None:
        self.zeta.copy_((values - self.smallest).mean().clamp_min(0.5 / len(values)))

    def sweep(self, indices: Int[Tensor, "N D"], values: Float[Tensor, "N"]) -> Float[Tensor, ""]:
        for mode in range(len(self.shape)):
            self.update_factors(mode, indices, values)
        self.update_offset(values, *self.f_moments(indices))
        self.update_alpha()
        moments = self.f_moments(indices)  # they do not depend on alpha and zeta
        self.update_zeta(values, *moments)
        return self.elbo(values, *moments)

    def update_factors(self, mode: int, indices: Int[Tensor, "N D"], values: Float[Tensor, "N"]) -> None:
        """q(A_d[i]) = N(P^-1 h, P^-1), with w the product of the other modes' rows and sums over the row's entries:

        P = diag(E[alpha]) + sum_n theta_n E[w_n w_n']
        h = sum_n (chi_n - theta_n E[offset]) E[w_n]
        """
        rows, own = indices + self.starts, indices[:, mode]
        others = [d for d in range(len(self.shape)) if d != mode]
        first, second = self.product(rows[:, others])
        mean, variance = self.sum_moments(first, second, rows[:, mode])
        theta = self.likelihood.theta(values, mean + self.offset_mean, variance + self.offset_variance)
        linear_weight = self.likelihood.chi(values) - theta * self.offset_mean

        size, rank = self.shape[mode], len(self.alpha)
        precision = torch.diag(self.alpha).repeat(size, 1, 1).index_add_(0, own, theta[:, None, None] * second)
        linear = torch.zeros_like(self.mean[:size]).index_add_(0, own, linear_weight[:, None] * first)
        L, failed = torch.linalg.cholesky_ex(precision)
        L = torch.where(failed[:, None, None] == 0, L, torch.nan)  # the bound shows it
        covariance = torch.cholesky_inverse(L)
        here = slice(self.starts[mode], self.starts[mode] + size)
        self.covariance[here] = covariance
        self.mean[here] = (covariance @ linear.view(size, rank, 1)).squeeze(-1)

    def update_offset(
        self, values: Float[Tensor, "N"], f_mean: Float[Tensor, "N"], f_variance: Float[Tensor, "N"]
    ) -> None:
        """q(offset) = N(h / p, 1 / p) with p = tau + sum_n theta_n, h = sum_n chi_n - theta_n E[f_n - offset]."""
        theta = self.likelihood.theta(values, f_mean, f_variance)
        linear = self.likelihood.chi(values) - theta * (f_mean - self.offset_mean)
        self.offset_variance.copy_(1 / (self.offset_precision + theta.sum()))
        self.offset_mean.copy_(self.offset_variance * linear.sum())

    def update_alpha(self) -> None:
        """Rate of q(alpha_r): the prior's, and half the component's expected squares in all modes."""
        squares = self.mean.square() + self.covariance.diagonal(dim1=-2, dim2=-1)
        self.alpha_rate.copy_(self.ard_rate + squares.sum(0) / 2)

    def update_zeta(
        self, values: Float[Tensor, "N"], f_mean: Float[Tensor, "N"], f_variance: Float[Tensor, "N"]
    ) -> None:
        """The shape at which the bound is largest.

        With q(omega) at its optimum for every zeta the bound is sum_n [lgamma(y_n + zeta) - lgamma(zeta)] - zeta K up
        to a constant, with y_n = x_n - smallest and K = sum_n [E[f_n] / 2 + log(2 cosh(c_n / 2))] > 0. It is concave:
        its derivative

            sum_n [digamma(y_n + zeta) - digamma(zeta)] - K

        falls, and digamma(y + zeta) - digamma(zeta) lies between [y > 0] / zeta and y / zeta, so bisection finds the
        root.
        """
        y = values.double() - self.smallest
        c = (f_mean.square() + f_variance).sqrt().double()
        slope = (f_mean.double() / 2 + c / 2 + torch.nn.functional.softplus(-c)).sum()
        counts, number = y.unique(return_counts=True)
        low, high = (y > 0).sum().clamp_min(0.5) / slope, y.sum().clamp_min(0.5) / slope
        for _ in range(60):
            middle = (low * high).sqrt()
            rises = (number * (torch.digamma(counts + middle) - torch.digamma(middle))).sum() > slope
            low, high = torch.where(rises, middle, low), torch.where(rises, high, middle)
        self.zeta.copy_(middle)

    def elbo(
        self, values: Float[Tensor, "N"], f_mean: Float[Tensor, "N"], f_variance: Float[Tensor, "N"]
    ) -> Float[Tensor, ""]:
        """E_q[log p(x, omega, A, alpha, offset) - log q], with q(omega) at its optimum."""
        data = self.likelihood.bound(values, f_mean, f_variance).sum()
        alpha = Gamma(torch.full_like(self.alpha_rate, self.alpha_shape), self.alpha_rate)
        alpha_prior = Gamma(
            torch.full_like(self.alpha_rate, self.ard_shape), torch.full_like(alpha.rate, self.ard_rate)
        )
        offset = Normal(self.offset_mean, self.offset_variance.sqrt())
        offset_prior = Normal(torch.zeros_like(self.offset_mean), self.offset_precision**-0.5)
        return data - self.factors_kl() - kl_divergence(alpha, alpha_prior).sum() - kl_divergence(offset, offset_prior)

    def factors_kl(self) -> Float[Tensor, ""]:
        """E_q(alpha)[KL(q(A) | p(A | alpha))], half of

        sum_r (E[alpha_r] sum_i E[a_ir^2] - I E[log alpha_r]) - sum_i log det covariance_i - I R.
        """
        squares = self.mean.square() + self.covariance.diagonal(dim1=-2, dim2=-1)
        log_alpha = torch.digamma(torch.full_like(self.alpha_rate, self.alpha_shape)) - self.alpha_rate.log()
        prior = (self.alpha * squares - log_alpha).sum()
        return (prior - torch.logdet(self.covariance).sum() - self.mean.numel()) / 2

    def predictive(self, indices: Int[Tensor, "S D"]) -> LatentGaussian:
        """The posterior of f is not Gaussian for more than one mode; the Gaussian here has its mean and variance."""
        f_mean, f_variance = self.f_moments(indices)
        return LatentGaussian(self.likelihood, f_mean.double(), f_variance.double())
