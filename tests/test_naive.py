import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import expit
from sklearn.linear_model import LogisticRegression

from ented.likelihoods import Bernoulli, NegativeBinomial
from ented.naive import main_effects, overall_mean
from ented.tensor import COOTensor

SHAPE, ZETA = (4, 3, 5), 7.0
NB = NegativeBinomial(ZETA)


def make(values, seed=0):
    rng = np.random.default_rng(seed)
    indices = torch.from_numpy(rng.integers(0, SHAPE, size=(len(values), len(SHAPE))))
    return COOTensor(indices, torch.tensor(values, dtype=torch.float64), SHAPE)


def random_tensor(kind, n=80, seed=0):
    """Values that depend on the row of each mode; no entry in the last row of the first mode."""
    rng = np.random.default_rng(seed)
    indices = rng.integers(0, (SHAPE[0] - 1, *SHAPE[1:]), size=(n, len(SHAPE)))
    f = sum(rng.normal(0, 0.7, size)[column] for size, column in zip(SHAPE, indices.T, strict=True))
    x = rng.binomial(1, expit(f)) if kind == "binary" else rng.negative_binomial(ZETA, expit(-f))
    return COOTensor(torch.from_numpy(indices), torch.from_numpy(x).double(), SHAPE)


def one_hot(indices):
    """A column for each row of each mode."""
    return np.hstack([np.eye(size)[column] for size, column in zip(SHAPE, indices.numpy().T, strict=True)])


def all_cells():
    return torch.cartesian_prod(*[torch.arange(size) for size in SHAPE])


def newton_count(train, penalty):
    """The constant and the effects at which the penalised log likelihood is stationary."""
    A = np.hstack([np.ones((len(train), 1)), one_hot(train.indices)])
    ridge = penalty * np.diag([0.0] + [1.0] * sum(SHAPE))
    x, w = train.values.numpy(), np.zeros(A.shape[1])
    for _ in range(100):
        # log p = x log sigmoid(f) + zeta log sigmoid(-f) + const
        p = expit(A @ w)
        gradient = A.T @ (x - (x + ZETA) * p) - ridge @ w
        w += np.linalg.solve((A.T * ((x + ZETA) * p * (1 - p))) @ A + ridge, gradient)
    assert np.abs(gradient).max() < 1e-10
    return w


@pytest.mark.parametrize("values", [[0, 3, 40, 5], [1, 1, 1, 1], [0, 0, 0, 6]])
def test_overall_mean_of_counts(values):
    predictive = overall_mean(make(values), NB, all_cells())
    assert predictive.mean.tolist() == pytest.approx([np.mean(values)] * 60)
    # f is known: no more variance than the likelihood's own
    assert predictive.variance[0].item() == pytest.approx(stats.nbinom.var(ZETA, ZETA / (ZETA + np.mean(values))))


@pytest.mark.parametrize("values", [[0, 1, 1, 1], [0, 0, 0, 1, 0]])
def test_overall_mean_of_binary_entries(values):
    predictive = overall_mean(make(values), Bernoulli(), all_cells())
    assert predictive.mean.tolist() == pytest.approx([np.mean(values)] * 60)


def test_overall_mean_of_values_all_alike_stays_half_an_entry_away():
    """Of 4 entries: odds 0.5 to 4, 4 to 0.5, and half a count in 4 entries."""
    for values, likelihood, expected in [
        ([0] * 4, Bernoulli(), 0.5 / 4.5),
        ([1] * 4, Bernoulli(), 4 / 4.5),
        ([0] * 4, NB, 0.5 / 4),
    ]:
        predictive = overall_mean(make(values), likelihood, all_cells())
        assert predictive.mean.tolist() == pytest.approx([expected] * 60)
        assert predictive.log_prob(torch.ones(60, dtype=torch.float64)).isfinite().all()


@pytest.mark.parametrize("penalty", [0.1, 3.0])
def test_main_effects_of_binary_entries_are_scikit_learns(penalty):
    train, cells = random_tensor("binary"), all_cells()
    reference = LogisticRegression(C=1 / penalty, tol=1e-10, max_iter=10_000)
    reference.fit(one_hot(train.indices), train.values.numpy())
    expected = reference.decision_function(one_hot(cells))
    predictive = main_effects(train, Bernoulli(), cells, penalty)
    # L-BFGS stops when the loss, of order 50, changes by less than 2e-9 of itself
    assert predictive.f_mean.tolist() == pytest.approx(expected, abs=2e-3)
    assert not predictive.f_variance.any()


@pytest.mark.parametrize("penalty", [0.1, 3.0])
def test_main_effects_of_counts_are_newtons(penalty):
    train, cells = random_tensor("count"), all_cells()
    w = newton_count(train, penalty)
    predictive = main_effects(train, NB, cells, penalty)
    assert predictive.f_mean.tolist() == pytest.approx(w[0] + one_hot(cells) @ w[1:], abs=2e-3)
    assert not predictive.f_variance.any()


@pytest.mark.parametrize("kind", ["binary", "count"])
def test_main_effects_explain_their_training_entries_better_than_the_mean(kind):
    likelihood = NB if kind == "count" else Bernoulli()
    train = random_tensor(kind)
    effects, mean = (fit(train, likelihood, train.indices) for fit in (main_effects, overall_mean))
    assert effects.log_prob(train.values).sum() > mean.log_prob(train.values).sum() + 1


def test_the_constant_bears_no_penalty():
    """Values all alike need no effects, however heavy the penalty: the mean is met."""
    predictive = main_effects(make([30] * 20), NB, all_cells(), penalty=100.0)
    assert predictive.mean.tolist() == pytest.approx([30] * 60, rel=1e-3)


def test_rows_without_entries_have_no_effect():
    """As the last row of the first mode. The effects of a mode sum to zero, where the constant is at its optimum."""
    train, cells = random_tensor("count"), all_cells()
    f = main_effects(train, NB, cells).f_mean.reshape(SHAPE)
    torch.testing.assert_close(f[-1], f[:-1].mean(0), rtol=0, atol=2e-3)


@pytest.mark.parametrize("likelihood", [Bernoulli(), NB], ids=["binary", "count"])
def test_main_effects_stay_finite_where_a_row_is_all_zero(likelihood):
    train = random_tensor("binary")
    train = COOTensor(train.indices, torch.where(train.indices[:, 0] == 1, 0.0, train.values), SHAPE)
    predictive = main_effects(train, likelihood, all_cells())
    in_row = all_cells()[:, 0] == 1
    assert predictive.f_mean.abs().max() < 10
    assert predictive.mean[in_row].mean() < predictive.mean[~in_row].mean() / 2
