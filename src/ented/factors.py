"""The factor table Z: a row for each index of each mode, and what is known of it.

Row i of mode d holds the R factors z_i^(d) and, with main effects, one number a_i^(d) more; all are N(0, 1) a priori.
They are point estimates, or have a mean-field Gaussian posterior: then Z holds the means, and in as many further
columns the logarithms of the standard deviations. The factors enter the kernel. The effects make the mean of f,

    o_n = a_0 + sum_d (tau_d a_{i_d}^(d) + gamma_d c_{i_d}^(d)),

whose constant a_0, scales tau_d and slopes gamma_d are point estimates. c_i is the logarithm of one more than the
number of other training entries in the row, centred over the training entries. Where events are recorded, a row that
has few of them is mostly one of small values, and one that has none is not an average row. With the row's degree n_i,
its number of training entries, c_i is log n_i for one of these and log(1 + n_i) for a new entry. A row that has none
is taken for one of as few as any row of its mode has: what f would be for fewer, no entry says.

As to a new entry, the prior mean of e_i = tau a_i + gamma c_i was too low by delta = gamma (log(1 + n_i) - log n_i)
when the posterior N(m, s^2) of a_i was found. With the right one the posterior mean of e_i is higher by s^2 delta: s^2
is the share of its prior variance, tau^2, that the data have left.

A minibatch draws z = mean + std * noise anew for each of its entries, so that the gradient passes through the draw
(Kingma and Welling 2014). Effects need no draw: f is linear in them, and their variance adds to that of f.
"""

from dataclasses import dataclass
from itertools import accumulate
from math import log, pi, prod
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import embedding
from torch.quasirandom import SobolEngine

from ented.errors import InputError


class Columns(NamedTuple):
    """The columns of Z in their order; those that the table does not have are of width 0."""

    factors: Float[Tensor, "... R"]
    effect: Float[Tensor, "... E"]
    log_std: Float[Tensor, "... R"]
    effect_log_std: Float[Tensor, "... E"]


@dataclass
class Draw:
    """The table's part in S entries."""

    rows: Int[Tensor, "... S D"]  # of Z
    z: Float[Tensor, "... S Q"]  # the drawn factors side by side, Q = D R
    prior_mean: Float[Tensor, "... #S"] | float  # o
    variance: Float[Tensor, "... S"] | float  # that the effects add to f's
    # and what the backward pass takes up again
    values: Float[Tensor, "... S D W"]  # the rows of Z, W columns
    deviation: Float[Tensor, "... S D R"] | None  # z less its mean
    log_degrees: Float[Tensor, "... S D"] | None  # c


