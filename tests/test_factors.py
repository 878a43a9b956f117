"""The factor table: draws, gradients and prior, against automatic differentiation and torch.distributions."""

from math import log

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from ented.factors import FactorTable
from ented.kernels import RBF
from ented.likelihoods import Bernoulli, NegativeBinomial
from ented.model import ENTED
from ented.quadrature import gauss_hermite, normal_grid

SHAPE, RANK, ENTRIES = (4, 3, 5), 2, 12
INPUTS = len(SHAPE) * RANK
means = pytest.mark.parametrize("mean", ["zero", "constant", "effects", "degrees"])
EFFECTS = ("effects", "degrees")
DEGREES = torch.tensor([3, 0, 8, 1, 2, 7, 3, 2, 2, 0, 4, 4])  # of the rows; 12 entries
stds = pytest.mark.parametrize("std", [None, 0.3])


def make(std, mean, leading=(), sparse_gradients=False) -> FactorTable:
    """A table away from its initial values."""
    torch.manual_seed(0)
    table = FactorTable(SHAPE, RANK, 1.0, std, mean, sparse_gradients)
    if mean == "degrees":
        table.set_degrees(DEGREES)
    for parameter in table.parameters():
        parameter.data = parameter + 0.2 * torch.randn(*leading, *parameter.shape)
    return table


def entries(leading=()):
    return torch.stack([torch.randint(size, (*leading, ENTRIES)) for size in SHAPE], -1)


def test_rows_are_those_of_each_mode(float64):
    table = FactorTable(SHAPE, RANK, 1.0)
    table.Z.data = torch.arange(24.0).reshape(12, 2)
    draw = table.draw(torch.tensor([[0, 0, 0], [3, 2, 4]]))
    assert draw.z.tolist() == [[0, 1, 8, 9, 14, 15], [6, 7, 12, 13, 22, 23]]
    assert draw.prior_mean == draw.variance == 0


def centred_log(degrees, i, s2) -> float:
    """log(1 + number of other training entries in row i), centred, from a list of these entries' rows.

    That of a training entry, and for a new one as far towards its own as the effect's posterior variance s2 says. Of a
    row without training entries, that of a training entry of the row that has the fewest.
    """
    rows = [row for row, degree in enumerate(degrees.tolist()) for _ in range(degree)]
    centre = sum(log(rows.count(row)) for row in rows) / len(rows)
    if i not in rows:
        return log(min(rows.count(row) for row in rows)) - centre
    return (1 - s2) * log(rows.count(i)) + s2 * log(1 + rows.count(i)) - centre


@pytest.mark.parametrize("leading", [(), (2,)])
@means
@stds
def test_new_rows_are_those_that_have_no_entry_and_the_priors_posterior(float64, std, mean, leading):
    """As in a table that had them from the start."""
    table, shape = make(std, mean), tuple(size + 1 for size in SHAPE)
    longer = FactorTable(shape, RANK, 1.0, std, mean)
    known = torch.cat([torch.arange(size) + offset for size, offset in zip(SHAPE, longer.offsets[0], strict=True)])
    for name, parameter in longer.named_parameters():
        parameter.data.zero_()  # a standard deviation of 1
        parameter.data[known if name == "Z" else ...] = table.get_parameter(name)
    if mean == "degrees":
        longer.set_degrees(torch.zeros(sum(shape), dtype=torch.int64).index_put((known,), DEGREES))
    for name, tensor in [*table.named_parameters(), *table.named_buffers()]:
        stacked = tensor.detach().expand(*leading, *tensor.shape).clone()
        setattr(table, name, torch.nn.Parameter(stacked) if tensor.requires_grad else stacked)
    table.add_new_rows()
    indices = torch.tensor([[4, 0, 5], [1, 3, 5], [4, 3, 5], [3, 2, 4]])
    noise = torch.randn(len(SHAPE), RANK)
    expected = longer.draw(indices, noise, new=True)
    actual = table.draw(indices.expand(*leading, 4, 3), noise, new=True)
    for name in "z", "prior_mean", "variance":
        of_new, of_longer = (torch.as_tensor(getattr(draw, name)) for draw in (actual, expected))
        torch.testing.assert_close(of_new, of_longer.expand_as(of_new))


@pytest.mark.parametrize("new", [False, True])
@means
def test_a_draw_has_the_posterior_of_its_rows(float64, mean, new):
    """Of z and of o, from a loop over rows."""
    table, indices = make(0.3, mean), entries()
    noise = torch.randn(ENTRIES, len(SHAPE), RANK)
    with torch.no_grad():
        drawn, draw = table.draw(indices, noise).z, table.draw(indices, new=new)
        columns = table.Z.split([RANK, *[1] * (mean in EFFECTS), RANK, *[1] * (mean in EFFECTS)], 1)
    Z, log_std = (columns[0], columns[2]) if mean in EFFECTS else columns
    offsets = [0, SHAPE[0], SHAPE[0] + SHAPE[1]]
    for n, cell in enumerate(indices.tolist()):
        rows = [offset + i for offset, i in zip(offsets, cell, strict=True)]
        torch.testing.assert_close(draw.z[n], torch.cat([Z[row] for row in rows]))
        std = torch.cat([log_std[row].exp() for row in rows])
        torch.testing.assert_close(drawn[n], draw.z[n] + std * noise[n].flatten())
        constant = 0 if mean == "zero" else table.constant.item()
        expected, variance = constant, 0.0
        if mean in EFFECTS:
            for tau, row in zip(table.log_tau.exp().tolist(), rows, strict=True):
                expected += tau * columns[1][row].item()
                variance += (tau * columns[3][row].exp().item()) ** 2
        if mean == "degrees":
            for mode, (gamma, degrees) in enumerate(zip(table.gamma.tolist(), DEGREES.split(SHAPE), strict=True)):
                s2 = columns[3][rows[mode]].exp().item() ** 2 if new else 0.0
                expected += gamma * centred_log(degrees, cell[mode], s2)
        found = [torch.as_tensor(moment).expand(ENTRIES)[n].item() for moment in (draw.prior_mean, draw.variance)]
        assert found == pytest.approx([expected, variance])


