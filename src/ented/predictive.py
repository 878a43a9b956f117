"""What every method answers to `predictive(indices)`: the distribution of some entries, or a number for each."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

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

    def plugin(self) -> "Predictive":
        """The same with every parameter fixed at its posterior mean."""
        return self

    def columns(self, values: Float[Tensor, "S"]) -> dict[str, Float[Tensor, "S"]]:
        """What predictions.csv says of each entry, beside its indices and its value."""
        log_prob = self.log_prob(values)
        return {"mean": self.mean} | ({} if log_prob is None else {"log_prob": log_prob})


@dataclass
class Known(Predictive):
    """A distribution of torch.distributions whose parameters are taken as known."""

    distribution: torch.distributions.Distribution

    @property
    def mean(self) -> Float[Tensor, "S"]:
        return self.distribution.mean

    def log_prob(self, values: Float[Tensor, "S"]) -> Float[Tensor, "S"]:
        return self.distribution.log_prob(values)

    def columns(self, values: Float[Tensor, "S"]) -> dict[str, Float[Tensor, "S"]]:
        """Also the standard deviation."""
        return super().columns(values) | {"std": self.distribution.stddev}


@dataclass
class Point(Predictive):
    """A number for each entry and no distribution."""

    prediction: Float[Tensor, "S"]

    @property
    def mean(self) -> Float[Tensor, "S"]:
        return self.prediction

    def log_prob(self, values: Float[Tensor, "S"]) -> None:
        return None
