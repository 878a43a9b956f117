import copy
import types

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import digamma, expit
from torch.distributions import Gamma, Normal, kl_divergence
from torchmetrics.functional.classification import binary_auroc

from baselines.main_effects import MainEffects
from baselines.sbtr import SBTR
from ented.errors import InputError
from ented.likelihoods import Bernoulli, NegativeBinomial
from ented.predictive import LatentGaussian
from ented.tensor import COOTensor

SHAPE = (4, 3, 5)


def make(shape=SHAPE, rank=2, seed=0, **settings) -> SBTR:
    """A module away from its initial values."""
    torch.manual_seed(seed)
    module = SBTR(shape, Bernoulli(), rank, **settings).double()
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter)
    module.delta.copy_(0.5 + torch.rand_like(module.delta))
    return module


def cells(shape):
    return torch.cartesian_prod(*[torch.arange(size) for size in shape])


def make_entries(shape=SHAPE, n=20, seed=0):
    rng = np.random.default_rng(seed)
    indices = torch.from_numpy(rng.integers(0, shape, size=(n, len(shape))))
    return indices, torch.from_numpy(rng.integers(0, 2, n)).double()


def fit(module: SBTR, batch, steps: int, lr: float, optimizer=None, entries=None):
    """Training steps on a batch that stands for `entries` entries; its own number without."""
    module.lr = lr
    # all that a training step asks of its trainer
    module._trainer = types.SimpleNamespace(datamodule=types.SimpleNamespace(train=range(entries or len(batch[1]))))
    optimizer = optimizer or module.configure_optimizers()
    for _ in range(steps):
        loss = module.training_step(batch, 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return optimizer


# the model


@pytest.mark.parametrize(
    ("shape", "ring"),
    [
        ((4, 3), "iab,b,jba,a->ij"),
        ((4, 3, 5), "iab,b,jbc,c,kca,a->ijk"),
        ((4, 3, 5, 2), "iab,b,jbc,c,kcd,d,lda,a->ijkl"),
    ],
)
def test_f_is_the_weighted_ring(shape, ring):
    module = make(shape, rank=3)
    operands = [tensor for pair in zip(module.cores, module.weights, strict=True) for tensor in pair]
    expected = torch.einsum(ring, *operands).flatten()
    predictive = module.predictive(cells(shape))
    torch.testing.assert_close(predictive.f_mean, expected.detach())
    assert not predictive.f_mean.requires_grad and not predictive.f_variance.any()


def test_predictive_of_a_float32_module_is_in_float64():
    predictive = make().float().predictive(cells(SHAPE))
    assert isinstance(predictive, LatentGaussian)
    assert predictive.mean.dtype == predictive.log_prob(torch.ones(60).double()).dtype == torch.float64
    torch.testing.assert_close(predictive.mean, torch.sigmoid(make().float().f(cells(SHAPE))).double().detach())


def test_counts_are_refused():
    with pytest.raises(InputError, match="SBTR is for binary entries, these are count"):
        SBTR(SHAPE, NegativeBinomial(), 2)


def test_start():
    module = SBTR((400, 3), Bernoulli(), rank=2, init_scale=0.3)
    assert all(0 <= core.min() and core.max() <= 0.3 for core in module.cores)
    # the mean of 1600 uniform numbers has a standard error of 0.3 / sqrt(12 * 1600)
    assert module.cores[0].mean().item() == pytest.approx(0.15, abs=4 * 0.3 / (12 * 1600) ** 0.5)
    assert (module.weights == 1).all() and (module.delta == 1).all()


# expectation maximisation


def dense_log_joint(module, indices, values, scale=1.0):
    """log p(x, G, lambda | tau) of the model, with no Polya-Gamma variables."""
    f = module.f(indices)
    data = (values * f - torch.log1p(f.exp())).sum()
    prior = sum(Normal(0, 1).log_prob(core).sum() for core in module.cores)
    tau = torch.stack([module.delta[:, : r + 1].prod(1) for r in range(module.delta.shape[1])], 1)
    return scale * data + prior + Normal(0, tau.rsqrt()).log_prob(module.weights).sum()


def with_core_prior(module, batch, omega, scale=1.0):
    """The expected log joint with the prior of the cores, whose gradient the method leaves to Adam."""
    return module.expected_log_joint(batch, omega, scale) + sum(
        Normal(0, 1).log_prob(core).sum() for core in module.cores
    )


def test_expected_log_joint_is_a_lower_bound_that_touches_the_log_joint():
    """Both have one gradient at the parameters of the E step (Fisher's identity); elsewhere the bound gains less."""
    for seed in range(5):
        module, batch = make(seed=seed), make_entries(seed=seed)
        omega, parameters = module.expected_omega(batch), list(module.parameters())
        here = with_core_prior(module, batch, omega, 3.5), dense_log_joint(module, *batch, 3.5)
        gradients = [torch.autograd.grad(value, parameters) for value in here]
        torch.testing.assert_close(*gradients)
        for size in (0.01, 0.1, 1.0):
            moved = copy.deepcopy(module)
            for parameter in moved.parameters():
                parameter.data += size * torch.randn_like(parameter)
            bound, exact = with_core_prior(moved, batch, omega, 3.5), dense_log_joint(moved, *batch, 3.5)
            assert (bound - here[0]).item() < (exact - here[1]).item()


def test_expected_omega_is_the_mean_of_the_polya_gamma_series():
    """PG(1, f) = sum_k g_k / (2 pi^2 ((k - 1/2)^2 + f^2 / (4 pi^2))), g_k ~ Gamma(1, 1) (Polson, Scott, Windle)."""
    module, batch = make(), make_entries()
    f = module.f(batch[0]).detach().numpy()
    k = np.arange(1, 200_001)[:, None]
    expected = (1 / ((k - 0.5) ** 2 + f**2 / (4 * np.pi**2))).sum(0) / (2 * np.pi**2)
    np.testing.assert_allclose(module.expected_omega(batch), expected, rtol=1e-4)  # the rest of the series is 3e-7


def test_closed_form_em_raises_the_log_joint():
    """The expected log joint is quadratic in a core, and in a mode's weights: Newton's step is its maximum.

    Each E step and M step of a sweep raises the log joint, which is the log posterior up to a constant.
    """
    module, batch = make(), make_entries(n=40)
    blocks = [(core, slice(None)) for core in module.cores] + [(module.weights, slice(d, d + 1)) for d in range(3)]
    values = [dense_log_joint(module, *batch).item()]
    for _ in range(10):
        for parameter, block in blocks:
            value = with_core_prior(module, batch, module.expected_omega(batch))
            (gradient,) = torch.autograd.grad(value, parameter, create_graph=True)
            gradient = gradient[block].flatten()
            rows = [torch.autograd.grad(g, parameter, retain_graph=True)[0][block].flatten() for g in gradient]
            step = torch.linalg.solve(-torch.stack(rows), gradient.detach())
            parameter.data[block] += step.view_as(parameter[block])
            values.append(dense_log_joint(module, *batch).item())
    assert (np.diff(values) > -1e-9).all()
    assert values[-1] > values[0] + 10  # a quarter of a nat and more an entry


def elbo(module, indices, values, a, b):
    """log p(x, G | lambda) + E[log p(lambda | delta)] - KL(q(delta) | p), for q(delta) = Gamma(a, b), elementwise."""
    with torch.no_grad():
        mean, log_mean = a / b, torch.from_numpy(digamma(a.numpy())) - b.log()
        tau, log_tau = mean.cumprod(1), log_mean.cumsum(1)
        weights = 0.5 * (log_tau - tau * module.weights.square() - np.log(2 * np.pi)).sum()
        f = module.f(indices)
        data = torch.from_numpy(np.log(expit(((2 * values - 1) * f).numpy()))).sum()
        prior = sum(Normal(0, 1).log_prob(core).sum() for core in module.cores)
        kl = kl_divergence(Gamma(a, b), Gamma(torch.full_like(a, module.a_delta), torch.ones_like(a))).sum()
        return (data + prior + weights - kl).item()


def test_delta_is_updated_one_after_the_other_to_the_optimum():
    """The precision's shape is known, so each E[delta] decides its rate; no other rate gives a higher bound."""
    module, batch, R = make(rank=4, a_delta=3.0), make_entries(), 4
    a = module.a_delta + (R - torch.arange(R).double()).expand(3, R) / 2
    before = module.delta.clone()
    module.update_delta()
    after = module.delta.clone()
    for d in range(3):
        delta = before.clone()
        for r in range(R):

            def negative(log_rate, d=d, r=r, delta=delta):
                trial = delta.clone()
                trial[d, r] = a[d, r] / np.exp(log_rate)
                return -elbo(module, *batch, a, a / trial)

            best = minimize_scalar(negative, bounds=(-10, 10), method="bounded", options={"xatol": 1e-10}).x
            delta[d, r] = a[d, r] / np.exp(best)
            # a minimum is found to the square root of the rounding errors
            assert after[d, r].item() == pytest.approx(delta[d, r].item(), rel=1e-5)


def test_posterior_of_a_single_delta_is_the_conjugate_one():
    """R = 1: lambda | delta ~ N(0, 1 / delta), by quadrature over delta."""
    module = make(rank=1, a_delta=3.0)
    module.update_delta()
    grid = np.linspace(1e-6, 60, 600_001)
    for weight, delta in zip(module.weights[:, 0].tolist(), module.delta[:, 0].tolist(), strict=True):
        log_density = (3.0 - 1 + 0.5) * np.log(grid) - grid - grid * weight**2 / 2
        density = np.exp(log_density)
        assert delta == pytest.approx((grid * density).sum() / density.sum(), rel=1e-4)


def test_gradient_ascent_and_updates_of_delta_raise_the_bound():
    """Gradient ascent with a step too small to overshoot, after every update of q(delta)."""
    module, batch = make(rank=3), make_entries(n=40)
    R = 3
    a = module.a_delta + (R - torch.arange(R).double()).expand(3, R) / 2
    module.update_delta()
    values = [elbo(module, *batch, a, a / module.delta)]
    for _ in range(200):
        value = with_core_prior(module, batch, module.expected_omega(batch))
        gradients = torch.autograd.grad(value, list(module.parameters()))
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            parameter.data += 5e-3 * gradient
        values.append(elbo(module, *batch, a, a / module.delta))
        module.update_delta()
        values.append(elbo(module, *batch, a, a / module.delta))
    assert (np.diff(values) > -1e-9).all()
    assert values[-1] > values[0] + 10


def test_a_step_is_adam_on_the_expected_log_joint():
    """With all of it in the loss, and no weight decay."""
    module, batch = make(), make_entries()
    expected = copy.deepcopy(module)
    adam = torch.optim.Adam(expected.parameters(), 0.1)
    for _ in range(5):
        expected.update_delta()
        adam.zero_grad()
        (-with_core_prior(expected, batch, expected.expected_omega(batch), 3.5)).backward()
        adam.step()
    fit(module, batch, steps=5, lr=0.1, entries=70)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, msg=name)


