"""MDTF against a dense Tucker product, and on a tensor drawn from its own model."""

import copy

import numpy as np
import pytest
import torch
from training import fit

from baselines.mdtf import MDTF, tucker
from ented.datamodule import COODataModule
from ented.errors import InputError
from ented.likelihoods import Bernoulli, NegativeBinomial
from ented.tensor import COOTensor

SHAPES = [(5, 4), (4, 2, 5), (3, 6, 2, 4)]
DECAY = {"factor_decay": 0.3, "weight_decay": 0.2, "core_decay": 0.7}

shapes = pytest.mark.parametrize("shape", SHAPES)
pytestmark = pytest.mark.usefixtures("float64")


def make(shape, rank=3, hidden=(4,), **settings):
    """A module whose core and scale are not the initial ones."""
    torch.manual_seed(0)
    module = MDTF(shape, NegativeBinomial(20), rank, inputs=2, hidden=hidden, **DECAY | settings)
    module.core.data.normal_()
    module.scale.fill_(2.5)
    for Z in module.Z:
        Z.data.normal_()
    return module


def every_cell(shape, repeated=5):
    """All cells in random order, some of them twice."""
    cells = np.random.default_rng(0).permutation(np.argwhere(np.ones(shape)))
    return torch.from_numpy(np.concatenate([cells, cells[:repeated]]))


