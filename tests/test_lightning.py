"""Training in Lightning is the model's own steps, one after the other."""

import copy

import lightning as L
import pytest
import torch
from torch._dynamo.utils import counters
from training import ALL, fit

from ented.datamodule import COODataModule
from ented.errors import InputError
from ented.gaussian_process import ENTEDModule, check_numbers, initial_lengthscales
from ented.likelihoods import Bernoulli, NegativeBinomial
from ented.model import stack
from ented.tensor import COOTensor

SHAPE = (7, 6, 5)


def make_data(kind: str, batch_size: int, held_out: float = 0.0) -> COODataModule:
    random = torch.Generator().manual_seed(0)
    indices = torch.stack([torch.randint(size, (41,), generator=random) for size in SHAPE], 1)
    values = torch.randint(2 if kind == "binary" else 9, (41,), generator=random).double()
    tensor = COOTensor(indices, values, SHAPE)
    return COODataModule(tensor, tensor, batch_size, seed=0, held_out=held_out)


def make_module(kind: str, **settings) -> ENTEDModule:
    torch.manual_seed(0)
    likelihood = Bernoulli() if kind == "binary" else NegativeBinomial(20)
    settings = {"init_std": 0.5, "jitter": 1e-4, "lr": 0.01, "rho": 0.3, "milestones": ()} | settings
    return ENTEDModule(SHAPE, likelihood, 2, inducing=8, blocks=2, **settings).double()


kinds = pytest.mark.parametrize("kind", ["binary", "count"])


@kinds
def test_an_epoch_is_natural_gradient_and_adam_steps_in_turn(kind, tmp_path):
    module, data = make_module(kind), make_data(kind, batch_size=15)
    model = copy.deepcopy(module.model)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    bound = log_prob = 0.0
    batches = list(data.train_dataloader())
    assert [len(values) for _, values in batches] == [14, 14, 13]
    for indices, values in batches:
        features = model.features(indices)
        model.natural_gradient_step(features, values, scale=41 / len(values), rho=0.3)
        elbo = model.elbo(indices, values, total=41)  # its gradient by autograd, not by hand
        with torch.no_grad():
            mean, variance, _ = model.q.moments(features.phi, features.diagonal)
            bound += model.likelihood.bound(values, mean, variance).sum()
            log_prob += model.likelihood.log_prob(values, mean).sum()
        optimizer.zero_grad()
        (-elbo).backward()
        optimizer.step()

    history = fit(module, data, 1, tmp_path)
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(module.model.state_dict()[name], expected, rtol=1e-7, atol=1e-9)
    with torch.no_grad():
        assert history.rows[0]["elbo"] == pytest.approx((bound - model.q.kl() + model.log_prior()).item())
    assert history.rows[0]["train_nll_plugin"] == pytest.approx(-log_prob.item() / 41)


def test_the_logged_bound_is_the_models_where_nothing_moves(tmp_path):
    """One batch, and an Adam step too small to count."""
    module, data = make_module("count", lr=1e-15), make_data("count", batch_size=41)
    history = fit(module, data, 3, tmp_path)
    expected = module.model.elbo(data.train.indices, data.train.values).item()
    assert history.rows[-1]["elbo"] == pytest.approx(expected, rel=1e-9)


