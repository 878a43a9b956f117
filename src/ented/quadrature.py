"""Expectations over a normal f: a rule of few nodes for training, and one of known error for predictions."""

from math import ceil

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

NODES = 512  # at once: a narrow function needs thousands of them


def gauss_hermite(nodes: int) -> tuple[Float[Tensor, "G"], Float[Tensor, "G"]]:
    """Nodes and weights of E[g(z)], z standard normal: exact for polynomials g of degree 2 G - 1."""
    z, weights = np.polynomial.hermite_e.hermegauss(nodes)
    return tuple(torch.tensor(rule).to(torch.get_default_dtype()) for rule in (z, weights / weights.sum()))


def normal_grid(variance: Float[Tensor, "..."], width: float) -> tuple[Float[Tensor, "G"], Float[Tensor, "G"]]:
    """Nodes and log weights of the trapezoid rule for E[g(mean + sd z)], z standard normal.

    Where g has no finer detail than `width`, the integrand has none finer than h = (1 + sd^2 / width^2)^-1/2 in z, the
    width of the product of two Gaussians. With h as its step the rule's relative error is about
    2 exp(-2 pi^2) = 5e-9. The entry with the largest variance decides for all.
    """
    steps = ceil(12 * (1 + variance.max().item() / width**2) ** 0.5)
    nodes = torch.linspace(-12, 12, 2 * steps + 1, dtype=variance.dtype, device=variance.device)
    return nodes, torch.log_softmax(-nodes.square() / 2, -1)


def log_expectation(
    log_function, mean: Float[Tensor, "... S"], variance: Float[Tensor, "... S"], width: float
) -> Float[Tensor, "... S"]:
    """log E[exp(log_function(f))] for f ~ N(mean, variance), without leaving the log domain; `width` as above."""
    total = torch.full_like(mean, -torch.inf)
    for nodes, log_weights in zip(*(rule.split(NODES) for rule in normal_grid(variance, width)), strict=True):
        f = mean[..., None] + variance.sqrt()[..., None] * nodes
        total = torch.logaddexp(total, torch.logsumexp(log_function(f) + log_weights, -1))
    return total
