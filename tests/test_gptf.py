"""GPTF against GPyTorch, quadrature and orthant probabilities of the normal distribution."""

import lightning as L
import numpy as np
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel
from gpytorch.means import ZeroMean
from gpytorch.models import ApproximateGP
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy
from scipy.integrate import quad
from scipy.stats import multivariate_normal, norm
from torch.distributions import Normal
from training import fit

from baselines.gptf import GPTF, Gaussian, Probit
from baselines.main_effects import MainEffects
from ented.datamodule import COODataModule
from ented.errors import InputError
from ented.likelihoods import Bernoulli, NegativeBinomial
from ented.tensor import COOTensor

SHAPE, RANK, JITTER = (4, 3, 5), 2, 1e-2
LOCATION, SCALE, LOG_NOISE = 20.0, 7.0, -0.4
LIKELIHOODS = {"binary": Bernoulli(), "count": NegativeBinomial(20)}
kinds = pytest.mark.parametrize("kind", LIKELIHOODS)


def make_module(kind, seed=0, at_start=False, shape=SHAPE, rank=RANK, inducing=6, **settings) -> GPTF:
    torch.manual_seed(seed)
    settings = {"init_std": 1.0, "jitter": JITTER, "lr": 0.01} | settings
    module = GPTF(shape, LIKELIHOODS[kind], rank, inducing, **settings).double()
    if not at_start:
        module.q.mean.data.normal_()
        module.q.root.data.normal_(std=0.5)
        if kind == "count":
            set_scale(module.likelihood)
    return module


def set_scale(likelihood):
    likelihood.location.fill_(LOCATION)
    likelihood.scale.fill_(SCALE)
    likelihood.log_noise.data.fill_(LOG_NOISE)


def make_entries(kind, n=12, seed=0):
    rng = np.random.default_rng(seed)
    indices = torch.from_numpy(rng.integers(0, SHAPE, size=(n, len(SHAPE))))
    return indices, torch.from_numpy(rng.integers(0, 2 if kind == "binary" else 40, n)).double()


def make_data(kind, batch_size) -> COODataModule:
    indices, values = make_entries(kind, 41)
    tensor = COOTensor(indices, values, SHAPE)
    return COODataModule(tensor, tensor, batch_size, seed=0)


def side_by_side(Z, indices):
    """Factor rows of each entry."""
    return torch.cat([mode[i] for mode, i in zip(Z.split(SHAPE), indices.T, strict=True)], 1)


def expectation(function, mean, variance):
    """E[function(f)] for f ~ N(mean, variance)."""
    sd = variance**0.5
    return quad(lambda f: function(f) * norm.pdf(f, mean, sd), mean - 12 * sd, mean + 12 * sd, epsabs=1e-12)[0]


def elbo(module, indices, x, scale):
    """The bound with its gradient by automatic differentiation all the way."""
    return scale * module.data_term(module.model.features(indices), x) - module.q.kl() + module.model.log_prior()


# the bound


class SVGP(ApproximateGP):
    """GPyTorch's sparse GP with whitened q(u) = N(m, L L')."""

    def __init__(self, X, mean, L):
        q = CholeskyVariationalDistribution(len(X))
        super().__init__(VariationalStrategy(self, X, q, jitter_val=JITTER))
        q.variational_mean.data = mean
        q.chol_variational_covar.data = L
        self.variational_strategy.variational_params_initialized.fill_(1)
        self.mean_module, self.covar_module = ZeroMean(), RBFKernel()
        self.covar_module.lengthscale = 1.0

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


