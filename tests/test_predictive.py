"""The predictive distribution of entries whose f is Gaussian, against SciPy's distributions and brute force."""

import numpy as np
import pytest
import torch
from dense_sums import NB, ZETA, both, expectation, gaussian, log_pmf, predictive, tensor, values_of
from scipy import integrate, stats
from scipy.special import expit

import ented.predictive
from ented.errors import InputError
from ented.likelihoods import Bernoulli, NegativeBinomial
from ented.predictive import Known, LatentGaussian, LatentMixture, Point


def brute_force_cdf(mean, variance, below):
    """P(x <= k) for k = 0, 1, ..., below - 1."""
    k = np.arange(below)[:, None]
    return expectation(lambda f: stats.nbinom.cdf(k, ZETA, expit(-f)), mean, variance)


@gaussian
@both
def test_predictive_log_prob_is_the_integral(likelihood, mean, variance):
    sd = np.sqrt(variance)
    for x in values_of(likelihood):
        if likelihood.kind == "count" and abs(np.log((x + 0.5) / likelihood.zeta) - mean) > 3 * sd + 1.5:
            continue  # so far from the mean that the integral underflows or is of no account
        expected, _ = integrate.quad(
            lambda f, x=x: np.exp(log_pmf(likelihood, x, f)) * stats.norm.pdf(f, mean, sd),
            mean - 10 * sd,
            mean + 10 * sd,
            epsabs=0,
            epsrel=1e-10,
            limit=500,
        )
        actual = predictive(likelihood, mean, variance).log_prob(tensor(x)).item()
        assert actual == pytest.approx(np.log(expected), abs=1e-7)  # eight digits are promised


@pytest.mark.parametrize("mean", [-3.0, 0.0, 3.0])
@pytest.mark.parametrize("variance", [0.01, 0.5, 4.0])
@pytest.mark.parametrize("zeta", [2.0, 20.0, 1000.0])
def test_predictive_log_prob_is_exact_for_every_shape(mean, variance, zeta):
    """Counts at 3 standard deviations of f to both sides, against adaptive quadrature; eight digits are promised."""
    sd = np.sqrt(variance)
    x = np.unique(np.rint(zeta * np.exp(mean + sd * np.linspace(-3, 3, 13))))

    def joint(f):
        return stats.nbinom.pmf(x, zeta, expit(-f)) * stats.norm.pdf(f, mean, sd)

    points = np.log((x + 0.5) / zeta)  # where the integrands peak
    expected, _ = integrate.quad_vec(joint, mean - 12 * sd, mean + 12 * sd, epsabs=0, epsrel=1e-11, points=points)
    f_mean, f_variance = (torch.full((len(x),), value, dtype=torch.float64) for value in (mean, variance))
    actual = LatentGaussian(NegativeBinomial(zeta), f_mean, f_variance).log_prob(torch.from_numpy(x))
    np.testing.assert_allclose(actual, np.log(expected), atol=1e-7)


def test_many_quantiles_are_found_in_parts(monkeypatch):
    latent = LatentMixture(NB, *torch.rand(2, 2, 10, dtype=torch.float64))
    together = latent.quantile(0.9)
    monkeypatch.setattr(ented.predictive, "AT_ONCE", 3)
    assert latent.quantile(0.9).tolist() == together.tolist()


def test_predictive_log_prob_is_the_average_over_draws_of_f():
    draws = stats.norm(0.4, 0.8).rvs(200_000, random_state=0)
    for likelihood, x in [(Bernoulli(), 0), (NB, 12), (NB, 60)]:
        p = np.exp(log_pmf(likelihood, x, draws))
        actual = predictive(likelihood, 0.4, 0.64).log_prob(tensor(x)).exp().item()
        assert actual == pytest.approx(p.mean(), abs=5 * p.std() / np.sqrt(len(p)))


def test_predictive_log_prob_survives_extremes():
    """Where p(x) itself underflows: f = -30 leaves nothing but log sigmoid(-30) = -30 for a one."""
    assert predictive(Bernoulli(), -30.0, 1e-6).log_prob(tensor(1.0)).item() == pytest.approx(-30, abs=1e-4)
    assert predictive(NB, -30.0, 1e-8).log_prob(tensor(100.0)).item() < -2500


