"""BCP against scikit-learn's logistic regression, and on a tensor drawn from its own model."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from baselines.bcp import BCP
from baselines.main_effects import MainEffects
from ented.errors import InputError
from ented.likelihoods import Bernoulli, NegativeBinomial
from ented.tensor import COOTensor

SHAPE, RANK = (12, 11, 10), 2


def all_cells(shape=SHAPE):
    return torch.cartesian_prod(*[torch.arange(size) for size in shape])


def draw(spread: float, seed=0) -> tuple[COOTensor, COOTensor, np.ndarray]:
    """Entries of a rank 2 model for training and test, and the test entries' logits, of that standard deviation."""
    rng = np.random.default_rng(seed)
    cells = all_cells()
    rows = [rng.normal(size=(size, RANK))[cells[:, mode]] for mode, size in enumerate(SHAPE)]
    theta = np.prod(rows, 0).sum(-1)
    theta = np.clip(theta * spread / theta.std(), -10, 10)
    x = rng.random(len(theta)) < 1 / (1 + np.exp(-theta))
    order = rng.permutation(len(theta))
    tensor, (test, train) = COOTensor(cells, torch.from_numpy(x.astype(float)), SHAPE), np.split(order, [300])
    return tensor.subset(torch.from_numpy(train)), tensor.subset(torch.from_numpy(test)), theta[test]


def make(seed=0, rank=RANK, shape=SHAPE, **settings) -> BCP:
    torch.manual_seed(seed)
    return BCP(shape, Bernoulli(), rank, **settings).double()


