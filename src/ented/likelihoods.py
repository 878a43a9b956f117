"""Likelihoods of the tensor's entries given f.

Both are Polya-Gamma likelihoods (Polson, Scott, Windle 2013): for some b and chi that depend on the entry x,

    p(x | f) = h(x) exp(chi f) / (2 cosh(f / 2))^b
             = h(x) exp(chi f) 2^-b  int exp(-omega f^2 / 2) PG(omega | b, 0) domega,

so given omega the log likelihood is quadratic in f, and q(omega) = PG(b, c) with mean theta = b tanh(c / 2) / (2 c).

What inference needs is E[log p(x | f)] for f ~ N(mean, variance), that is E[log(2 cosh(f / 2))]. Its upper bound by
q(omega) is the closed form log(2 cosh(c / 2)) with c^2 = E[f^2]. The bound is loose where b is large and f far from 0,
as for counts far above zeta, and then the posterior variances are too small. The alternative is quadrature, in which
theta becomes -E[d^2 log p / df^2] (conjugate-computation variational inference, Khan and Lin 2017).
"""

from collections.abc import Iterable
from math import ceil, lgamma, log

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import elementwise
from scipy.special import betainc, expit, gammaincinv, ndtri, pdtr
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus
from torch.quasirandom import SobolEngine

from ented.errors import InputError
from ented.quadrature import gauss_hermite, log_expectation, normal_grid

LARGEST_ZETA = 1e4  # from there on it is all but a Poisson distribution, and predictions would need many nodes
NODES = 12  # of the Gauss-Hermite rules of training
SAMPLES = 256  # quasi-random draws of an entry, of all components together, for a median