@gaussian
@both
def test_mean_and_variance_are_the_mixtures(likelihood, mean, variance):
    if likelihood.kind == "binary":  # the variance of the probability
        first, second = (expectation(lambda f, k=k: expit(f) ** k, mean, variance) for k in (1, 2))
    else:
        zeta = likelihood.zeta
        first = expectation(lambda f: stats.nbinom.mean(zeta, expit(-f)), mean, variance)
        second = expectation(
            lambda f: stats.nbinom.var(zeta, expit(-f)) + stats.nbinom.mean(zeta, expit(-f)) ** 2, mean, variance
        )
    actual = predictive(likelihood, mean, variance)
    assert actual.mean.item() == pytest.approx(first, rel=1e-8)
    assert actual.variance.item() == pytest.approx(second - first**2, rel=1e-7, abs=1e-12)


@pytest.mark.parametrize(
    ("mean", "variance", "below"),
    [(0.0, 1.0, 1200), (-1.3, 0.2, 60), (0.8, 0.5, 900), (-3.0, 1.0, 80), (-6.0, 0.3, 20), (2.5, 0.05, 800)],
)
def test_quantile_is_that_of_the_mixture(mean, variance, below):
    cdf = brute_force_cdf(mean, variance, below)
    for q in (0.01, 0.05, 0.3, 0.5, 0.8, 0.95, 0.999):
        assert cdf[-1] > q
        # at mean 0 P(x <= 19) is 1/2 exactly, by symmetry in f: rounding must not decide
        assert predictive(NB, mean, variance).quantile(q).item() == (cdf < q - 1e-9).sum()


def test_quantiles_of_several_entries_are_those_of_each():
    """Of sizes so different that the root finder is done with some entries long before others."""
    f = torch.from_numpy(np.random.default_rng(0).uniform(-18, 11, 200))
    for q in (0.05, 0.5, 0.9):
        expected = stats.nbinom.ppf(q, ZETA, expit(-f.numpy()))
        assert LatentGaussian(NB, f, torch.zeros_like(f)).quantile(q).tolist() == expected.tolist()
    f_mean, f_variance = torch.linspace(-8, 1, 12).double().flip(0), torch.linspace(0, 0.4, 12).double()
    entries = zip(f_mean.tolist(), f_variance.tolist(), strict=True)
    expected = [(brute_force_cdf(*entry, 200) < 0.9).sum() for entry in entries]
    assert LatentGaussian(NB, f_mean, f_variance).quantile(0.9).tolist() == expected


@pytest.mark.parametrize(("f", "k"), [(-4.0, 0), (-2.0, 0), (-2.0, 1), (0.2, 9), (0.2, 24), (0.2, 50)])
def test_quantile_at_the_edge_between_two_counts(f, k):
    """With f known P(x <= k) is in closed form: q at it and below belongs to k, q above to k + 1."""
    edge = stats.nbinom.cdf(k, ZETA, expit(-f))
    quantiles = [predictive(NB, f, 0.0).quantile(q).item() for q in (edge - 1e-5, edge, edge + 1e-5)]
    assert quantiles == [k, k, k + 1]


@pytest.mark.parametrize("variance", [0.0, 0.5])
@pytest.mark.parametrize("f", [-20.0, -30.0, -50.0])
def test_quantile_of_a_count_that_is_surely_zero(f, variance):
    assert predictive(NB, f, variance).quantile(0.95).item() == 0


@pytest.mark.parametrize(("mean", "variance"), [(6.0, 0.0), (10.0, 0.0), (8.0, 0.3), (12.0, 0.05)])
@pytest.mark.parametrize("q", [0.05, 0.5, 0.95])
def test_quantile_of_large_counts(mean, variance, q):
    k = predictive(NB, mean, variance).quantile(q).item()
    below, at = (expectation(lambda f, k=k: stats.nbinom.cdf(k, ZETA, expit(-f)), mean, variance) for k in (k - 1, k))
    # 1e-6 for the quadrature rules, on both sides
    assert k == int(k)
    assert below - 1e-6 < q <= at + 1e-6


