"""GPTF: Gaussian-process tensor factorisation with a probit or a Gaussian likelihood (Zhe et al. 2016).

The factors, the process f and its inducing inputs are those of `ented.model`, in one block. What differs is the
likelihood, and that everything is trained by Adam on minibatches (stochastic variational inference, Hensman, Fusi and
Lawrence 2013), the posterior q(u) = N(m, L L') of the whitened inducing values included:

    ELBO = sum_n bound(x_n; mu_n, s2_n) - KL(q | N(0, I)) + log p(Z),    q(f_n) = N(mu_n, s2_n).
"""

from dataclasses import dataclass, replace
from math import log, pi, sqrt

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ented.distributed import all_reduce, processes
from ented.factors import FactorTable
from ented.gaussian_process import GaussianProcessModule
from ented.inducing import Features
from ented.lightning import Batch
from ented.likelihoods import PolyaGamma
from ented.model import FactorProcess
from ented.predictive import Predictive


class GPTF(GaussianProcessModule):
    """One Adam step on Z, the inducing inputs, q(u) and the noise for every minibatch.

    Parameters
    ----------
    shape : sizes of the tensor's modes.
    likelihood : says of which kind the entries are: ones and zeros are probit, counts Gaussian as if continuous.
    rank, init_std, sparse_gradients : see `ented.factors.FactorTable`.
    inducing, jitter : see `ented.model.FactorProcess`.
    lr, milestones : of Adam, see `GaussianProcessModule`.
    """

    likelihood_settings = ()

    def __init__(
        self,
        shape: tuple[int, ...],
        likelihood: PolyaGamma,
        rank: int,
        inducing: int = 100,
        init_std: float = 0.5,
        jitter: float = 1e-4,
        lr: float = 1e-3,
        milestones: tuple[float, ...] = (),
        sparse_gradients: bool = False,
    ):
        table = FactorTable(shape, rank, init_std, sparse_gradients=sparse_gradients)
        process = FactorProcess(table, inducing, jitter=jitter)
        super().__init__(likelihood.kind, process, lr, milestones)
        self.q = CholeskyGaussian(inducing)
        self.likelihood = Probit() if likelihood.kind == "binary" else Gaussian()

    def predictive(self, indices: Int[Tensor, "S D"]) -> Predictive:
        with torch.no_grad():
            features = self.model.features(indices)
            self.model.check_factorisation(features)
            mean, variance = self.q.moments(features.phi, features.residual)
            return self.likelihood.predictive(mean.double(), variance.double())

    def initialise(self, indices: Int[Tensor, "N D"], values: Float[Tensor, "N"]) -> None:
        self.likelihood.standardise(values)

    def data_term(self, features: Features, values: Float[Tensor, "S"]) -> Float[Tensor, ""]:
        """The data term of the ELBO, summed over the batch."""
        mean, variance = self.q.moments(features.phi, features.residual)
        return self.likelihood.bound(values, mean, variance).sum()

    def step(self, indices: Int[Tensor, "S D"], values: Float[Tensor, "S"], scale: float) -> Float[Tensor, ""]:
        """Set all gradients, those of minus the bound; one entry of the batch stands for `scale`.

        Returns the sum of the batch's bounds, without the KL.
        """
        with torch.no_grad():
            features = self.model.features(indices)
        # automatic differentiation down to the features, and from there by hand
        features.phi.requires_grad_()
        data = self.data_term(features, values)
        parameters = [*self.q.parameters(), *self.likelihood.parameters()]
        *gradients, phi_bar = torch.autograd.grad(self.q.kl() / processes() - scale * data, [*parameters, features.phi])
        for parameter, gradient in zip(parameters, all_reduce(*gradients), strict=True):
            parameter.grad = gradient
        self.model.backward(features, phi_bar, scale)
        self.model.failures += features.info
        return data.detach()

    def training_step(self, batch: Batch, batch_index: int) -> None:
        indices, values = batch
        self.bound_sum += self.step(indices, values, self.trainer.datamodule.scale(batch_index))
        self.adam_step(indices)

    def on_train_epoch_end(self) -> None:
        """Log the epoch's bound, whose data term sums what each minibatch gave when its turn came."""
        super().on_train_epoch_end()
        with torch.no_grad():
            self.log("elbo", self.bound() - self.q.kl() + self.model.log_prior(), prog_bar=True)


class CholeskyGaussian(nn.Module):
    """q(u) = N(m, L L') of the whitened inducing values, whose prior is N(0, I); it starts from the prior.

    L is lower triangular, with a positive diagonal that is stored as its logarithm.

    Parameters
    ----------
    size : number of inducing points P.
    """

    def __init__(self, size: int):
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(size))
        self.root = nn.Parameter(torch.zeros(size, size))  # L below the diagonal, log L on it, unused above

    @property
    def L(self) -> Float[Tensor, "P P"]:
        return self.root.tril(-1) + self.root.diagonal().exp().diag()

    def moments(
        self, phi: Float[Tensor, "S P"], residual: Float[Tensor, "S"]
    ) -> tuple[Float[Tensor, "S"], Float[Tensor, "S"]]:
        """Mean m' phi_n and variance residual_n + |L' phi_n|^2 of f at each entry."""
        return phi @ self.mean, residual + (phi @ self.L).square().sum(1)

    def kl(self) -> Float[Tensor, ""]:
        """KL(q | p) = 1/2 (tr L L' + m' m - P) - log|L|."""
        quadratic = self.L.square().sum() + self.mean.square().sum() - len(self.mean)
        return 0.5 * quadratic - self.root.diagonal().sum()