def dense(module):
    """The whole tensor, from the parameters: networks and Tucker product in NumPy, the core's modes one by one."""
    state = {name: value.numpy() for name, value in module.state_dict().items()}
    tensor = state["core"]
    for d in range(tensor.ndim):
        U = state[f"Z.{d}"]
        for layer in range(len(module.networks[d]) // 2):
            W, b = (state[f"networks.{d}.{2 * layer}.{name}"] for name in ("weight", "bias"))
            U = 1.7159 * np.tanh(2 / 3 * (U @ W.T + b))
        tensor = np.moveaxis(np.tensordot(tensor, U, axes=(d, 1)), -1, d)
    return tensor * state["scale"]


@pytest.mark.parametrize("hidden", [(), (4,), (6, 3)])
@shapes
def test_predictions_are_the_dense_tucker_product(shape, hidden):
    module, indices = make(shape, hidden=hidden), every_cell(shape)
    with torch.no_grad():
        predictive = module.predictive(indices)
    np.testing.assert_allclose(predictive.mean, dense(module)[tuple(indices.numpy().T)], rtol=1e-10)
    assert predictive.log_prob(predictive.mean) is None


@shapes
def test_the_loss_is_squared_error_and_decay(shape):
    module, indices = make(shape), every_cell(shape)
    x = np.random.default_rng(1).poisson(5, len(indices))
    state = {name: value.numpy() for name, value in module.state_dict().items()}
    error = (x - dense(module)[tuple(indices.numpy().T)]) / 2.5
    size = np.prod(shape) ** (1 / len(shape))
    expected = np.sum(error**2)
    expected += 0.3 * sum(np.sum(value**2) for name, value in state.items() if name.startswith("Z."))
    expected += 0.2 * size * sum(np.sum(value**2) for name, value in state.items() if name.endswith(".weight"))
    expected += 0.7 * size * np.sum(state["core"] ** 2)
    assert module.loss(indices, torch.from_numpy(x).double()).item() == pytest.approx(expected / 2)


def test_the_tucker_product_of_long_modes_makes_no_dense_tensor():
    """10^16 cells, 40 entries in 40 different groups."""
    rng = np.random.default_rng(0)
    factors = [rng.normal(size=(10_000, 2)) for _ in range(4)]
    core, indices = rng.normal(size=(2, 2, 2, 2)), rng.integers(0, 10_000, (40, 4))
    rows = [factor[index] for factor, index in zip(factors, indices.T, strict=True)]
    expected = np.einsum("abcd,na,nb,nc,nd->n", core, *rows)
    actual = tucker(torch.from_numpy(core), [torch.from_numpy(U) for U in factors], torch.from_numpy(indices))
    np.testing.assert_allclose(actual, expected, rtol=1e-10)


# training


def draw(seed=0, shape=(20, 15, 10)):
    """Poisson counts with means from the model: factors (1, tanh(...)), and a core that keeps the means above zero."""
    rng = np.random.default_rng(seed)
    factors = [np.stack([np.ones(size), np.tanh(2 * rng.normal(size=size))], 1) for size in shape]
    core = np.array([[[4.0, -0.5], [0.6, 0.8]], [[-0.7, 0.5], [0.3, 0.6]]])  # the others' absolute values sum to 4
    mean = 20 * np.einsum("abc,ia,jb,kc->ijk", core, *factors)
    cells = rng.permutation(np.argwhere(np.ones(shape)))
    values = torch.from_numpy(rng.poisson(mean[tuple(cells.T)])).double()
    cells, cut = torch.from_numpy(cells), 2 * len(cells) // 3
    train, test = (COOTensor(cells[part], values[part], shape) for part in (slice(cut), slice(cut, None)))
    return train, test, torch.from_numpy(mean[tuple(test.indices.numpy().T)])


def data(train) -> COODataModule:
    return COODataModule(train, train, "all", seed=0)


def fresh(shape, seed=0, **settings):
    torch.manual_seed(seed)
    return MDTF(shape, NegativeBinomial(20), rank=2, inputs=2, **settings)


def test_recovers_the_tensor_it_was_drawn_as(tmp_path):
    train, test, mean = draw()
    small = dict.fromkeys(DECAY, 1e-3)
    module = fresh(train.shape, **small)
    history = fit(module, data(train), 400, tmp_path)
    with torch.no_grad():
        prediction = module.predictive(test.indices).mean
    mse, oracle, constant = ((test.values - guess).square().mean() for guess in (prediction, mean, train.values.mean()))
    assert constant > 5 * oracle
    # 2000 entries for about 140 parameters cost 140 / 2000 = 7 % of the oracle's error; this is four times that
    assert mse < 1.3 * oracle
    assert history.rows[-1]["loss"] < 0.05 * history.rows[0]["loss"]


def test_predictions_scale_with_the_values(tmp_path):
    train, test, _ = draw()
    predictions = []
    for factor in (1, 8):
        module = fresh(train.shape)
        scaled = COOTensor(train.indices, factor * train.values, train.shape)
        fit(module, data(scaled), 20, tmp_path / str(factor))
        with torch.no_grad():
            predictions.append(module.predictive(test.indices).mean)
    assert predictions[0].std() > 1
    # a power of two: not even rounding differs
    torch.testing.assert_close(predictions[1], 8 * predictions[0], rtol=1e-9, atol=1e-9)


def test_a_fit_is_rprop_on_the_loss(tmp_path):
    train, *_ = draw()
    module = fresh(train.shape)
    by_hand = copy.deepcopy(module)
    by_hand.scale.fill_((train.values**2).mean() ** 0.5)
    step = {name: torch.full_like(p, 0.0123) for name, p in by_hand.named_parameters()}
    last = {name: torch.zeros_like(p) for name, p in by_hand.named_parameters()}
    for _ in range(8):
        names, parameters = zip(*by_hand.named_parameters(), strict=True)
        gradients = torch.autograd.grad(by_hand.loss(train.indices, train.values), parameters)
        for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
            agreement = (gradient * last[name]).sign()
            step[name] *= torch.where(agreement > 0, 1.2, torch.where(agreement < 0, 0.5, 1.0))
            gradient = torch.where(agreement < 0, 0.0, gradient)  # no move after a change of sign
            parameter.data -= gradient.sign() * step[name]
            last[name] = gradient
    fit(module, data(train), 8, tmp_path)
    assert module.scale == by_hand.scale
    parameters = dict(module.named_parameters())
    for name, expected in by_hand.named_parameters():
        torch.testing.assert_close(parameters[name], expected, rtol=1e-9, atol=1e-12)


def test_goes_on_from_a_checkpoint_to_the_same_numbers(tmp_path):
    train, *_ = draw()
    whole, half, resumed = fresh(train.shape), fresh(train.shape), fresh(train.shape, seed=1)
    fit(whole, data(train), 8, tmp_path / "whole")
    fit(half, data(train), 4, tmp_path / "parts")
    fit(resumed, data(train), 8, tmp_path / "parts")
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def test_starts_with_a_core_of_zeros_and_weights_in_the_published_range():
    module = MDTF((300, 200), NegativeBinomial(20), rank=10, inputs=5, hidden=(40,))
    assert not module.core.any()
    assert module.Z[0].std().item() == pytest.approx(0.01, rel=0.1)  # 1500 draws: 2 % standard error
    for linear, widths in ((module.networks[0][0], 45), (module.networks[0][2], 50)):
        bound = 4 * (6 / widths) ** 0.5
        assert 0.9 * bound < linear.weight.abs().max() <= bound  # 200 draws or more


def test_binary_entries_are_refused():
    with pytest.raises(InputError, match="MDTF is for count entries, these are binary: choose another model="):
        MDTF((3, 3), Bernoulli(), rank=2)
