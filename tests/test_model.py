"""ENTED against its formulas in dense algebra, without whitening and with all matrices written out."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import gammaln, log_expit
from small_model import (
    ENTRIES,
    JITTER,
    LENGTHSCALE,
    LIKELIHOODS,
    RANK,
    SHAPE,
    VARIANCE,
    ZETA,
    blocks_1_2_3,
    eye,
    kinds,
    make_entries,
    make_model,
    side_by_side,
)
from torch.distributions import MultivariateNormal, Normal, kl_divergence

from ented.errors import InputError
from ented.factors import FactorTable
from ented.likelihoods import Bernoulli
from ented.model import ENTED

# The model in dense formulas, unwhitened: u_i ~ N(0, C_i) with C_i the covariance of block i's inducing values given
# those of the blocks before it.


def k(x, y):
    squared = (x[:, None] - y[None]).square().sum(-1)
    return VARIANCE * torch.exp(-squared / (2 * LENGTHSCALE**2))


def processes(X, M, blocks, jitter=JITTER):
    """(C_i, c_i) of each block: covariance of its values, and with f at the entries, given the blocks before it."""
    p = len(X) // blocks
    K, K_XM = k(X, X) + jitter * eye(len(X)), k(X, M)
    result = []
    for i in range(blocks):
        past, own = slice(0, i * p), slice(i * p, (i + 1) * p)
        gain = K[own, past] @ torch.linalg.inv(K[past, past])
        result.append((K[own, own] - gain @ K[past, own], K_XM[own] - gain @ K_XM[past]))
    return result


def unwhitened(model):
    """q(u_i) = N(L_i m_i, L_i S_i L_i') of each block, with L_i L_i' = C_i."""
    X = model.inducing.X.detach()
    result = []
    blocks = len(model.q.mean)
    for (C, _), m, S in zip(processes(X, X, blocks), model.q.mean, model.q.covariance, strict=True):
        L = torch.linalg.cholesky(C)
        result.append((L @ m, L @ S @ L.T))
    return result


def dense_posterior(X, M, whitened_mean, whitened_covariance):
    """Mean and variance of f at the entries, and KL(q(u) | p(u))."""
    f_mean, f_variance, kl = 0, VARIANCE, 0
    for (C, c), m, S in zip(processes(X, M, len(whitened_mean)), whitened_mean, whitened_covariance, strict=True):
        L, kappa = torch.linalg.cholesky(C), torch.linalg.solve(C, c)
        u_mean, u_covariance = L @ m, L @ S @ L.T
        f_mean = f_mean + kappa.T @ u_mean
        f_variance = f_variance + (kappa * (u_covariance @ kappa - c)).sum(0)
        kl = kl + kl_divergence(
            MultivariateNormal(u_mean, u_covariance), MultivariateNormal(torch.zeros_like(u_mean), C)
        )
    return f_mean, f_variance, kl


def dense_augmentation(kind, x):
    """b, chi and log h."""
    if kind == "binary":
        return torch.ones_like(x), x - 0.5, torch.zeros_like(x)
    log_h = torch.lgamma(x + ZETA) - torch.lgamma(x + 1) - np.log(120.0)  # Gamma(6) = 120
    return x + ZETA, (x - ZETA) / 2, log_h


def dense_elbo(kind, Z, X, q_mean, q_covariance, indices, x, total=None):
    b, chi, log_h = dense_augmentation(kind, x)
    mu, s2, kl = dense_posterior(X, side_by_side(Z, indices), q_mean, q_covariance)
    c = (mu**2 + s2).sqrt()
    theta = b * torch.tanh(c / 2) / (2 * c)
    log_2cosh = torch.logaddexp(c / 2, -c / 2)
    data = chi * mu - theta * (mu**2 + s2) / 2 + theta * c**2 / 2 - b * log_2cosh + log_h
    scale = 1 if total is None else total / len(x)
    return scale * data.sum() - kl + Normal(0, 1).log_prob(Z).sum()


def dense_elbo_of(model, kind, indices, x, total=None):
    with torch.no_grad():
        return dense_elbo(kind, model.Z, model.inducing.X, model.q.mean, model.q.covariance, indices, x, total)


# bound


@pytest.mark.parametrize("total", [None, 50])
@blocks_1_2_3
@kinds
def test_elbo_is_the_dense_formula(kind, blocks, total):
    model, (indices, x) = make_model(kind, blocks), make_entries(kind)
    torch.testing.assert_close(model.elbo(indices, x, total).detach(), dense_elbo_of(model, kind, indices, x, total))


@kinds
def test_elbo_in_float32_agrees(kind):
    model, (indices, x) = make_model(kind, 2), make_entries(kind)
    single = copy.deepcopy(model).float().elbo(indices, x.float())
    assert single.dtype == torch.float32
    # relative error 6e-8 of each operation, enlarged by the condition of K, here below 1e3
    assert single.item() == pytest.approx(model.elbo(indices, x).item(), rel=1e-5)


def test_log_prior_is_standard_normal():
    model = make_model("binary", 2)
    torch.testing.assert_close(model.log_prior().detach(), Normal(0, 1).log_prob(model.Z.detach()).sum())


def log_marginal_likelihood(model, kind, indices, x, nodes):
    """log p(x | Z) = log E[prod p(x_n | f_n)] over f ~ N(0, k(M, M)), on a grid of Gauss-Hermite nodes."""
    M = side_by_side(model.Z.detach(), indices)
    eigenvalues, vectors = np.linalg.eigh(k(M, M).numpy())
    root = vectors * np.sqrt(eigenvalues.clip(0))
    t, w = np.polynomial.hermite_e.hermegauss(nodes)
    grid = np.stack(np.meshgrid(*[t] * len(x), indexing="ij"), -1).reshape(-1, len(x))
    log_weight = sum(np.meshgrid(*[np.log(w / w.sum())] * len(x), indexing="ij")).ravel()
    f, x = grid @ root.T, x.numpy()
    if kind == "binary":
        log_p = log_expit((2 * x - 1) * f)
    else:
        log_p = gammaln(x + ZETA) - gammaln(x + 1) - gammaln(ZETA) + x * log_expit(f) + ZETA * log_expit(-f)
    return np.logaddexp.reduce(log_p.sum(-1) + log_weight)


@pytest.mark.parametrize("blocks", [1, 2])
@kinds
def test_bound_lies_below_the_log_marginal_likelihood(kind, blocks):
    """At random Z, X and q, and after steps that bring q near its best."""
    for seed in range(5):
        model, (indices, x) = make_model(kind, blocks, seed), make_entries(kind, 3, seed)
        exact = log_marginal_likelihood(model, kind, indices, x, 50)
        assert exact == pytest.approx(log_marginal_likelihood(model, kind, indices, x, 40), abs=1e-4)
        with torch.no_grad():
            for rho in (0.1, 0.3, 1.0, 1.0):
                assert (model.elbo(indices, x) - model.log_prior()).item() < exact
                model.natural_gradient_step(model.features(indices), x, 1.0, rho)


@pytest.mark.parametrize("blocks", [1, 3])
@kinds
def test_bound_is_nearly_tight_with_inducing_inputs_at_the_data(kind, blocks):
    """What is left is Polya-Gamma's gap, and the correlation of the blocks' posteriors."""
    for seed in range(3):
        model, (indices, x) = make_model(kind, blocks, seed, inducing=3, jitter=1e-8), make_entries(kind, 3, seed)
        model.inducing.X.data = side_by_side(model.Z.detach(), indices)
        exact = log_marginal_likelihood(model, kind, indices, x, 50)
        with torch.no_grad():
            before = exact - (model.elbo(indices, x) - model.log_prior()).item()
            for _ in range(50):
                model.natural_gradient_step(model.features(indices), x, 1.0, 1.0)
            gap = exact - (model.elbo(indices, x) - model.log_prior()).item()
        assert 0 < gap < min(0.2, before / 5)


# natural gradient


@pytest.mark.parametrize(("rho", "scale"), [(1.0, 1.0), (1.0, 3.5), (0.3, 1.0), (0.3, 3.5)])
@blocks_1_2_3
@kinds
def test_steps_are_coordinate_ascent_in_dense_formulas(kind, blocks, rho, scale):
    """rho = 1 sets each q(u_i) to its optimum given theta and the other blocks; rho < 1 mixes natural parameters."""
    model, (indices, x) = make_model(kind, blocks), make_entries(kind)
    b, chi, _ = dense_augmentation(kind, x)
    pairs = processes(model.inducing.X.detach(), side_by_side(model.Z.detach(), indices), blocks)
    kappas = [torch.linalg.solve(C, c) for C, c in pairs]
    prior_variance = VARIANCE - sum((c * kappa).sum(0) for (_, c), kappa in zip(pairs, kappas, strict=True))
    q = unwhitened(model)
    for _ in range(3):
        mu = sum(kappa.T @ m for kappa, (m, _) in zip(kappas, q, strict=True))
        s2 = prior_variance + sum((kappa * (S @ kappa)).sum(0) for kappa, (_, S) in zip(kappas, q, strict=True))
        c = (mu**2 + s2).sqrt()
        theta = b * torch.tanh(c / 2) / (2 * c)
        for i, (kappa, (C, _)) in enumerate(zip(kappas, pairs, strict=True)):
            rest = sum(kappas[j].T @ q[j][0] for j in range(blocks) if j != i)
            optimal_precision = C.inverse() + scale * (kappa * theta) @ kappa.T
            optimal_eta = scale * kappa @ (chi - theta * rest)
            old_precision = q[i][1].inverse()
            covariance = ((1 - rho) * old_precision + rho * optimal_precision).inverse()
            q[i] = (covariance @ ((1 - rho) * old_precision @ q[i][0] + rho * optimal_eta), covariance)
        model.natural_gradient_step(model.features(indices), x, scale, rho)
        for actual, expected in zip(unwhitened(model), q, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-9)


@blocks_1_2_3
@kinds
def test_full_steps_climb_to_a_stationary_point_of_the_bound(kind, blocks):
    model, (indices, x) = make_model(kind, blocks), make_entries(kind)
    values = [dense_elbo_of(model, kind, indices, x)]
    for _ in range(20 if blocks == 1 else 300):  # correlated blocks converge slowly
        model.natural_gradient_step(model.features(indices), x, 1.0, 1.0)
        values.append(model.elbo(indices, x).detach())
    assert (torch.stack(values).diff() >= -1e-10).all()
    q = [model.q.mean.clone().requires_grad_(), model.q.covariance.clone().requires_grad_()]
    bound = dense_elbo(kind, model.Z.detach(), model.inducing.X.detach(), *q, indices, x)
    for gradient in torch.autograd.grad(bound, q):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-6)


def test_a_batch_stands_for_copies_of_itself():
    """A batch with scale 3 and the same entries three times with scale 1 move q alike."""
    one, three, (indices, x) = make_model("count", 2), make_model("count", 2), make_entries("count")
    one.natural_gradient_step(one.features(indices), x, 3.0, 0.4)
    three.natural_gradient_step(three.features(indices.repeat(3, 1)), x.repeat(3), 1.0, 0.4)
    torch.testing.assert_close(one.q.state_dict(), three.q.state_dict())
    torch.testing.assert_close(one.elbo(indices, x, 36), three.elbo(indices.repeat(3, 1), x.repeat(3)))


# gradient in Z and X


def gradient_by_hand(model, indices, x, scale):
    """Of the bound, in Z and X."""
    model.set_gradients(model.features(indices), x, scale)
    return -model.Z.grad, -model.inducing.X.grad


@pytest.mark.parametrize("scale", [1.0, 3.5])
@blocks_1_2_3
@kinds
def test_gradient_is_that_of_the_dense_bound(kind, blocks, scale):
    model, (indices, x) = make_model(kind, blocks), make_entries(kind)
    parameters = (model.Z, model.inducing.X)
    bound = dense_elbo(kind, *parameters, model.q.mean, model.q.covariance, indices, x, total=scale * ENTRIES)
    expected = torch.autograd.grad(bound, parameters)
    torch.testing.assert_close(gradient_by_hand(model, indices, x, scale), expected, rtol=1e-7, atol=1e-9)


@blocks_1_2_3
@kinds
def test_gradient_is_that_of_the_models_own_bound(kind, blocks):
    model, (indices, x) = make_model(kind, blocks), make_entries(kind)
    parameters = [model.Z, model.inducing.X]
    expected = torch.autograd.grad(model.elbo(indices, x, 2 * len(x)), parameters)
    torch.testing.assert_close(gradient_by_hand(model, indices, x, 2.0), expected, rtol=1e-9, atol=1e-11)


@kinds
def test_the_gradients_come_with_the_bounds_and_log_probabilities(kind):
    model, (indices, x) = make_model(kind, 2), make_entries(kind)
    bound, log_prob = model.set_gradients(model.features(indices), x, 1.0)
    with torch.no_grad():
        M = side_by_side(model.Z, indices)
        f_mean, _, kl = dense_posterior(model.inducing.X, M, model.q.mean, model.q.covariance)
        expected = dense_elbo_of(model, kind, indices, x) + kl - Normal(0, 1).log_prob(model.Z).sum()
        known = torch.distributions.Bernoulli(logits=f_mean)
        if kind == "count":
            known = torch.distributions.NegativeBinomial(ZETA, logits=f_mean)
    torch.testing.assert_close((bound.sum(), log_prob), (expected, known.log_prob(x)))


@pytest.mark.parametrize("sparse_gradients", [False, True])
def test_a_process_may_have_no_entry_of_a_batch(sparse_gradients):
    """Its step is that of the priors alone."""
    model = ENTED(FactorTable(SHAPE, RANK, sparse_gradients=sparse_gradients), LIKELIHOODS["count"], 6).double()
    indices, x = make_entries("count", 0)
    bound, log_prob = model.step(indices, x, 1.0, 0.5)
    assert bound.shape == log_prob.shape == (0,) and model.q.kl() == 0
    assert torch.equal(model.Z.grad, torch.zeros_like(model.Z) if sparse_gradients else model.Z)
    assert not model.inducing.X.grad.any()


# sparse gradients


@kinds
def test_sparse_gradients_of_an_epochs_batches_add_up_to_the_gradient(kind):
    """With scale 1, so that each entry carries its share of the prior; a row without entries has a gradient of 0."""
    (indices, x), dense = make_entries(kind), make_model(kind, 2)
    indices[:, 0].clamp_(max=2)  # the last row has none
    counts = torch.cat([indices[:, mode].bincount(minlength=size) for mode, size in enumerate(SHAPE)])
    sparse = ENTED(
        FactorTable(SHAPE, RANK, sparse_gradients=True), LIKELIHOODS[kind], 6, kernel=dense.kernel, jitter=JITTER
    )
    sparse = sparse.double()
    sparse.load_state_dict(dense.state_dict(), strict=False)
    sparse.table.set_degrees(counts)
    assert (counts == 0).any() and not sparse.Z[counts == 0].any()
    dense.Z.data.copy_(sparse.Z)
    gradient_by_hand(dense, indices, x, 1.0)
    X_bar = torch.zeros_like(sparse.inducing.X)
    for part in torch.arange(ENTRIES).split(5):
        sparse.set_gradients(sparse.features(indices[part]), x[part], 1.0)
        X_bar += sparse.inducing.X.grad
    torch.testing.assert_close((sparse.Z.grad, X_bar), (dense.Z.grad, dense.inducing.X.grad), rtol=1e-9, atol=1e-11)


# posterior of f


@blocks_1_2_3
def test_predictive_is_the_dense_posterior(blocks):
    model, (indices, _) = make_model("count", blocks), make_entries("count")
    predictive = model.predictive(indices)
    with torch.no_grad():
        M = side_by_side(model.Z, indices)
        f_mean, f_variance, _ = dense_posterior(model.inducing.X, M, model.q.mean, model.q.covariance)
    assert predictive.likelihood is model.likelihood
    assert not predictive.f_mean.requires_grad and not predictive.f_variance.requires_grad
    torch.testing.assert_close((predictive.f_mean, predictive.f_variance), (f_mean, f_variance))


def test_predictive_of_a_float32_model_is_in_float64():
    predictive = make_model("count", 2).float().predictive(make_entries("count")[0])
    assert predictive.f_mean.dtype == predictive.f_variance.dtype == torch.float64


# the module


def test_only_the_factor_rows_of_an_entry_feel_it():
    model, indices, x = make_model("count", 2), torch.tensor([[3, 0, 4]]), torch.tensor([9.0], dtype=torch.float64)
    gradient = gradient_by_hand(model, indices, x, 1.0)[0] + model.Z.detach()  # without log p(Z)
    # row 3 of the first mode, row 0 of the second (after 4 rows), row 4 of the third (after 7)
    assert gradient.any(-1).nonzero().flatten().tolist() == [3, 4, 11]


def test_starts_from_a_gaussian_and_from_the_prior_of_u():
    torch.manual_seed(0)
    model = ENTED(FactorTable((300, 200), 10, init_std=0.3), Bernoulli(), 500)
    for parameter in (model.Z, model.inducing.X):
        assert parameter.std().item() == pytest.approx(0.3, rel=0.05)  # 5000 draws or more: 1 % standard error
    assert model.q.kl() == 0
    assert {name for name, _ in model.named_parameters()} == {"table.Z", "inducing.X"}


@blocks_1_2_3
def test_a_new_model_predicts_the_prior_of_f(blocks):
    predictive = make_model("count", blocks, at_prior=True).predictive(make_entries("count")[0])
    torch.testing.assert_close(predictive.f_mean, torch.zeros(ENTRIES, dtype=torch.float64))
    torch.testing.assert_close(predictive.f_variance, torch.full((ENTRIES,), VARIANCE, dtype=torch.float64))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, "rank=0: it must be at least 1"),
        ({"inducing": 0}, "inducing=0: it must be at least 1"),
        ({"blocks": 0}, "model.blocks=0: it must be at least 1"),
        ({"blocks": -2}, "model.blocks=-2: it must be at least 1"),
        ({"inducing": 7}, "inducing=7 points cannot be divided into model.blocks=2 equal blocks"),
        ({"inducing": 1}, "inducing=1 points cannot be divided into model.blocks=2 equal blocks"),
    ],
)
def test_sizes_that_make_no_model_are_refused(arguments, message):
    with pytest.raises(InputError) as error:
        ENTED(FactorTable(SHAPE, arguments.pop("rank", 2)), Bernoulli(), **{"inducing": 6} | arguments)
    assert str(error.value) == message


def test_failed_factorisations_are_kept_in_mind():
    model, (indices, x) = make_model("count", 2), make_entries("count")
    features = model.features(indices)
    model.natural_gradient_step(features, x, 1.0, 1.0)
    assert model.failures == 0
    # K's, flagged by the features
    model.natural_gradient_step(replace(features, info=torch.tensor(3)), x, 1.0, 1.0)
    assert model.failures > 0
    # that of a precision, which a negative weight of the data makes indefinite
    model.failures.zero_()
    model.natural_gradient_step(features, x, -100.0, 1.0)
    assert model.failures > 0


@pytest.mark.parametrize("breakage", ["jitter", "nan"])
def test_a_kernel_matrix_that_is_not_positive_definite_counts_as_a_failure(breakage):
    model, (indices, x) = make_model("count", 2), make_entries("count")
    if breakage == "jitter":
        model.inducing.jitter = -1.0
    else:
        model.inducing.X.data[0, 0] = torch.nan
    features = model.features(indices)
    assert features.info != 0
    model.natural_gradient_step(features, x, 1.0, 1.0)
    assert model.failures > 0
    with pytest.raises(InputError, match="^a Cholesky factorisation failed in a prediction: .* higher model.jitter"):
        model.predictive(indices)
