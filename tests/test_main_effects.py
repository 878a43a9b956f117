import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import expit
from sklearn.linear_model import LogisticRegression, PoissonRegressor

from baselines.main_effects import MainEffects
from ented.likelihoods import Bernoulli, NegativeBinomial
from ented.predictive import LatentGaussian
from ented.tensor import COOTensor

SHAPE, ZETA = (4, 3, 5), 7.0
NB = NegativeBinomial(ZETA)
pytestmark = pytest.mark.usefixtures("float64")


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


def fit(train, likelihood, **settings) -> LatentGaussian:
    """Predictive distribution of all cells."""
    return MainEffects(SHAPE, likelihood, **settings).fit(train, 500).predictive(all_cells())


def overall_mean(train, likelihood) -> LatentGaussian:
    """What the model predicts before its first sweep."""
    model = MainEffects(SHAPE, likelihood)
    model.initialise(train.indices, train.values)
    return model.predictive(all_cells())


def newton_count(train, penalty):
    """The constant and the effects at which the penalised negative binomial log likelihood is stationary."""
    A = np.hstack([np.ones((len(train), 1)), one_hot(train.indices)])
    ridge = penalty * len(train) * np.diag([0.0] + [1.0] * sum(SHAPE))
    x, w = train.values.numpy(), np.zeros(A.shape[1])
    for _ in range(100):
        # log p = x log sigmoid(f) + zeta log sigmoid(-f) + const
        p = expit(A @ w)
        gradient = A.T @ (x - (x + ZETA) * p) - ridge @ w
        w += np.linalg.solve((A.T * ((x + ZETA) * p * (1 - p))) @ A + ridge, gradient)
    assert np.abs(gradient).max() < 1e-10
    return w


@pytest.mark.parametrize("values", [[0, 3, 40, 5], [1, 1, 1, 1], [0, 0, 0, 6]])
def test_the_mean_and_the_shape_of_counts_before_the_first_sweep(values):
    predictive, mean = overall_mean(make(values), NB), np.mean(values)
    assert predictive.mean.tolist() == pytest.approx([mean] * 60)
    # of shapes from 0.01 to 10000 the most likely one; f is known: no more variance than the likelihood's own
    shapes = np.geomspace(1e-2, 1e4, 2001)
    log_prob = stats.nbinom.logpmf(np.array(values)[:, None], shapes, shapes / (shapes + mean)).sum(0)
    assert predictive.variance[0].item() == pytest.approx(mean + mean**2 / shapes[log_prob.argmax()], rel=1e-2)


@pytest.mark.parametrize("values", [[0, 1, 1, 1], [0, 0, 0, 1, 0]])
def test_the_mean_of_binary_entries_before_the_first_sweep(values):
    assert overall_mean(make(values), Bernoulli()).mean.tolist() == pytest.approx([np.mean(values)] * 60)


def test_a_mean_of_values_all_alike_stays_half_an_entry_away():
    """Of 4 entries: odds 0.5 to 4, 4 to 0.5, and half a count in 4 entries."""
    for values, likelihood, expected in [
        ([0] * 4, Bernoulli(), 0.5 / 4.5),
        ([1] * 4, Bernoulli(), 4 / 4.5),
        ([0] * 4, NB, 0.5 / 4),
    ]:
        predictive = overall_mean(make(values), likelihood)
        assert predictive.mean.tolist() == pytest.approx([expected] * 60)
        assert predictive.log_prob(torch.ones(60)).isfinite().all()


@pytest.mark.parametrize("penalty", [1e-3, 3e-2])
def test_binary_entries_are_scikit_learns(penalty):
    train = random_tensor("binary")
    reference = LogisticRegression(C=1 / (penalty * len(train)), tol=1e-10, max_iter=10_000)
    reference.fit(one_hot(train.indices), train.values.numpy())
    expected = reference.decision_function(one_hot(all_cells()))
    # the penalty's curvature, 80 * 1e-3 at least, makes a loss of 50 * 1e-10 an error of (2 * 5e-9 / 0.08)^1/2 = 4e-4
    assert fit(train, Bernoulli(), penalty=penalty).f_mean.tolist() == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("penalty", [1e-3, 3e-2])
def test_the_mean_of_counts_is_scikit_learns_poisson_regression(penalty):
    train = random_tensor("count")
    reference = PoissonRegressor(alpha=penalty, tol=1e-10, max_iter=10_000)
    reference.fit(one_hot(train.indices), train.values.numpy())
    expected = reference.predict(one_hot(all_cells()))
    assert fit(train, NB, penalty=penalty).mean.tolist() == pytest.approx(expected, rel=2e-3)


