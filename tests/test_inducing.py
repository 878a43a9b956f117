import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from torch.autograd import gradcheck

from ented.inducing import InducingBlocks, Whiten
from ented.kernels import RBF

POINTS, INPUTS, ENTRIES = 6, 4, 7


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def k(x, y):
    return torch.from_numpy(np.exp(-cdist(x.detach(), y.detach(), "sqeuclidean") / 2))


def make(jitter):
    """Inducing inputs, and a batch that has one of them among its rows."""
    inducing = InducingBlocks(POINTS, INPUTS, std=1.0, jitter=jitter).double()
    inducing.X.data = normal(POINTS, INPUTS)
    M = normal(ENTRIES, INPUTS, seed=1)
    M[0] = inducing.X[2].detach()
    return inducing, M


def positive(*shape, seed=0):
    """Positive definite matrices."""
    A = normal(*shape, shape[-1], seed=seed)
    return A @ A.mT + torch.eye(shape[-1], dtype=A.dtype)


@pytest.mark.parametrize("jitter", [1e-6, 0.2])
def test_features_are_those_of_two_orthogonal_processes(jitter):
    """phi_u = Lu^-1 K_Bm and phi_v = Lv^-1 C_Hm with C the covariance of what B does not explain."""
    inducing, M = make(jitter)
    p = POINTS // 2
    B, H = inducing.X[:p], inducing.X[p:]
    eye = torch.eye(p, dtype=torch.float64)
    K_BB, K_HB, K_HH = k(B, B) + jitter * eye, k(H, B), k(H, H) + jitter * eye
    C_HH = K_HH - K_HB @ K_BB.inverse() @ K_HB.T
    C_Hm = k(H, M) - K_HB @ K_BB.inverse() @ k(B, M)
    expected = torch.cat(
        [torch.linalg.cholesky(K_BB).inverse() @ k(B, M), torch.linalg.cholesky(C_HH).inverse() @ C_Hm]
    )
    features = inducing(RBF(), M)
    torch.testing.assert_close(features.phi, expected, rtol=1e-6, atol=1e-9)
    assert features.info == 0


@pytest.mark.parametrize("jitter", [1e-6, 0.2])
def test_residual_is_the_conditional_variance_given_all_points(jitter):
    inducing, M = make(jitter)
    K = k(inducing.X, inducing.X) + jitter * torch.eye(POINTS, dtype=torch.float64)
    K_XM = k(inducing.X, M)
    expected = 1 - (K_XM * torch.linalg.solve(K, K_XM)).sum(0)
    torch.testing.assert_close(inducing(RBF(), M).residual, expected, rtol=1e-6, atol=1e-9)


def test_residual_uses_the_kernels_variance():
    inducing, _ = make(1e-6)
    far = 100 + normal(3, INPUTS)  # the points explain nothing here
    assert inducing(RBF(variance=2.5), far).residual.tolist() == [2.5] * 3


def test_residual_is_never_negative():
    """At an inducing input without jitter it is rounding noise of either sign."""
    inducing = InducingBlocks(50, INPUTS, std=1.0, jitter=0.0).double()
    inducing.X.data = 3 * normal(50, INPUTS)
    assert (inducing(RBF(), inducing.X.detach()).residual >= 0).all()


def test_a_failed_factorisation_is_flagged():
    inducing, M = make(-2.0)
    assert inducing(RBF(), M).info != 0


def test_inputs_start_from_a_gaussian_of_the_given_deviation():
    torch.manual_seed(0)
    X = InducingBlocks(200, 100, std=0.3, jitter=0.0).X
    # 20000 draws: standard errors 0.002 and 0.0015
    assert X.mean().item() == pytest.approx(0, abs=0.01)
    assert X.std().item() == pytest.approx(0.3, abs=0.0075)


def test_derivative_of_whiten():
    # K is made from a free matrix, so that the numerical derivative keeps it symmetric
    def phi(A, K_XM):
        return Whiten.apply(A @ A.mT + torch.eye(3, dtype=A.dtype), K_XM)[0]

    assert gradcheck(phi, (normal(3, 3).requires_grad_(), normal(3, 5, seed=1).requires_grad_()))
    assert gradcheck(phi, (normal(2, 3, 3).requires_grad_(), normal(2, 3, 5, seed=1).requires_grad_()))


def test_derivative_of_whiten_is_autograds():
    """Through PyTorch's own Cholesky factorisation and solve, whose derivative in K is symmetric too."""
    K, K_XM, G = positive(4, seed=1), normal(4, 5, seed=2), normal(4, 5, seed=3)
    K.requires_grad_(), K_XM.requires_grad_()
    expected = torch.linalg.solve_triangular(torch.linalg.cholesky(K), K_XM, upper=False)
    expected = torch.autograd.grad((G * expected).sum(), (K, K_XM))
    torch.testing.assert_close(torch.autograd.grad((G * Whiten.apply(K, K_XM)[0]).sum(), (K, K_XM)), expected)


def test_leading_dimensions_of_whiten_equal_a_loop():
    K, K_XM, G = positive(2, 3, 4), normal(2, 3, 4, 5, seed=1), normal(2, 3, 4, 5, seed=2)

    def value_and_gradients(K, K_XM, G):
        K, K_XM = K.clone().requires_grad_(), K_XM.clone().requires_grad_()
        phi, info = Whiten.apply(K, K_XM)
        return phi.detach(), info, *torch.autograd.grad((G * phi).sum(), (K, K_XM))

    together = value_and_gradients(K, K_XM, G)
    for i in range(2):
        for j in range(3):
            alone = value_and_gradients(K[i, j], K_XM[i, j], G[i, j])
            torch.testing.assert_close(tuple(part[i, j] for part in together), alone)


def test_each_failed_factorisation_of_a_stack_is_flagged():
    K = positive(3, 4)
    K[1] = -K[1]
    _, info = Whiten.apply(K, normal(3, 4, 5))
    assert (info != 0).tolist() == [False, True, False]
