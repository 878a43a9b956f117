"""Generalised CP, beside the Python Tensor Toolbox and plain main effects."""

import numpy as np
import pytest
import pyttb
import torch
from baseline_data import cells, cp, halves, tensor
from pyttb.gcp.fg import evaluate
from pyttb.gcp.fg_setup import setup
from pyttb.gcp.handles import Objectives
from pyttb.gcp.optimizers import LBFGSB
from scipy import stats
from scipy.special import expit

from baselines.cp import exposure, total
from baselines.gcp import GCP
from baselines.main_effects import MainEffects
from ented.errors import InputError
from ented.likelihoods import Bernoulli, NegativeBinomial

OBJECTIVES = {"count": Objectives.POISSON, "binary": Objectives.BERNOULLI_LOGIT}
LIKELIHOODS = {"count": NegativeBinomial(20), "binary": Bernoulli()}
both = pytest.mark.parametrize("kind", ["count", "binary"])
missings = pytest.mark.parametrize("missing", ["masked", "zeros"])
pytestmark = pytest.mark.usefixtures("float64")


def draw(kind, shape, rank, seed=0):
    """A dense tensor from the method's own model, its mean or logit, and the factors."""
    rng = np.random.default_rng(seed)
    if kind == "count":
        factors = [rng.gamma(0.7, 1.7, (size, rank)) for size in shape]
        return rng.poisson(cp(factors)), cp(factors), factors
    factors = [rng.normal(0, 1.6, (size, rank)) for size in shape]
    return rng.binomial(1, expit(cp(factors))), cp(factors), factors


def known(values, missing):
    """A training tensor, the dense array that the toolbox is given for it, and its mask."""
    mask = np.random.default_rng(1).random(values.shape) < 0.7
    if missing == "zeros":  # some of the zeros have no entry
        mask = mask | (values > 0)
    train = tensor(cells(values.shape)[mask.reshape(-1)], values[mask], values.shape)
    return train, values.astype(float), None if missing == "zeros" else mask.astype(float)


def ktensor(factors) -> pyttb.ktensor:
    return pyttb.ktensor([factor.numpy().copy(order="F") for factor in factors])


@both
@missings
def test_the_objective_and_the_fit_are_the_toolboxs(kind, missing):
    """Both start from the true factors.

    From there both reach the same optimum for counts. The logits of binary entries grow without end, and the toolbox
    stops where exp overflows: ours must come at least as far.
    """
    shape, rank, sweeps = (8, 7, 6), 2, 40 if kind == "count" else 7
    values, _, factors = draw(kind, shape, rank)
    train, dense, mask = known(values, missing)
    assert missing == "masked" or len(train) < values.size
    model = GCP(shape, LIKELIHOODS[kind], rank, missing, tolerance=1e-13)
    model.initialise(train.indices, train.values)
    model.started.fill_(True)
    model.A.copy_(torch.from_numpy(np.concatenate(factors)))
    model.fit(train, sweeps)

    data = pyttb.tensor(dense)
    value, _ = evaluate(ktensor(model.factors), data, mask, *setup(OBJECTIVES[kind], data)[:2])
    assert -model.objective.item() == pytest.approx(value)
    optimizer = LBFGSB(factr=10, pgtol=1e-9, maxiter=5000, maxfun=100_000)
    start = ktensor(map(torch.from_numpy, factors))
    fitted, _, info = pyttb.gcp_opt(data, rank, OBJECTIVES[kind], optimizer, init=start, mask=mask, printitn=0)
    if kind == "count":
        assert -model.objective.item() == pytest.approx(info["final_f"], rel=1e-6)
        ours = cp([factor.numpy() for factor in model.factors])
        np.testing.assert_allclose(ours, fitted.full().data, rtol=0.01, atol=0.01)
    else:
        assert -model.objective.item() <= info["final_f"]


@both
@missings
def test_the_start_has_the_sum_of_the_data(kind, missing):
    values, _, _ = draw(kind, (8, 7, 6), 2)
    train, dense, mask = known(values, missing)
    model = GCP((8, 7, 6), LIKELIHOODS[kind], 3, missing)
    model.start(train)
    assert (model.A > 0).all()
    start = ktensor(model.factors).full().data * (1 if mask is None else mask)
    assert start.sum() == pytest.approx(train.values.sum().item())


@pytest.mark.parametrize("rank", [1, 2])
@both
def test_a_table_of_zeros_is_fitted(kind, rank):
    """From factors of zero no gradient leads away."""
    train = tensor(cells((5, 4, 3)), np.zeros(60), (5, 4, 3))
    model = GCP((5, 4, 3), LIKELIHOODS[kind], rank).fit(train, 8)
    assert model.predictive(train.indices).mean.max() < 1e-3


def test_sweeps_double(monkeypatch):
    iterations = []

    def count(objective, start, limit, lower):
        iterations.append(limit)
        return start, torch.tensor(-1.0)

    monkeypatch.setattr("baselines.gcp.maximise", count)
    values, _, _ = draw("count", (4, 3), 1)
    train, _, _ = known(values, "masked")
    model = GCP((4, 3), LIKELIHOODS["count"], 1)
    model.start(train)
    for _ in range(11):
        model.step(*model.entries(train))
    assert iterations == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 512]


