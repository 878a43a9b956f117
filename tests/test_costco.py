import copy

import lightning as L
import numpy as np
import pytest
import torch
from scipy.special import expit
from torchmetrics.functional.classification import binary_auroc
from training import fit

from baselines.costco import CoSTCo
from baselines.main_effects import MainEffects
from ented.datamodule import COODataModule
from ented.likelihoods import Bernoulli, NegativeBinomial
from ented.predictive import Known, Point
from ented.tensor import COOTensor

SHAPE = (4, 3, 5)
LIKELIHOODS = {"binary": Bernoulli(), "count": NegativeBinomial(20)}
kinds = pytest.mark.parametrize("kind", ["binary", "count"])


def make(kind, shape=SHAPE, rank=3, channels=4, seed=0, lr=1e-2) -> CoSTCo:
    """A module away from its initial values."""
    torch.manual_seed(seed)
    module = CoSTCo(shape, LIKELIHOODS[kind], rank, channels, lr).double()
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter)
    return module


def cells(shape):
    return torch.cartesian_prod(*[torch.arange(size) for size in shape])


def make_data(kind, n=41, batch_size=15) -> COODataModule:
    rng = np.random.default_rng(0)
    indices = torch.from_numpy(rng.integers(0, SHAPE, size=(n, len(SHAPE))))
    values = torch.from_numpy(rng.integers(0, 2 if kind == "binary" else 9, n)).double()
    tensor = COOTensor(indices, values, SHAPE)
    return COODataModule(tensor, tensor, batch_size, seed=0)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (4, 3, 5, 2)])
@kinds
def test_forward_is_the_network_in_einsums(kind, shape):
    module, indices = make(kind, shape), cells(shape)
    w = {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}
    embedded = np.stack([w[f"embeddings.{d}.weight"][indices[:, d]] for d in range(len(shape))], 2)  # S x R x D

    def relu(x):
        return np.maximum(x, 0)

    # a filter is the same for every component r, then one weight for each channel and component
    modes = relu(
        np.einsum("srd,cd->scr", embedded, w["across_modes.weight"][:, 0, 0]) + w["across_modes.bias"][:, None]
    )
    rank = relu(np.einsum("scr,kcr->sk", modes, w["across_rank.weight"][..., 0]) + w["across_rank.bias"])
    hidden = relu(rank @ w["hidden.weight"].T + w["hidden.bias"])
    output = hidden @ w["output.weight"][0]
    module.output.bias.data.fill_(-np.median(output))  # half of the outputs below zero
    output = output - np.median(output)

    predictive = module.predictive(indices)
    if kind == "binary":
        assert isinstance(predictive, Known)
        np.testing.assert_allclose(predictive.mean, expit(output), rtol=1e-10)
    else:
        assert isinstance(predictive, Point)
        assert (output < 0).any() and (output > 0).any()
        np.testing.assert_allclose(predictive.mean, relu(output), rtol=1e-10, atol=1e-10)


@kinds
def test_predictive_of_a_float32_module_is_in_float64(kind):
    predictive = make(kind).float().predictive(cells(SHAPE))
    assert predictive.mean.dtype == torch.float64 and not predictive.mean.requires_grad


@kinds
def test_the_names_of_the_rows_do_not_matter(kind):
    """Permuting the rows of a mode and their embeddings leaves the prediction of every entry."""
    module, indices = make(kind), cells(SHAPE)
    expected = module.predictive(indices).mean
    permutation = torch.tensor([2, 0, 4, 1, 3])
    renamed = indices.clone()
    renamed[:, 2] = permutation.argsort()[indices[:, 2]]
    assert not torch.equal(module.predictive(renamed).mean, expected)
    module.embeddings[2].weight.data = module.embeddings[2].weight.data[permutation]
    assert torch.equal(module.predictive(renamed).mean, expected)


def test_a_network_of_equal_filters_does_not_tell_the_modes_apart():
    """With equal weights of the modes the order of an entry's embeddings does not matter."""
    module = make("binary", shape=(5, 5, 5))
    module.across_modes.weight.data[:] = module.across_modes.weight[..., :1].detach()
    for embedding in module.embeddings:
        embedding.weight.data = module.embeddings[0].weight.data
    indices = torch.tensor([[0, 1, 2], [2, 0, 1], [1, 2, 0]])
    output = module(indices)
    torch.testing.assert_close(output, output[:1].expand(3))
    assert not torch.isclose(module(torch.tensor([[0, 1, 3]])), output[0])


@kinds
def test_initial_values_are_those_of_keras(kind):
    """Embeddings uniform on (-0.05, 0.05); weights uniform with variance 2 / (fan in + fan out); biases zero."""
    torch.manual_seed(0)
    module = CoSTCo((2000, 1000, 1500), LIKELIHOODS[kind], 10, 50, lr=1e-3)
    for embedding in module.embeddings:
        assert embedding.weight.abs().max() <= 0.05
        assert embedding.weight.var().item() == pytest.approx(0.1**2 / 12, rel=0.05)  # of 10 000 numbers and more
    fans = {"across_modes": (3, 150), "across_rank": (500, 500), "hidden": (50, 50), "output": (50, 1)}
    for name, (fan_in, fan_out) in fans.items():
        layer = getattr(module, name)
        limit = (6 / (fan_in + fan_out)) ** 0.5
        assert layer.weight.abs().max() <= limit
        # the largest of 50 uniform numbers and more falls below 0.9 of the limit in 1 of 200 cases
        assert layer.weight.abs().max() > 0.9 * limit
        assert not layer.bias.any()


