"""Generalised CP (Hong, Kolda, Duersch 2020): a CP model of the mean of counts, or of the logit of a one."""

from math import prod

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import softplus

from baselines.cp import FLOOR, Missing, components, poisson_log_likelihood, total
from baselines.lbfgs import maximise
from ented.datamodule import generator
from ented.errors import InputError
from ented.lightning import SweepModule
from ented.likelihoods import PolyaGamma
from ented.predictive import Known, Predictive
from ented.tensor import COOTensor


class GCP(SweepModule):
    """Maximum likelihood by L-BFGS over all entries; sweep k makes 2^(k - 1) of its iterations, at most 512.

    The first sweeps are short because with few entries the fit that predicts best comes within a few iterations, the
    later ones long because L-BFGS begins each without memory, and a fit to sparse counts needs it.

    Counts are Poisson with mean m, and the factors are not negative. Binary entries are Bernoulli with logit m. The
    factors of both start positive, and m with the sum of the data: from logits of both signs, or large ones, the fits
    predict held-out entries worse.

    Parameters
    ----------
    shape : sizes of the tensor's modes.
    likelihood : says of which kind the entries are.
    rank : number of components.
    missing : what cells without an entry are, see `baselines.cp`.
    sample : the Bernoulli likelihood of all zeros has no closed form. In a tensor with more cells than this, so many
        are drawn uniformly, and those without an entry, repeats dropped, stand for all of them: the zero stratum of
        Kolda and Hong (2020), but drawn once and the same in every sweep.
    tolerance : see `SweepModule`.
    """

    likelihood_settings = ()

    def __init__(
        self,
        shape: tuple[int, ...],
        likelihood: PolyaGamma,
        rank: int,
        missing: Missing = "masked",
        sample: int = 1_000_000,
        tolerance: float = 1e-8,
    ):
        super().__init__(likelihood.kind, tolerance)
        self.shape, self.missing, self.sample = tuple(shape), missing, sample
        self.counts = likelihood.kind == "count"
        # the factor matrices of all modes, one below the other
        self.register_buffer("A", torch.rand(sum(shape), rank))
        self.register_buffer("seed", torch.randint(2**31, ()))  # of the sample
        self.register_buffer("sweeps", torch.tensor(0))
        self.zeros: Int[Tensor, "M D"] | None = None

    @property
    def factors(self) -> tuple[Float[Tensor, "I R"], ...]:
        return self.A.split(self.shape)

    def initialise(self, indices: Int[Tensor, "N D"], values: Float[Tensor, "N"]) -> None:
        """Scale the factors so that m has the sum of the data, or 1 where all are zeros: no gradient leaves m = 0."""
        mass = values.sum().clamp(min=1)
        self.A *= (mass / total(self.factors, indices, self.missing)) ** (1 / len(self.shape))

    def sweep(self, indices: Int[Tensor, "N D"], values: Float[Tensor, "N"]) -> Float[Tensor, ""]:
        def objective(vector):
            factors = vector.view_as(self.A).split(self.shape)
            if self.counts:
                return poisson_log_likelihood(factors, indices, values, self.missing)
            logit = components(factors, indices).sum(-1)
            return (values * logit - softplus(logit)).sum() + self.zeros_log_likelihood(factors, indices)

        lower = 0.0 if self.counts else None
        self.sweeps += 1
        iterations = min(2 ** (self.sweeps.item() - 1), 512)
        vector, value = maximise(objective, self.A.flatten(), iterations, lower)
        self.A.copy_(vector.view_as(self.A))
        return value

    def zeros_log_likelihood(self, factors, indices: Int[Tensor, "N D"]) -> Float[Tensor, ""] | float:
        """Bernoulli log likelihood of the cells without an entry, where they are zeros."""
        unknown = prod(self.shape) - len(indices)
        if self.missing == "masked" or not unknown:
            return 0.0
        if self.zeros is None:
            self.zeros = self.draw_zeros(indices).to(indices.device)
        logit = components(factors, self.zeros).sum(-1)
        return -unknown / len(self.zeros) * softplus(logit).sum()

    def draw_zeros(self, indices: Int[Tensor, "N D"]) -> Int[Tensor, "M D"]:
        """All cells without an entry, or a sample of them.

        Raises
        ------
        InputError : no drawn cell is without an entry.
        """
        if prod(self.shape) <= self.sample:
            cells = torch.cartesian_prod(*[torch.arange(size) for size in self.shape]).view(-1, len(self.shape))
        else:
            random = generator(self.seed.item())
            cells = torch.stack([torch.randint(size, (self.sample,), generator=random) for size in self.shape], 1)
        known, drawn = (
            COOTensor(rows, torch.zeros(len(rows), dtype=torch.float64), self.shape) for rows in (indices.cpu(), cells)
        )
        try:
            return drawn.distinct().without(known).indices
        except InputError:
            raise InputError(f"every cell of the sample has an entry: raise model.sample (now {self.sample})") from None

    def predictive(self, indices: Int[Tensor, "S D"]) -> Predictive:
        m = components(self.factors, indices).sum(-1).double()
        if self.counts:
            return Known(torch.distributions.Poisson(m + FLOOR))
        return Known(torch.distributions.Bernoulli(logits=m))