def test_the_shape_of_counts_is_the_most_likely_at_the_regressions_means():
    train = random_tensor("count", n=400)
    model = MainEffects(SHAPE, NB).fit(train, 500)
    mean, x = model.predictive(train.indices).mean.numpy(), train.values.numpy()

    def log_likelihood(zeta):
        return stats.nbinom.logpmf(x, zeta, zeta / (zeta + mean)).sum()

    zeta = model.likelihood.zeta
    best = max(np.geomspace(0.5, 200, 2000), key=log_likelihood)
    assert zeta == pytest.approx(best, rel=4e-3)  # the grid's step is 3e-3
    assert model.predictive(train.indices).log_prob(train.values).sum().item() == pytest.approx(log_likelihood(zeta))


@pytest.mark.parametrize("penalty", [1e-3, 3e-2])
def test_counts_under_their_likelihood_are_newtons(penalty):
    train = random_tensor("count")
    w = newton_count(train, penalty)
    predictive = fit(train, NB, regression="likelihood", penalty=penalty)
    assert predictive.likelihood.zeta == ZETA
    assert predictive.f_mean.tolist() == pytest.approx(w[0] + one_hot(all_cells()) @ w[1:], abs=1e-3)


@pytest.mark.parametrize("kind", ["binary", "count"])
def test_the_objective_grows(kind):
    train = random_tensor(kind, n=300)
    model, objective = MainEffects(SHAPE, NB if kind == "count" else Bernoulli()), []
    for _ in range(4):
        model.fit(train, 1)
        objective.append(model.objective.item())
    assert objective == sorted(objective) and objective[-1] > objective[0]


@pytest.mark.parametrize("kind", ["binary", "count"])
def test_effects_predict_new_entries_nearly_as_well_as_the_truth(kind):
    """Twelve parameters from 3000 entries: the excess log loss is about 12 / (2 * 3000) = 0.002 an entry."""
    rng = np.random.default_rng(3)
    effects = [rng.normal(0, 0.7, size) for size in SHAPE]

    def draw(n):
        indices = rng.integers(0, SHAPE, size=(n, 3))
        f = sum(effect[column] for effect, column in zip(effects, indices.T, strict=True))
        x = rng.binomial(1, expit(f)) if kind == "binary" else rng.negative_binomial(ZETA, expit(-f))
        return COOTensor(torch.from_numpy(indices), torch.from_numpy(x).double(), SHAPE), torch.from_numpy(f)

    likelihood = NB if kind == "count" else Bernoulli()
    train, _ = draw(3000)
    test, f = draw(3000)
    model = MainEffects(SHAPE, likelihood)
    model.initialise(train.indices, train.values)
    start = model.predictive(test.indices).log_prob(test.values).mean()
    excess = (
        likelihood.log_prob(test.values, f).mean()
        - model.fit(train, 500).predictive(test.indices).log_prob(test.values).mean()
    )
    assert excess < 0.01 < likelihood.log_prob(test.values, f).mean() - start - 0.02


def test_the_constant_bears_no_penalty():
    """Values all alike need no effects, however heavy the penalty: the mean is met."""
    assert fit(make([30] * 20), NB, penalty=5.0).mean.tolist() == pytest.approx([30] * 60, rel=1e-3)


@pytest.mark.parametrize("regression", ["poisson", "likelihood"])
def test_rows_without_entries_have_no_effect(regression):
    """As the last row of the first mode. The effects of a mode sum to zero, where the constant is at its optimum."""
    f = fit(random_tensor("count"), NB, regression=regression).f_mean.reshape(SHAPE)
    torch.testing.assert_close(f[-1], f[:-1].mean(0), rtol=0, atol=2e-3)


@pytest.mark.parametrize("likelihood", [Bernoulli(), NB], ids=["binary", "count"])
def test_effects_stay_finite_where_a_row_is_all_zero(likelihood):
    train = random_tensor("binary")
    train = COOTensor(train.indices, torch.where(train.indices[:, 0] == 1, 0.0, train.values), SHAPE)
    predictive = fit(train, likelihood)
    in_row = all_cells()[:, 0] == 1
    assert predictive.log_prob(train.values[:1].expand(60)).isfinite().all()
    assert predictive.mean[in_row].mean() < predictive.mean[~in_row].mean() / 2
