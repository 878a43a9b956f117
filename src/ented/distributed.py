"""The processes of a fit: what torchrun says of them, what one of them does, and sums over all.

And those of a grid, which share the GPUs of a machine.
"""

import os
import tempfile
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout
from torch import Tensor

from ented.errors import InputError


def started_by_torchrun() -> bool:
    return "LOCAL_WORLD_SIZE" in os.environ


def connect(backend: str) -> None:
    """Let the processes that torchrun started find each other."""
    if not dist.is_initialized():
        if backend == "nccl":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(backend)


def is_distributed() -> bool:
    """Whether `connect` was called; torchrun may also start one process alone."""
    return dist.is_available() and dist.is_initialized()


def is_first() -> bool:
    """Whether this process writes the files and speaks to the user."""
    return not is_distributed() or dist.get_rank() == 0


def processes() -> int:
    return dist.get_world_size() if is_distributed() else 1


def processes_of_node() -> int:
    """How many of them are on this machine; torchrun starts as many on every one."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if is_distributed() else 1


def from_first(do):
    """What the first process finds or makes, or the InputError that it raises, in every process.

    Nodes may see a file of a shared folder at different times.
    """
    if not is_distributed():
        return do()
    found = [None, None]
    if is_first():
        try:
            found[0] = do()
        except InputError as error:
            found[1] = error
    dist.broadcast_object_list(found)
    value, error = found
    if error:
        raise error
    return value


def all_reduce(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The sum of each tensor over all processes, in one message; the tensors themselves where there is one process.

    All have one dtype. The results are to be read, not changed in place.
    """
    if not is_distributed():
        return tensors
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return tuple(part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True))


_taken: list[FileLock] = []  # a lock that nothing refers to would be released


@cache
def own_gpu(gpus: int) -> int:
    """A GPU that no other process of this user has taken, where there is one; it is this one's until it ends."""
    for gpu in range(gpus):
        lock = FileLock(Path(tempfile.gettempdir()) / f"ented-{os.getuid()}-gpu-{gpu}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            continue
        _taken.append(lock)
        return gpu
    return os.getpid() % gpus
