"""ENTED in pure PyTorch: Gaussian-process tensor factorisation with Polya-Gamma likelihoods (paper, section 3).

Generative model of an entry with index (i_1, ..., i_D):

    z_i^(d) ~ N(0, I_R)                        factor row i of mode d
    m = [z_i1^(1), ..., z_iD^(D)]              factor rows side by side, in R^(D R)
    f ~ GP(0, k),   x ~ p(x | f(m))            Bernoulli or negative binomial

The factors Z and the inducing inputs X are point estimates; the inducing values have a Gaussian posterior. The bound
that training climbs is

    ELBO = sum_n bound(x_n; mu_n, s2_n) - KL(q | p) + log p(Z).
"""

from itertools import accumulate
from math import log, pi

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import embedding

from ented.distributed import all_reduce
from ented.inducing import Features, InducingBlocks
from ented.kernels import RBF
from ented.likelihoods import LatentGaussian, PolyaGamma
from ented.tensor import InputError
from ented.variational import GaussianBlocks


class FactorProcess(nn.Module):
    """The prior of f: factors Z, a Gaussian process over their combinations, and its inducing inputs X.

    Parameters
    ----------
    shape : sizes I_1, ..., I_D of the tensor's modes.
    rank : length R of a factor row, the same in every mode.
    inducing : number of inducing points.
    init_std : standard deviation of the Gaussian that Z and X start from.
    jitter : added to the diagonal of k(X, X).
    kernel : covariance function.
    sparse_gradients : whether a step leaves the factor rows alone that its batch does not hold. Each entry then carries
        its share of its rows' prior, log p(z_i) / n_i for a row with n_i training entries, see `count_rows`.

    Raises
    ------
    InputError : a rank or number of inducing points below 1.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        rank: int,
        inducing: int = 100,
        init_std: float = 0.5,
        jitter: float = 1e-4,
        kernel: RBF | None = None,
        sparse_gradients: bool = False,
    ):
        super().__init__()
        for name, value in {"rank": rank, "inducing": inducing}.items():
            if value < 1:
                raise InputError(f"{name}={value}: it must be at least 1")
        self.shape = tuple(shape)
        self.kernel = kernel or RBF()
        # the factor matrices of all modes, one below the other; row i of mode d is row offset_d + i
        self.Z = nn.Parameter(init_std * torch.randn(sum(self.shape), rank))
        self.inducing = InducingBlocks(inducing, len(self.shape) * rank, init_std, jitter)
        self.register_buffer("offsets", torch.tensor([0, *accumulate(self.shape)][:-1]), persistent=False)
        self.sparse_gradients = sparse_gradients
        if sparse_gradients:
            # the gradient's place, zero between the steps, see `ented.adam.RowAdam`
            self.register_buffer("Z_bar", torch.zeros_like(self.Z), persistent=False)
            self.register_buffer("row_counts", torch.ones(len(self.Z)))
        # not 0 once a factorisation has failed; read once an epoch, so that no step waits for the device
        self.register_buffer("failures", torch.zeros((), dtype=torch.long), persistent=False)

    @property
    def factors(self) -> tuple[Float[Tensor, "... I R"], ...]:
        """Factor matrix of each mode."""
        return self.Z.detach().split(self.shape, -2)

    @torch.no_grad()
    def count_rows(self, counts: Int[Tensor, "I"]) -> None:
        """Take how many training entries each row has; one that has none is put where its prior is highest."""
        self.row_counts.copy_(counts)
        self.Z.mul_((self.row_counts > 0)[:, None])

    def rows(self, indices: Int[Tensor, "... S D"]) -> Int[Tensor, "... S D"]:
        """The entries' rows of Z."""
        return indices + self.offsets

    def features(self, indices: Int[Tensor, "... S D"]) -> Features:
        """Whitened features of a batch, differentiable in Z and X."""
        m = embedding(self.rows(indices), self.Z.flatten(0, -2)).flatten(-2)
        return self.inducing(self.kernel, m)

    @torch.no_grad()
    def backward(
        self,
        indices: Int[Tensor, "... S D"],
        features: Features,
        phi_bar: Float[Tensor, "... S P"],
        scale: float | Float[Tensor, "... S"],
    ) -> None:
        """Set the gradients of Z and X to those of a loss that has the derivative phi_bar in Phi, less log p(Z).

        `scale` is what one entry of the batch stands for; with sparse gradients it is a number, and says how much of
        the prior comes with the entry.
        """
        X_bar, M_bar = self.inducing.backward(self.kernel, features, phi_bar)
        rows, M_bar = self.rows(indices), M_bar.reshape(*indices.shape, self.Z.shape[-1])
        if self.sparse_gradients:
            M_bar += (scale / self.row_counts[rows])[..., None] * self.Z[rows]
            self.Z.grad = self.Z_bar.index_add_(0, rows.flatten(), M_bar.flatten(0, -2))
            self.inducing.X.grad = X_bar
            return
        Z_bar = torch.zeros_like(self.Z)
        Z_bar.flatten(0, -2).index_add_(0, rows.flatten(), M_bar.flatten(0, -2))
        self.inducing.X.grad, Z_bar = all_reduce(X_bar, Z_bar)
        self.Z.grad = Z_bar + self.Z

    def log_prior(self) -> Float[Tensor, "..."]:
        """log p(Z), standard normal."""
        return -0.5 * (self.Z.square() + log(2 * pi)).sum((-2, -1))