def test_the_learning_rate_falls_to_three_tenths_at_the_milestones(tmp_path):
    rates = []

    class Rates(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    fit(make_module("binary", milestones=(0.6, 0.8)), make_data("binary", 41), 10, tmp_path, Rates())
    assert rates == pytest.approx([0.01] * 6 + [0.003] * 2 + [0.0009] * 2)


@pytest.mark.parametrize("settings", [{}, {"sparse_gradients": True}, ALL])
@pytest.mark.parametrize("held_out", [0.0, 0.2])
def test_a_fit_that_was_interrupted_goes_on_as_if_it_had_not_been(tmp_path, held_out, settings):
    class Interrupt(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.current_epoch == 3 and batch_idx == 1:
                raise OSError("interrupted")

    settings = {"milestones": (0.5,)} | settings
    whole = make_module("binary", **settings)
    expected = fit(whole, make_data("binary", 15, held_out), 6, tmp_path / "whole")
    with pytest.raises(OSError, match="interrupted"):
        fit(make_module("binary", **settings), make_data("binary", 15, held_out), 6, tmp_path / "parts", Interrupt())
    resumed = make_module("binary", **settings)
    actual = fit(resumed, make_data("binary", 15, held_out), 6, tmp_path / "parts")
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    without_time = [[{**row, "seconds": 0} for row in history.rows] for history in (expected, actual)]
    assert without_time[0] == without_time[1]


def test_what_a_float32_model_sums_over_an_epoch_is_of_double_precision():
    torch.set_default_dtype(torch.float32)
    module = ENTEDModule(SHAPE, NegativeBinomial(20), 2, 8, 2, 0.5, 1e-4, lr=0.01, rho=0.3)
    assert module.model.Z.dtype == torch.float32
    assert module.bound_sum.dtype == module.log_prob_sum.dtype == torch.float64
    states = [state for metric in module.metrics.metrics.values() for state in metric.metric_state.values()]
    assert all(state.dtype == torch.float64 for state in states)


@pytest.mark.parametrize("settings", [{}, ALL], ids=["paper", "all"])
def test_a_compiled_step_trains_the_same_model(tmp_path, settings):
    counters.clear()
    modules = [make_module("count", compile=compile, **settings) for compile in (False, True)]
    for compile, module in enumerate(modules):
        fit(module, make_data("count", 15), 3, tmp_path / str(compile))
    expected, actual = (module.state_dict() for module in modules)
    torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-9)
    assert counters["frames"]["ok"] > 0


@kinds
def test_sparse_gradients_make_the_same_fit_where_every_step_has_all_rows(kind, tmp_path):
    modules = [make_module(kind, milestones=(0.5,), sparse_gradients=sparse) for sparse in (False, True)]
    data = make_data(kind, "all")
    for module in modules:
        fit(module, data, 5, tmp_path / str(module.model.table.sparse_gradients))
    dense, sparse = (module.model for module in modules)
    assert (sparse.table.degrees > 0).all()
    state = sparse.state_dict()
    state.pop("table.degrees")
    torch.testing.assert_close(state, dict(dense.state_dict()), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("compile", [False, True])
def test_a_step_with_sparse_gradients_moves_the_rows_of_its_batch_alone(compile, tmp_path):
    states = []

    class Before(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            states.append((pl_module.model.table.rows(batch[0]).unique(), pl_module.model.Z.detach().clone()))

    module = make_module("count", sparse_gradients=True, compile=compile)
    fit(module, make_data("count", 5), 2, tmp_path, Before())
    states.append((None, module.model.Z.detach()))
    assert len(states) == 19
    for (rows, before), (_, after) in zip(states, states[1:], strict=False):
        moved = (before != after).any(1).nonzero().squeeze(1)
        assert torch.equal(moved, rows)
    assert not module.model.table.Z_bar.any()


@pytest.mark.parametrize("ratio", [1.0, 2.0, 5.0])
def test_lengthscales_start_alike_in_every_mode_and_grow_from_factor_to_factor(float64, ratio):
    of_modes = initial_lengthscales(3, 4, ratio).view(3, 4)
    assert torch.equal(of_modes[0], of_modes[1]) and torch.equal(of_modes[0], of_modes[2])
    torch.testing.assert_close(of_modes[:, 1:] / of_modes[:, :-1], torch.full((3, 3), ratio))
    # inputs with unit variance lie at a scaled squared distance of 2 on average, whatever rank and ratio
    assert of_modes.pow(-2).sum().item() == pytest.approx(1)


def test_annealing_takes_both_step_sizes_down_to_zero(tmp_path):
    """Half a cosine: all at first, a half in the middle, and little in the last epoch."""
    sizes = []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer, module, *_):
            sizes.append((module.optimizers().param_groups[0]["lr"], module.rho_now.item()))

    fit(make_module("binary", annealing=True), make_data("binary", 41), 4, tmp_path, Watch())
    shares = torch.tensor([1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5], dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(sizes, dtype=torch.float64), shares[:, None] * torch.tensor([0.01, 0.3]))


def test_inducing_inputs_start_near_the_factors_of_training_entries():
    module, data = make_module("binary", inducing_inputs="data", init_std=3.0), make_data("binary", 41)
    X = module.model.inducing.X.detach().clone()
    module.start(data.train)
    at = (module.inducing_places * 41).long()
    factors = module.model.table.draw(data.train.indices[at]).z
    torch.testing.assert_close(module.model.inducing.X - factors, 0.2 * X)
    assert len(at.unique()) > 4


def test_a_parameter_beyond_all_bounds_is_noticed():
    """Whichever it is, also where the bound of the last step was finite."""
    model = ENTEDModule(
        SHAPE, NegativeBinomial(20.0, learned=True), 2, 8, 2, 0.5, 1e-4, 0.01, 0.3, **ALL
    ).model.double()
    check_numbers(model, torch.zeros(()), 0.01, 0)
    names = dict(model.named_parameters())
    assert len(names) == 8  # Z, X, a_0, tau, gamma, lengthscales, variance, zeta
    for parameter in names.values():
        kept = parameter.data.clone()
        parameter.data.flatten()[-1] = torch.nan
        with pytest.raises(InputError, match="in epoch 1 with lr=0.01"):
            check_numbers(model, torch.zeros(()), 0.01, 0)
        parameter.data.copy_(kept)


def test_the_rate_of_a_replica_that_fails_is_named():
    """Of three, each a mixture of two."""
    replicas = stack([make_module("count", **ALL).model for _ in range(3)])
    check_numbers(replicas, torch.zeros(3), torch.tensor([0.1, 0.2, 0.3]), 0)
    replicas.failures[2, 0] = 1
    with pytest.raises(InputError, match="in epoch 1 with lr=0.3: lower lr="):
        check_numbers(replicas, torch.zeros(3), torch.tensor([0.1, 0.2, 0.3]), 0)


@pytest.mark.parametrize("sparse_gradients", [False, True])
@kinds
def test_each_component_of_a_mixture_is_trained_as_it_would_be_alone(kind, sparse_gradients, tmp_path):
    """Point estimates, which need no noise; one number of the history is the mean of theirs."""
    settings = {"kernel": "ard", "mean": "degrees", "inducing_inputs": "data", "annealing": True}
    settings |= {"sparse_gradients": sparse_gradients}
    together, data = make_module(kind, components=3, **settings), make_data(kind, batch_size=15)
    state = together.model.state_dict()
    alone = []
    for i in range(3):
        module = make_module(kind, **settings)
        module.model.load_state_dict({name: tensor[i] for name, tensor in state.items()})
        module.inducing_places = together.inducing_places[i]
        alone.append(module)
    histories = [fit(module, data, 3, tmp_path / str(i)) for i, module in enumerate([*alone, together])]
    trained = together.model.state_dict()
    for i, module in enumerate(alone):
        expected = module.model.state_dict()
        torch.testing.assert_close(
            {name: tensor[i] for name, tensor in trained.items()}, expected, rtol=1e-7, atol=1e-9
        )
    *singles, row = (history.rows[-1] for history in histories)
    for name in "elbo", "train_nll_plugin":
        assert row[name] == pytest.approx(sum(single[name] for single in singles) / 3)


def test_the_first_of_several_components_has_the_initial_values_of_one():
    one, three = (make_module("count", components=components, factors="variational").model for components in (1, 3))
    for name, expected in one.state_dict().items():
        torch.testing.assert_close(three.state_dict()[name][0], expected, rtol=0, atol=0)
    assert (three.Z[0] != three.Z[1]).any()
