"""ENTED in pure PyTorch: Gaussian-process tensor factorisation with Polya-Gamma likelihoods (paper, section 3).

Generative model of an entry with index (i_1, ..., i_D):

    z_i^(d) ~ N(0, I_R)                        factor row i of mode d
    m = [z_i1^(1), ..., z_iD^(D)]              factor rows side by side, in R^(D R)
    f ~ GP(o, k),   x ~ p(x | f(m))            Bernoulli or negative binomial

The inducing values have a Gaussian posterior. The factors Z are point estimates, as in the paper, or have one too; the
mean function o is zero, as in the paper, or more, see `ented.factors`. Point estimates are the inducing inputs X, and
where they are learned the parameters of o and of k. The bound that training climbs is

    ELBO = sum_n bound(x_n; mu_n, s2_n) - KL(q | p) + log p(Z)

where -KL(q(Z) | p(Z)) takes the place of log p(Z), and a draw of Z that of an expectation, if Z has a posterior.
A learned shape of counts climbs sum_n log E[p(x_n | f)], given that draw, instead (`NegativeBinomial.shape_gradient`).

The posterior has many modes, and a Gaussian finds one of them. A mixture of C models of equal weight has several, each
with parameters of its own, from initial values of its own; by Jensen's inequality the mean of their bounds is a bound
on the log of their mean p(x). These components are a leading dimension of every tensor but the entries'. A prediction
is the mixture of theirs, with one shape of counts, the geometric mean of those that they learned.
"""

import copy
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ented.distributed import all_reduce
from ented.errors import InputError
from ented.factors import FactorTable
from ented.inducing import Features, InducingInputs
from ented.kernels import RBF
from ented.likelihoods import PolyaGamma
from ented.predictive import LatentMixture
from ented.variational import GaussianBlocks

DRAWS = 32  # of factors that have a posterior, for a prediction
SPREAD = 0.2  # inducing inputs start this share of their own initial spread away from the factors of entries


class FactorProcess(nn.Module):
    """The prior of f: factors Z, a Gaussian process over their combinations, and its inducing inputs X.

    Parameters
    ----------
    table : the factors.
    inducing : number of inducing points.
    kernel : covariance function, by default the paper's.
    jitter : added to the diagonal of k(X, X).

    Raises
    ------
    InputError : a number of inducing points below 1.
    """

    def __init__(self, table: FactorTable, inducing: int = 100, kernel: RBF | None = None, jitter: float = 1e-4):
        super().__init__()
        if inducing < 1:
            raise InputError(f"inducing={inducing}: it must be at least 1")
        self.table = table
        self.kernel = kernel or RBF()
        self.inducing = InducingInputs(inducing, len(table.shape) * table.rank, table.init_std, jitter)
        # not 0 once a factorisation has failed; read once an epoch, so that no step waits for the device
        self.register_buffer("failures", torch.zeros((), dtype=torch.long), persistent=False)

    @property
    def Z(self) -> nn.Parameter:
        return self.table.Z

    def features(
        self, indices: Int[Tensor, "... S D"], noise: Float[Tensor, "... D R"] | None = None, new: bool = False
    ) -> Features:
        """Whitened features of a batch at a draw of its factors, see `FactorTable.draw`; differentiable in Z and X."""
        draw = self.table.draw(indices, noise, new)
        return replace(self.inducing(self.kernel, draw.z), draw=draw)

    def check_factorisation(self, features: Features) -> None:
        """Raise InputError where that of k(X, X) failed, for a prediction: here the host waits for the device."""
        if features.info.any():
            raise InputError(
                "a Cholesky factorisation failed in a prediction: train with a lower lr=, a higher model.jitter (now "
                f"{self.inducing.jitter:g}) or dtype=float64"
            )

    @torch.no_grad()
    def backward(
        self,
        features: Features,
        phi_bar: Float[Tensor, "... S P"],
        scale: float | Float[Tensor, "... S"],
        mean_bar: Float[Tensor, "... S"] | None = None,
        variance_bar: Float[Tensor, "... S"] | None = None,
        others: dict[nn.Parameter, Tensor] | None = None,
    ) -> None:
        """Set all gradients, of a loss less log p(Z).

        `phi_bar` is its derivative in Phi, with all that reaches Phi through f; `mean_bar` and `variance_bar`, those in
        the mean and the variance of f, serve the parts of these that are beside Phi: o, the effects' variance and k_nn.
        `scale` is what one entry of the batch stands for, see `FactorTable.gradients`; `others` are derivatives in
        parameters that are not part of the prior of f.
        """
        X_bar, z_bar, gradients = self.inducing.backward(self.kernel, features, phi_bar)
        if self.kernel.learned:  # k_nn is a part of the variance
            of_diagonal = variance_bar.sum(-1, keepdim=True) * self.kernel.log_variance.exp()
            gradients[self.kernel.log_variance] = gradients[self.kernel.log_variance] + of_diagonal
        gradients |= self.table.gradients(features.draw, z_bar, mean_bar, variance_bar, scale)
        gradients |= {self.inducing.X: X_bar} | (others or {})
        for parameter, gradient in zip(gradients, all_reduce(*gradients.values()), strict=True):
            parameter.grad = gradient
        self.table.add_prior()

    @torch.no_grad()
    def start_inducing_at(self, indices: Int[Tensor, "... P D"]) -> None:
        """Put the new inducing inputs near the factors of P entries, one near each."""
        X = self.inducing.X
        X.mul_(SPREAD).add_(self.table.draw(indices).z)

    def log_prior(self) -> Float[Tensor, "..."]:
        """log p(Z), or -KL(q(Z) | p(Z))."""
        return self.table.log_prior()


