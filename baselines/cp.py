"""Pieces of the canonical polyadic (CP) model, m_n = sum_r prod_d A_d[i_nd, r], for tensors in coordinate form.

The methods that are made of them take `missing`, which says what is known of the cells without an entry: nothing
("masked"), or that they are zero ("zeros"). A Poisson likelihood never has these zeros written down: all that it takes
from them is the sum of m over all cells, which the column sums of the factors give.
"""

from collections.abc import Sequence
from math import prod
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import embedding

Missing = Literal["masked", "zeros"]
Factors = Sequence[Float[Tensor, "I R"]]
FLOOR = 1e-10  # added to a Poisson mean, so that a count above zero has a finite log likelihood where the mean is 0


def components(factors: Factors, indices: Int[Tensor, "S D"], skip: int | None = None) -> Float[Tensor, "S R"]:
    """prod_d A_d[i_nd, r] of each entry and component, over all modes but `skip`."""
    return prod(embedding(indices[:, mode], factor) for mode, factor in enumerate(factors) if mode != skip)


def exposure(factors: Factors, indices: Int[Tensor, "N D"], mode: int, missing: Missing) -> Float[Tensor, "I R"]:
    """The derivative in A_mode of the sum of m over the known cells."""
    if missing == "zeros":
        others = prod(factor.sum(0) for d, factor in enumerate(factors) if d != mode)
        return others.expand_as(factors[mode])
    return sum_by_row(components(factors, indices, skip=mode), indices[:, mode], len(factors[mode]))


def total(factors: Factors, indices: Int[Tensor, "N D"], missing: Missing) -> Float[Tensor, ""]:
    """The sum of m over the known cells."""
    if missing == "zeros":
        return prod(factor.sum(0) for factor in factors).sum()
    return components(factors, indices).sum()


def poisson_log_likelihood(
    factors: Factors, indices: Int[Tensor, "N D"], values: Float[Tensor, "N"], missing: Missing
) -> Float[Tensor, ""]:
    """sum x log(m + FLOOR) - m over the known cells: without the term that the factors do not change, -log x!."""
    mean = components(factors, indices).sum(-1)
    return (values * (mean + FLOOR).log()).sum() - total(factors, indices, missing)


def sum_by_row(terms: Float[Tensor, "N ..."], row: Int[Tensor, "N"], rows: int) -> Float[Tensor, "rows ..."]:
    """Sum of the terms of each row of a mode."""
    return terms.new_zeros(rows, *terms.shape[1:]).index_add_(0, row, terms)
