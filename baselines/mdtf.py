"""MDTF: multi-mode deep tensor factorisation (Fan 2022), a Tucker decomposition whose factors come from networks.

    x_n ~ sum_r core[r_1, ..., r_D] prod_d U_d[i_nd, r_d]     U_d = g_d(Z_d)

with a network g_d and inputs Z_d for each mode. Counts are taken as real numbers.
"""

from math import prod

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ented.lightning import GradientModule
from ented.likelihoods import PolyaGamma
from ented.predictive import Point


class MDTF(GradientModule):
    """Squared error with weight decay, minimised by Rprop on all entries at once.

    The values are divided by their root mean square, so that the decay means the same for every tensor. The author's
    release sets the decay anew for each of its examples, between 1e-3 and 100; the defaults are those of its synthetic
    tensor. Initial values are the release's, and inputs and layers those of its rating tensor. PyTorch's Rprop leaves
    out the release's step back after an increase of the loss.

    Parameters
    ----------
    shape : sizes of the tensor's modes.
    likelihood : of the entries; only its kind is used.
    rank : of the core, in every mode: the length of a row of U_d.
    inputs : length of a row of Z_d.
    hidden : widths of the layers between Z_d and U_d.
    factor_decay, weight_decay, core_decay : on the squares of Z_d, of the networks' weights and of the core.
    lr : Rprop's first step.
    """

    kinds = ("count",)
    likelihood_settings = ()
    all_entries = True

    def __init__(
        self,
        shape: tuple[int, ...],
        likelihood: PolyaGamma,
        rank: int,
        inputs: int = 5,
        hidden: tuple[int, ...] = (),
        factor_decay: float = 1.0,
        weight_decay: float = 1.0,
        core_decay: float = 1.0,
        lr: float = 0.0123,
    ):
        super().__init__(likelihood.kind, lr)
        self.factor_decay, self.weight_decay, self.core_decay = factor_decay, weight_decay, core_decay
        # initial values as in the author's release; the gradient of a core of zeros is not zero, so it moves first
        self.Z = nn.ParameterList(0.01 * torch.randn(size, inputs) for size in shape)
        self.networks = nn.ModuleList(network(inputs, *hidden, rank) for _ in shape)
        self.core = nn.Parameter(torch.zeros((rank,) * len(shape)))
        self.mean_size = prod(shape) ** (1 / len(shape))
        self.register_buffer("scale", torch.ones(()))

    def factors(self) -> list[Float[Tensor, "I R"]]:
        """U_d of every mode."""
        return [g(Z) for g, Z in zip(self.networks, self.Z, strict=True)]

    def forward(self, indices: Int[Tensor, "S D"]) -> Float[Tensor, "S"]:
        """The entries, in units of `scale`."""
        return tucker(self.core, self.factors(), indices)

    def loss(self, indices: Int[Tensor, "N D"], values: Float[Tensor, "N"]) -> Float[Tensor, ""]:
        """Half of

        sum_n (x_n - xhat_n)^2 + l_Z sum_d |Z_d|^2 + I (l_W sum |W|^2 + l_C |core|^2)

        with I the geometric mean of the modes' sizes, W the networks' weights without their biases.
        """
        error = (values / self.scale - self(indices)).square().sum()
        weights = [layer.weight for layer in self.networks.modules() if isinstance(layer, nn.Linear)]
        decay = self.weight_decay * squares(weights) + self.core_decay * squares([self.core])
        return (error + self.factor_decay * squares(self.Z) + self.mean_size * decay) / 2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Rprop(self.parameters(), lr=self.lr, etas=(0.5, 1.2), step_sizes=(0, 50))

    def initialise(self, indices: Int[Tensor, "N D"], values: Float[Tensor, "N"]) -> None:
        self.scale.copy_(values.square().mean().sqrt().clamp_min(1e-6))

    def predictive(self, indices: Int[Tensor, "S D"]) -> Point:
        with torch.no_grad():
            return Point((self.scale * self(indices)).double())


class ScaledTanh(nn.Module):
    """1.7159 tanh(2 x / 3), of unit gain for inputs of unit variance (LeCun, Bottou, Orr, Mueller 1998)."""

    def forward(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return 1.7159 * torch.tanh(2 / 3 * x)


def network(*widths: int) -> nn.Sequential:
    """Linear layers of the given widths, each with a scaled tanh after it; weights and biases start uniform."""
    layers = []
    for width, following in zip(widths, widths[1:], strict=False):
        linear = nn.Linear(width, following)
        bound = 4 * (6 / (width + following)) ** 0.5
        nn.init.uniform_(linear.weight, -bound, bound)
        nn.init.uniform_(linear.bias, -bound, bound)
        layers += [linear, ScaledTanh()]
    return nn.Sequential(*layers)


def squares(tensors: list[Float[Tensor, "..."]]) -> Float[Tensor, ""]:
    """Sum of squares of all elements."""
    return sum(tensor.square().sum() for tensor in tensors)


def tucker(
    core: Float[Tensor, "..."], factors: list[Float[Tensor, "I R"]], indices: Int[Tensor, "S D"]
) -> Float[Tensor, "S"]:
    """sum_r core[r_1, ..., r_D] prod_d U_d[i_d, r_d] at the given entries.

    The two longest modes come last. Their R x R slice of the core, contracted with the others, is the same for all
    entries that share their other indices, so it is made once for each such group.
    """
    *short, left, right = sorted(range(len(factors)), key=lambda mode: len(factors[mode]))
    key = torch.zeros_like(indices[:, 0])
    for mode in short:
        key = key * len(factors[mode]) + indices[:, mode]
    groups, group = key.unique(return_inverse=True)
    member = torch.empty_like(groups).scatter_(0, group, torch.arange(len(group), device=group.device))

    slices = core.permute(*short, left, right).expand(len(groups), *core.shape)
    for mode in short:
        slices = torch.einsum("gr...,gr->g...", slices, factors[mode][indices[member, mode]])
    rows = [factors[mode].index_select(0, indices[:, mode]) for mode in (left, right)]
    return torch.einsum("sr,srt,st->s", rows[0], slices.index_select(0, group), rows[1])
