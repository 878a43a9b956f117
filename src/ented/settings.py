"""What the settings of a run must be."""

import math

import torch

from ented.runs import flat
from ented.tensor import InputError


def whole(value) -> bool:
    return type(value) is int


def number(value) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def shares(value) -> bool:
    return isinstance(value, list) and all(number(share) and 0 < share <= 1 for share in value)


# what a setting must be -> the settings that must be it, and how that is seen
RULES = {
    "a whole number from 1": (
        ["rank", "inducing", "model.blocks", "epochs", "protocol.patience", "threads"],
        lambda value: whole(value) and value >= 1,
    ),
    "a whole number from 1, or all": (["batch_size"], lambda value: value == "all" or whole(value) and value >= 1),
    "masked or zeros": (["missing", "model.missing"], lambda value: value in ("masked", "zeros")),
    "a whole number from 0 to 2^32 - 1": (["seed"], lambda value: whole(value) and 0 <= value < 2**32),
    "a number above 0": (["lr", "model.init_std", "likelihood.zeta"], lambda value: number(value) and value > 0),
    "a number above 0 and at most 1": (["rho"], lambda value: number(value) and 0 < value <= 1),
    "a number from 0": (["model.jitter", "checkpoint_seconds"], lambda value: number(value) and value >= 0),
    "a number from 0 and below 1": (["protocol.held_out"], lambda value: number(value) and 0 <= value < 1),
    "a list of shares of the epochs, each above 0 and at most 1": (["protocol.milestones", "model.milestones"], shares),
    "a number or all": (["fold"], lambda value: value == "all" or whole(value)),
    "true or false": (["force"], lambda value: type(value) is bool),
    "the name of a folder": (["runs_dir"], lambda value: value not in (None, "")),
    "float32 or float64": (["dtype"], lambda value: value in ("float32", "float64")),
    "auto, cpu, or cuda where there is a device": (
        ["trainer.accelerator"],
        lambda value: value in ("auto", "cpu") or (value == "cuda" and torch.cuda.is_available()),
    ),
}


def check(config: dict) -> None:
    """Raise InputError where a setting is not what it must be; those that a model does not have are passed over."""
    settings = flat(config)
    for rule, (names, holds) in RULES.items():
        for name in names:
            if name in settings and not holds(settings[name]):
                raise InputError(f"{name}={settings[name]}: it must be {rule}")
    rank = settings.get("model.rank", settings["rank"])
    if rank != settings["rank"]:
        raise InputError(f"model.rank={rank}: set rank={rank}, which names the folder too")
