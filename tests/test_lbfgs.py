"""L-BFGS on a concave quadratic, -(x - c)^T H (x - c) / 2, whose maximum is known."""

import pytest
import torch

from baselines.lbfgs import maximise

C = torch.tensor([3.0, -2.0, 0.5], dtype=torch.float64)
H = torch.diag(torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64))


def objective(x):
    d = x - C.to(x)
    return -d @ H.to(x) @ d / 2


def test_reaches_the_maximum():
    point, value = maximise(objective, torch.zeros(3, dtype=torch.float64), 100)
    torch.testing.assert_close(point, C)
    # the tolerances of SciPy would have stopped it at 1e-9 or so
    assert -1e-12 < value.item() <= 0 and value.dtype == torch.float64


def test_keeps_to_the_bound():
    """The elements of a diagonal quadratic are independent: the second stays on its bound."""
    point, value = maximise(objective, torch.ones(3, dtype=torch.float64), 100, lower=0.0)
    torch.testing.assert_close(point, C.clamp(min=0))
    assert value.item() == pytest.approx(-10 * 2**2 / 2)


def test_makes_no_more_iterations_than_asked():
    """One is a line search along the gradient: better than the start, and not the maximum."""
    start = torch.zeros(3, dtype=torch.float64)
    point, value = maximise(objective, start, 1)
    assert objective(start) < value < -0.1
    assert value.item() == pytest.approx(objective(point).item())
    direction = (point - start) / (H @ C)
    torch.testing.assert_close(direction, direction[0].expand(3))


def test_keeps_the_dtype_of_the_start():
    point, value = maximise(objective, torch.zeros(3), 100)
    assert point.dtype == torch.float32 and value.dtype == torch.float64
    torch.testing.assert_close(point, C.float(), rtol=1e-3, atol=1e-3)
