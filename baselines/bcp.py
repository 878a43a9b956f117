"""BCP: binary CP decomposition by alternating logistic regressions (Wang and Li 2020).

    x_n ~ Bernoulli(sigmoid(theta_n)),    theta_n = sum_r prod_d A_d[i_nd, r],    |theta| <= alpha

Given the other modes, theta is linear in A_d, and each row of A_d is a logistic regression of its own: its entries are
the responses, the products of the other modes' rows the R features.
"""

from math import prod

import torch
from jaxtyping import Float, Int
from torch import Tensor

from baselines.cp import components, sum_by_row
from ented.lightning import SweepModule
from ented.likelihoods import PolyaGamma
from ented.predictive import LatentGaussian

TRIALS = [0.5**k for k in range(9)]  # step sizes that are tried, in this order


class BCP(SweepModule):
    """Maximum likelihood by damped Newton steps, all rows of a mode at once; a sweep is an update of each mode.

    The bound holds in every cell, with an entry or without: a row that a step moves is kept within

        sum_r |A_d[i, r]| prod_{e != d} max_j |A_e[j, r]| <= alpha,

    the most that |theta| can be in its cells. A row above it shrinks to it before its likelihood is compared, so no
    sweep lowers the likelihood, and one row at the bound stops no other. Rows without entries are zero.

    The authors' code solves each regression, or a majorising one, to its end and then goes back towards the last
    factors as far as the bound asks for. It gives cells without an entry the mean of the others, which draws all logits
    towards that mean, and takes the best of several starts; here such cells are unknown, and there is one start.

    Parameters
    ----------
    shape : sizes of the tensor's modes.
    likelihood : of the entries, Bernoulli.
    rank : number of components R.
    alpha : bound on |theta|; 10 in the authors' code.
    newton_steps : Newton steps that an update of a mode makes.
    tolerance : see `SweepModule`; 1e-3 in the authors' code, as are 50 sweeps at most.
    """

    kinds = ("binary",)

    def __init__(
        self,
        shape: tuple[int, ...],
        likelihood: PolyaGamma,
        rank: int,
        alpha: float = 10.0,
        newton_steps: int = 10,
        tolerance: float = 1e-3,
    ):
        super().__init__(likelihood.kind, tolerance)
        self.shape, self.likelihood = tuple(shape), likelihood
        self.alpha, self.newton_steps = alpha, newton_steps
        # the factor matrices of all modes, one below the other
        self.register_buffer("A", torch.randn(sum(shape), rank))

    @property
    def factors(self) -> tuple[Float[Tensor, "I R"], ...]:
        """Factor matrix of each mode."""
        return self.A.split(self.shape)

    def theta(self, indices: Int[Tensor, "S D"]) -> Float[Tensor, "S"]:
        """Logit of each entry."""
        return components(self.factors, indices).sum(-1)

    def initialise(self, indices: Int[Tensor, "N D"], values: Float[Tensor, "N"]) -> None:
        """Spectral start: W is 2 alpha (x - mean x) where there is an entry, and 0 elsewhere.

        The columns of a factor matrix are left singular vectors of W unfolded along its mode. The last mode's are the
        least squares solution given the others, within the bound.
        """
        W = 2 * self.alpha * (values - values.mean())
        for mode, factor in enumerate(self.factors[:-1]):
            rank = min(*factor.shape, len(W))  # where a mode is smaller than R, the other columns stay random
            others = torch.cat([indices[:, :mode], indices[:, mode + 1 :]], 1)
            _, column = others.unique(dim=0, return_inverse=True)
            cells, size = torch.stack([indices[:, mode], column]), (len(factor), len(W))
            unfolded = torch.sparse_coo_tensor(cells, W, size, check_invariants=False)
            U, _, _ = torch.svd_lowrank(unfolded, q=min(rank + 6, *size), niter=10)
            factor[:, :rank] = U[:, :rank]
            factor *= (torch.bincount(indices[:, mode], minlength=len(factor)) > 0)[:, None]
        last, row = self.factors[-1], indices[:, -1]
        X = components(self.factors, indices, skip=len(self.shape) - 1)
        gram = prod(factor.T @ factor for factor in self.factors[:-1])
        last.copy_(sum_by_row(W[:, None] * X, row, len(last)) @ torch.linalg.pinv(gram))
        last *= self.shrinkage(last, len(self.shape) - 1)[:, None]

    def sweep(self, indices: Int[Tensor, "N D"], values: Float[Tensor, "N"]) -> Float[Tensor, ""]:
        for mode in range(len(self.shape)):
            self.update(mode, indices, values)
        return self.likelihood.log_prob(values, self.theta(indices)).sum()

    def update(self, mode: int, indices: Int[Tensor, "N D"], values: Float[Tensor, "N"]) -> None:
        """Newton steps on all rows of a mode's factor matrix A.

        With X_n the features of entry n and p_n = sigmoid(theta_n), a row's direction is H^-1 g with

            g = sum (x_n - p_n) X_n,    H = sum p_n (1 - p_n) X_n X_n'    over its entries.
        """
        A, row = self.factors[mode], indices[:, mode]
        X = components(self.factors, indices, skip=mode)
        identity = torch.eye(X.shape[1], dtype=X.dtype, device=X.device)
        for _ in range(self.newton_steps):
            theta = (X * A[row]).sum(-1)
            p = theta.sigmoid()
            g = sum_by_row((values - p)[:, None] * X, row, len(A))
            weighted = (p * (1 - p))[:, None] * X
            H = sum_by_row(weighted[:, :, None] * X[:, None, :], row, len(A))
            # H is singular in rows with fewer than R entries. The damping changes the way to the maximum, where g = 0
            damping = torch.finfo(X.dtype).eps ** 0.5 * (1 + H.diagonal(dim1=1, dim2=2).sum(-1))
            L, _ = torch.linalg.cholesky_ex(H + damping[:, None, None] * identity)
            direction = torch.cholesky_solve(g[:, :, None], L).squeeze(-1)
            A.copy_(self.line_search(A, direction, mode, theta, (X * direction[row]).sum(-1), values, row))

    def line_search(
        self,
        A: Float[Tensor, "I R"],
        direction: Float[Tensor, "I R"],
        mode: int,
        theta: Float[Tensor, "N"],
        change: Float[Tensor, "N"],
        values: Float[Tensor, "N"],
        row: Int[Tensor, "N"],
    ) -> Float[Tensor, "I R"]:
        """Each row after the first step that does not lower its likelihood; where none does, as it was."""

        def log_likelihood(theta):
            return sum_by_row(self.likelihood.log_prob(values, theta), row, len(A))

        # no further than from bound to bound: where all p are near 0 or 1, H is tiny and the direction far too long
        longest = (2 * self.shrinkage(direction, mode))[:, None].clamp_max(1)
        before, result = log_likelihood(theta), A
        waiting = torch.ones_like(before, dtype=torch.bool)
        for trial in TRIALS:
            step = trial * longest
            moved = A + step * direction
            shrink = self.shrinkage(moved, mode)
            chosen = waiting & (log_likelihood(shrink[row] * (theta + step[row, 0] * change)) >= before)
            result = torch.where(chosen[:, None], shrink[:, None] * moved, result)
            waiting = waiting & ~chosen
        return result

    def shrinkage(self, A: Float[Tensor, "I R"], mode: int) -> Float[Tensor, "I"]:
        """What brings each row of a mode within the bound, 1 where it is."""
        reach = prod(factor.abs().amax(0) for d, factor in enumerate(self.factors) if d != mode)
        return (self.alpha / (A.abs() @ reach)).clamp_max(1)

    def predictive(self, indices: Int[Tensor, "S D"]) -> LatentGaussian:
        theta = self.theta(indices).double()
        return LatentGaussian(self.likelihood, theta, torch.zeros_like(theta))