class Probit(nn.Module):
    """p(x = 1 | w) = Phi(w) with w ~ N(f, 1), so that p(x = 1 | f) = Phi(f / sqrt 2)."""

    def standardise(self, values: Float[Tensor, "N"]) -> None:
        """Nothing: ones and zeros have no scale."""

    def bound(
        self, x: Float[Tensor, "S"], mean: Float[Tensor, "S"], variance: Float[Tensor, "S"]
    ) -> Float[Tensor, "S"]:
        """Lower bound on what an entry adds to log p(x | Z), for f ~ N(mean, variance).

        First E[log N(w | f, 1)] = log N(w | mean, 1) - variance / 2, a bound for every w, and then the integral over w
        of its exponential times p(x | w), which is Phi(+-mean / sqrt 2) exp(-variance / 2).
        """
        return torch.special.log_ndtr((2 * x - 1) * mean / sqrt(2)) - variance / 2

    def predictive(self, mean: Float[Tensor, "S"], variance: Float[Tensor, "S"]) -> "ProbitPredictive":
        return ProbitPredictive(mean, variance)


class Gaussian(nn.Module):
    """(x - location) / scale ~ N(f, noise), noise learned.

    The kernel has variance 1, so counts are standardised by the mean and standard deviation of the training entries;
    densities are those of x.
    """

    def __init__(self):
        super().__init__()
        self.log_noise = nn.Parameter(torch.zeros(()))
        self.register_buffer("location", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))

    def standardise(self, values: Float[Tensor, "N"]) -> None:
        """Take location and scale from the training entries."""
        scale = values.std(correction=0)
        self.location.copy_(values.mean())
        self.scale.copy_(torch.where(scale > 0, scale, 1.0))

    def bound(
        self, x: Float[Tensor, "S"], mean: Float[Tensor, "S"], variance: Float[Tensor, "S"]
    ) -> Float[Tensor, "S"]:
        """E[log p(x | f)] for f ~ N(mean, variance)."""
        error = ((x - self.location) / self.scale - mean).square() + variance
        return -0.5 * (error * torch.exp(-self.log_noise) + self.log_noise + log(2 * pi)) - self.scale.log()

    def predictive(self, mean: Float[Tensor, "S"], variance: Float[Tensor, "S"]) -> "GaussianPredictive":
        location, scale, noise = self.location.double(), self.scale.double(), self.log_noise.double().exp()
        return GaussianPredictive(location + scale * mean, scale.square() * variance, scale.square() * noise)


@dataclass
class ProbitPredictive(Predictive):
    """x = 1 with probability Phi(w) for w ~ N(f, 1) and f ~ N(f_mean, f_variance)."""

    f_mean: Float[Tensor, "S"]
    f_variance: Float[Tensor, "S"]

    @property
    def score(self) -> Float[Tensor, "S"]:
        """What Phi makes the probability of a one: w's and x's own noise have variance 1 each."""
        return self.f_mean / (2 + self.f_variance).sqrt()

    @property
    def mean(self) -> Float[Tensor, "S"]:
        return torch.special.ndtr(self.score)

    def log_prob(self, values: Float[Tensor, "S"]) -> Float[Tensor, "S"]:
        return torch.special.log_ndtr((2 * values - 1) * self.score)

    def plugin(self) -> "ProbitPredictive":
        return replace(self, f_variance=torch.zeros_like(self.f_variance))

    def columns(self) -> dict[str, Float[Tensor, "S"]]:
        """Also the posterior of f."""
        return super().columns() | {"f_mean": self.f_mean, "f_std": self.f_variance.sqrt()}


@dataclass
class GaussianPredictive(Predictive):
    """x ~ N(f, noise) with f ~ N(f_mean, f_variance), all on the scale of x."""

    f_mean: Float[Tensor, "S"]
    f_variance: Float[Tensor, "S"]
    noise: Float[Tensor, ""]

    @property
    def distribution(self) -> torch.distributions.Normal:
        return torch.distributions.Normal(self.f_mean, (self.f_variance + self.noise).sqrt())

    @property
    def mean(self) -> Float[Tensor, "S"]:
        return self.f_mean

    def log_prob(self, values: Float[Tensor, "S"]) -> Float[Tensor, "S"]:
        return self.distribution.log_prob(values)

    def plugin(self) -> "GaussianPredictive":
        return replace(self, f_variance=torch.zeros_like(self.f_variance))

    def columns(self) -> dict[str, Float[Tensor, "S"]]:
        """Also the standard deviation, and that of f."""
        return super().columns() | {"std": self.distribution.stddev, "f_std": self.f_variance.sqrt()}