class ENTED(FactorProcess):
    """The model and its inference.

    Parameters
    ----------
    table, kernel, jitter : see `FactorProcess`.
    likelihood : of an entry given f.
    inducing : inducing points in all blocks together.
    blocks : orthogonal blocks they are divided into: 2 is ENTED, 1 is GPTF-PG.

    Raises
    ------
    InputError : as above, or blocks below 1, or inducing points that the blocks do not divide.
    """

    def __init__(
        self,
        table: FactorTable,
        likelihood: PolyaGamma,
        inducing: int = 100,
        blocks: int = 2,
        kernel: RBF | None = None,
        jitter: float = 1e-4,
    ):
        super().__init__(table, inducing, kernel, jitter)
        if blocks < 1:
            raise InputError(f"model.blocks={blocks}: it must be at least 1")
        if inducing % blocks:
            raise InputError(f"inducing={inducing} points cannot be divided into model.blocks={blocks} equal blocks")
        self.likelihood = likelihood
        self.q = GaussianBlocks(blocks, inducing // blocks)
        self.is_mixture = False  # whether the last leading dimension is that of components, see `mixture`
        self.has_mean = table.constant is not None or likelihood.learned

    def moments(
        self, features: Features
    ) -> tuple[Float[Tensor, "... S"], Float[Tensor, "... S"], Float[Tensor, "... S P"]]:
        """Mean and variance of f at each entry, and D_phi of `GaussianBlocks.moments`."""
        mean, variance, D_phi = self.q.moments(features.phi, features.diagonal)
        if self.has_mean:
            mean, variance = mean + self.prior_mean(features), variance + features.draw.variance
        return mean, variance, D_phi

    def prior_mean(self, features: Features) -> Float[Tensor, "... #S"]:
        """o at each entry, and the likelihood's offset."""
        return features.draw.prior_mean + self.likelihood.offset

    def predictive(self, indices: Int[Tensor, "S D"]) -> LatentMixture:
        """Predictive distribution of the entries at `indices`."""
        return LatentMixture(self.likelihood.known(), *self.posterior(indices))

    @torch.no_grad()
    def posterior(self, indices: Int[Tensor, "... S D"]) -> tuple[Float[Tensor, "... C S"], Float[Tensor, "... C S"]]:
        """Mean and variance of f at `indices`, over u and draws of Z, of each component of a mixture, in float64."""
        if self.is_mixture:
            indices = indices.unsqueeze(-3)
        moments = []
        for noise in self.table.prediction_noise(DRAWS):
            features = self.features(indices, noise, new=True)
            moments.append(self.moments(features)[:2])
        self.check_factorisation(features)  # the same for all draws
        means, variances = map(torch.stack, zip(*moments, strict=True))
        mean, variance = means.mean(0), variances.mean(0) + means.var(0, correction=0)
        if not self.is_mixture:
            mean, variance = mean.unsqueeze(-2), variance.unsqueeze(-2)
        elif self.likelihood.learned:  # each has its own zeta: to the f that goes with the one of `known`
            mean = mean + (self.likelihood.offset.mean(-2, keepdim=True) - self.likelihood.offset)
        return mean.double(), variance.double()

    def elbo(
        self,
        indices: Int[Tensor, "... S D"],
        values: Float[Tensor, "... S"],
        total: int | None = None,
        noise: Float[Tensor, "... S D R"] | None = None,
    ) -> Float[Tensor, "..."]:
        """Bound on log p(x, Z), or on log p(x) where Z has a posterior; of a mixture, each component's.

        It is estimated from S of `total` entries, where `total` is given, and from a draw of Z. Without noise the draw
        is the mean of Z.
        """
        mean, variance, _ = self.moments(self.features(indices, noise))
        scale = 1.0 if total is None else total / values.shape[-1]
        return scale * self.likelihood.bound(values, mean, variance).sum(-1) - self.q.kl() + self.log_prior()

    def prior_terms(self) -> Float[Tensor, "..."]:
        """What the bound has besides the entries' part, -KL(q | p) + log p(Z); of a mixture the mean."""
        terms = self.log_prior() - self.q.kl()
        return terms.mean(-1) if self.is_mixture else terms

    @torch.no_grad()
    def step(
        self,
        indices: Int[Tensor, "... S D"],
        values: Float[Tensor, "... S"],
        scale: float | Float[Tensor, "... S"],
        rho: float | Float[Tensor, "..."],
        noise: Float[Tensor, "... S D R"] | None = None,
    ) -> tuple[Float[Tensor, "... S"], Float[Tensor, "... S"]]:
        """Natural gradient step on q(u); then `set_gradients`.

        `scale` is N / S: what one entry of the batch stands for. Where the fit has several processes, each has a part
        of the batch; their sums make the step, and S counts all entries of the batch. `noise` is standard normal, for
        the draw of Z. Returns each entry's bound and log p(x | f) at the posterior mean of f, from after the step on
        q(u); of a mixture, the mean of its components'.
        """
        self.likelihood.limit()
        if self.is_mixture:
            indices, values = indices.unsqueeze(-3), values.unsqueeze(-2)
            scale = scale.unsqueeze(-2) if isinstance(scale, Tensor) else scale
            rho = rho.unsqueeze(-1) if isinstance(rho, Tensor) else rho
        features = self.features(indices, noise)
        self.natural_gradient_step(features, values, scale, rho)
        of_entries = self.set_gradients(features, values, scale)
        return tuple(of_entry.mean(-2) for of_entry in of_entries) if self.is_mixture else of_entries

    @torch.no_grad()
    def natural_gradient_step(
        self,
        features: Features,
        values: Float[Tensor, "... S"],
        scale: float | Float[Tensor, "... S"],
        rho: float | Float[Tensor, "..."],
    ) -> None:
        """Update the sites, q(omega) among them; then move q(u), every block by a natural gradient step of size rho."""
        phi = features.phi
        mean, variance, _ = self.moments(features)
        theta, t = self.likelihood.sites(values, mean, variance)
        if self.has_mean:
            t = t - theta * self.prior_mean(features)  # what is left for u
        G = phi.mT @ ((scale * theta)[..., None] * phi)
        r = (phi.mT @ (scale * t)[..., None]).squeeze(-1)
        info = self.q.natural_gradient_step(*all_reduce(G, r), rho)
        self.failures += info.sum(-1) + features.info

    @torch.no_grad()
    def set_gradients(
        self, features: Features, values: Float[Tensor, "... S"], scale: float | Float[Tensor, "... S"]
    ) -> tuple[Float[Tensor, "... S"], Float[Tensor, "... S"]]:
        """Set all gradients, those of minus the bound with q held fixed, but for a learned shape of counts, see
        `NegativeBinomial.shape_gradient`. Returns each entry's bound and log p(x | f).

        The bound of entry n has the derivatives t_n - theta_n mu_n in the mean of f and -theta_n / 2 in its variance,
        see `PolyaGamma.sites`: since q(omega) is optimal (envelope theorem), or as those of the expectation (Bonnet and
        Price), which a rule of few nodes has up to its error. KL(q | p) depends on nothing but q. So what reaches Z, X
        and the kernel goes through, with D_i = S_i - I,

            mean of f:      scale (theta_n mu_n - t_n)
            variance of f:  scale theta_n / 2
            phi_in:         scale ((theta_n mu_n - t_n) m_i + theta_n D_i phi_in).
        """
        mean, variance, D_phi = self.moments(features)
        theta, t = self.likelihood.sites(values, mean, variance)
        mean_bar, variance_bar = scale * (theta * mean - t), scale * theta / 2
        phi_bar = D_phi.mul_((scale * theta)[..., None])
        phi_bar.addcmul_(mean_bar[..., None], self.q.mean.flatten(-2)[..., None, :])
        others = {}
        if self.likelihood.learned:
            of_entries = scale * self.likelihood.shape_gradient(values, mean, variance)
            others[self.likelihood.log_zeta] = -of_entries.sum(-1, keepdim=True)
        self.backward(features, phi_bar, scale, mean_bar, variance_bar, others)
        return self.likelihood.bound(values, mean, variance), self.likelihood.log_prob(values, mean)


def stack(models: list[ENTED]) -> ENTED:
    """The models as one whose tensors have a leading dimension, of size B.

    They must have the same sizes and settings: what is no tensor is the first one's.
    """
    together = copy.deepcopy(models[0])
    for name, tensor in [*together.named_parameters(), *together.named_buffers()]:
        path, _, leaf = name.rpartition(".")
        stacked = torch.stack([getattr(model.get_submodule(path), leaf).detach() for model in models])
        setattr(together.get_submodule(path), leaf, nn.Parameter(stacked) if tensor.requires_grad else stacked)
    return together


def mixture(models: list[ENTED]) -> ENTED:
    """The models as components of a mixture; of one model, itself."""
    if len(models) == 1:
        return models[0]
    together = stack(models)
    together.is_mixture = True
    return together
