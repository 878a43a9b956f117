"""SBTR: scalable Bayesian tensor ring for binary tensors (Tao, Tanaka, Zhao 2023), fitted by online EM.

    x_n ~ Bernoulli(sigmoid(f_n)),    f_n = tr( prod_d G_d[i_d] diag(lambda_d) )
    G_d[i][r, s] ~ N(0, 1),           lambda_dr ~ N(0, 1 / tau_dr)
    tau_dr = prod_{l <= r} delta_dl,  delta_dl ~ Gamma(a, 1)

The multiplicative gamma process (Bhattacharya, Dunson 2011) makes the precision tau grow with r on average (a > 1), so
that components that the data do not ask for fade. Polya-Gamma variables omega_n (Polson, Scott, Windle 2013) make f_n
Gaussian.
"""

from functools import reduce

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ented.lightning import Batch, GradientModule
from ented.likelihoods import PolyaGamma
from ented.predictive import LatentGaussian


class SBTR(GradientModule):
    """Each minibatch brings q(omega) of its entries and q(delta) up to date, then makes an Adam step on G and lambda.

    G and lambda are point estimates, the Rs of the ring all equal.

    Parameters
    ----------
    shape : sizes of the tensor's modes.
    likelihood : of the entries; its q(omega) is used.
    rank : R, the size of each bond of the ring.
    a_delta : shape a of the gamma prior; 2.1 in the authors' code.
    init_scale : the cores start from the uniform distribution between 0 and this.
    lr : Adam's learning rate.
    """

    kinds = ("binary",)

    def __init__(
        self,
        shape: tuple[int, ...],
        likelihood: PolyaGamma,
        rank: int,
        a_delta: float = 2.1,
        init_scale: float = 0.5,
        lr: float = 1e-3,
    ):
        super().__init__(likelihood.kind, lr)
        self.likelihood, self.a_delta = likelihood, a_delta
        self.cores = nn.ParameterList([init_scale * torch.rand(size, rank, rank) for size in shape])
        self.weights = nn.Parameter(torch.ones(len(shape), rank))  # lambda
        self.register_buffer("delta", torch.ones(len(shape), rank))  # E[delta]

    @property
    def tau(self) -> Float[Tensor, "D R"]:
        """E[tau] under q(delta), whose elements are independent."""
        return self.delta.cumprod(1)

    def f(self, indices: Int[Tensor, "S D"]) -> Float[Tensor, "S"]:
        """Trace of the product around the ring."""
        *chain, last = [
            core.index_select(0, rows) * weight
            for core, rows, weight in zip(self.cores, indices.T, self.weights, strict=True)
        ]
        return (reduce(torch.matmul, chain) * last.mT).sum((1, 2))  # tr(A B) = sum of A * B'

    def predictive(self, indices: Int[Tensor, "S D"]) -> LatentGaussian:
        with torch.no_grad():
            f = self.f(indices).double()
        return LatentGaussian(self.likelihood, f, torch.zeros_like(f))

    @torch.no_grad()
    def update_delta(self) -> None:
        """q(delta_dr) = Gamma(a + (R - r + 1) / 2, 1 + sum_{h >= r} lambda_dh^2 E[tau_dh / delta_dr] / 2), r = 1..R."""
        R = self.delta.shape[1]
        for r in range(R):
            others = self.delta.clone()
            others[:, r] = 1
            rate = 1 + (self.weights.square() * others.cumprod(1))[:, r:].sum(1) / 2
            self.delta[:, r] = (self.a_delta + (R - r) / 2) / rate

    @torch.no_grad()
    def expected_omega(self, batch: Batch) -> Float[Tensor, "S"]:
        """E[omega] under the optimal q(omega) = PG(1, f), tanh(f / 2) / (2 f)."""
        indices, values = batch
        f = self.f(indices)
        return self.likelihood.theta(values, f, torch.zeros_like(f))

    def expected_log_joint(self, batch: Batch, omega: Float[Tensor, "S"], scale: float) -> Float[Tensor, ""]:
        """E[log p(x, omega, lambda | G, delta)] under q(omega) and q(delta), up to a constant in G and lambda.

        The batch's part counts `scale` times. log p(G) is left to Adam, see `configure_optimizers`.
        """
        indices, values = batch
        f = self.f(indices)
        data = (self.likelihood.chi(values) * f - omega * f.square() / 2).sum()
        return scale * data - (self.tau * self.weights.square()).sum() / 2

    def loss(self, indices: Int[Tensor, "S D"], values: Float[Tensor, "S"]) -> Float[Tensor, ""]:
        """Minus the expected log joint, at the optimal q(omega) and after one pass over q(delta).

        Only its gradient counts: the entropies of q are left out, so that values of different steps do not compare.
        """
        self.update_delta()
        batch = indices, values
        scale = len(self.trainer.datamodule.train) / len(values)
        return -self.expected_log_joint(batch, self.expected_omega(batch), scale)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, whose weight decay is the prior of the cores: the gradient of -log N(G; 0, 1) is G.

        As a term of the loss it would pass over every row of every core twice more in each step.
        """
        groups = [{"params": self.cores.parameters(), "weight_decay": 1.0}, {"params": [self.weights]}]
        return torch.optim.Adam(groups, self.lr, fused=True)
