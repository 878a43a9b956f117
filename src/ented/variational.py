"""Variational posterior of the whitened inducing values: one Gaussian a block, in natural parameters."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class GaussianBlocks(nn.Module):
    """q(u_1) ... q(u_b) with q(u_i) = N(m_i, S_i); the prior of each u_i is N(0, I).

    The natural parameters are Lambda_i = S_i^-1 and eta_i = Lambda_i m_i. They and the moments m_i, S_i, which the
    next step starts from, are buffers: the natural gradient moves them, never an optimiser.

    Parameters
    ----------
    blocks : number of mutually independent blocks, b.
    size : inducing points in a block, p.
    """

    def __init__(self, blocks: int, size: int):
        super().__init__()
        identity = torch.eye(size).expand(blocks, size, size)
        self.register_buffer("eta", torch.zeros(blocks, size))
        self.register_buffer("precision", identity.clone())
        self.register_buffer("mean", torch.zeros(blocks, size))
        self.register_buffer("covariance", identity.clone())

    def moments(
        self, phi: Float[Tensor, "... S P"], diagonal: Float[Tensor, "... S"]
    ) -> tuple[Float[Tensor, "... S"], Float[Tensor, "... S"], Float[Tensor, "... S P"]]:
        """Mean and variance of f at each entry, and D_i phi_in with D_i = S_i - I, which the gradient needs too.

        mu_n = sum_i m_i' phi_in,    s2_n = k_nn + sum_i phi_in' D_i phi_in
        """
        mean = (phi @ self.mean.flatten(-2)[..., None]).squeeze(-1)
        D = self.covariance - torch.eye(self.covariance.shape[-1], dtype=phi.dtype, device=phi.device)
        of_blocks = zip(phi.split(D.shape[-1], -1), D.unbind(-3), strict=True)
        D_phi = torch.cat([phi_i @ D_i for phi_i, D_i in of_blocks], -1)
        variance = diagonal + (phi * D_phi).sum(-1)
        return mean, variance.clamp_min(0), D_phi  # rounding may leave it slightly below zero

    @torch.no_grad()
    def natural_gradient_step(
        self, G: Float[Tensor, "... P P"], r: Float[Tensor, "... P"], rho: float | Float[Tensor, "..."]
    ) -> Int[Tensor, "... b"]:
        """Move every block by step size rho in [0, 1]; rho = 1 is exact coordinate ascent, 0 moves nothing.

        The data enter through two sums over entries, G = sum_n theta_n phi_n phi_n' and r = sum_n t_n phi_n, where t_n
        is the linear term of the entry's site, the paper's chi_n, less what the mean function explains:

            Lambda_i <- (1 - rho) Lambda_i + rho (I + G_ii)
            eta_i    <- (1 - rho) eta_i    + rho (r_i - sum_{j != i} G_ij m_j)        block after block

        Returns the info flag of each block's Cholesky factorisation, non-zero where it failed.
        """
        blocks, size = self.mean.shape[-2:]
        G = G.unflatten(-1, (blocks, size)).unflatten(-3, (blocks, size))  # (..., b, p, b, p)
        own = G.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)  # G_ii, (..., b, p, p)
        r = r.unflatten(-1, (blocks, size))
        rho = torch.as_tensor(rho, dtype=G.dtype, device=G.device)[..., None]
        # every Lambda_i first: theta is fixed, so they do not depend on each other
        self.precision.lerp_(own, rho[..., None, None]).diagonal(dim1=-2, dim2=-1).add_(rho[..., None])
        L, info = torch.linalg.cholesky_ex(self.precision)
        # S_i = L^-T L^-1; torch.cholesky_inverse would wait for the device to see whether it worked
        identity = torch.eye(size, dtype=L.dtype, device=L.device).expand_as(L)
        L_inverse = torch.linalg.solve_triangular(L, identity, upper=False)
        torch.matmul(L_inverse.mT, L_inverse, out=self.covariance)
        for i in range(blocks):
            r_i = r[..., i, :, None]
            for j in range(blocks):
                if j != i:
                    r_i = r_i - G[..., i, :, j, :] @ self.mean[..., j, :, None]
            self.eta[..., i, :].lerp_(r_i.squeeze(-1), rho)
            m_i = self.covariance[..., i, :, :] @ self.eta[..., i, :, None]
            self.mean[..., i, :].copy_(m_i.squeeze(-1))
        return info

    def kl(self) -> Float[Tensor, "..."]:
        """KL(q | p) = sum_i 1/2 (tr S_i + m_i' m_i - p + log|Lambda_i|)."""
        L, _ = torch.linalg.cholesky_ex(self.precision)
        log_det = 2 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        trace = self.covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
        quadratic = self.mean.square().sum(-1)
        return 0.5 * (trace + quadratic - self.mean.shape[-1] + log_det).sum(-1)