@kinds
def test_the_bound_and_its_gradient_are_gpytorchs(kind):
    module, (indices, x) = make_module(kind), make_entries(kind)
    model = module.model
    lower = module.q.L.detach().clone()
    svgp = SVGP(model.inducing.X.detach().clone(), module.q.mean.detach().clone(), lower).double()
    Z = model.Z.detach().clone().requires_grad_()
    log_noise = torch.tensor(LOG_NOISE, dtype=torch.float64, requires_grad=True)
    f = svgp(side_by_side(Z, indices))
    mu, s2 = f.mean, f.variance - JITTER  # GPyTorch adds its jitter to the variance of f too
    if kind == "binary":
        data = (Normal(0, 1).cdf((2 * x - 1) * mu / 2**0.5)).log() - s2 / 2
    else:
        f_mean, noise = LOCATION + SCALE * mu, SCALE**2 * log_noise.exp()
        data = Normal(f_mean, noise.sqrt()).log_prob(x) - SCALE**2 * s2 / (2 * noise)
    expected = 3.5 * data.sum() - svgp.variational_strategy.kl_divergence() + Normal(0, 1).log_prob(Z).sum()

    actual = elbo(module, indices, x, 3.5)
    torch.testing.assert_close(actual, expected)
    strategy = svgp.variational_strategy
    q = strategy._variational_distribution
    theirs = [Z, strategy.inducing_points, q.variational_mean, q.chol_variational_covar]
    ours = [model.Z, model.inducing.X, module.q.mean, module.q.root]
    if kind == "count":
        theirs, ours = [*theirs, log_noise], [*ours, module.likelihood.log_noise]
    expected, actual = torch.autograd.grad(expected, theirs), torch.autograd.grad(actual, ours)
    # the diagonal of the root is log L_ii: d / d log L_ii = L_ii d / d L_ii
    by_root = expected[3].tril(-1) + (expected[3].diagonal() * lower.diagonal()).diag()
    for ours, theirs in zip(actual, [*expected[:3], by_root, *expected[4:]], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("x", [0.0, 1.0])
@pytest.mark.parametrize(("mean", "variance"), [(0.0, 0.3), (1.7, 1.0), (-2.5, 0.8)])
def test_the_probit_bound_is_the_integral_over_w(x, mean, variance):
    """And, as -1 < (log Phi)'' < 0, it lies s2 / 4 to s2 / 2 below the expectation of log p(x | f)."""
    bound = Probit().bound(*torch.tensor([x, mean, variance], dtype=torch.float64).split(1)).item()
    sign = 2 * x - 1
    integral = expectation(lambda w: norm.cdf(sign * w), mean, 1.0)
    assert bound == pytest.approx(np.log(integral) - variance / 2, abs=1e-9)
    exact = expectation(lambda f: norm.logcdf(sign * f / 2**0.5), mean, variance)
    assert variance / 4 < exact - bound < variance / 2


def log_marginal_likelihood(module, indices, x):
    """log p(x | Z) of ones and zeros: x = 1 where f + N(0, 2) > 0, so it is an orthant probability."""
    M = side_by_side(module.model.Z.detach(), indices).numpy()
    K = np.exp(-((M[:, None] - M[None]) ** 2).sum(-1) / 2)
    sign = 2 * x.numpy() - 1
    covariance = sign[:, None] * (K + 2 * np.eye(len(x))) * sign
    return np.log(multivariate_normal.cdf(np.zeros(len(x)), np.zeros(len(x)), covariance, abseps=1e-6, releps=1e-6))


def test_the_bound_lies_below_the_log_marginal_likelihood_and_closes_in():
    for seed in range(3):
        indices, x = make_entries("binary", 4, seed)
        module = make_module("binary", seed, inducing=4, jitter=1e-8)
        # cells that repeat would make K singular
        module.model.inducing.X.data = side_by_side(module.model.Z.detach(), indices)
        module.model.Z.requires_grad_(False), module.model.inducing.X.requires_grad_(False)
        exact = log_marginal_likelihood(module, indices, x)
        features, q = module.model.features(indices), module.q
        optimizer = torch.optim.LBFGS(q.parameters(), max_iter=100, line_search_fn="strong_wolfe")
        gaps = []

        def loss(module=module, features=features, x=x, optimizer=optimizer, exact=exact, gaps=gaps):
            optimizer.zero_grad()
            bound = module.data_term(features, x) - module.q.kl()
            gaps.append(exact - bound.item())
            (-bound).backward()
            return -bound

        optimizer.step(loss)
        assert min(gaps) > 0
        # what is left is Jensen's gap, at most half the posterior variance of each of 4 entries, which is below 1
        assert gaps[-1] < min(2, gaps[0] / 2)


def test_the_gaussian_bound_is_the_expected_log_density():
    likelihood = Gaussian().double()
    set_scale(likelihood)
    x, mean, variance = torch.tensor([31.0, 0.6, 0.7], dtype=torch.float64)
    sd = SCALE * np.exp(LOG_NOISE / 2)
    expected = expectation(lambda f: norm.logpdf(31.0, LOCATION + SCALE * f, sd), 0.6, 0.7)
    assert likelihood.bound(x, mean, variance).item() == pytest.approx(expected, abs=1e-9)


# predictions


def test_the_probability_of_a_one_is_the_integral_over_f():
    mean, variance = torch.tensor([[0.0, 0.4], [1.7, 1.0], [-2.5, 0.8]], dtype=torch.float64).T
    predictive = Probit().predictive(mean, variance)
    pairs = list(zip(mean.tolist(), variance.tolist(), strict=True))
    expected = [expectation(lambda f: norm.cdf(f / 2**0.5), *pair) for pair in pairs]
    np.testing.assert_allclose(predictive.mean, expected, atol=1e-10)
    np.testing.assert_allclose(predictive.log_prob(torch.ones(3)), np.log(expected), atol=1e-9)
    np.testing.assert_allclose(predictive.log_prob(torch.zeros(3)), np.log1p(-np.array(expected)), atol=1e-9)
    np.testing.assert_allclose(predictive.plugin().mean, norm.cdf(mean / 2**0.5))


def test_the_density_of_a_count_is_the_integral_over_f():
    likelihood = Gaussian().double()
    set_scale(likelihood)
    mean, variance = torch.tensor([[0.3], [0.6]], dtype=torch.float64)
    predictive, x = likelihood.predictive(mean, variance), torch.tensor([33.0], dtype=torch.float64)
    sd = SCALE * np.exp(LOG_NOISE / 2)
    density = expectation(lambda f: norm.pdf(33.0, LOCATION + SCALE * f, sd), 0.3, 0.6)
    assert predictive.log_prob(x).item() == pytest.approx(np.log(density), abs=1e-9)
    assert predictive.mean.item() == pytest.approx(LOCATION + SCALE * 0.3)
    assert predictive.plugin().log_prob(x).item() == pytest.approx(norm.logpdf(33.0, LOCATION + SCALE * 0.3, sd))


@kinds
def test_predictions_are_in_float64_and_those_of_gpytorch(kind):
    module, (indices, x) = make_module(kind), make_entries(kind)
    q = module.q
    svgp = SVGP(module.model.inducing.X.detach().clone(), q.mean.detach().clone(), q.L.detach().clone()).double().eval()
    with torch.no_grad():
        f = svgp(side_by_side(module.model.Z, indices))
    location, scale = (0, 1) if kind == "binary" else (LOCATION, SCALE)
    predictive = module.predictive(indices)
    torch.testing.assert_close(predictive.f_mean, location + scale * f.mean)
    torch.testing.assert_close(predictive.f_variance, scale**2 * (f.variance - JITTER))
    single = module.float().predictive(indices)
    assert single.mean.dtype == single.log_prob(x).dtype == torch.float64


# training


@kinds
def test_an_epoch_is_adam_steps_on_the_bound(kind, tmp_path):
    module, reference, data = make_module(kind), make_module(kind), make_data(kind, batch_size=15)
    if kind == "count":  # location and scale come from the training entries
        x = data.train.values.numpy()
        reference.likelihood.location.fill_(x.mean())
        reference.likelihood.scale.fill_(x.std())
    optimizer, bound = torch.optim.Adam(reference.parameters(), 0.01), 0.0
    for indices, values in data.train_dataloader():
        optimizer.zero_grad()
        (-elbo(reference, indices, values, 41 / len(values))).backward()
        with torch.no_grad():
            bound += reference.data_term(reference.model.features(indices), values)
        optimizer.step()
    with torch.no_grad():
        bound += reference.model.log_prior() - reference.q.kl()
    history = fit(module, data, 1, tmp_path)
    parameters = dict(module.named_parameters())
    for name, expected in reference.named_parameters():
        torch.testing.assert_close(parameters[name], expected, rtol=1e-7, atol=1e-9)
    assert history.rows[0]["elbo"] == pytest.approx(bound.item())


@kinds
def test_a_fit_that_was_interrupted_goes_on_as_if_it_had_not_been(kind, tmp_path):
    class Interrupt(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.current_epoch == 3 and batch_idx == 1:
                raise OSError("interrupted")

    def make():
        return make_module(kind, at_start=True, milestones=(0.5,)), make_data(kind, 15)

    whole, resumed = make(), make()
    expected = fit(*whole, 6, tmp_path / "whole")
    with pytest.raises(OSError, match="interrupted"):
        fit(*make(), 6, tmp_path / "parts", Interrupt())
    actual = fit(*resumed, 6, tmp_path / "parts")
    for name, value in whole[0].state_dict().items():
        assert torch.equal(resumed[0].state_dict()[name], value), name
    assert [row["elbo"] for row in actual.rows] == [row["elbo"] for row in expected.rows]


def test_the_learning_rate_falls_to_three_tenths_at_the_milestones(tmp_path):
    rates = []

    class Rates(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    fit(make_module("binary", milestones=(0.6, 0.8)), make_data("binary", 41), 10, tmp_path, Rates())
    assert rates == pytest.approx([0.01] * 6 + [0.003] * 2 + [0.0009] * 2)


def test_counts_that_are_all_equal_have_scale_one():
    likelihood = Gaussian()
    likelihood.standardise(torch.full((5,), 3.0))
    assert (likelihood.location, likelihood.scale) == (3, 1)


def test_a_failed_factorisation_ends_training(tmp_path):
    with pytest.raises(InputError, match="Cholesky factorisation failed in epoch 1 .* raise model.jitter"):
        fit(make_module("binary", jitter=-2.0), make_data("binary", 41), 2, tmp_path)


def test_a_failed_factorisation_ends_a_prediction():
    module = make_module("binary", jitter=-2.0)
    with pytest.raises(InputError, match="^a Cholesky factorisation failed in a prediction"):
        module.predictive(make_entries("binary")[0])


def test_starts_from_the_prior():
    module = make_module("binary", at_start=True)
    assert module.q.kl() == 0
    torch.testing.assert_close(module.predictive(make_entries("binary")[0]).mean, torch.full((12,), 0.5).double())


# recovery


def draw(kind, shape, strength=3.0):
    """A tensor of the model with rank 1 and 80 inducing points: training and test entries, and f of the latter."""
    rng = np.random.default_rng(1)
    M = np.stack(np.meshgrid(*[rng.normal(size=size) for size in shape], indexing="ij"), -1).reshape(-1, len(shape))
    X = rng.normal(size=(80, len(shape)))
    k_XX, k_XM = (np.exp(-((X[:, None] - other) ** 2).sum(-1) / 2) for other in (X, M))
    f = np.linalg.solve(np.linalg.cholesky(k_XX + 1e-6 * np.eye(80)), k_XM).T @ rng.normal(size=80)
    if kind == "binary":
        f = strength * f
        x = f + rng.normal(size=len(f)) + rng.normal(size=len(f)) > 0
    else:
        x = np.rint(60 + 15 * f + 5 * rng.normal(size=len(f)))
    cells = torch.cartesian_prod(*[torch.arange(size) for size in shape])
    tensor = COOTensor(cells, torch.from_numpy(x.astype(float)), shape)
    test, train = torch.from_numpy(rng.permutation(len(f))).split([400, len(f) - 400])
    return tensor.subset(train), tensor.subset(test), torch.from_numpy(f)[test]


@pytest.mark.parametrize(("kind", "shape"), [("binary", (60, 50)), ("count", (20, 18, 15))])
def test_recovers_a_tensor_of_its_own_model(kind, shape, tmp_path):
    """More than half of what the truth explains beyond main effects: Z is a point estimate from few entries a row."""
    train, test, f = draw(kind, shape)
    settings = {"shape": shape, "rank": 1, "inducing": 30, "lr": 0.05, "milestones": (0.6, 0.8)}
    module = make_module(kind, at_start=True, **settings)
    fit(module, COODataModule(train, test, 512, seed=0), 40, tmp_path)
    x, predictive = test.values, module.predictive(test.indices)
    effects = MainEffects(shape, LIKELIHOODS[kind]).double().fit(train, 500).predictive(test.indices)
    if kind == "binary":
        losses = [-p.log_prob(x).mean().item() for p in (predictive, effects)]
        oracle = -norm.logcdf((2 * x - 1) * f / 2**0.5).mean()
    else:
        losses = [(x - p.mean).square().mean().item() for p in (predictive, effects)]
        oracle = (x - (60 + 15 * f)).square().mean().item()
    assert losses[1] > 1.3 * oracle  # main effects are not the truth
    assert losses[0] - oracle < 0.5 * (losses[1] - oracle)
