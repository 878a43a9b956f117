"""Sparse orthogonal inducing points: inducing inputs -> whitened features and residual variance.

All blocks of inducing inputs are stacked, X = [B; H; ...]. With K = k(X, X) + jitter I and L = chol(K), the features
of a batch M of factor rows are

    Phi = L^-1 k(X, M).

Block Cholesky makes the parts of Phi that belong to B and H the whitened features of SOLVE-GP,
L_B^-1 k(B, M) and L_C^-1 C(H, M) with C(.,.) = k(.,.) - k(., B) k(B, B)^-1 k(B, .), so one factorisation serves any
number of mutually orthogonal processes. (Paper, section "Efficient Orthogonally Decoupled Approximation".)
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ented.kernels import RBF


class Features(NamedTuple):
    """What a batch of S entries looks like from the inducing points."""

    phi: Float[Tensor, "... P S"]  # whitened features, all blocks stacked
    residual: Float[Tensor, "... S"]  # k_nn - |phi_n|^2 >= 0: prior variance that no inducing point explains
    info: Int[Tensor, "..."]  # non-zero where the Cholesky factorisation failed


class Whiten(torch.autograd.Function):
    """Phi = L^-1 K_XM with L = chol(K_XX), and its derivative with respect to K_XX and K_XM.

    Reverse mode of the Cholesky factorisation as in Murray (2016, arXiv:1602.07527); written out because here it needs
    no more than the product of the incoming adjoint with Phi'. K_XX is (..., P, P), K_XM and Phi are (..., P, S).
    """

    @staticmethod
    def forward(ctx, K_XX: Tensor, K_XM: Tensor):
        L, info = torch.linalg.cholesky_ex(K_XX)
        phi = torch.linalg.solve_triangular(L, K_XM, upper=False)
        ctx.save_for_backward(L, phi)
        ctx.mark_non_differentiable(info)
        return phi, info

    @staticmethod
    @once_differentiable
    def backward(ctx, G: Tensor, _):
        L, phi = ctx.saved_tensors
        # with bars for adjoints, G = Phi-bar:  K_XM-bar = L^-T G
        grad_XM = torch.linalg.solve_triangular(L.mT, G, upper=True)
        # L-bar = -tril(K_XM-bar Phi'), so tril(L' L-bar) = -tril(G Phi') =: -T
        # K_XX-bar = -1/2 L^-T (T + T' - diag T) L^-1
        T = (G @ phi.mT).tril()
        symmetric = T + T.tril(-1).mT
        half = torch.linalg.solve_triangular(L.mT, symmetric, upper=True)
        grad_XX = -0.5 * torch.linalg.solve_triangular(L, half, upper=False, left=False)
        return grad_XX, grad_XM


class InducingBlocks(nn.Module):
    """Inducing inputs X = [X_1; ...; X_b], one block of rows for each orthogonal process.

    Parameters
    ----------
    points : inducing points in all blocks together, P.
    inputs : size Q of an input, here D * R: the factor rows of an entry side by side.
    std : standard deviation of the Gaussian that the inputs start from.
    jitter : added to the diagonal of k(X, X).
    """

    def __init__(self, points: int, inputs: int, std: float, jitter: float):
        super().__init__()
        self.X = nn.Parameter(std * torch.randn(points, inputs))
        self.jitter = jitter

    def forward(self, kernel: RBF, M: Float[Tensor, "... S Q"]) -> Features:
        """Features of the factor rows `M`."""
        identity = torch.eye(self.X.shape[-2], dtype=self.X.dtype, device=self.X.device)
        phi, info = Whiten.apply(kernel(self.X, self.X) + self.jitter * identity, kernel(self.X, M))
        residual = (kernel.diagonal(M) - phi.square().sum(-2)).clamp_min(0)
        return Features(phi, residual, info)
