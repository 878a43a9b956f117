import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import expit
from sklearn.metrics import roc_auc_score

from ented.likelihoods import Bernoulli, NegativeBinomial
from ented.metrics import CompletionMetrics
from ented.predictive import LatentGaussian

ZETA = 20.0
BATCHES = [(0, 1), (1, 40), (40, 200)]  # unequal, the first of one entry


def make(kind, seed=0, n=200):
    """Means and variances of f, and values that come from neither exactly."""
    rng = np.random.default_rng(seed)
    f_mean, f_variance = rng.normal(0, 1, n), rng.uniform(0, 0.8, n)
    f = rng.normal(f_mean, 1)
    x = rng.binomial(1, expit(f)) if kind == "binary" else rng.negative_binomial(ZETA, expit(-f))
    return f_mean, f_variance, x.astype(float)


def update(metrics, kind, f_mean, f_variance, x, batches=BATCHES):
    likelihood = Bernoulli() if kind == "binary" else NegativeBinomial(ZETA)
    for start, stop in batches:
        part = [torch.from_numpy(column[start:stop]) for column in (f_mean, f_variance, x)]
        metrics.update(LatentGaussian(likelihood, part[0], part[1]), part[2])


def expectation(function, f_mean, f_variance, nodes=801):
    """E[function(f)] of each entry."""
    t = np.linspace(-10, 10, nodes)
    f = f_mean[:, None] + np.sqrt(f_variance)[:, None] * t
    return (function(f) * stats.norm.pdf(t)).sum(-1) * (t[1] - t[0])


def expected_binary(f_mean, f_variance, x):
    p, p_plugin = expectation(expit, f_mean, f_variance), expit(f_mean)
    return {
        "auc": roc_auc_score(x, p),
        "nll": -np.mean(np.log(np.where(x == 1, p, 1 - p))),
        "nll_plugin": -np.mean(np.log(np.where(x == 1, p_plugin, 1 - p_plugin))),
    }


def relative_median(f_mean, f_variance):
    """The median under p(x) / (x + 1), from the probabilities of all counts that matter."""
    k = np.arange(1500)[:, None]

    def pmf(f):
        return stats.nbinom.pmf(k, ZETA, expit(-f))

    pairs = zip(f_mean, f_variance, strict=True)
    pmfs = [expectation(pmf, np.full(1, mean), np.full(1, variance), nodes=161) for mean, variance in pairs]
    weights = [(p / (k[:, 0] + 1)).cumsum() for p in pmfs]
    return np.array([np.searchsorted(weight, weight[-1] / 2) for weight in weights])


def expected_count(f_mean, f_variance, x):
    p = expectation(lambda f: stats.nbinom.pmf(x[:, None], ZETA, expit(-f)), f_mean, f_variance)
    prediction, plugin = ZETA * expectation(np.exp, f_mean, f_variance), ZETA * np.exp(f_mean)
    return {
        "nll": -np.mean(np.log(p)),
        "nll_plugin": -np.mean(stats.nbinom.logpmf(x, ZETA, expit(-f_mean))),
        "rmse": np.linalg.norm(x - prediction) / np.linalg.norm(x),
        "rmse_plugin": np.linalg.norm(x - plugin) / np.linalg.norm(x),
        "mape": np.mean(np.abs(x - relative_median(f_mean, f_variance)) / (x + 1)),
        "mape_plugin": np.mean(np.abs(x - plugin) / (x + 1)),
    }


EXPECTED = {"binary": expected_binary, "count": expected_count}
kinds = pytest.mark.parametrize("kind", list(EXPECTED))


def assert_close(actual, expected):
    """Up to the error of the predictive nll's quadrature, and in mape up to that of its medians, which are sampled."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name] == pytest.approx(value, rel=2e-2 if name == "mape" else 1e-4), name


def floats(metrics):
    return {name: value.item() for name, value in metrics.compute().items()}


@kinds
def test_metrics_are_those_of_all_entries_whatever_the_batches(kind):
    data, metrics = make(kind), CompletionMetrics(kind)
    update(metrics, kind, *data)
    assert_close(floats(metrics), EXPECTED[kind](*data))


@kinds
def test_reset_forgets(kind):
    metrics = CompletionMetrics(kind)
    update(metrics, kind, *make(kind, seed=1))
    metrics.reset()
    data = make(kind, seed=2)
    update(metrics, kind, *data)
    assert_close(floats(metrics), EXPECTED[kind](*data))


def test_auc_ranks_by_the_predictive_probability_with_ties():
    """E[sigmoid(f)], which the variance shrinks towards 1/2: another order than that of the means."""
    f_mean, f_variance = np.array([1.0, 1.2, 1.0, -1.0]), np.array([0.0, 9.0, 0.0, 0.0])
    x = np.array([1.0, 0.0, 0.0, 0.0])
    metrics = CompletionMetrics("binary")
    update(metrics, "binary", f_mean, f_variance, x, [(0, 3), (3, 4)])
    # the one beats two of the three zeros, and ties with the other
    assert floats(metrics)["auc"] == pytest.approx(2.5 / 3)


def test_sums_are_in_double_precision():
    """A million in float32 swallows the halves that follow it."""
    x = np.array([1e6] + [1.0] * 200)
    metrics, data = CompletionMetrics("count"), (np.log((x + 0.5) / ZETA), np.zeros_like(x), x)
    update(metrics, "count", *data, [(0, 1), (1, 201)])
    assert all(value.dtype == torch.float64 for value in metrics.compute().values())
    expected = expected_count(*data) | {"mape": floats(metrics)["mape"]}  # of medians of a million: not by their sum
    assert floats(metrics) == pytest.approx(expected, rel=1e-9)


def test_sums_are_in_double_precision_also_where_a_module_is_moved():
    """A value of 1e-9 beside ones is lost in single precision."""
    from torch.distributions import Poisson

    from ented.predictive import Known

    metrics = CompletionMetrics("count").to("cpu")
    x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    rate = x + torch.tensor([1e-9, -2e-9, 3e-9], dtype=torch.float64)
    metrics.update(Known(Poisson(rate)), x)
    expected = ((rate - x).abs() / (x + 1)).mean().item()
    assert metrics.compute()["mape"].item() == pytest.approx(expected, rel=1e-12)
    metrics.update(Known(Poisson(x + 1 + 1e-9)), x)
    expected = torch.cat([(rate - x).abs() / (x + 1), (1 + 1e-9) / (x + 1)]).mean().item()
    assert metrics.compute()["mape"].item() == pytest.approx(expected, rel=1e-12)
