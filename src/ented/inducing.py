"""Sparse orthogonal inducing points: inducing inputs -> whitened features and residual variance.

All blocks of inducing inputs are stacked, X = [B; H; ...]. With K = k(X, X) + jitter I = L L', the features of a batch
M of factor rows are the rows of

    Phi = k(M, X) L'^-1.

Block Cholesky makes the parts of Phi that belong to B and H the whitened features of SOLVE-GP,
k(M, B) L_B'^-1 and C(M, H) L_C'^-1 with C(.,.) = k(.,.) - k(., B) k(B, B)^-1 k(B, .), so one factorisation serves any
number of mutually orthogonal processes. (Paper, section "Efficient Orthogonally Decoupled Approximation".)

An entry is a row, here and in `ented.variational`. PyTorch solves in column-major order, so the right-hand sides are
given, and the solutions taken, as transposes: then nothing is copied from one order to the other.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ented.factors import Draw
from ented.kernels import RBF


@dataclass
class Features:
    """What a batch of S entries looks like from the inducing points."""

    phi: Float[Tensor, "... S P"]  # whitened features, all blocks side by side
    diagonal: Float[Tensor, "... S"]  # k_nn
    info: Int[Tensor, "..."]  # non-zero where the Cholesky factorisation failed
    # and what the backward pass takes up again
    XM: Float[Tensor, "... P+S Q"]  # X above M
    K: Float[Tensor, "... P+S P"]  # k(XM, X)
    L: Float[Tensor, "... P P"]
    draw: Draw | None = None  # M's, where there is one

    @property
    def residual(self) -> Float[Tensor, "... S"]:
        """k_nn - |phi_n|^2 >= 0: the prior variance that no inducing point explains."""
        return (self.diagonal - self.phi.square().sum(-1)).clamp_min(0)


class InducingInputs(nn.Module):
    """Inducing inputs X = [X_1; ...; X_b], the blocks one below the other, and the features that they make.

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
        XM = torch.cat([self.X, M], -2)
        K = kernel(XM, self.X)
        K_XX, K_MX = K.tensor_split([self.X.shape[-2]], -2)
        K_XX = K_XX.clone()
        K_XX.diagonal(dim1=-2, dim2=-1).add_(self.jitter)
        L, info = torch.linalg.cholesky_ex(K_XX)
        phi = torch.linalg.solve_triangular(L, K_MX.mT, upper=False).mT
        return Features(phi, kernel.diagonal(M), info, XM, K, L)

    @torch.no_grad()
    def backward(
        self, kernel: RBF, features: Features, phi_bar: Float[Tensor, "... S P"]
    ) -> tuple[Float[Tensor, "... P Q"], Float[Tensor, "... S Q"], dict[nn.Parameter, Tensor]]:
        """The derivative in X, M and the kernel's parameters of a function whose derivative in Phi is phi_bar.

        Reverse mode of the Cholesky factorisation as in Murray (2016, arXiv:1602.07527); written out because here it
        needs no more than the product of phi_bar with Phi. With bars for adjoints,

            K_MX_bar = phi_bar L^-1
            L_bar    = -tril(K_MX_bar' Phi),  so that  tril(L' L_bar) = -tril(phi_bar' Phi) =: T
            K_XX_bar = L'^-1 (T - diag(T) / 2) L^-1

        The transpose of K_XX_bar does as well, since X stands in the rows and the columns of k(X, X); it is made with
        K_MX_bar, which lies below it.
        """
        phi, XM, K, L = features.phi, features.XM, features.K, features.L
        T = (phi_bar.mT @ phi).neg_().tril_()
        T.diagonal(dim1=-2, dim2=-1).mul_(0.5)
        T_Linv_mT = torch.linalg.solve_triangular(L.mT, T.mT, upper=True)
        right_hand_sides = torch.cat([T_Linv_mT, phi_bar], -2)
        K_bar = torch.linalg.solve_triangular(L.mT, right_hand_sides.mT, upper=True).mT
        XM_bar, X_bar, of_kernel = kernel.backward(XM, self.X, K, K_bar)
        X_again_bar, M_bar = XM_bar.tensor_split([L.shape[-1]], -2)
        return X_bar + X_again_bar, M_bar, of_kernel
