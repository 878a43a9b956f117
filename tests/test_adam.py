"""Partial Adams against PyTorch's own, one for each part."""

import torch
from torch.testing import assert_close

from ented.adam import ReplicaAdam, RowAdam


def test_each_replica_has_pytorchs_adam_in_its_turns():
    random = torch.Generator().manual_seed(0)
    values = torch.randn(3, 4, 2, generator=random, dtype=torch.float64)
    together, lr = torch.nn.Parameter(values.clone()), [0.1, 0.02, 0.5]
    optimizer = ReplicaAdam([together], torch.tensor(lr))
    slices = [torch.nn.Parameter(value.clone()) for value in values]
    adams = [torch.optim.Adam([one], rate) for one, rate in zip(slices, lr, strict=True)]
    for turns in ([1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 1], [0, 0, 0]):
        together.grad = torch.randn(values.shape, generator=random, dtype=torch.float64)
        optimizer.step(active=torch.tensor(turns).bool())
        for one, adam, gradient, turn in zip(slices, adams, together.grad, turns, strict=True):
            one.grad = gradient.clone()
            if turn:
                adam.step()
    assert_close(together.detach(), torch.stack(slices).detach(), rtol=1e-7, atol=0)


def test_each_row_has_pytorchs_adam_in_its_turns():
    random = torch.Generator().manual_seed(0)
    values = torch.randn(5, 2, generator=random, dtype=torch.float64)
    table = torch.nn.Parameter(values.clone())
    table.grad = torch.zeros_like(table)
    optimizer = RowAdam([table], 0.1)
    rows = [torch.nn.Parameter(value.clone()) for value in values]
    adams = [torch.optim.Adam([row], 0.1) for row in rows]
    for turns in ([0, 1, 2, 3, 4], [2, 0, 2], [1, 1, 1], [4], [0, 2, 4, 0]):
        for i in set(turns):
            table.grad[i] = torch.randn(2, generator=random, dtype=torch.float64)
            rows[i].grad = table.grad[i].clone()
            adams[i].step()
        optimizer.step(rows=torch.tensor(turns))
        assert not table.grad.any()
    assert_close(table.detach(), torch.stack(rows).detach(), rtol=1e-7, atol=0)
