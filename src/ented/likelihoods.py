"""Likelihoods of the tensor's entries given f, and the predictive distribution they give.

Both are Polya-Gamma likelihoods (Polson, Scott, Windle 2013): for some b and chi that depend on the entry x,

    p(x | f) = h(x) exp(chi f) / (2 cosh(f / 2))^b
             = h(x) exp(chi f) 2^-b  int exp(-omega f^2 / 2) PG(omega | b, 0) domega,

so given omega the log likelihood is quadratic in f, and q(omega) = PG(b, c) with mean theta = b tanh(c / 2) / (2 c).
"""

from dataclasses import dataclass, replace
from math import ceil, lgamma, log

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import elementwise
from scipy.special import betainc
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from ented.predictive import Predictive
from ented.tensor import InputError


class PolyaGamma:
    """Base of the likelihoods above: a subclass says what b, chi and log h are, and what f says of x."""

    kind: str  # "binary" or "count"
    width: float  # p(x | f) has no finer detail in f than this, see `normal_grid`

    def check(self, values: Float[Tensor, "S"]) -> None:
        """Raise InputError if the likelihood cannot have produced one of the values."""

    def b(self, x: Float[Tensor, "... S"]) -> Float[Tensor, "... S"]:
        """Exponent of the hyperbolic cosine, the first parameter of PG."""
        raise NotImplementedError

    def chi(self, x: Float[Tensor, "... S"]) -> Float[Tensor, "... S"]:
        """Coefficient of f (kappa in Polson, Scott and Windle)."""
        raise NotImplementedError

    def log_h(self, x: Float[Tensor, "... S"]) -> Float[Tensor, "... S"]:
        """What does not depend on f, up to the factor 2^b that the cosh takes."""
        raise NotImplementedError

    def theta(
        self, x: Float[Tensor, "... S"], mean: Float[Tensor, "... S"], variance: Float[Tensor, "... S"]
    ) -> Float[Tensor, "... S"]:
        """E[omega] under the optimal q(omega): c^2 = E[f^2], theta = b tanh(c / 2) / (2 c), b / 4 at c = 0."""
        c = (mean.square() + variance).clamp_min(1e-12).sqrt()  # below c = 1e-6 nothing changes within rounding
        return self.b(x) * (torch.tanh(c / 2) / (2 * c))

    def bound(
        self, x: Float[Tensor, "... S"], mean: Float[Tensor, "... S"], variance: Float[Tensor, "... S"]
    ) -> Float[Tensor, "... S"]:
        """Lower bound on E[log p(x | f)] for f ~ N(mean, variance), at the optimal q(omega).

        With c^2 = mean^2 + variance the two terms in theta cancel, and what is left is
        chi mean - b log(2 cosh(c / 2)) + log h.
        """
        return self._tilted(x, mean, (mean.square() + variance).sqrt())

    def log_prob(self, x: Float[Tensor, "... S"], f: Float[Tensor, "... S"]) -> Float[Tensor, "... S"]:
        """log p(x | f): the bound at c = |f|, where it is tight. Differentiable in f, also at f = 0."""
        return self._tilted(x, f, f.abs())

    def _tilted(self, x: Tensor, mean: Tensor, c: Tensor) -> Tensor:
        # log(2 cosh(c / 2)) = c / 2 + softplus(-c) does not overflow
        return self.chi(x) * mean - self.b(x) * (c / 2 + softplus(-c)) + self.log_h(x)

    def mean(self, f_mean: Float[Tensor, "S"], f_variance: Float[Tensor, "S"]) -> Float[Tensor, "S"]:
        """E[x] for f ~ N(f_mean, f_variance)."""
        raise NotImplementedError

    def variance(self, f_mean: Float[Tensor, "S"], f_variance: Float[Tensor, "S"]) -> Float[Tensor, "S"]:
        """Var[x] for f ~ N(f_mean, f_variance)."""
        raise NotImplementedError

    def quantile(self, q: float, f_mean: Float[Tensor, "S"], f_variance: Float[Tensor, "S"]) -> Float[Tensor, "S"]:
        """See `LatentGaussian.quantile`; 0 < q < 1."""
        raise NotImplementedError

    def sample(self, f: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """One x for each f."""
        raise NotImplementedError

    def intercept(self, values: Float[Tensor, "S"]) -> float:
        """The f at which E[x | f] is the mean of the values, kept half an entry away from where f is infinite."""
        raise NotImplementedError


class Bernoulli(PolyaGamma):
    """p(x = 1 | f) = 1 / (1 + exp(-f)); b = 1, chi = x - 1/2, h = 1."""

    kind = "binary"
    width = 0.8  # the sigmoid's poles at +-i pi leave an error of exp(-2 pi^2 / 0.8) = 2e-11

    def check(self, values):
        wrong = values[(values != 0) & (values != 1)]
        if len(wrong):
            raise InputError(
                f"likelihood=bernoulli takes the values 0 and 1, the data hold {wrong[0]:g}: "
                "use likelihood=negative_binomial for counts"
            )

    def b(self, x):
        return torch.ones_like(x)

    def chi(self, x):
        return x - 0.5

    def log_h(self, x):
        return torch.zeros_like(x)

    def mean(self, f_mean, f_variance):
        return log_expectation(logsigmoid, f_mean, f_variance, self.width).exp().clamp_max(1)

    def variance(self, f_mean, f_variance):
        p = self.mean(f_mean, f_variance)
        return p * (1 - p)

    def quantile(self, q, f_mean, f_variance):
        # of the probability: monotone in f
        z = torch.special.ndtri(torch.tensor(q, dtype=f_mean.dtype))
        return torch.sigmoid(f_mean + z * f_variance.sqrt())

    def sample(self, f):
        return torch.bernoulli(torch.sigmoid(f))

    def intercept(self, values):
        ones, zeros = values.sum().item(), (1 - values).sum().item()
        return log(max(ones, 0.5)) - log(max(zeros, 0.5))


class NegativeBinomial(PolyaGamma):
    """NB with shape zeta and mean zeta exp(f); b = x + zeta, chi = (x - zeta) / 2.

    Parameters
    ----------
    zeta : shape, > 0; the variance is mean + mean^2 / zeta. The paper's value is 20.
    """

    kind = "count"

    def __init__(self, zeta: float = 20.0):
        if not zeta > 0:
            raise InputError(f"likelihood.zeta is {zeta}: it must be above 0")
        self.zeta = float(zeta)
        # a bell of curvature up to zeta; for small zeta exp(-exp(-f)), which steps of 6^-1/2 = 0.4 resolve
        self.width = (self.zeta + 6) ** -0.5

    def b(self, x):
        return x + self.zeta

    def chi(self, x):
        return (x - self.zeta) / 2

    def log_h(self, x):
        x64 = x.double()  # the difference of large terms would lose all of float32's digits
        return (torch.lgamma(x64 + self.zeta) - torch.lgamma(x64 + 1) - lgamma(self.zeta)).to(x.dtype)

    def mean(self, f_mean, f_variance):
        return self.zeta * torch.exp(f_mean + f_variance / 2)

    def variance(self, f_mean, f_variance):
        # Var[x] = E[m] + (1 + 1/zeta) E[m^2] - E[m]^2 with m = zeta exp(f) log-normal
        mean = self.mean(f_mean, f_variance)
        return mean + mean.square() * ((1 + 1 / self.zeta) * f_variance.exp() - 1)

    def quantile(self, q, f_mean, f_variance):
        device, f_mean, f_variance = f_mean.device, f_mean.cpu(), f_variance.cpu()  # SciPy's part
        nodes, log_weights = normal_grid(f_variance, self.width)
        weights = log_weights.exp().numpy()
        failure = torch.sigmoid(-(f_mean[..., None] + f_variance.sqrt()[..., None] * nodes)).numpy()

        def excess(k, entry):
            # P(x <= k) - q, continued to real k by the regularised incomplete beta function
            return betainc(self.zeta, k[..., None] + 1, failure[entry.astype(int)]) @ weights - q

        entry, zero = np.arange(len(f_mean)), np.zeros(len(f_mean))
        # Cantelli's inequality: the quantile lies below mean + sd sqrt(q / (1 - q))
        spread = (self.variance(f_mean, f_variance) * (q / (1 - q))).sqrt()
        upper = (self.mean(f_mean, f_variance) + spread).numpy() + 1
        root = elementwise.find_root(excess, (zero, upper), args=(entry,)).x
        # find_root stops within rounding of a root that is an integer
        return torch.from_numpy(np.where(excess(zero, entry) >= 0, 0, np.ceil(root - 1e-6))).to(device)

    def sample(self, f):
        rate = torch.distributions.Gamma(self.zeta, torch.exp(-f)).sample()
        return torch.poisson(rate)

    def intercept(self, values):
        return log(max(values.sum().item(), 0.5) / (len(values) * self.zeta))


@dataclass
class LatentGaussian(Predictive):
    """x ~ p(x | f) with f ~ N(f_mean, f_variance), in float64. A variance of 0 is a known f."""

    likelihood: PolyaGamma
    f_mean: Float[Tensor, "S"]
    f_variance: Float[Tensor, "S"]

    @property
    def mean(self) -> Float[Tensor, "S"]:
        return self.likelihood.mean(self.f_mean, self.f_variance)

    @property
    def variance(self) -> Float[Tensor, "S"]:
        """Variance of the value, from f and from p(x | f) together."""
        return self.likelihood.variance(self.f_mean, self.f_variance)

    def log_prob(self, values: Float[Tensor, "S"]) -> Float[Tensor, "S"]:
        """log E_f[p(x | f)], by quadrature."""

        def log_prob(f):
            return self.likelihood.log_prob(values[..., None], f)

        return log_expectation(log_prob, self.f_mean, self.f_variance, self.likelihood.width)

    def quantile(self, q: float) -> Float[Tensor, "S"]:
        """The smallest count k with P(x <= k) >= q; for binary entries the q-quantile of the probability."""
        return self.likelihood.quantile(q, self.f_mean, self.f_variance)

    def sample(self, n: int) -> Float[Tensor, "n S"]:
        """n independent draws of every entry."""
        noise = torch.randn(n, *self.f_mean.shape, dtype=self.f_mean.dtype, device=self.f_mean.device)
        return self.likelihood.sample(self.f_mean + self.f_variance.sqrt() * noise)

    def plugin(self) -> "LatentGaussian":
        """f fixed at its mean, p(x | f = f_mean): what the paper's tables hold."""
        return replace(self, f_variance=torch.zeros_like(self.f_variance))

    def columns(self, values: Float[Tensor, "S"]) -> dict[str, Float[Tensor, "S"]]:
        """Also the standard deviation, the 5% and 95% quantiles, and the posterior of f."""
        return {
            "mean": self.mean,
            "std": self.variance.sqrt(),
            "lower": self.quantile(0.05),
            "upper": self.quantile(0.95),
            "log_prob": self.log_prob(values),
            "f_mean": self.f_mean,
            "f_std": self.f_variance.sqrt(),
        }


def normal_grid(variance: Float[Tensor, "S"], width: float) -> tuple[Float[Tensor, "G"], Float[Tensor, "G"]]:
    """Nodes and log weights of the trapezoid rule for E[g(mean + sd z)], z standard normal.

    Where g has no finer detail than `width`, the integrand has none finer than h = (1 + sd^2 / width^2)^-1/2 in z, the
    width of the product of two Gaussians. With h as its step the rule's relative error is about
    2 exp(-2 pi^2) = 5e-9. The entry with the largest variance decides for all.
    """
    steps = ceil(12 * (1 + variance.max().item() / width**2) ** 0.5)
    nodes = torch.linspace(-12, 12, 2 * steps + 1, dtype=variance.dtype, device=variance.device)
    return nodes, torch.log_softmax(-nodes.square() / 2, -1)


def log_expectation(
    log_function, mean: Float[Tensor, "S"], variance: Float[Tensor, "S"], width: float
) -> Float[Tensor, "S"]:
    """log E[exp(log_function(f))] for f ~ N(mean, variance), without leaving the log domain; `width` as above."""
    nodes, log_weights = normal_grid(variance, width)
    f = mean[..., None] + variance.sqrt()[..., None] * nodes
    return torch.logsumexp(log_function(f) + log_weights, -1)