# recovery


def truth(shape, seed, scale):
    """f of every cell, a ring of rank 2 brought to the given scale."""
    rng = np.random.default_rng(seed)
    cores = [rng.normal(size=(size, 2, 2)) for size in shape]
    f = np.einsum("iab,jbc,kca->ijk", *cores)
    return torch.from_numpy(f / f.std() * scale).flatten()


def test_recovers_a_ring_of_its_own_model():
    shape = (20, 20, 20)
    f, indices = truth(shape, seed=1, scale=4.0), cells(shape)
    torch.manual_seed(0)
    values = torch.bernoulli(torch.sigmoid(f))
    order = torch.randperm(len(f))
    train, test = order[:6000], order[6000:]
    torch.manual_seed(1)
    module = SBTR(shape, Bernoulli(), rank=2).double()
    fit(module, (indices[train], values[train]), steps=150, lr=0.05)

    def scores(predictive):
        auc = binary_auroc(predictive.mean, values[test].long()).item()
        return auc, predictive.log_prob(values[test]).mean().item()

    additive = MainEffects(shape, Bernoulli()).double()
    additive.fit(COOTensor(indices[train], values[train], shape), epochs=20)
    oracle = LatentGaussian(Bernoulli(), f[test], torch.zeros_like(f[test]))
    predictives = additive.predictive(indices[test]), module.predictive(indices[test]), oracle
    for low, own, high in zip(*map(scores, predictives), strict=True):
        assert high > low + 0.2  # the interactions matter
        # 240 numbers from 6000 bits: five sixths of the way from the additive model to the truth
        assert own > low + 5 / 6 * (high - low)