class PolyaGamma(nn.Module):
    """Base of the likelihoods above: a subclass says what b, chi and log h are, and what f says of x."""

    kind: str  # "binary" or "count"
    width: float  # p(x | f) has no finer detail in f than this, see `normal_grid`
    learned = False  # whether it has a parameter that an optimiser moves, see `NegativeBinomial`
    offset: float | Float[Tensor, "... 1"] = 0.0  # part of the mean of f that belongs to it

    def __init__(self, quadrature: bool = False):
        super().__init__()
        self.quadrature = quadrature
        nodes, weights = gauss_hermite(NODES)
        self.register_buffer("nodes", nodes, persistent=False)
        self.register_buffer("weights", weights, persistent=False)

    def check(self, values: Float[Tensor, "S"]) -> None:
        """Raise InputError if the likelihood cannot have produced one of the values."""

    def b(self, x: Float[Tensor, "... S"]) -> Float[Tensor, "... S"]:
        """Exponent of the hyperbolic cosine, the first parameter of PG."""
        raise NotImplementedError

    def chi(self, x: Float[Tensor, "... S"]) -> Float[Tensor, "... S"]:
        """Coefficient of f (kappa in Polson, Scott and Windle)."""
        raise NotImplementedError

    def log_h(self, x: Float[Tensor, "... S"]) -> Float[Tensor, "... S"]:
        """What does not depend on f."""
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
        """Lower bound on E[log p(x | f)] for f ~ N(mean, variance) at the optimal q(omega), or its quadrature.

        With c^2 = mean^2 + variance the two terms in theta cancel, and what is left is
        chi mean - b log(2 cosh(c / 2)) + log h.
        """
        return self.chi(x) * mean - self.b(x) * self.log_cosh(mean, variance) + self.log_h(x)

    def log_cosh(self, mean: Float[Tensor, "... S"], variance: Float[Tensor, "... S"]) -> Float[Tensor, "... S"]:
        """log(2 cosh(c / 2)), or E[log(2 cosh(f / 2))]."""
        if self.quadrature:
            return self.expectation(log_two_cosh(self.f_nodes(mean, variance)))
        return log_two_cosh((mean.square() + variance).sqrt())

    def f_nodes(self, mean: Float[Tensor, "... S"], variance: Float[Tensor, "... S"]) -> Float[Tensor, "... S G"]:
        """The nodes of the quadrature."""
        return mean[..., None] + variance.sqrt()[..., None] * self.nodes[..., None, :]

    def expectation(self, at_nodes: Float[Tensor, "... S G"]) -> Float[Tensor, "... S"]:
        return (at_nodes * self.weights[..., None, :]).sum(-1)

    def sites(
        self, x: Float[Tensor, "... S"], mean: Float[Tensor, "... S"], variance: Float[Tensor, "... S"]
    ) -> tuple[Float[Tensor, "... S"], Float[Tensor, "... S"]]:
        """Precision theta and linear term t of the Gaussian that stands for p(x | f), t f - theta f^2 / 2.

        The derivatives of `bound` are t - theta mean in the mean, and -theta / 2 in the variance.
        """
        if not self.quadrature:
            return self.theta(x, mean, variance), self.chi(x)
        # log p = chi f - b log(2 cosh(f / 2)) + log h, twice differentiated
        b, tanh = self.b(x), torch.tanh(self.f_nodes(mean, variance) / 2)
        theta = b * (1 - self.expectation(tanh.square())) / 4
        return theta, self.chi(x) - b * self.expectation(tanh) / 2 + theta * mean

    def log_prob(self, x: Float[Tensor, "... S"], f: Float[Tensor, "... S"]) -> Float[Tensor, "... S"]:
        """log p(x | f): the bound at c = |f|, where it is tight. Differentiable in f, also at f = 0."""
        return self.chi(x) * f - self.b(x) * log_two_cosh(f) + self.log_h(x)

    def mean(self, f_mean: Float[Tensor, "... S"], f_variance: Float[Tensor, "... S"]) -> Float[Tensor, "... S"]:
        """E[x] for f ~ N(f_mean, f_variance)."""
        raise NotImplementedError

    def variance(self, f_mean: Float[Tensor, "... S"], f_variance: Float[Tensor, "... S"]) -> Float[Tensor, "... S"]:
        """Of the count, or of the probability of a one, for f ~ N(f_mean, f_variance)."""
        raise NotImplementedError

    def quantile(self, q: float, f_mean: Float[Tensor, "C S"], f_variance: Float[Tensor, "C S"]) -> Float[Tensor, "S"]:
        """See `LatentMixture.quantile`; 0 < q < 1."""
        raise NotImplementedError

    def above(self, count: int, f_mean: Float[Tensor, "C S"], f_variance: Float[Tensor, "C S"]) -> Float[Tensor, "S"]:
        """See `Predictive.above`."""
        raise InputError("of zeros and ones the mean is the probability of a one: leave --above out")

    def relative_median(self, f_mean: Float[Tensor, "C S"], f_variance: Float[Tensor, "C S"]) -> Float[Tensor, "S"]:
        """See `Predictive.relative_median`; of counts from draws, with the same uniform numbers for each Gaussian."""
        return self.mean(f_mean, f_variance).mean(0)

    def sample(self, f: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """One x for each f."""
        raise NotImplementedError

    def limit(self) -> None:
        """Keep the parameters that an optimiser moves within their bounds."""

    def known(self, replica: int | None = None) -> "PolyaGamma":
        """The same with its parameters, or those of a replica, as numbers; here the host waits for the device.

        Of several models, those of a mixture, it has their geometric mean.
        """
        return self

    def intercept(self, values: Float[Tensor, "S"]) -> float:
        """The f at which E[x | f] is the mean of the values, kept half an entry away from where f is infinite."""
        raise NotImplementedError


def log_two_cosh(c: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """log(2 cosh(c / 2)), without overflow."""
    c = c.abs()
    return c / 2 + softplus(-c)


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
        f_mean = -f_mean.abs()  # the same variance, as a difference of small numbers
        of_square = log_expectation(lambda f: 2 * logsigmoid(f), f_mean, f_variance, self.width).exp()
        return (of_square - self.mean(f_mean, f_variance).square()).clamp_min(0)

    def quantile(self, q, f_mean, f_variance):
        # of the probability: monotone in f; that of a mixture lies between those of its components
        of_components = f_mean + torch.special.ndtri(torch.tensor(q, dtype=f_mean.dtype)) * f_variance.sqrt()
        low, high = of_components.aminmax(dim=0)
        for _ in range(60):
            middle = (low + high) / 2
            below = torch.special.ndtr((middle - f_mean) / f_variance.sqrt()).mean(0) < q
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return torch.sigmoid(high)

    def sample(self, f):
        return torch.bernoulli(torch.sigmoid(f))

    def intercept(self, values):
        ones, zeros = values.sum().item(), (1 - values).sum().item()
        return log(max(ones, 0.5)) - log(max(zeros, 0.5))


class NegativeBinomial(PolyaGamma):
    """y = x - smallest is NB with shape zeta and mean zeta exp(f); b = y + zeta, chi = (y - zeta) / 2.

    Parameters
    ----------
    zeta : shape, > 0; y of mean m has the variance m + m^2 / zeta. The paper's value is 20.
    smallest : the smallest count that there can be.
    quadrature : whether E[log p(x | f)] is one, see above.
    learned : whether the shape is a parameter, whose logarithm an optimiser moves by `shape_gradient`. Then f is
        log m - log zeta for the log m that the model has, so that the shape decides on the variance alone.
    """

    kind = "count"

    def __init__(self, zeta: float = 20.0, smallest: int = 0, learned: bool = False, quadrature: bool = False):
        super().__init__(quadrature)
        if not zeta > 0:
            raise InputError(f"likelihood.zeta is {zeta}: it must be above 0")
        self.smallest, self.learned = smallest, learned
        if learned:
            self.log_zeta = nn.Parameter(torch.tensor([log(zeta)]))
        else:
            self.fixed_zeta = float(zeta)  # which costs a step nothing

    @property
    def zeta(self) -> float | Float[Tensor, "... 1"]:
        return self.log_zeta.exp() if self.learned else self.fixed_zeta

    @property
    def offset(self) -> float | Float[Tensor, "... 1"]:
        return -self.log_zeta if self.learned else 0.0

    @property
    def width(self) -> float:
        # a bell of curvature up to zeta; for small zeta exp(-exp(-f)), which steps of 6^-1/2 = 0.4 resolve
        return (self.known().zeta + 6) ** -0.5

    def known(self, replica=None):
        if not self.learned:
            return self
        log_zeta = self.log_zeta if replica is None else self.log_zeta[replica]
        return NegativeBinomial(log_zeta.mean().exp().item(), self.smallest)

    def limit(self):
        if self.learned:
            self.log_zeta.clamp_max_(log(LARGEST_ZETA))

    def check(self, values):
        below = values[values < self.smallest]
        if len(below):
            raise InputError(
                f"the data hold {below[0]:g}, and likelihood.smallest is {self.smallest}, as auto finds it where the "
                "training entries hold no 0: set likelihood.smallest=0"
            )

    def b(self, x):
        return x + (self.zeta - self.smallest)

    def chi(self, x):
        return (x - (self.zeta + self.smallest)) / 2

    def log_h(self, x):
        y = x.double() - self.smallest  # the difference of large terms would lose all of float32's digits
        of_zeta = torch.lgamma(self.zeta.double()) if self.learned else lgamma(self.zeta)
        return (torch.lgamma(y + self.zeta) - torch.lgamma(y + 1) - of_zeta).to(x.dtype)

    def shape_gradient(
        self, x: Float[Tensor, "... S"], mean: Float[Tensor, "... S"], variance: Float[Tensor, "... S"]
    ) -> Float[Tensor, "... S"]:
        """The derivative of log E[p(x | f)] in log zeta, where log m = f + log zeta keeps its distribution:

            E[zeta (digamma(y + zeta) - digamma(zeta) - log(1 + exp f) + s) - y (1 - s) | x],   s the sigmoid of f.

        The shape is learned by this, as the noise in Jankowiak, Pleiss and Gardner (2020), and not by the bound, which
        takes the variance of f for noise once more and finds too small a shape.
        """
        y, zeta = x - self.smallest, self.zeta
        digammas = (torch.digamma(y.double() + zeta.double()) - torch.digamma(zeta.double())).to(x.dtype)
        # The expectation is a sum over nodes of N(centre, shrink) in u = (f - mean) / sd, which is near p(u | x):
        # p(x | f) has its mode at f = log(y / zeta), and there the curvature -1 / (1 / y + 1 / zeta). A node weighs
        # v p(x | f) N(u; 0, 1) / N(u; centre, shrink) by the sum of these, where v is its weight in the rule.
        sd, count = variance.sqrt(), y + 0.5  # a mode for y = 0 too
        precision = 1 / (1 / count + 1 / zeta)
        shrink = 1 / (1 + variance * precision)
        centre = sd * precision * ((count / zeta).log() - mean) * shrink
        u = centre[..., None] + shrink.sqrt()[..., None] * self.nodes[..., None, :]
        f, y, zeta = mean[..., None] + sd[..., None] * u, y[..., None], zeta[..., None]
        log_rule = (self.weights.log() + self.nodes.square() / 2)[..., None, :]  # v / N(u; centre, shrink)
        posterior = torch.softmax(y * f - (y + zeta) * softplus(f) - u.square() / 2 + log_rule, -1)
        at_nodes = zeta * (digammas[..., None] - softplus(f) + torch.sigmoid(f)) - y * torch.sigmoid(-f)
        return (posterior * at_nodes).sum(-1)

    def mean(self, f_mean, f_variance):
        return self.smallest + self.zeta * torch.exp(f_mean + f_variance / 2)

    def variance(self, f_mean, f_variance):
        # Var[x] = E[m] + (1 + 1/zeta) E[m^2] - E[m]^2 with m = zeta exp(f) log-normal
        mean = self.mean(f_mean, f_variance) - self.smallest
        return mean + mean.square() * ((1 + 1 / self.zeta) * f_variance.exp() - 1)

    def quantile(self, q, f_mean, f_variance):
        device, f_mean, f_variance = f_mean.device, f_mean.cpu(), f_variance.cpu()  # SciPy's part
        f, weights = self._mixture_grid(f_mean, f_variance)
        failure = expit(-f)

        def excess(k, entry):
            # P(y <= k) - q, continued to real k by the regularised incomplete beta function
            return betainc(self.zeta, k[..., None] + 1, failure[entry.astype(int)]) @ weights - q

        entry, zero = np.arange(len(failure)), np.zeros(len(failure))
        # Cantelli's inequality: the quantile of a component lies below mean + sd sqrt(q / (1 - q))
        spread = (self.variance(f_mean, f_variance) * (q / (1 - q))).sqrt()
        upper = (self.mean(f_mean, f_variance) + spread).amax(0).numpy() + 1
        root = elementwise.find_root(excess, (zero, upper), args=(entry,)).x
        # find_root stops within rounding of a root that is an integer
        y = np.where(excess(zero, entry) >= 0, 0, np.ceil(root - 1e-6))
        return torch.from_numpy(self.smallest + y).to(device)

    def above(self, count, f_mean, f_variance):
        if count < self.smallest:
            return torch.ones_like(f_mean[0])
        f, weights = self._mixture_grid(f_mean.cpu(), f_variance.cpu())
        return torch.from_numpy(betainc(count - self.smallest + 1, self.zeta, expit(f)) @ weights).to(f_mean)

    def _mixture_grid(
        self, f_mean: Float[Tensor, "C S"], f_variance: Float[Tensor, "C S"]
    ) -> tuple[Float[np.ndarray, "S G"], Float[np.ndarray, "G"]]:
        """Nodes, those of all components side by side, and weights of an expectation over f."""
        nodes, log_weights = normal_grid(f_variance, self.width)
        kept = log_weights > -32  # the others have less than 1e-11 together
        f = f_mean[..., None] + f_variance.sqrt()[..., None] * nodes[kept]
        weights = log_weights[kept].exp() / len(f)
        return f.movedim(0, 1).flatten(1).numpy(), weights.repeat(len(f)).numpy()

    def relative_median(self, f_mean, f_variance):
        draws = ceil(SAMPLES / len(f_mean))
        uniform = SobolEngine(3, scramble=True, seed=0).draw(draws, dtype=torch.float64).clamp(1e-9, 1 - 1e-9)
        u, v, w = uniform.split(1, 1)
        # x is Poisson with a rate that is Gamma distributed
        f = f_mean.cpu()[:, None] + f_variance.cpu().sqrt()[:, None] * torch.special.ndtri(u)  # (C, draws, S)
        rate = (gammaincinv(self.zeta, v.numpy()) * f.exp().numpy()).reshape(-1, f.shape[-1])
        w = w.repeat(len(f), 1).numpy()
        x = self.smallest + torch.from_numpy(np.sort(poisson_quantile(w, rate), 0))
        weight = (1 / (x + 1)).cumsum(0)
        middle = (weight < weight[-1] / 2).sum(0, keepdim=True)
        return x.gather(0, middle).squeeze(0).to(f_mean)

    def sample(self, f):
        rate = torch.distributions.Gamma(self.zeta, torch.exp(-f)).sample()
        return self.smallest + torch.poisson(rate)

    def intercept(self, values):
        return log(max((values - self.smallest).sum().item(), 0.5) / (len(values) * self.known().zeta))


def check_comparable(likelihoods: Iterable[PolyaGamma]) -> None:
    """Raise InputError where the counts of several runs start at different numbers."""
    if len({getattr(likelihood, "smallest", None) for likelihood in likelihoods}) > 1:
        raise InputError(
            "likelihood.smallest=auto finds 0 among the training entries of some of the runs and not of others: "
            "set likelihood.smallest=0"
        )


def poisson_quantile(q: Float[np.ndarray, "n #S"], rate: Float[np.ndarray, "n S"]) -> Float[np.ndarray, "n S"]:
    """The smallest count k with P(x <= k) >= q, of a Poisson distribution.

    The Cornish-Fisher expansion is within a few counts of it, from where steps of one lead there. SciPy's pdtrik, which
    looks for a root, takes six to eighteen times as long.
    """
    shape, q, rate = rate.shape, np.broadcast_to(q, rate.shape).ravel(), rate.ravel()
    z = ndtri(q)
    k = np.floor(rate + np.sqrt(rate) * z + (z**2 - 1) / 6 + 0.5).clip(0)
    near = np.flatnonzero(rate < 1e9)  # above, the expansion itself is right to a part in 10^9
    low = 1, lambda at: pdtr(k[at], rate[at]) < q[at]
    high = -1, lambda at: pdtr(k[at] - 1, rate[at]) >= q[at]  # nan of k = 0, which is never too high
    for step, is_wrong in low, high:
        at = near[is_wrong(near)]
        while len(at):
            k[at] += step
            at = at[is_wrong(at)]
    return k.reshape(shape)