@gaussian
def test_binary_quantile_is_that_of_the_probability(mean, variance):
    for q in (0.05, 0.5, 0.9):
        expected = expit(stats.norm.ppf(q, mean, np.sqrt(variance)))
        assert predictive(Bernoulli(), mean, variance).quantile(q).item() == pytest.approx(expected)


@pytest.mark.parametrize("likelihood", [Bernoulli(), NB], ids=["binary", "count"])
def test_draws_follow_the_mixture(likelihood):
    torch.manual_seed(0)
    n, f_mean, f_variance = 100_000, tensor(0.0, 0.0, -2.0), tensor(0.3, 0.3, 0.0)
    x = LatentGaussian(likelihood, f_mean, f_variance).sample(n)
    assert x.shape == (n, 3) and x.dtype == torch.float64
    for s, (mean, variance) in enumerate(zip(f_mean.tolist(), f_variance.tolist(), strict=True)):
        for value in (0, 1) if likelihood.kind == "binary" else (0, 2, 5, 12, 20, 35):
            p = expectation(lambda f, v=value: np.exp(log_pmf(likelihood, v, f)), mean, variance)
            share = (x[:, s] == value).double().mean().item()
            assert share == pytest.approx(p, abs=5 * np.sqrt(p * (1 - p) / n))
    # entries are drawn independently, even two of one distribution; so are draws in turn
    assert abs(np.corrcoef(x[:, 0], x[:, 1])[0, 1]) < 5 / np.sqrt(n)
    assert abs(np.corrcoef(x[:-1, 0], x[1:, 0])[0, 1]) < 5 / np.sqrt(n)


@both
def test_plugin_has_f_at_its_mean(likelihood):
    plugin = predictive(likelihood, 0.8, 0.5).plugin()
    expected = expit(0.8) if likelihood.kind == "binary" else likelihood.zeta * np.exp(0.8)
    assert plugin.mean.item() == pytest.approx(expected)
    for x in values_of(likelihood):
        assert plugin.log_prob(tensor(x)).item() == pytest.approx(log_pmf(likelihood, x, 0.8))
    known = 0 if likelihood.kind == "binary" else stats.nbinom.var(likelihood.zeta, expit(-0.8))
    assert plugin.variance.item() == pytest.approx(known, abs=1e-12)


@pytest.mark.parametrize("smallest", [0, 1])
@pytest.mark.parametrize("zeta", [0.6, 20.0])
@gaussian
def test_the_relative_median_has_the_smallest_relative_error(mean, variance, zeta, smallest):
    """E|x - a| / (x + 1) over the exact probabilities: within 1% of what the best a has."""
    k = np.arange(6000)
    p = expectation(lambda f: stats.nbinom.pmf(k[:, None], zeta, expit(-f)), mean, variance)
    x = k + smallest
    losses = [(p * abs(x - a) / (x + 1)).sum() for a in range(400)]
    latent = LatentGaussian(NegativeBinomial(zeta, smallest), tensor(mean), tensor(variance))
    assert losses[int(latent.relative_median.item())] <= 1.01 * min(losses)


# mixtures: three Gaussians, far apart, next to each other, and one of them known

MIXTURES = pytest.mark.parametrize(
    "components",
    [[(-2.0, 0.1), (1.5, 0.3), (0.0, 0.5)], [(0.4, 0.2), (0.5, 0.2), (0.6, 0.1)], [(0.3, 0.0), (-1.0, 0.5)]],
)


def mixture(likelihood, components) -> LatentMixture:
    means, variances = torch.tensor(components, dtype=torch.float64).T
    return LatentMixture(likelihood, means[:, None], variances[:, None])


def pmf(components, below):
    """P(x = k) of counts for k = 0, 1, ..., below - 1."""
    k = np.arange(below)[:, None]
    of_components = [expectation(lambda f: stats.nbinom.pmf(k, ZETA, expit(-f)), *each) for each in components]
    return np.mean(of_components, 0)