def test_components_that_the_data_do_not_ask_for_shrink():
    """A ring of rank 2 is fitted with rank 4, to ten entries in each cell whose mean is their expected value.

    A component's share is its weight times the sizes of the slices of two cores that it joins. The priors of cores and
    weights do it together; what q(delta) adds is tested above.
    """
    shape = (7, 7, 7)
    f, indices = truth(shape, seed=2, scale=3.0), cells(shape)
    torch.manual_seed(1)
    module = SBTR(shape, Bernoulli(), rank=4).double()
    fit(module, (indices, torch.sigmoid(f)), steps=700, lr=0.05, entries=10 * len(f))
    for d in range(3):
        left, right = module.cores[d], module.cores[(d + 1) % 3]
        share = module.weights[d].abs() * left.square().sum((0, 1)).sqrt() * right.square().sum((0, 2)).sqrt()
        share = (share / share.max()).detach().sort(descending=True).values
        # they start equal but for noise; without data a component's weight has no optimum but zero
        assert share[1] > 0.5
        assert share[2:].max() < 1e-2
    # the truth's variance is 9, and the prior pulls f towards zero
    assert (module.predictive(indices).f_mean - f).square().mean() < 0.1


# checkpoints


def test_a_checkpoint_continues_to_the_same_numbers():
    batch = make_entries(n=30)
    whole = make()
    optimizer = fit(whole, batch, 5, 0.01)
    resumed = make(seed=7)
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    state = copy.deepcopy(optimizer.state_dict())
    fit(whole, batch, 5, 0.01, optimizer)
    other = resumed.configure_optimizers()
    other.load_state_dict(state)
    fit(resumed, batch, 5, 0.01, other)
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