class ENTED(FactorProcess):
    """The model and its inference.

    Parameters
    ----------
    shape, rank, init_std, jitter, kernel, sparse_gradients : see `FactorProcess`.
    likelihood : of an entry given f.
    inducing : inducing points in all blocks together.
    blocks : orthogonal blocks they are divided into: 2 is ENTED, 1 is GPTF-PG.

    Raises
    ------
    InputError : as above, or blocks below 1, or inducing points that the blocks do not divide.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        likelihood: PolyaGamma,
        rank: int,
        inducing: int = 100,
        blocks: int = 2,
        init_std: float = 0.5,
        jitter: float = 1e-4,
        kernel: RBF | None = None,
        sparse_gradients: bool = False,
    ):
        super().__init__(shape, rank, inducing, init_std, jitter, kernel, sparse_gradients)
        if blocks < 1:
            raise InputError(f"model.blocks={blocks}: it must be at least 1")
        if inducing % blocks:
            raise InputError(f"inducing={inducing} points cannot be divided into model.blocks={blocks} equal blocks")
        self.likelihood = likelihood
        self.q = GaussianBlocks(blocks, inducing // blocks)

    def predictive(self, indices: Int[Tensor, "... S D"]) -> LatentGaussian:
        """Predictive distribution of the entries at `indices`."""
        with torch.no_grad():
            features = self.features(indices)
            mean, variance, _ = self.q.moments(features.phi, features.diagonal)
        return LatentGaussian(self.likelihood, mean.double(), variance.double())

    def elbo(
        self, indices: Int[Tensor, "... S D"], values: Float[Tensor, "... S"], total: int | None = None
    ) -> Float[Tensor, "..."]:
        """Bound on log p(x, Z); estimated from S of `total` entries where `total` is given."""
        features = self.features(indices)
        mean, variance, _ = self.q.moments(features.phi, features.diagonal)
        scale = 1.0 if total is None else total / values.shape[-1]
        return scale * self.likelihood.bound(values, mean, variance).sum(-1) - self.q.kl() + self.log_prior()

    @torch.no_grad()
    def step(
        self,
        indices: Int[Tensor, "... S D"],
        values: Float[Tensor, "... S"],
        scale: float | Float[Tensor, "... S"],
        rho: float | Float[Tensor, "..."],
    ) -> tuple[Float[Tensor, "... S"], Float[Tensor, "... S"]]:
        """Natural gradient step on q(u); then set the gradients of Z and X, those of minus the bound.

        `scale` is N / S: what one entry of the batch stands for. Where the fit has several processes, each has a part
        of the batch; their sums make the step, and S counts all entries of the batch. Returns each entry's bound and
        posterior mean of f, from after the step on q(u).
        """
        features = self.features(indices)
        self.natural_gradient_step(features, values, scale, rho)
        phi_bar, bound, mean = self.feature_gradient(features, values, scale)
        self.backward(indices, features, phi_bar, scale)
        return bound, mean

    @torch.no_grad()
    def natural_gradient_step(
        self,
        features: Features,
        values: Float[Tensor, "... S"],
        scale: float | Float[Tensor, "... S"],
        rho: float | Float[Tensor, "..."],
    ) -> None:
        """Update q(omega), then move q(u) of every block by a natural gradient step of size rho."""
        phi = features.phi
        mean, variance, _ = self.q.moments(phi, features.diagonal)
        theta = self.likelihood.theta(values, mean, variance)
        gram = phi.mT @ ((scale * theta)[..., None] * phi)
        linear = (phi.mT @ (scale * self.likelihood.chi(values))[..., None]).squeeze(-1)
        info = self.q.natural_gradient_step(*all_reduce(gram, linear), rho)
        self.failures += info.sum(-1) + features.info

    @torch.no_grad()
    def feature_gradient(
        self, features: Features, values: Float[Tensor, "... S"], scale: float | Float[Tensor, "... S"]
    ) -> tuple[Float[Tensor, "... S P"], Float[Tensor, "... S"], Float[Tensor, "... S"]]:
        """Derivative of minus the bound in the features, with q held fixed: what reaches Z and X goes through them.

        q(omega) is optimal for q(u), so the bound's gradient does not pass through it (envelope theorem); neither the
        KL nor k(m, m) depends on Z and X. For the features of entry n in block i it is

            -scale ((chi_n - theta_n mu_n) m_i - theta_n D_i phi_in),    D_i = S_i - I.

        Returns
        -------
        phi_bar : this derivative.
        bound : of each entry at the current q.
        mean : posterior mean of f at each entry.
        """
        mean, variance, D_phi = self.q.moments(features.phi, features.diagonal)
        theta = self.likelihood.theta(values, mean, variance)
        bound = self.likelihood.bound(values, mean, variance)
        mean_bar = scale * (theta * mean - self.likelihood.chi(values))
        phi_bar = D_phi.mul_((scale * theta)[..., None])
        phi_bar.addcmul_(mean_bar[..., None], self.q.mean.flatten(-2)[..., None, :])
        return phi_bar, bound, mean