@kinds
def test_loss_is_the_mean_cross_entropy_or_squared_error(kind):
    module, data = make(kind), make_data(kind)
    indices, x = data.train.indices, data.train.values
    prediction = module.predictive(indices).mean.numpy()
    x = x.numpy()
    if kind == "binary":
        expected = -np.mean(x * np.log(prediction) + (1 - x) * np.log1p(-prediction))
    else:
        expected = np.mean((x - prediction) ** 2)
    assert module.training_step((indices, torch.from_numpy(x)), 0).item() == pytest.approx(expected)


def nonlinear_truth(shape, seed):
    """A network of this kind in which the entry is the largest where two modes' positions meet: not additive."""
    rng = np.random.default_rng(seed)
    positions = [rng.uniform(-1, 1, size) for size in shape]
    u, v, w = (p[cells(shape)[:, d].numpy()] for d, p in enumerate(positions))
    return torch.from_numpy(np.abs(u - v) * 8 - np.abs(v + w) * 6)


def split(shape, values):
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
    n = len(values) * 2 // 3
    indices = cells(shape)
    train, test = (COOTensor(indices[rows], values[rows], shape) for rows in (order[:n], order[n:]))
    return train, test, order[n:]


def test_recovers_a_nonlinear_binary_tensor(tmp_path):
    shape = (14, 14, 14)
    f = nonlinear_truth(shape, seed=3)
    values = torch.bernoulli(torch.sigmoid(f), generator=torch.Generator().manual_seed(0))
    train, test, rows = split(shape, values)
    torch.manual_seed(0)
    module = CoSTCo(shape, Bernoulli(), 4, 16, lr=5e-3).double()
    fit(module, COODataModule(train, test, 128, seed=0), 30, tmp_path)
    auc = binary_auroc(module.predictive(test.indices).mean, test.values.long())
    oracle = binary_auroc(torch.sigmoid(f[rows]), test.values.long())
    additive = MainEffects(shape, Bernoulli()).double().fit(train, epochs=20).predictive(test.indices)
    effects = binary_auroc(additive.mean, test.values.long())
    assert oracle > effects + 0.1  # the interactions matter
    # at least two thirds of the way from the additive model to the truth
    assert auc > effects + 2 / 3 * (oracle - effects)


def test_recovers_a_nonlinear_count_tensor(tmp_path):
    """RMSE of the means, beside that of the overall mean and of the additive model."""
    shape = (14, 14, 14)
    mean = nonlinear_truth(shape, seed=3).clamp_min(0)
    values = torch.poisson(mean, generator=torch.Generator().manual_seed(0))
    train, test, rows = split(shape, values)
    torch.manual_seed(0)
    module = CoSTCo(shape, NegativeBinomial(20), 4, 16, lr=5e-3).double()
    fit(module, COODataModule(train, test, 128, seed=0), 30, tmp_path)

    def error(prediction):
        return (prediction - mean[rows]).square().mean().sqrt().item()

    prediction = module.predictive(test.indices).mean
    assert (prediction >= 0).all()
    effects = MainEffects(shape, NegativeBinomial(20)).double().fit(train, epochs=20)
    additive = error(effects.predictive(test.indices).mean)
    assert error(prediction) < additive / 2
    # the noise of a single count is as large
    assert error(prediction) < mean.mean().sqrt()


@kinds
def test_a_fit_that_was_interrupted_goes_on_as_if_it_had_not_been(kind, tmp_path):
    class Interrupt(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.current_epoch == 3 and batch_idx == 1:
                raise OSError("interrupted")

    whole = make(kind)
    before = copy.deepcopy(whole.state_dict())
    fit(whole, make_data(kind), 6, tmp_path / "whole")
    with pytest.raises(OSError, match="interrupted"):
        fit(make(kind), make_data(kind), 6, tmp_path / "parts", Interrupt())
    resumed = make(kind, seed=5)
    fit(resumed, make_data(kind), 6, tmp_path / "parts")
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    assert any(not torch.equal(before[name], value) for name, value in whole.state_dict().items())


def test_counts_start_at_their_mean_and_every_start_has_a_gradient(tmp_path):
    """Where the last ReLU is zero for every entry nothing would ever be learned."""
    for seed in range(5):
        torch.manual_seed(seed)
        module = CoSTCo(SHAPE, LIKELIHOODS["count"], rank=2, channels=2, lr=1e-12).double()
        data = make_data("count")
        fit(module, data, 1, tmp_path / str(seed))
        mean = module.predictive(data.train.indices).mean.mean()
        assert mean.item() == pytest.approx(data.train.values.mean().item(), rel=0.05)
        module.training_step((data.train.indices, data.train.values), 0).backward()
        assert module.output.bias.grad != 0