def state(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def features(module, indices, mode):
    """Products of the other modes' rows, entry by entry."""
    A = np.split(module.A.numpy(), np.cumsum(SHAPE)[:-1])
    others = [d for d in range(3) if d != mode]
    return np.stack([np.prod([A[d][index[d]] for d in others], 0) for index in indices.numpy()])


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_each_row_of_a_mode_is_scikit_learns_regression(mode):
    train, _, _ = draw(spread=1.0)
    module = make(newton_steps=30)
    module.initialise(train.indices, train.values)
    X = features(module, train.indices, mode)
    module.update(mode, train.indices, train.values)
    assert module.theta(train.indices).abs().max() < 10  # no regression reaches the bound
    for i, row in enumerate(module.factors[mode]):
        own = (train.indices[:, mode] == i).numpy()
        regression = LogisticRegression(C=np.inf, fit_intercept=False, tol=1e-10, max_iter=1000)
        regression.fit(X[own], train.values[own].numpy())
        # lbfgs stops at a gradient of 1e-10 for each entry, H is above 1e-2 for each entry
        np.testing.assert_allclose(row, regression.coef_[0], rtol=1e-5, atol=1e-6)


def test_rows_where_one_step_is_too_long_climb_all_the_same():
    """Newton's full steps diverge from a start that is far away: here logits up to the bound, many of them wrong."""
    train, _, _ = draw(spread=1.0)
    module = make(newton_steps=30)
    module.initialise(train.indices, train.values)
    X = features(module, train.indices, 0)
    module.factors[0].mul_(1e3)
    module.factors[0].mul_(module.shrinkage(module.factors[0], 0)[:, None])
    module.update(0, train.indices, train.values)
    for i, row in enumerate(module.factors[0]):
        own = (train.indices[:, 0] == i).numpy()
        regression = LogisticRegression(C=np.inf, fit_intercept=False, tol=1e-10, max_iter=1000)
        regression.fit(X[own], train.values[own].numpy())
        np.testing.assert_allclose(row, regression.coef_[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("alpha", [10.0, 2.0])
@pytest.mark.parametrize("entries", [900, 60])  # of 60 entries, most rows can be separated, and reach the bound
def test_no_sweep_lowers_the_likelihood_or_leaves_the_bound(alpha, entries):
    train, _, _ = draw(spread=3.0)
    train = train.subset(torch.arange(entries))
    module, values = make(alpha=alpha, tolerance=0.0), []
    x, rows = train.values.numpy(), np.ravel_multi_index(train.indices.numpy().T, SHAPE)
    for _ in range(8):
        module.fit(train, 1)
        A = np.split(module.A.numpy(), np.cumsum(SHAPE)[:-1])
        theta = np.einsum("ir,jr,kr->ijk", *A).reshape(-1)
        assert np.abs(theta).max() <= alpha * (1 + 1e-12)  # in every cell
        values.append(-np.logaddexp(0, -(2 * x - 1) * theta[rows]).sum())
        assert module.objective.item() == pytest.approx(values[-1], rel=1e-12)
    assert (np.diff(values) >= -1e-9).all()
    assert values[-1] > values[0] > -entries * np.log(2)  # theta = 0 has log 2 an entry
    if alpha == 2 or entries == 60:  # the likelihood asks for more; the rows' bounds leave less than half unused
        assert np.abs(theta).max() > alpha / 2


def test_a_row_at_the_bound_does_not_hold_back_the_others():
    """Row 0 has only ones, so its likelihood has no maximum; row 1 has its own, of logit log 3."""
    indices = torch.tensor([[0, 0]] * 4 + [[1, 0]] * 4)
    values = torch.tensor([1, 1, 1, 1, 1, 1, 1, 0], dtype=torch.float64)
    module = make(rank=1, shape=(2, 1))
    module.initialise(indices, values)
    module.update(0, indices, values)
    torch.testing.assert_close(module.theta(indices[[0, 4]]), torch.tensor([10.0, np.log(3)], dtype=torch.float64))


def test_recovers_a_tensor_of_its_own_model():
    train, test, theta = draw(spread=3.0)
    module = make().fit(train, 50)
    assert module.converged
    x, predictive = test.values.numpy(), module.predictive(test.indices)
    nll = -predictive.log_prob(test.values).mean().item()
    oracle = np.logaddexp(0, -(2 * x - 1) * theta).mean()
    effects = MainEffects(SHAPE, Bernoulli()).double().fit(train, 500)
    naive = -effects.predictive(test.indices).log_prob(test.values).mean().item()
    assert naive - oracle > 0.2  # the effects are multiplicative
    # maximum likelihood costs about parameters / (2 entries) = 66 / 2040 nats a training entry, and more in test
    assert nll < oracle + 0.15 * (naive - oracle) + 66 / 1020
    assert roc_auc_score(x, predictive.mean) > roc_auc_score(x, theta) - 0.04


def test_a_fit_that_is_resumed_comes_to_the_same_numbers():
    train, _, _ = draw(spread=3.0)
    whole, resumed = make(tolerance=0.0), make(seed=9, tolerance=0.0)
    whole.fit(train, 3)
    resumed.load_state_dict(state(whole))
    for module in (whole, resumed):
        module.fit(train, 3)
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def test_rows_without_entries_predict_one_half_and_no_cell_is_beyond_the_bound():
    train, _, _ = draw(spread=3.0)
    train = train.subset(train.indices[:, 1] != 4)
    module = make(alpha=1.0).fit(train, 5)
    assert (module.predictive(all_cells()).mean[all_cells()[:, 1] == 4] == 0.5).all()
    assert 0.5 < module.theta(all_cells()).abs().max() <= 1 + 1e-12


@pytest.mark.parametrize("entries", [900, 5])
def test_the_rank_may_be_larger_than_a_mode_or_the_number_of_entries(entries):
    train, _, _ = draw(spread=3.0)
    train = train.subset(torch.arange(entries))
    module = make(rank=11).fit(train, 2)
    assert -0.75 * entries * np.log(2) < module.objective < 0  # theta = 0 has log 2 an entry


def test_predictions_of_a_float32_model_are_in_float64():
    train, test, _ = draw(spread=3.0)
    module = make().float()
    module.fit(train, 1)
    assert module.predictive(test.indices).f_mean.dtype == torch.float64
    double = make()
    double.fit(train, 1)
    # ten Newton steps of three modes in single precision
    assert module.objective.item() == pytest.approx(double.objective.item(), rel=1e-2)


def test_counts_are_refused():
    with pytest.raises(InputError, match="BCP is for binary entries"):
        BCP(SHAPE, NegativeBinomial(20), RANK)
