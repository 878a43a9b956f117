"""The likelihoods against SciPy's distributions, dense sums and automatic differentiation."""

import numpy as np
import pytest
import torch
from dense_sums import GAUSSIANS, NB, ZETA, both, expectation, gaussian, log_pmf, tensor, values_of
from scipy import integrate, stats
from scipy.optimize import minimize_scalar
from scipy.special import expit
from torch.special import gammaincc

from ented.errors import InputError
from ented.likelihoods import Bernoulli, NegativeBinomial, poisson_quantile
from ented.predictive import LatentGaussian

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


# a smallest count, and a learned shape


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


@pytest.mark.parametrize("smallest", [0, 1])
@pytest.mark.parametrize(
    ("zeta", "variance"), [(0.6, 1.0), (3.5, 0.0), (3.5, 0.5), (20.0, 0.64), (100.0, 0.25), (1e4, 0.01)]
)
@pytest.mark.parametrize("surprise", [-1.5, -0.5, 0.0, 0.5, 1.5])
def test_the_shape_gradient_is_that_of_the_predictive_log_probability(float64, surprise, zeta, variance, smallest):
    """In log zeta, at a fixed distribution of log m; by a dense sum and differences. Counts are off by so many sd."""
    y = np.array([0.0, 1.0, 7.0, 300.0])
    log_m = np.log(y + 0.5) - surprise * np.sqrt(variance + 1 / (y + 1) + 1 / zeta)

    def predictive(log_zeta):
        nb = NegativeBinomial(np.exp(log_zeta))
        return np.array(
            [
                np.log(expectation(lambda f, y=y: np.exp(log_pmf(nb, y, f)), log_m - log_zeta, variance))
                for y, log_m in zip(y, log_m, strict=True)
            ]
        )

    expected = (predictive(np.log(zeta) + 1e-4) - predictive(np.log(zeta) - 1e-4)) / 2e-4
    likelihood = NegativeBinomial(zeta, smallest, learned=True)
    f_mean = torch.from_numpy(log_m - np.log(zeta))
    gradient = likelihood.shape_gradient(torch.from_numpy(y + smallest), f_mean, torch.full_like(f_mean, variance))
    assert gradient.detach().numpy() == pytest.approx(expected, rel=5e-3, abs=2e-4)


def test_the_shape_gradient_finds_the_shape_of_uncertain_counts(float64):
    """Of counts whose log means are draws from what is known of them; the bound has its optimum below half of it."""
    random = np.random.default_rng(0)
    entries, zeta, variance = 20_000, 20.0, 0.1
    mean = random.normal(2.0, 1.0, entries)  # of log m
    m = np.exp(random.normal(mean, np.sqrt(variance)))
    x, log_m = torch.from_numpy(random.negative_binomial(zeta, zeta / (zeta + m)).astype(float)), torch.from_numpy(mean)
    variances = torch.full((entries,), variance)

    def of_shape(zeta):
        likelihood = NegativeBinomial(zeta, learned=True, quadrature=True)
        f_mean = log_m + likelihood.offset  # -log zeta
        (of_bound,) = torch.autograd.grad(likelihood.bound(x, f_mean, variances).sum(), likelihood.log_zeta)
        return likelihood.shape_gradient(x, f_mean, variances).sum().item(), of_bound.item()

    assert of_shape(0.9 * zeta)[0] > 0 > of_shape(1.1 * zeta)[0]
    assert of_shape(0.5 * zeta)[1] < 0


def test_a_learned_shape_as_a_number(float64):
    known = NegativeBinomial(3.5, 1, learned=True).known()
    assert (known.zeta, known.smallest, known.learned) == (pytest.approx(3.5), 1, False)


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


def test_quantiles_of_poisson_distributions():
    """By their definition, and where SciPy's root is exact by that."""
    random = np.random.default_rng(0)
    rate = np.concatenate([10.0 ** random.uniform(-12, 9, 20000), [1e-300]])
    for q in (1e-9, 0.05, 0.5, 0.95, 1 - 1e-9, random.uniform(0, 1, len(rate))):
        k = poisson_quantile(np.array(q), rate)
        small = rate < 1e4
        np.testing.assert_array_equal(k[small], stats.poisson.ppf(q, rate)[small].clip(0))
        up_to, below = (gammaincc(torch.from_numpy(k + more), torch.from_numpy(rate)).numpy() for more in (1, 0))
        assert (up_to >= q * (1 - 1e-6)).all() and ((below <= q * (1 + 1e-6)) | (k == 0)).all()
    assert poisson_quantile(np.array(0.5), np.array([0.0])) == 0
    np.testing.assert_allclose(poisson_quantile(np.array(0.9), np.array([1e12, 1e18])), [1e12, 1e18], rtol=1e-5)
    assert np.isnan(poisson_quantile(np.array(0.1), np.array([np.nan]))).all()
