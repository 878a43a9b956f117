import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from ented.variational import GaussianBlocks

BLOCKS = [1, 2, 3]
SIZE = 3


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def eye(n):
    return torch.eye(n, dtype=torch.float64)


def positive(*shape, seed=0):
    """Positive definite matrices."""
    A = normal(*shape, shape[-1], seed=seed)
    return A @ A.mT / shape[-1] + 0.5 * eye(shape[-1])


def make(blocks, leading=(), seed=0):
    """A posterior away from its initial value."""
    q = GaussianBlocks(blocks, SIZE).double()
    q.covariance = positive(*leading, blocks, SIZE, seed=seed)
    q.mean = normal(*leading, blocks, SIZE, seed=seed + 1)
    q.precision = q.covariance.inverse()
    q.eta = (q.precision @ q.mean[..., None]).squeeze(-1)
    return q


def statistics(blocks, leading=(), seed=10):
    """G = sum_n theta_n phi_n phi_n' and r = sum_n chi_n phi_n of made-up entries."""
    P = blocks * SIZE
    phi, theta = normal(*leading, 8, P, seed=seed), normal(*leading, 8, seed=seed + 1).abs()
    return phi.mT @ (theta[..., None] * phi), normal(*leading, P, seed=seed + 2)


def parameters(q):
    return q.eta, q.precision, q.mean, q.covariance


def objective(mean, covariance, gram, linear):
    """E_q[r'u - u'Gu / 2] - KL(q | N(0, I)) over all blocks, which a step with rho = 1 maximises block by block."""
    u, S = mean.flatten(), torch.block_diag(*covariance)
    prior = MultivariateNormal(torch.zeros_like(u), eye(len(u)))
    return linear @ u - 0.5 * (u @ gram @ u + (gram * S).sum()) - kl_divergence(MultivariateNormal(u, S), prior)


def test_starts_at_the_prior():
    q = GaussianBlocks(2, SIZE).double()
    assert torch.equal(q.mean, torch.zeros(2, SIZE)) and torch.equal(q.eta, torch.zeros(2, SIZE))
    for i in range(2):
        assert torch.equal(q.covariance[i], eye(SIZE)) and torch.equal(q.precision[i], eye(SIZE))
    assert q.kl() == 0


def test_an_optimiser_finds_no_parameters_but_a_checkpoint_keeps_all():
    q = GaussianBlocks(2, SIZE)
    assert not list(q.parameters())
    assert set(q.state_dict()) == {"eta", "precision", "mean", "covariance"}


@pytest.mark.parametrize("blocks", BLOCKS)
def test_kl_is_the_sum_over_blocks(blocks):
    q = make(blocks)
    prior = MultivariateNormal(torch.zeros(SIZE, dtype=torch.float64), eye(SIZE))
    expected = sum(kl_divergence(MultivariateNormal(q.mean[i], q.covariance[i]), prior) for i in range(blocks))
    torch.testing.assert_close(q.kl(), expected)


@pytest.mark.parametrize("blocks", BLOCKS)
def test_moments_are_those_of_a_linear_function_of_all_blocks(blocks):
    q, phi = make(blocks), normal(5, blocks * SIZE, seed=3)
    residual = normal(5, seed=4).abs()  # prior variance that the features do not explain
    S = torch.block_diag(*q.covariance)
    mean, variance, D_phi = q.moments(phi, phi.square().sum(-1) + residual)
    torch.testing.assert_close(mean, phi @ q.mean.flatten())
    torch.testing.assert_close(variance, residual + (phi @ S @ phi.T).diagonal())
    torch.testing.assert_close(D_phi, phi @ S - phi)


def test_variance_is_never_negative():
    """A posterior of almost no variance, at entries that the features explain: rounding noise of either sign."""
    q, phi = GaussianBlocks(2, 10).float(), normal(500, 20)
    q.covariance *= 1e-9
    _, variance, _ = q.moments(phi.float(), phi.square().sum(-1).float())
    assert (variance >= 0).all() and (variance > 0).any()


@pytest.mark.parametrize("rho", [1.0, 0.3])
@pytest.mark.parametrize("blocks", BLOCKS)
def test_step_interpolates_natural_parameters_block_after_block(blocks, rho):
    q = make(blocks)
    gram, linear = statistics(blocks)
    mean = [m.clone() for m in q.mean]
    eta, precision = [], []
    for i in range(blocks):
        own = slice(i * SIZE, (i + 1) * SIZE)
        # the earlier blocks have moved already
        others = sum(gram[own, j * SIZE : (j + 1) * SIZE] @ mean[j] for j in range(blocks) if j != i)
        precision.append((1 - rho) * q.precision[i] + rho * (eye(SIZE) + gram[own, own]))
        eta.append((1 - rho) * q.eta[i] + rho * (linear[own] - others))
        mean[i] = torch.linalg.solve(precision[i], eta[i])
    info = q.natural_gradient_step(gram, linear, rho)
    precision = torch.stack(precision)
    assert info.tolist() == [0] * blocks
    torch.testing.assert_close(parameters(q), (torch.stack(eta), precision, torch.stack(mean), precision.inverse()))


@pytest.mark.parametrize("blocks", BLOCKS)
def test_full_steps_climb_to_the_maximum_of_the_quadratic_objective(blocks):
    q = make(blocks)
    gram, linear = statistics(blocks)
    values = [objective(q.mean, q.covariance, gram, linear)]
    for _ in range(1 if blocks == 1 else 300):  # one block is there after one step
        q.natural_gradient_step(gram, linear, 1.0)
        values.append(objective(q.mean, q.covariance, gram, linear))
    assert (torch.stack(values).diff() >= -1e-10).all()
    mean, covariance = q.mean.clone().requires_grad_(), q.covariance.clone().requires_grad_()
    gradients = torch.autograd.grad(objective(mean, covariance, gram, linear), (mean, covariance))
    for gradient in gradients:
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-8)


@pytest.mark.parametrize("blocks", [1, 2])
def test_leading_dimensions_equal_a_loop(blocks):
    leading = (2, 2)
    q = make(blocks, leading)
    phi, diagonal = normal(*leading, 5, blocks * SIZE, seed=3), 100 + normal(*leading, 5, seed=4)
    gram, linear = statistics(blocks, leading)
    singles = {}
    for at in [(i, j) for i in range(2) for j in range(2)]:
        singles[at] = GaussianBlocks(blocks, SIZE).double()
        for name, value in q.named_buffers():
            setattr(singles[at], name, value[at].clone())

    moments, kl = q.moments(phi, diagonal), q.kl()
    for at, single in singles.items():
        torch.testing.assert_close(tuple(part[at] for part in moments), single.moments(phi[at], diagonal[at]))
        torch.testing.assert_close(kl[at], single.kl())

    info = q.natural_gradient_step(gram, linear, 0.3)
    assert info.shape == (*leading, blocks)
    for at, single in singles.items():
        single.natural_gradient_step(gram[at], linear[at], 0.3)
        torch.testing.assert_close(tuple(part[at] for part in parameters(q)), parameters(single))


def test_a_block_whose_precision_is_not_positive_definite_is_flagged():
    q = GaussianBlocks(2, SIZE).double()
    gram = torch.block_diag(eye(SIZE), -5 * eye(SIZE))
    info = q.natural_gradient_step(gram, torch.zeros(2 * SIZE, dtype=torch.float64), 1.0)
    assert (info != 0).tolist() == [False, True]
