"""L-BFGS-B (Byrd, Lu, Nocedal, Zhu 1995) from SciPy, for objectives written in PyTorch."""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import minimize
from torch import Tensor


def maximise(
    objective: Callable[[Float[Tensor, "P"]], Float[Tensor, ""]],
    start: Float[Tensor, "P"],
    iterations: int = 10,
    lower: float | None = None,
) -> tuple[Float[Tensor, "P"], Float[Tensor, ""]]:
    """Climb a differentiable objective for some iterations; return the point that is reached, and its value there.

    The approximation of the Hessian is not kept for the next call, so that the point is all there is to resume from.

    Parameters
    ----------
    start : where to begin; the result has its dtype and device.
    iterations : at most; by default as many as L-BFGS remembers.
    lower : lower bound of every element; None for none.
    """

    def negative(array: np.ndarray) -> tuple[float, np.ndarray]:
        with torch.enable_grad():
            point = torch.from_numpy(array).to(start).requires_grad_()
            value = -objective(point)
            (gradient,) = torch.autograd.grad(value, point)
        return value.item(), gradient.double().cpu().numpy()

    array = start.double().cpu().numpy()
    bounds = None if lower is None else [(lower, None)] * len(array)
    options = {"maxiter": iterations, "ftol": 0, "gtol": 0}  # whether it has converged is for the caller to say
    result = minimize(negative, array, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return torch.from_numpy(result.x).to(start), torch.tensor(-result.fun, dtype=torch.float64)
