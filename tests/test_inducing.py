import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

from ented.inducing import InducingInputs
from ented.kernels import RBF

POINTS, INPUTS, ENTRIES = 6, 4, 7


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def k(x, y):
    return torch.from_numpy(np.exp(-cdist(x.detach(), y.detach(), "sqeuclidean") / 2))


def make(jitter):
    """Inducing inputs, and a batch that has one of them among its rows."""
    inducing = InducingInputs(POINTS, INPUTS, std=1.0, jitter=jitter).double()
    inducing.X.data = normal(POINTS, INPUTS)
    M = normal(ENTRIES, INPUTS, seed=1)
    M[0] = inducing.X[2].detach()
    return inducing, M


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
    torch.testing.assert_close(features.phi.T, expected, rtol=1e-6, atol=1e-9)
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
    inducing = InducingInputs(50, INPUTS, std=1.0, jitter=0.0).double()
    inducing.X.data = 3 * normal(50, INPUTS)
    assert (inducing(RBF(), inducing.X.detach()).residual >= 0).all()


def test_a_failed_factorisation_is_flagged():
    inducing, M = make(-2.0)
    assert inducing(RBF(), M).info != 0


def test_inputs_start_from_a_gaussian_of_the_given_deviation():
    torch.manual_seed(0)
    X = InducingInputs(200, 100, std=0.3, jitter=0.0).X
    # 20000 draws: standard errors 0.002 and 0.0015
    assert X.mean().item() == pytest.approx(0, abs=0.01)
    assert X.std().item() == pytest.approx(0.3, abs=0.0075)


def backward_by_hand_and_by_autograd(X, M, phi_bar):
    inducing = InducingInputs(POINTS, INPUTS, std=1.0, jitter=0.1).double()
    inducing.X = torch.nn.Parameter(X)
    M = M.clone().requires_grad_()
    features = inducing(RBF(0.8, 2.5), M)
    expected = torch.autograd.grad((phi_bar * features.phi).sum(), (inducing.X, M))
    return inducing.backward(RBF(0.8, 2.5), features, phi_bar)[:2], expected


def test_backward_is_the_derivative():
    """Through PyTorch's own Cholesky factorisation and solve."""
    actual, expected = backward_by_hand_and_by_autograd(
        normal(POINTS, INPUTS), normal(ENTRIES, INPUTS, seed=1), normal(ENTRIES, POINTS, seed=2)
    )
    torch.testing.assert_close(actual, expected)


def test_leading_dimensions_equal_a_loop():
    X, M, phi_bar = normal(2, POINTS, INPUTS), normal(2, ENTRIES, INPUTS, seed=1), normal(2, ENTRIES, POINTS, seed=2)
    together, expected = backward_by_hand_and_by_autograd(X, M, phi_bar)
    torch.testing.assert_close(together, expected)
    for i in range(2):
        alone, _ = backward_by_hand_and_by_autograd(X[i], M[i], phi_bar[i])
        torch.testing.assert_close(tuple(part[i] for part in together), alone)


def test_each_failed_factorisation_of_a_stack_is_flagged():
    inducing = InducingInputs(POINTS, INPUTS, std=1.0, jitter=0.1).double()
    inducing.X = torch.nn.Parameter(normal(3, POINTS, INPUTS))
    inducing.X.data[1] = torch.nan
    features = inducing(RBF(), normal(3, ENTRIES, INPUTS))
    assert (features.info != 0).tolist() == [False, True, False]
