import numpy as np
import pytest
import torch
from scipy import integrate, stats
from scipy.optimize import minimize_scalar
from scipy.special import expit

from ented.likelihoods import Bernoulli, NegativeBinomial
from ented.predictive import LatentGaussian
from ented.tensor import InputError

ZETA = 20.0
NB = NegativeBinomial(ZETA)
# (mean, variance) of f
GAUSSIANS = [(0.0, 1.0), (-1.3, 0.2), (0.8, 0.5), (2.5, 0.05), (-3.0, 1.0)]


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def log_pmf(likelihood, x, f):
    """log p(x | f) by SciPy."""
    if likelihood.kind == "binary":
        return stats.bernoulli.logpmf(x, expit(f))
    return stats.nbinom.logpmf(x, likelihood.zeta, expit(-f))


def values_of(likelihood):
    return (0, 1) if likelihood.kind == "binary" else (0, 1, 7, 20, 150)


def expectation(function, mean, variance):
    """E[function(f)] for f ~ N(mean, variance), by the trapezoidal rule: exact to rounding for smooth functions."""
    t = np.linspace(-12, 12, 801)
    return (function(mean + np.sqrt(variance) * t) * stats.norm.pdf(t)).sum(-1) * (t[1] - t[0])


def predictive(likelihood, mean, variance):
    """Of one entry."""
    return LatentGaussian(likelihood, tensor(mean), tensor(variance))


def brute_force_cdf(mean, variance, below):
    """P(x <= k) for k = 0, 1, ..., below - 1."""
    k = np.arange(below)[:, None]
    return expectation(lambda f: stats.nbinom.cdf(k, ZETA, expit(-f)), mean, variance)


both = pytest.mark.parametrize("likelihood", [Bernoulli(), NB, NegativeBinomial(3.5)], ids=["binary", "20", "3.5"])
gaussian = pytest.mark.parametrize(("mean", "variance"), GAUSSIANS)


# p(x | f)


