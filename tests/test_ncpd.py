"""CP-APR, beside the Python Tensor Toolbox's."""

import copy

import numpy as np
import pytest
import pyttb
import torch
from baseline_data import cells, cp, halves, tensor
from pyttb.gcp.handles import Objectives
from pyttb.gcp.optimizers import LBFGSB
from scipy import stats

from baselines.main_effects import MainEffects
from baselines.ncpd import NCPD
from ented.errors import InputError
from ented.likelihoods import Bernoulli, NegativeBinomial

NB = NegativeBinomial(20)
pytestmark = pytest.mark.usefixtures("float64")


def draw(shape, rank, seed=0):
    rng = np.random.default_rng(seed)
    factors = [rng.gamma(0.7, 1.7, (size, rank)) for size in shape]
    return rng.poisson(cp(factors)), cp(factors), rng


def dense(model) -> np.ndarray:
    return cp([factor.numpy() for factor in model.scaled()])


def all_entries(values):
    return tensor(cells(values.shape), values.reshape(-1), values.shape)


def ones_only(values):
    """The cells that are not zero, which is all that the method needs where the others are zeros."""
    train = all_entries(values)
    return train.subset(train.values > 0)


def test_zeros_are_the_toolboxs_cp_apr():
    """From the same start, to the same point, which meets the toolbox's KKT tolerance."""
    values, _, _ = draw((5, 4, 3), 2)
    train = ones_only(values)
    model = NCPD((5, 4, 3), NB, rank=2, missing="zeros")
    model.initialise(train.indices, train.values)
    model.started.fill_(True)
    start = pyttb.ktensor([factor.numpy().copy(order="F") for factor in model.factors], model.weights.numpy().copy())
    sparse = pyttb.sptensor.from_aggregator(
        train.indices.numpy(), train.values.numpy()[:, None].astype(float), (5, 4, 3)
    )
    fitted, _, info = pyttb.cp_apr(sparse, 2, init=start, maxiters=2000, printitn=0)
    model.fit(train, 2000)
    assert model.converged and model.violation <= 1e-4
    # a KKT violation of 1e-4 leaves the mean that far from the optimum, relative to a curvature of order 1
    np.testing.assert_allclose(dense(model), fitted.full().data, atol=0.02)
    # where the columns sum to one, the total of the model is that of the data
    assert dense(model).sum() == pytest.approx(values.sum())


def test_masked_entries_reach_the_optimum_of_the_toolboxs_gcp():
    """The same likelihood by another algorithm, both from the factors that made the data."""
    shape = (8, 7, 6)
    rng = np.random.default_rng(0)
    factors = [rng.gamma(0.7, 1.7, (size, 2)) for size in shape]
    values = rng.poisson(cp(factors))
    mask = rng.random(shape) < 0.7
    train = tensor(cells(shape)[mask.reshape(-1)], values[mask], shape)
    model = NCPD(shape, NB, rank=2, missing="masked", tolerance=1e-6)
    model.started.fill_(True)
    for factor, truth in zip(model.factors, factors, strict=True):
        factor.copy_(torch.from_numpy(truth / truth.sum(0)))
    model.weights.copy_(torch.from_numpy(np.prod([truth.sum(0) for truth in factors], axis=0)))
    model.fit(train, 3000)
    data = pyttb.tensor(values.astype(float))
    start = pyttb.ktensor([factor.copy(order="F") for factor in factors])
    optimizer = LBFGSB(factr=10, pgtol=1e-9, maxiter=5000, maxfun=100_000)
    _, _, info = pyttb.gcp_opt(data, 2, Objectives.POISSON, optimizer, init=start, mask=mask.astype(float), printitn=0)
    assert -model.objective.item() == pytest.approx(info["final_f"], rel=1e-4)


@pytest.mark.parametrize("missing", ["masked", "zeros"])
def test_the_likelihood_grows(missing):
    values, _, _ = draw((7, 6, 5), 2)
    train, _, _ = halves(values, np.random.default_rng(1))
    model, objective = NCPD((7, 6, 5), NB, rank=4, missing=missing), []
    for _ in range(30):
        model.fit(train, 1)
        objective.append(model.objective.item())
    assert (np.diff(objective) > -1e-9).all() and objective[-1] > objective[0] + 1


def test_where_it_ends_no_element_can_be_moved_for_the_better():
    """The KKT condition by finite differences: a derivative of 0, or below 0 at an element that is 0."""
    values, _, _ = draw((5, 4, 3), 2)
    train, _, _ = halves(values, np.random.default_rng(1))
    model = NCPD((5, 4, 3), NB, rank=2, tolerance=1e-5).fit(train, 5000)
    assert model.converged
    x, rows = train.values.numpy(), np.ravel_multi_index(train.indices.numpy().T, (5, 4, 3))

    def log_likelihood(factors):
        return stats.poisson.logpmf(x, cp(factors).reshape(-1)[rows] + 1e-10).sum()

    factors = [factor.numpy().copy() for factor in model.scaled()]
    for mode, factor in enumerate(factors):
        # in the coordinates of an update, where the other modes' columns sum to one
        scale = np.prod([other.sum(0) for d, other in enumerate(factors) if d != mode], axis=0)
        for i, r in np.ndindex(*factor.shape):
            moved = copy.deepcopy(factors)
            moved[mode][i, r] += 1e-6 / scale[r]
            slope = (log_likelihood(moved) - log_likelihood(factors)) / 1e-6
            assert slope < 0.01
            assert abs(slope) < 0.01 or factor[i, r] * scale[r] < 0.01


def test_an_inadmissible_zero_is_left():
    """An element started at zero, where multiplication would keep it, reaches what a start inside reaches."""
    values, _, _ = draw((6, 5, 4), 1, seed=2)
    train = ones_only(values)
    inside = NCPD((6, 5, 4), NB, rank=1, missing="zeros").fit(train, 500)
    outside = NCPD((6, 5, 4), NB, rank=1, missing="zeros")
    row = int(values.sum((1, 2)).argmax())
    outside.factors[0][row] = 0
    outside.fit(train, 500)
    np.testing.assert_allclose(dense(outside), dense(inside), atol=1e-3)


def test_what_was_not_seen_is_predicted_nearly_as_well_as_by_the_truth():
    """About 100 parameters from 3000 entries: an excess log loss of 100 / (2 * 3000) = 0.02, thrice for slack."""
    shape = (20, 20, 15)
    values, mean, rng = draw(shape, 2)
    train, test, rows = halves(values, rng)
    oracle = stats.poisson.logpmf(values, mean).reshape(-1)[rows].mean()
    model = NCPD(shape, NB, rank=2).fit(train, 1000)
    effects = MainEffects(shape, NB).fit(train, 500)
    excess = oracle - model.predictive(test.indices).log_prob(test.values).mean().item()
    rival = oracle - effects.predictive(test.indices).log_prob(test.values).mean().item()
    assert excess < 0.06 and rival > 4 * excess


def test_binary_entries_end_with_one_line():
    with pytest.raises(InputError, match="NCPD is for count entries, these are binary: choose another model="):
        NCPD((3, 3), Bernoulli(), 1)