@MIXTURES
def test_a_mixture_of_counts_is_the_average_of_its_distributions(components):
    latent, p, k = mixture(NB, components), pmf(components, 6000), np.arange(6000)
    assert p.sum() == pytest.approx(1)
    mean = (p * k).sum()
    assert latent.mean.item() == pytest.approx(mean)
    assert latent.variance.item() == pytest.approx((p * k**2).sum() - mean**2)
    for x in (0, 7, 60):
        assert latent.log_prob(tensor(x)).item() == pytest.approx(np.log(p[x]))
    for q in (0.05, 0.3, 0.5, 0.95):
        assert latent.quantile(q).item() == (p.cumsum() < q - 1e-9).sum()
    for count in (-1, 0, 7, 60):
        assert latent.above(count).item() == pytest.approx(p[count + 1 :].sum(), abs=1e-9)
    losses = [(p * abs(k - a) / (k + 1)).sum() for a in range(200)]
    assert losses[int(latent.relative_median.item())] <= 1.01 * min(losses)


@MIXTURES
def test_a_mixture_of_probabilities_is_the_average_of_its_distributions(components):
    latent = mixture(Bernoulli(), components)
    p = np.mean([expectation(expit, *each) for each in components])
    assert latent.mean.item() == pytest.approx(p)
    p2 = np.mean([expectation(lambda f: expit(f) ** 2, *each) for each in components])
    assert latent.variance.item() == pytest.approx(p2 - p**2, rel=1e-7, abs=1e-12)
    with pytest.raises(InputError, match="the mean is the probability of a one"):
        latent.above(0)
    assert latent.log_prob(tensor(1.0)).exp().item() == pytest.approx(p)
    for q in (0.05, 0.3, 0.5, 0.95):
        f = np.log(latent.quantile(q).item() / (1 - latent.quantile(q).item()))
        below, at = (
            np.mean([stats.norm.cdf(f + step, mean, max(variance, 1e-30) ** 0.5) for mean, variance in components])
            for step in (-1e-6, 1e-6)
        )
        assert below <= q <= at


@MIXTURES
def test_draws_of_a_mixture_and_its_moments(components):
    torch.manual_seed(0)
    latent, draws = mixture(NB, components), 100_000
    x = latent.sample(draws)
    assert x.shape == (draws, 1)
    for value in (0, 5, 20):
        p = pmf(components, 60)[value]
        assert (x == value).double().mean().item() == pytest.approx(p, abs=4 * np.sqrt(p * (1 - p) / draws))
    means, variances = np.array(components).T
    assert latent.f_mean.item() == pytest.approx(means.mean())
    assert latent.f_variance.item() == pytest.approx((variances + means**2).mean() - means.mean() ** 2)
    assert latent.plugin().mean.item() == pytest.approx(ZETA * np.exp(means.mean()))


def test_several_entries_of_a_mixture_are_those_of_each():
    """With quantiles and medians from the same nodes and draws."""
    means, variances = torch.randn(3, 5, dtype=torch.float64), torch.rand(3, 5, dtype=torch.float64)
    for likelihood in (Bernoulli(), NB):
        together = LatentMixture(likelihood, means, variances)
        for s in range(5):
            alone = LatentMixture(likelihood, means[:, s : s + 1], variances[:, s : s + 1])
            for name in ("mean", "variance", "relative_median"):
                assert getattr(together, name)[s].item() == pytest.approx(getattr(alone, name).item())
            assert together.quantile(0.3)[s].item() == pytest.approx(alone.quantile(0.3).item())
            if likelihood is NB:
                assert together.above(3)[s].item() == pytest.approx(alone.above(3).item())


def test_a_probability_near_one_is_as_uncertain_as_one_near_zero():
    """There sigmoid(f) is exp(f), and log-normal."""
    std = LatentGaussian(Bernoulli(), tensor(20.0, -20.0), tensor(1.0, 1.0)).columns()["std"]
    expected = stats.lognorm.std(1.0, scale=np.exp(-20))
    assert std.tolist() == pytest.approx([expected, expected], rel=1e-6)


def test_how_probable_large_counts_are_where_the_rate_is_known():
    rates = tensor(0.3, 7.0, 400.0)
    known = Known(torch.distributions.Poisson(rates))
    for count in (-1, 0, 5, 420):
        np.testing.assert_allclose(known.above(count), stats.poisson.sf(count, rates), rtol=1e-9, atol=1e-14)
    for other in (Point(rates), Known(torch.distributions.Bernoulli(rates / 500))):
        with pytest.raises(InputError, match="does not say how probable large counts are"):
            other.above(3)
        assert list(other.columns()) == ["mean"]