@pytest.mark.parametrize("f", [-4.0, -0.5, 0.0, 1e-9, 0.3, 2.0, 4.0])
@both
def test_log_prob_is_scipys(likelihood, f):
    for x in values_of(likelihood):
        actual = likelihood.log_prob(tensor(x), tensor(f)).item()
        assert actual == pytest.approx(log_pmf(likelihood, x, f), rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("f", [-40.0, 40.0])
def test_log_prob_of_a_binary_entry_at_an_extreme_f(f):
    """The less likely value has log p = -log(1 + e^40) = -40 and the other 0, to rounding."""
    likely, unlikely = (1.0, 0.0) if f > 0 else (0.0, 1.0)
    assert Bernoulli().log_prob(tensor(likely, unlikely), tensor(f, f)).tolist() == pytest.approx([0, -40], abs=1e-12)


@pytest.mark.parametrize("f", [-40.0, 40.0])
@pytest.mark.parametrize("x", [0, 3, 1000])
def test_log_prob_of_a_count_at_an_extreme_f(f, x):
    """log(1 - p) of SciPy's nbinom is lost here: written with log sigmoid(f) = -log(1 + e^-f)."""
    binomial = sum(np.log(np.arange(1, x + 1) + ZETA - 1)) - sum(np.log(np.arange(1, x + 1)))
    expected = binomial - x * np.logaddexp(0, -f) - ZETA * np.logaddexp(0, f)
    assert NB.log_prob(tensor(x), tensor(f)).item() == pytest.approx(expected, rel=1e-11, abs=1e-11)


@pytest.mark.parametrize("x", [10_000, 3_000_000])
def test_log_prob_of_large_counts(x):
    # log h subtracts numbers of size x log x, which leaves 16 digits less log10(x log x) of them
    for f in (np.log(x / ZETA), np.log(x / ZETA) - 0.5):
        assert NB.log_prob(tensor(x), tensor(f)).item() == pytest.approx(log_pmf(NB, x, f), abs=1e-7)


# Polya-Gamma augmentation


def polya_gamma_mean(b, c):
    """PG(b, c) is a sum of Gamma(b, 1) variables, each over 2 pi^2 ((k - 1/2)^2 + c^2 / (4 pi^2))."""
    k = np.arange(1, 200_001) - 0.5
    tail = 1 / 200_000  # integral of 1 / k^2 over the terms left out
    return b * ((1 / (k**2 + c**2 / (4 * np.pi**2))).sum() + tail) / (2 * np.pi**2)


@pytest.mark.parametrize("c", [0.0, 1e-8, 1e-4, 9.99e-4, 1.001e-3, 0.01, 0.09, 0.5, 3.0, 30.0])
@both
def test_theta_is_the_polya_gamma_mean(likelihood, c):
    for x in values_of(likelihood):
        b = 1 if likelihood.kind == "binary" else x + likelihood.zeta
        # c^2 is split between the mean and the variance of f
        theta = likelihood.theta(tensor(x), tensor(0.6 * c), tensor(0.64 * c**2)).item()
        assert theta == pytest.approx(polya_gamma_mean(b, c), rel=1e-9)


def test_theta_in_float32_near_zero():
    c = torch.cat([torch.zeros(1), torch.logspace(-10, 0, 101)])
    x = torch.full_like(c, 4.0)
    expected = [polya_gamma_mean(4 + ZETA, value) for value in c.double().tolist()]
    assert NB.theta(x, c, torch.zeros_like(c)).tolist() == pytest.approx(expected, rel=1e-6)
    assert NB.theta(x, torch.zeros_like(c), c.square()).tolist() == pytest.approx(expected, rel=1e-6)


@gaussian
@both
def test_bound_is_the_augmented_bound_at_the_best_tilt(likelihood, mean, variance):
    """For any c, chi mu - theta(c) (mu^2 + s2 - c^2) / 2 - b log(2 cosh(c / 2)) + log h bounds E log p(x | f)."""
    for x in values_of(likelihood):
        b, chi, at_zero = (1, x - 0.5, np.log(0.5)) if likelihood.kind == "binary" else (0, 0, 0)
        if likelihood.kind == "count":
            b, chi = x + likelihood.zeta, (x - likelihood.zeta) / 2
            at_zero = stats.nbinom.logpmf(x, likelihood.zeta, 0.5)

        def negative_bound(c, b=b, chi=chi, at_zero=at_zero):
            theta = b * np.tanh(c / 2) / (2 * c)
            # log h from p(x | f = 0) = h 2^-b
            return -(chi * mean - theta * (mean**2 + variance - c**2) / 2 - b * np.log(np.cosh(c / 2)) + at_zero)

        best = minimize_scalar(negative_bound, bounds=(1e-6, 20), method="bounded", options={"xatol": 1e-9})
        actual = likelihood.bound(tensor(x), tensor(mean), tensor(variance)).item()
        assert actual == pytest.approx(-best.fun, rel=1e-9)


@gaussian
@both
def test_bound_lies_below_the_expected_log_likelihood(likelihood, mean, variance):
    for x in values_of(likelihood):
        sd = np.sqrt(variance)
        expected, _ = integrate.quad(
            lambda f, x=x, sd=sd: log_pmf(likelihood, x, f) * stats.norm.pdf(f, mean, sd), mean - 8 * sd, mean + 8 * sd
        )
        gap = expected - likelihood.bound(tensor(x), tensor(mean), tensor(variance)).item()
        assert gap > 0
        # E log cosh(f / 2) >= log cosh(mu / 2), and log cosh(sqrt(w) / 2) has slope 1 / 8 in w at most
        b = 1 if likelihood.kind == "binary" else x + likelihood.zeta
        assert gap < b * variance / 8


@both
def test_likelihood_starts_from_f_of_the_mean_value(likelihood):
    values = tensor(0, 1, 1, 1) if likelihood.kind == "binary" else tensor(0, 3, 40, 5)
    f = likelihood.intercept(values)
    mean = expit(f) if likelihood.kind == "binary" else likelihood.zeta * np.exp(f)
    assert mean == pytest.approx(values.mean().item())


def test_values_that_the_likelihood_cannot_produce_are_refused():
    Bernoulli().check(tensor(0, 1, 1))
    NB.check(tensor(0, 1, 7))
    with pytest.raises(InputError, match="takes the values 0 and 1, the data hold 2: use likelihood=negative_binomial"):
        Bernoulli().check(tensor(0, 1, 2, 3))


@pytest.mark.parametrize("zeta", [0, -1.0, float("nan")])
def test_zeta_must_be_positive(zeta):
    with pytest.raises(InputError, match="likelihood.zeta is .*: it must be above 0"):
        NegativeBinomial(zeta)


def test_log_prob_of_large_counts_in_float32():
    """lgamma(x + zeta) - lgamma(x + 1) are differences of numbers near 1e7, which float32 holds to one unit."""
    x, f = torch.tensor([1e5, 1e6]), torch.tensor([1e5, 1e6]).div(ZETA).log()
    expected = NB.log_h(x.double())
    torch.testing.assert_close(NB.log_h(x).double(), expected, rtol=1e-6, atol=0)
    assert NB.log_prob(x, f).dtype == torch.float32


@both
def test_log_prob_has_a_gradient_at_zero(likelihood):
    """c = |f| has none, but b log(2 cosh(f / 2)) is flat there, so chi is left."""
    x = tensor(0.0, 1.0)
    f = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(likelihood.log_prob(x, f).sum(), f)
    torch.testing.assert_close(gradient, likelihood.chi(x))


def test_a_probability_is_never_above_one():
    """AUROC would take it for a logit."""
    p = LatentGaussian(Bernoulli(), tensor(40.0, 30.0), tensor(0.5, 2.0))
    assert (p.mean <= 1).all() and (p.variance >= 0).all()


# predictive distribution


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
    if likelihood.kind == "binary":
        first = second = expectation(expit, mean, variance)
    else:
        zeta = likelihood.zeta
        first = expectation(lambda f: stats.nbinom.mean(zeta, expit(-f)), mean, variance)
        second = expectation(
            lambda f: stats.nbinom.var(zeta, expit(-f)) + stats.nbinom.mean(zeta, expit(-f)) ** 2, mean, variance
        )
    actual = predictive(likelihood, mean, variance)
    assert actual.mean.item() == pytest.approx(first, rel=1e-8)
    assert actual.variance.item() == pytest.approx(second - first**2, rel=1e-8)


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
    assert plugin.variance.item() == pytest.approx(
        stats.bernoulli.var(expit(0.8))
        if likelihood.kind == "binary"
        else stats.nbinom.var(likelihood.zeta, expit(-0.8))
    )


# a smallest count, a learned shape, and the summary for relative errors


def test_a_smallest_count_shifts_the_distribution(float64):
    """Everything is that of counts from 0, one higher."""
    shifted = NegativeBinomial(3.5, smallest=1)
    f_mean, f_variance = tensor(0.3, -1.0, 2.0), tensor(0.5, 0.0, 0.1)
    x = tensor(1.0, 2.0, 40.0)
    of_shifted, of_zero = (LatentGaussian(nb, f_mean, f_variance) for nb in (shifted, NegativeBinomial(3.5)))
    torch.testing.assert_close(of_shifted.log_prob(x), of_zero.log_prob(x - 1))
    torch.testing.assert_close(of_shifted.mean, of_zero.mean + 1)
    torch.testing.assert_close(of_shifted.variance, of_zero.variance)
    torch.testing.assert_close(of_shifted.quantile(0.9), of_zero.quantile(0.9) + 1)
    bounds = [nb.bound(y, f_mean, f_variance) for nb, y in ((shifted, x), (NegativeBinomial(3.5), x - 1))]
    torch.testing.assert_close(*bounds)
    assert shifted.intercept(x) == pytest.approx(NegativeBinomial(3.5).intercept(x - 1))
    torch.manual_seed(0)
    assert of_shifted.sample(200).min() == 1
    with pytest.raises(InputError, match="set likelihood.smallest=0"):
        shifted.check(tensor(3.0, 0.0))


@pytest.mark.parametrize("quadrature", [False, True])
@pytest.mark.parametrize("smallest", [0, 1])
def test_the_slope_is_the_derivative_of_the_bound(float64, smallest, quadrature):
    likelihood = NegativeBinomial(3.5, smallest, learned=True, quadrature=quadrature)
    x, mean, variance = tensor(1.0, 2.0, 40.0), tensor(0.3, -1.0, 2.0), tensor(0.5, 0.0, 0.1)
    likelihood.bound(x, mean, variance).sum().backward()
    torch.testing.assert_close(likelihood.slope(x, mean, variance).sum(), likelihood.log_zeta.grad.squeeze())
    known = likelihood.known()
    assert (known.zeta, known.smallest, known.learned) == (pytest.approx(3.5), smallest, False)


@pytest.mark.parametrize("make", [Bernoulli, NegativeBinomial])
def test_quadrature_is_the_expectation_and_its_derivatives(float64, make):
    """The expectation by a dense sum; theta and the linear term by automatic differentiation."""
    likelihood = make(quadrature=True)
    for mean, variance in GAUSSIANS:
        for x in values_of(likelihood):
            m, v = tensor(mean).requires_grad_(), tensor(variance).requires_grad_()
            bound = likelihood.bound(tensor(x), m, v)
            expected = expectation(lambda f, x=x: log_pmf(likelihood, x, f), mean, variance)
            assert bound.item() == pytest.approx(expected, rel=1e-4, abs=1e-4)
            of_mean, of_variance = torch.autograd.grad(bound.sum(), [m, v])
            theta, linear = likelihood.sites(tensor(x), m.detach(), v.detach())
            torch.testing.assert_close(linear - theta * m.detach(), of_mean)
            torch.testing.assert_close(-theta / 2, of_variance, rtol=1e-3, atol=1e-4)  # equal for the exact expectation


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
