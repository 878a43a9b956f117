"""Non-negative CP decomposition of counts: alternating Poisson regression, CP-APR (Chi and Kolda 2012)."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import embedding

from baselines.cp import FLOOR, Missing, components, exposure, poisson_log_likelihood, sum_by_row
from ented.lightning import SweepModule
from ented.likelihoods import PolyaGamma
from ented.predictive import Known


class NCPD(SweepModule):
    """Poisson maximum likelihood by multiplicative updates, one mode at a time; a sweep is all modes once.

    With the columns of the other modes summing to one, B the factor matrix of a mode times the weights and Pi_n the
    components without that mode, the likelihood's gradient in B is Phi - E,

        Phi[i, r] = sum_n x_n Pi_nr / m_n        E[i, r] = the sum of Pi over the known cells of row i,

    and an update is B <- B Phi / E. Where every cell is known, E is 1.

    Parameters
    ----------
    shape : sizes of the tensor's modes.
    likelihood : says of which kind the entries are.
    rank : number of components.
    missing : what cells without an entry are, see `baselines.cp`.
    inner : updates of a mode in a sweep.
    kappa : what an element of B is raised to that is zero although the gradient there is positive (an inadmissible
        zero).
    kappa_tolerance : elements below this are taken for zero.
    tolerance : training ends when no element of min(B, E - Phi) is further from zero at the beginning of a mode's
        updates, which is the Karush-Kuhn-Tucker condition.
    """

    kinds = ("count",)
    likelihood_settings = ()

    def __init__(
        self,
        shape: tuple[int, ...],
        likelihood: PolyaGamma,
        rank: int,
        missing: Missing = "masked",
        inner: int = 10,
        kappa: float = 1e-2,
        kappa_tolerance: float = 1e-10,
        tolerance: float = 1e-4,
    ):
        super().__init__(likelihood.kind, tolerance)
        self.missing, self.inner, self.kappa, self.kappa_tolerance = missing, inner, kappa, kappa_tolerance
        self.shape = tuple(shape)
        # the factor matrices of all modes, one below the other, each with columns that sum to one
        columns = [torch.rand(size, rank) for size in shape]
        self.register_buffer("A", torch.cat([column / column.sum(0) for column in columns]))
        self.register_buffer("weights", torch.ones(rank))
        self.register_buffer("violation", torch.tensor(torch.inf))  # of the KKT condition

    @property
    def factors(self) -> tuple[Float[Tensor, "I R"], ...]:
        """Factor matrix of each mode; views, to be written in place."""
        return self.A.split(self.shape)

    def initialise(self, indices: Int[Tensor, "N D"], values: Float[Tensor, "N"]) -> None:
        """Equal weights, with which the model's total is that of the data."""
        known = exposure(self.factors, indices, 0, self.missing)
        self.weights.fill_(values.sum() / (known * self.factors[0]).sum())

    def sweep(self, indices: Int[Tensor, "N D"], values: Float[Tensor, "N"]) -> Float[Tensor, ""]:
        self.violation.zero_()
        for mode in range(len(self.shape)):
            self.update(mode, indices, values)
        return poisson_log_likelihood(self.scaled(), indices, values, self.missing)

    def update(self, mode: int, indices: Int[Tensor, "N D"], values: Float[Tensor, "N"]) -> None:
        """Update the factor matrix of one mode, and the weights."""
        row, pi = indices[:, mode], components(self.factors, indices, skip=mode)
        B, E = self.factors[mode] * self.weights, exposure(self.factors, indices, mode, self.missing)

        def phi(B):
            mean = (embedding(row, B) * pi).sum(-1)
            return sum_by_row((values / (mean + FLOOR))[:, None] * pi, row, len(B))

        inadmissible = (self.factors[mode] < self.kappa_tolerance) & (phi(B) > E)
        B = torch.where(inadmissible, B + self.kappa * self.weights, B)
        for step in range(self.inner):
            Phi = phi(B)
            if step == 0:
                self.violation.copy_(self.violation.maximum(torch.minimum(B, E - Phi).abs().max()))
            B = torch.where(E > 0, B * Phi / E, B)  # no known cell of a row says nothing
        self.weights.copy_(B.sum(0))
        self.factors[mode].copy_(B / self.weights.clamp_min(torch.finfo(B.dtype).tiny))

    def is_converged(self, before: Float[Tensor, ""]) -> Bool[Tensor, ""]:
        return self.violation <= self.tolerance

    def scaled(self) -> list[Float[Tensor, "I R"]]:
        """The factors, the first with the weights."""
        return [self.factors[0] * self.weights, *self.factors[1:]]

    def predictive(self, indices: Int[Tensor, "S D"]) -> Known:
        mean = components(self.scaled(), indices).sum(-1).double()
        return Known(torch.distributions.Poisson(mean + FLOOR))
