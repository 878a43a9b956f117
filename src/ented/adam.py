"""Adam (Kingma and Ba 2015) where a step moves only a part of a tensor, and each part counts its own steps.

With the gradient g of a part and t the number of its steps,

    m <- beta1 m + (1 - beta1) g,    v <- beta2 v + (1 - beta2) g^2
    x <- x - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps).
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


class PartialAdam(torch.optim.Optimizer):
    """Adam whose state counts steps for each part. The closure that Lightning hands to a step is not called.

    Parameters
    ----------
    params : tensors.
    lr : learning rate.
    """

    parts: slice  # the dimensions of a parameter that count its parts

    def __init__(self, params, lr: float | Float[Tensor, "B"]):
        super().__init__(params, {"lr": lr})

    def states(self):
        """Each parameter, its state, and the learning rate."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    # not "step", which PyTorch would leave on the CPU when it loads a checkpoint
                    counted = parameter.shape[self.parts]
                    state["t"] = parameter.new_zeros(*counted, *[1] * (parameter.ndim - len(counted)))
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                yield parameter, state, group["lr"]


def direction(m: Float[Tensor, "..."], v: Float[Tensor, "..."], t: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """What lr is multiplied by; t as in the formulas above, one number for each part."""
    return m / ((v / (1 - BETA2**t)).sqrt_().add_(EPS).mul_(1 - BETA1**t))


class ReplicaAdam(PartialAdam):
    """For tensors (B, ...) of B replicas, which have their own learning rates."""

    parts = slice(1)

    @torch.no_grad()
    def step(self, closure=None, *, active: Bool[Tensor, "B"]) -> None:
        """A step of the active replicas."""
        for x, state, lr in self.states():
            on = active.view(-1, *[1] * (x.ndim - 1)).to(x.dtype)
            t = state["t"].add_(on).clamp_min(1)  # those without a step yet are not active
            m = state["exp_avg"].lerp_(x.grad, (1 - BETA1) * on)
            v = state["exp_avg_sq"].lerp_(x.grad.square(), (1 - BETA2) * on)
            x.sub_(on * lr.to(x).view_as(on) * direction(m, v, t))


class RowAdam(PartialAdam):
    """For a table whose gradient is zero but for the rows of a minibatch: no other row is read or written.

    Rows of several tables are counted as in `ented.factors.FactorTable.rows`.
    """

    parts = slice(-1)

    @torch.no_grad()
    def step(self, closure=None, *, rows: Int[Tensor, "S"]) -> None:
        """A step of the given rows, once each however often they are given; then their gradient is zero again."""
        for parameter, state, lr in self.states():
            x, gradient = parameter.flatten(0, -2), parameter.grad.flatten(0, -2)
            all_t, all_m, all_v = (state[name].flatten(0, -2) for name in ("t", "exp_avg", "exp_avg_sq"))
            g = gradient[rows]
            t = all_t[rows] + 1
            m = torch.lerp(all_m[rows], g, 1 - BETA1)
            v = torch.lerp(all_v[rows], g.square(), 1 - BETA2)
            # where a row is given twice, the same is written twice
            all_t[rows], all_m[rows], all_v[rows] = t, m, v
            x[rows] = x[rows] - lr * direction(m, v, t)
            gradient[rows] = 0
