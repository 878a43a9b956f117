import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

from ented.kernels import RBF


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("lengthscale", "variance"), [(1.0, 1.0), (0.7, 2.5)])
def test_rbf_is_the_gaussian_of_the_distance(float64, lengthscale, variance):
    x, y = normal(4, 3), normal(5, 3, seed=1)
    expected = variance * np.exp(-((cdist(x, y) / lengthscale) ** 2) / 2)
    torch.testing.assert_close(RBF(lengthscale, variance)(x, y), torch.from_numpy(expected))
    torch.testing.assert_close(RBF(lengthscale, variance, learned=True)(x, y), torch.from_numpy(expected))


def test_ard_has_a_lengthscale_for_each_input(float64):
    x, y, lengthscales = normal(4, 3), normal(5, 3, seed=1), torch.tensor([0.5, 1.0, 3.0])
    expected = 2.5 * np.exp(-(cdist(x / lengthscales, y / lengthscales) ** 2) / 2)
    torch.testing.assert_close(RBF(lengthscales, 2.5, learned=True)(x, y), torch.from_numpy(expected))


def test_default_is_the_papers_bandwidth_one(float64):
    x, y = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 1.0]])
    assert RBF()(x, y).item() == pytest.approx(np.exp(-1))


KERNELS = pytest.mark.parametrize(
    "make",
    [
        lambda: RBF(0.7, 2.5),
        lambda: RBF(0.7, 2.5, learned=True),
        lambda: RBF(torch.tensor([0.5, 1.0, 3.0]), 2.5, learned=True),
    ],
    ids=["fixed", "rbf", "ard"],
)


@KERNELS
def test_diagonal_is_the_covariance_of_a_row_with_itself(float64, make):
    kernel, x = make(), normal(2, 4, 3)
    torch.testing.assert_close(kernel.diagonal(x), kernel(x, x).diagonal(dim1=-2, dim2=-1))


@KERNELS
def test_leading_dimensions_equal_a_loop(float64, make):
    kernel, x, y = make(), normal(2, 4, 3), normal(2, 5, 3, seed=1)
    torch.testing.assert_close(kernel(x, y), torch.stack([kernel(x[i], y[i]) for i in range(2)]))


def test_rounding_never_lifts_a_covariance_above_the_variance(float64):
    """|x|^2 + |y|^2 - 2 x'y of equal rows far from the origin is rounding noise of either sign."""
    x = 1e4 + normal(50, 3)
    assert (RBF()(x, x) <= 1).all()


@KERNELS
def test_backward_is_the_derivative(float64, make):
    """Of sum(K_bar * K), by automatic differentiation of the values."""
    kernel, x, y, K_bar = make(), normal(4, 3), normal(5, 3, seed=1), normal(4, 5, seed=2)
    x.requires_grad_(), y.requires_grad_()
    K = kernel(x, y)
    parameters = [*kernel.parameters()]
    x_bar, y_bar, *expected = torch.autograd.grad((K_bar * K).sum(), [x, y, *parameters])
    with torch.no_grad():
        found = kernel.backward(x, y, K.detach(), K_bar)
    torch.testing.assert_close(found[:2], (x_bar, y_bar))
    torch.testing.assert_close([found[2][parameter] for parameter in parameters], expected)