@both
@missings
def test_the_objective_grows(kind, missing):
    values, _, _ = draw(kind, (6, 5, 4), 2)
    train, _, _ = known(values, missing)
    model, objective = GCP((6, 5, 4), LIKELIHOODS[kind], rank=3, missing=missing), []
    for _ in range(8):
        model.fit(train, 1)
        objective.append(model.objective.item())
    assert objective == sorted(objective) and objective[-1] > objective[0]


@both
def test_what_was_not_seen_is_predicted_nearly_as_well_as_by_the_truth(kind):
    """About 100 parameters from 3000 entries: an excess log loss of 100 / (2 * 3000) = 0.02 an entry, thrice for slack.

    Main effects, which cannot hold the model, lose at least four times as much.
    """
    shape, rank = (20, 20, 15), 2
    values, m, _ = draw(kind, shape, rank)
    train, test, rows = halves(values, np.random.default_rng(2))
    truth = stats.poisson(m) if kind == "count" else stats.bernoulli(expit(m))
    oracle = truth.logpmf(values).reshape(-1)[rows].mean()
    model = GCP(shape, LIKELIHOODS[kind], rank).fit(train, 100)
    effects = MainEffects(shape, LIKELIHOODS[kind]).fit(train, 500)
    excess = oracle - model.predictive(test.indices).log_prob(test.values).mean().item()
    rival = oracle - effects.predictive(test.indices).log_prob(test.values).mean().item()
    assert excess < 0.06 and rival > 4 * excess


def test_sums_over_all_cells_are_those_of_the_dense_tensor():
    factors = [torch.rand(size, 3, requires_grad=True) for size in (4, 3, 5)]
    dense = cp([factor.detach().numpy() for factor in factors])
    everywhere = torch.from_numpy(cells((4, 3, 5)))
    for missing, indices in [("zeros", everywhere[:7]), ("masked", everywhere)]:
        value = total(factors, indices, missing)
        assert value.item() == pytest.approx(dense.sum())
        for mode, gradient in enumerate(torch.autograd.grad(value, factors)):
            torch.testing.assert_close(exposure(factors, indices, mode, missing), gradient)


def test_a_sample_of_zeros_stands_for_all_of_them():
    """The mean of 40 samples' estimates is within four standard errors of the sum over every cell without an entry."""
    values, _, _ = draw("binary", (9, 8, 7), 2)
    train, _, _ = known(values, "zeros")
    model = GCP((9, 8, 7), Bernoulli(), rank=2, missing="zeros", sample=200)
    factors = [torch.randn(size, 2) for size in (9, 8, 7)]
    logit = cp([factor.numpy() for factor in factors])
    unknown = np.ones(values.size, bool)
    unknown[np.ravel_multi_index(train.indices.numpy().T, values.shape)] = False
    exact = -np.logaddexp(0, logit.reshape(-1)[unknown]).sum()
    estimates = []
    for seed in range(40):
        model.seed.fill_(seed)
        model.zeros = None
        estimates.append(model.zeros_log_likelihood(factors, train.indices).item())
    error = np.std(estimates, ddof=1) / 40**0.5
    assert abs(np.mean(estimates) - exact) < 4 * error
    assert error < 0.02 * abs(exact)


def test_the_sample_of_zeros_is_drawn_once_and_again_after_a_restart():
    values, _, _ = draw("binary", (9, 8, 7), 2)
    train, _, _ = known(values, "zeros")
    model = GCP((9, 8, 7), Bernoulli(), rank=2, missing="zeros", sample=100).fit(train, 1)
    zeros = model.zeros
    model.fit(train, 1)
    assert model.zeros is zeros and len(zeros) < 100
    resumed = GCP((9, 8, 7), Bernoulli(), rank=2, missing="zeros", sample=100)
    resumed.load_state_dict(model.state_dict())
    resumed.fit(train, 1)
    assert torch.equal(resumed.zeros, zeros)


def test_a_sample_without_a_zero_is_refused():
    train = tensor(cells((3, 3))[1:], np.ones(8), (3, 3))
    model = GCP((3, 3), Bernoulli(), 1, "zeros", sample=1)
    with pytest.raises(InputError, match=r"every cell of the sample has an entry: raise model.sample \(now 1\)"):
        model.fit(train, 1)


def test_every_cell_may_have_an_entry():
    values, _, _ = draw("binary", (3, 3), 1)
    train = tensor(cells((3, 3)), values.reshape(-1), (3, 3))
    torch.manual_seed(0)
    masked = GCP((3, 3), Bernoulli(), 1, "masked")
    torch.manual_seed(0)
    zeros = GCP((3, 3), Bernoulli(), 1, "zeros")
    assert torch.equal(masked.fit(train, 1).A, zeros.fit(train, 1).A)