@means
@stds
def test_the_prior_is_standard_normal(float64, std, mean):
    table = make(std, mean)
    values, log_std = table.Z.tensor_split([RANK + (mean in EFFECTS)], 1)
    prior = Normal(torch.zeros_like(values), 1.0)
    expected = -kl_divergence(Normal(values, log_std.exp()), prior) if std else prior.log_prob(values)
    torch.testing.assert_close(table.log_prior(), expected.sum())


@pytest.mark.parametrize("sparse_gradients", [False, True])
@pytest.mark.parametrize("kernel", ["fixed", "rbf", "ard"])
@pytest.mark.parametrize("count", [None, {}, {"learned": True, "smallest": 1}, {"learned": True, "quadrature": True}])
@means
@stds
def test_gradients_are_those_of_the_bound(float64, std, mean, count, kernel, sparse_gradients):
    """After a step on q, of all parameters, by automatic differentiation of `elbo` at the same draw.

    That of a learned shape is the one of the predictive log probability.
    """
    torch.manual_seed(0)
    covariance = {
        "fixed": RBF(1.3, 0.8),
        "rbf": RBF(1.3, 0.8, True),
        "ard": RBF(torch.linspace(1, 2, INPUTS), 0.8, True),
    }[kernel]
    likelihood = Bernoulli() if count is None else NegativeBinomial(6.0, **count)
    if likelihood.quadrature:  # the step's derivatives are those of the expectation, so the rule has to be fine
        likelihood.nodes, likelihood.weights = gauss_hermite(100)
    model = ENTED(FactorTable(SHAPE, RANK, 1.0, std, mean, sparse_gradients), likelihood, 6, 2, covariance, 1e-2)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    indices, values = entries(), torch.randint(2, (ENTRIES,)).double()
    if count is not None:
        values += 1
    noise = torch.randn(ENTRIES, len(SHAPE), RANK) if std else None
    if model.table.needs_degrees:
        degrees = [indices[:, mode].bincount(minlength=size) for mode, size in enumerate(SHAPE)]
        # the entries stand for as many again, so that with sparse gradients the prior's shares add up to one
        model.table.set_degrees(2 * torch.cat(degrees))
    model.step(indices, values, 2.0, 0.3, noise)
    actual = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    (-model.elbo(indices, values, 2 * ENTRIES, noise)).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    if likelihood.learned:
        mean, variance, _ = model.moments(model.features(indices, noise))
        nodes, log_weights = normal_grid(variance, 0.1)
        f = mean[:, None] + variance.sqrt()[:, None] * nodes
        predictive = torch.logsumexp(likelihood.log_prob(values[:, None], f) + log_weights, -1).sum()
        (expected["likelihood.log_zeta"],) = torch.autograd.grad(-2 * predictive, likelihood.log_zeta)
        of_shape = (gradients.pop("likelihood.log_zeta") for gradients in (actual, expected))
        torch.testing.assert_close(*of_shape, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("new", [False, True])
@means
@stds
def test_leading_dimensions_equal_a_loop(float64, std, mean, new):
    table, indices = make(std, mean, leading=(2,)), entries((2,))
    noise = torch.randn(2, ENTRIES, len(SHAPE), RANK)
    if mean == "degrees":
        table.log_degrees, table.log_degrees_of_new = torch.randn(2, 2, sum(SHAPE))
    together = table.draw(indices, noise, new)
    for i in range(2):
        single = make(std, mean)
        for name, parameter in single.named_parameters():
            parameter.data = table.get_parameter(name)[i]
        if mean == "degrees":
            single.log_degrees, single.log_degrees_of_new = table.log_degrees[i], table.log_degrees_of_new[i]
        draw = single.draw(indices[i], noise[i], new)
        torch.testing.assert_close(together.z[i], draw.z)
        for name in "prior_mean", "variance":
            both, one = (torch.as_tensor(getattr(of, name)) for of in (together, draw))
            torch.testing.assert_close(both.expand(2, ENTRIES)[i], one.expand(ENTRIES))


def test_the_noise_of_predictions_is_standard_normal(float64):
    noise = torch.stack(FactorTable(SHAPE, RANK, 1.0, 0.1).prediction_noise(1024))
    assert noise.mean(0).abs().max() < 0.02 and (noise.std(0) - 1).abs().max() < 0.02
    again = torch.stack(FactorTable(SHAPE, RANK, 1.0, 0.1).prediction_noise(1024))
    assert torch.equal(noise, again)