class FactorTable(nn.Module):
    """See above.

    Parameters
    ----------
    shape : sizes I_1, ..., I_D of the tensor's modes.
    rank : factors in a row, R.
    init_std : standard deviation of the Gaussian that the factors, or their means, start from; the effects start at 0.
    posterior_std : what the standard deviations start from; None for point estimates.
    mean : the mean function o: "zero", "constant" for a learned a_0, "effects" without the slopes, or "degrees" for
        all of it.
    sparse_gradients : whether a step leaves the rows alone that its batch does not hold. Each entry then carries its
        share of its rows' prior, log p(z_i) / n_i.

    Raises
    ------
    InputError : a rank below 1.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        rank: int,
        init_std: float = 0.5,
        posterior_std: float | None = None,
        mean: Literal["zero", "constant", "effects", "degrees"] = "zero",
        sparse_gradients: bool = False,
    ):
        super().__init__()
        if rank < 1:
            raise InputError(f"rank={rank}: it must be at least 1")
        self.shape, self.rank, self.init_std = tuple(shape), rank, init_std
        self.has_effects, self.has_slopes = mean in ("effects", "degrees"), mean == "degrees"
        self.variational, self.sparse_gradients = posterior_std is not None, sparse_gradients
        rows, effects = sum(shape), int(self.has_effects)
        columns = [init_std * torch.randn(rows, rank), torch.zeros(rows, effects)]
        if self.variational:
            columns.append(torch.full((rows, rank + effects), log(posterior_std)))
        # the rows of all modes, one below the other; row i of mode d is row offset_d + i
        self.Z = nn.Parameter(torch.cat(columns, 1))
        self.register_buffer("offsets", torch.tensor([[0, *accumulate(self.shape)][:-1]]), persistent=False)
        self.constant = nn.Parameter(torch.zeros(1)) if mean != "zero" else None
        if self.has_effects:
            self.log_tau = nn.Parameter(torch.zeros(len(shape)))
        if self.has_slopes:
            self.gamma = nn.Parameter(torch.zeros(len(shape)))
            self.register_buffer("log_degrees", torch.zeros(rows))  # c for a training entry
            self.register_buffer("log_degrees_of_new", torch.zeros(rows))  # c for a new entry
        if sparse_gradients:
            # the gradient's place, zero between the steps, see `ented.adam.RowAdam`
            self.register_buffer("Z_bar", torch.zeros_like(self.Z), persistent=False)
            self.register_buffer("degrees", torch.ones(rows))

    @property
    def needs_degrees(self) -> bool:
        return self.has_slopes or self.sparse_gradients

    @torch.no_grad()
    def set_degrees(self, degrees: Int[Tensor, "I"]) -> None:
        """Take how many training entries each row has, before the first step where `needs_degrees`.

        With sparse gradients, a row that has none is put at its prior, a point estimate at the mode of that.
        """
        if self.has_slopes:
            of_modes = []
            for n in degrees.to(self.log_degrees).split(self.shape):
                least = n[n > 0].min()
                log_n = n.clamp_min(least).log()
                centre = (n * log_n).sum() / n.sum()
                of_modes.append((log_n - centre, n.clamp_min(least - 1).log1p() - centre))
            c, c_of_new = map(torch.cat, zip(*of_modes, strict=True))
            self.log_degrees.copy_(c)
            self.log_degrees_of_new.copy_(c_of_new)
        if self.sparse_gradients:
            self.degrees.copy_(degrees)
            self.Z.mul_((self.degrees > 0)[..., None])  # a mean of 0 and a standard deviation of 1

    @torch.no_grad()
    def add_new_rows(self) -> None:
        """Give each mode one more row, its last, without training entries: for predictions, not for training.

        Its posterior is the prior, a point estimate 0, where the prior is highest.
        """

        def longer(tensor: Float[Tensor, "... I W"], new: Float[Tensor, "... D W"]) -> Float[Tensor, "... I+D W"]:
            parts = zip(tensor.split(self.shape, -2), new.split(1, -2), strict=True)
            return torch.cat([part for pair in parts for part in pair], -2)

        self.Z = nn.Parameter(longer(self.Z, self.Z.new_zeros(*self.Z.shape[:-2], len(self.shape), self.Z.shape[-1])))
        if self.has_slopes:
            of_modes = self.log_degrees.split(self.shape, -1)
            of_none = torch.cat([of_mode.amin(-1, keepdim=True) for of_mode in of_modes], -1)[..., None]
            for name in ("log_degrees", "log_degrees_of_new"):
                setattr(self, name, longer(getattr(self, name)[..., None], of_none).squeeze(-1))
        self.shape = tuple(size + 1 for size in self.shape)
        self.offsets = self.offsets + torch.arange(len(self.shape), device=self.offsets.device)

    def columns(self, values: Float[Tensor, "... W"]) -> Columns:
        """Rows of Z by what they hold."""
        effects, variational = int(self.has_effects), int(self.variational)
        sizes = [self.rank, effects, variational * self.rank, variational * effects]
        return Columns(*values.split(sizes, -1))

    def rows(self, indices: Int[Tensor, "... S D"]) -> Int[Tensor, "... S D"]:
        """The entries' rows of Z; those of several tables are counted as if they stood one below the other."""
        leading = self.Z.shape[:-2]
        if not leading:
            return indices + self.offsets
        table = torch.arange(prod(leading), device=self.Z.device).view(*leading, 1, 1)
        return indices + self.offsets + table * self.Z.shape[-2]

    def noise(self, entries: int, random: torch.Generator) -> Float[Tensor, "... S D R"] | None:
        """For a draw of the factors of so many entries, in memory from which a copy to the device does not wait."""
        if not self.variational:
            return None
        shape = *self.Z.shape[:-2], entries, len(self.shape), self.rank
        return torch.randn(shape, generator=random, dtype=self.Z.dtype, pin_memory=torch.cuda.is_available())

    def draw(
        self, indices: Int[Tensor, "... S D"], noise: Float[Tensor, "... S D R"] | None = None, new: bool = False
    ) -> Draw:
        """The factors of a batch, at their means where there is no noise, and the mean function.

        `new` says that the entries are not those of the training set.
        """
        rows = self.rows(indices)
        values = embedding(rows, self.Z.flatten(0, -2))
        columns = self.columns(values)
        z, deviation, log_degrees = columns.factors, None, None
        if self.variational:
            deviation = columns.log_std.exp() * (0.0 if noise is None else noise)
            z = z + deviation
        mean, variance = 0.0 if self.constant is None else self.constant, 0.0
        if self.has_effects:
            tau = self.log_tau.exp()[..., None, :]
            mean = mean + (tau * columns.effect.squeeze(-1)).sum(-1)
        if self.has_slopes:
            log_degrees = self.log_degrees.flatten()[rows]
            if new and self.variational:
                s2 = (2 * columns.effect_log_std.squeeze(-1)).exp()
                log_degrees = log_degrees.lerp(self.log_degrees_of_new.flatten()[rows], s2)
            mean = mean + (self.gamma[..., None, :] * log_degrees).sum(-1)
        if self.has_effects and self.variational:
            variance = (tau * columns.effect_log_std.squeeze(-1).exp()).square().sum(-1)
        return Draw(rows, z.flatten(-2), mean, variance, values, deviation, log_degrees)

    def prediction_noise(self, draws: int) -> list[Float[Tensor, "D R"] | None]:
        """For draws that stand for the posterior, always the same: quantiles at the points of a Sobol sequence."""
        if not self.variational:
            return [None]
        inputs = len(self.shape) * self.rank
        uniform = SobolEngine(inputs, scramble=True, seed=0).draw(draws, dtype=torch.float64)
        noise = torch.special.ndtri(uniform.clamp(1e-9, 1 - 1e-9)).to(self.Z)
        return [*noise.unflatten(-1, (len(self.shape), self.rank))]

    def gradients(
        self,
        draw: Draw,
        z_bar: Float[Tensor, "... S Q"],
        mean_bar: Float[Tensor, "... S"] | None,
        variance_bar: Float[Tensor, "... S"] | None,
        scale: float | Float[Tensor, "... S"],
    ) -> dict[nn.Parameter, Float[Tensor, "..."]]:
        """Of a loss that has these derivatives in what was drawn, less the prior's part, see `add_prior`.

        `scale` is what one entry of the batch stands for; with sparse gradients it is a number, and says how much of
        the prior comes with the entry.
        """
        z_bar = z_bar.unflatten(-1, (-1, self.rank))
        columns, columns_bar, found = self.columns(draw.values), [z_bar], {}
        if self.constant is not None:
            found[self.constant] = mean_bar.sum(-1, keepdim=True)
        if self.has_effects:
            tau = self.log_tau.exp()[..., None, :]
            a_bar = tau * mean_bar[..., None]
            columns_bar.append(a_bar[..., None])
            of_tau = a_bar * columns.effect.squeeze(-1)
        if self.variational:
            columns_bar.append(z_bar * draw.deviation)
            if self.has_effects:
                s_bar = 2 * (tau * columns.effect_log_std.squeeze(-1).exp()).square() * variance_bar[..., None]
                columns_bar.append(s_bar[..., None])
                of_tau = of_tau + s_bar
        if self.has_effects:
            found[self.log_tau] = of_tau.sum(-2)
        if self.has_slopes:
            found[self.gamma] = (mean_bar[..., None] * draw.log_degrees).sum(-2)
        rows_bar = torch.cat(columns_bar, -1) if len(columns_bar) > 1 else z_bar
        if self.sparse_gradients:
            share = (scale / self.degrees.flatten()[draw.rows])[..., None]
            rows_bar = rows_bar + share * self._prior_gradient(draw.values)
            Z_bar = self.Z_bar
        else:
            Z_bar = torch.zeros_like(self.Z)
        Z_bar.flatten(0, -2).index_add_(0, draw.rows.flatten(), rows_bar.flatten(0, -2))
        return found | {self.Z: Z_bar}

    def add_prior(self) -> None:
        """Add the gradient of minus `log_prior`, unless the entries have brought it."""
        if not self.sparse_gradients:
            self.Z.grad = self.Z.grad + self._prior_gradient(self.Z)

    def _prior_gradient(self, values: Float[Tensor, "... W"]) -> Float[Tensor, "... W"]:
        """Of minus `log_prior`, in rows of Z."""
        if not self.variational:
            return values
        mean, log_std = values.chunk(2, -1)
        return torch.cat([mean, (2 * log_std).exp() - 1], -1)

    def log_prior(self) -> Float[Tensor, "..."]:
        """log p of the point estimates, or -KL(q | p) of the posterior."""
        if not self.variational:
            return -0.5 * (self.Z.square() + log(2 * pi)).sum((-2, -1))
        mean, log_std = self.Z.chunk(2, -1)
        return -0.5 * (mean.square() + (2 * log_std).exp() - 1 - 2 * log_std).sum((-2, -1))
