"""What every method answers to `predictive(indices)`: the distribution of some entries, or a number for each."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from math import log

import torch
from jaxtyping import Float
from torch import Tensor

from ented.errors import InputError
from ented.likelihoods import PolyaGamma
from ented.quadrature import log_expectation

AT_ONCE = 1024  # entries: a quantile and P(x > k) have hundreds of nodes, or thousands where f varies much
# of predictions.csv, whatever the method, beside one for each mode
COLUMNS = {"value", "mean", "std", "lower", "upper", "log_prob", "f_mean", "f_std"}


class Predictive(ABC):
    """Prediction of S entries, in float64.

    A method that knows more than a mean and a probability overrides `columns`, and one with a posterior `plugin`.
    """

    @property
    @abstractmethod
    def mean(self) -> Float[Tensor, "S"]:
        """Expected value: the probability of a one, or the expected count."""

    @property
    def relative_median(self) -> Float[Tensor, "S"]:
        """The median under p(x) / (x + 1), which has the lowest E|x - a| / (x + 1); or the mean, if it is not known."""
        return self.mean

    @abstractmethod
    def log_prob(self, values: Float[Tensor, "S"]) -> Float[Tensor, "S"] | None:
        """log p(values), or None where the method has no distribution."""

    def above(self, count: int) -> Float[Tensor, "S"]:
        """P(x > count); raises InputError where it is not known."""
        raise InputError("the method does not say how probable large counts are: leave --above out")

    def plugin(self) -> "Predictive":
        """The same with every parameter fixed at its posterior mean."""
        return self

    def columns(self) -> dict[str, Float[Tensor, "S"]]:
        """What predictions.csv says of each entry, beside its indices, its value and the log probability of that."""
        return {"mean": self.mean}


@dataclass
class Known(Predictive):
    """A distribution of torch.distributions whose parameters are taken as known."""

    distribution: torch.distributions.Distribution

    @property
    def mean(self) -> Float[Tensor, "S"]:
        return self.distribution.mean

    def log_prob(self, values: Float[Tensor, "S"]) -> Float[Tensor, "S"]:
        return self.distribution.log_prob(values)

    def above(self, count: int) -> Float[Tensor, "S"]:
        if not isinstance(self.distribution, torch.distributions.Poisson):
            return super().above(count)
        rate = self.distribution.rate
        return torch.special.gammainc(rate.new_tensor(count + 1), rate) if count >= 0 else torch.ones_like(rate)

    def columns(self) -> dict[str, Float[Tensor, "S"]]:
        """Also the standard deviation of a count; a known probability has none."""
        is_count = not isinstance(self.distribution, torch.distributions.Bernoulli)
        return super().columns() | ({"std": self.distribution.stddev} if is_count else {})


@dataclass
class Point(Predictive):
    """A number for each entry and no distribution."""

    prediction: Float[Tensor, "S"]

    @property
    def mean(self) -> Float[Tensor, "S"]:
        return self.prediction

    def log_prob(self, values: Float[Tensor, "S"]) -> None:
        return None


@dataclass
class LatentMixture(Predictive):
    """x ~ p(x | f) where f has one of C Gaussians as its distribution, each as likely, in float64."""

    likelihood: PolyaGamma
    means: Float[Tensor, "C S"]
    variances: Float[Tensor, "C S"]

    @property
    def f_mean(self) -> Float[Tensor, "S"]:
        return self.means.mean(0)

    @property
    def f_variance(self) -> Float[Tensor, "S"]:
        return self.variances.mean(0) + self.means.var(0, correction=0)

    @property
    def mean(self) -> Float[Tensor, "S"]:
        return self.likelihood.mean(self.means, self.variances).mean(0)

    @property
    def variance(self) -> Float[Tensor, "S"]:
        """Of the count, from f and from p(x | f) together; of the probability of a one, from f."""
        means = self.likelihood.mean(self.means, self.variances)
        return self.likelihood.variance(self.means, self.variances).mean(0) + means.var(0, correction=0)

    def log_prob(self, values: Float[Tensor, "S"]) -> Float[Tensor, "S"]:
        """log E_f[p(x | f)], by quadrature."""

        def log_prob(f):
            return self.likelihood.log_prob(values[..., None], f)

        of_components = log_expectation(log_prob, self.means, self.variances, self.likelihood.width)
        return of_components.logsumexp(0) - log(len(self.means))

    def quantile(self, q: float) -> Float[Tensor, "S"]:
        """The smallest count k with P(x <= k) >= q; for binary entries the q-quantile of the probability."""
        return torch.cat([self.likelihood.quantile(q, *part) for part in self._parts()])

    def above(self, count: int) -> Float[Tensor, "S"]:
        return torch.cat([self.likelihood.above(count, *part) for part in self._parts()])

    def _parts(self) -> Iterable[tuple[Float[Tensor, "C _"], Float[Tensor, "C _"]]]:
        """Means and variances of so many entries that their nodes fit in memory."""
        return zip(self.means.split(AT_ONCE, 1), self.variances.split(AT_ONCE, 1), strict=True)

    def sample(self, n: int) -> Float[Tensor, "n S"]:
        """n independent draws of every entry."""
        components, entries = self.means.shape
        chosen = torch.randint(components, (n, entries), device=self.means.device)
        mean, variance = self.means.gather(0, chosen), self.variances.gather(0, chosen)
        return self.likelihood.sample(mean + variance.sqrt() * torch.randn_like(mean))

    @property
    def relative_median(self) -> Float[Tensor, "S"]:
        return self.likelihood.relative_median(self.means, self.variances)

    def plugin(self) -> "LatentGaussian":
        """f fixed at its mean, p(x | f = f_mean): what the paper's tables hold."""
        return LatentGaussian(self.likelihood, self.f_mean, torch.zeros_like(self.f_mean))

    def columns(self) -> dict[str, Float[Tensor, "S"]]:
        """Also the standard deviation, the 5% and 95% quantiles, and the posterior of f."""
        return {
            "mean": self.mean,
            "std": self.variance.sqrt(),
            "lower": self.quantile(0.05),
            "upper": self.quantile(0.95),
            "f_mean": self.f_mean,
            "f_std": self.f_variance.sqrt(),
        }


class LatentGaussian(LatentMixture):
    """The same with one Gaussian, whose mean and variance are (S,). A variance of 0 is a known f."""

    def __init__(self, likelihood: PolyaGamma, f_mean: Float[Tensor, "S"], f_variance: Float[Tensor, "S"]):
        super().__init__(likelihood, f_mean[None], f_variance[None])
