"""What the settings of a run must be."""

import math
import shutil

import torch

from ented.errors import InputError
from ented.likelihoods import LARGEST_ZETA
from ented.runs import TAKEN_BY_MODEL, as_typed, flat


def whole(value) -> bool:
    return type(value) is int


def number(value) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def one_or_several(value, holds) -> bool:
    """Whether it holds for the value, or for the values of a list without repeats."""
    values = value if isinstance(value, list) else [value]
    return bool(values) and all(map(holds, values)) and len(set(values)) == len(values)


def shares(value) -> bool:
    return isinstance(value, list) and all(number(share) and 0 < share <= 1 for share in value)


# what a setting must be -> the settings that must be it, and how that is seen
RULES = {
    "a whole number from 1": (
        [
            "rank",
            "inducing",
            "model.blocks",
            "model.components",
            "model.inner",
            "model.sample",
            "model.newton_steps",
            "model.channels",
            "model.inputs",
        ],
        lambda value: whole(value) and value >= 1,
    ),
    "a whole number from 0": (["dataset.source.workers"], lambda value: whole(value) and value >= 0),
    "a whole number from 1 to 1024": (["threads"], lambda value: whole(value) and 1 <= value <= 1024),
    "a whole number from 1, or auto": (["epochs"], lambda value: value == "auto" or whole(value) and value >= 1),
    "a whole number from 1, or null": (
        ["protocol.patience"],
        lambda value: value is None or whole(value) and value >= 1,
    ),
    "a whole number from 1, all or auto": (
        ["batch_size"],
        lambda value: value in ("all", "auto") or whole(value) and value >= 1,
    ),
    "0, 1 or auto": (["likelihood.smallest"], lambda value: value == "auto" or type(value) is int and value in (0, 1)),
    "a whole number from 0 to 2^32 - 1, or a list of different ones": (
        ["seed"],
        lambda value: one_or_several(value, lambda seed: whole(seed) and 0 <= seed < 2**32),
    ),
    "a number above 0, or a list of different ones for protocol=holdout or validation": (
        ["lr"],
        lambda value: one_or_several(value, lambda lr: number(lr) and lr > 0),
    ),
    "a list of whole numbers from 1": (
        ["model.hidden"],
        lambda value: isinstance(value, list) and all(whole(width) and width >= 1 for width in value),
    ),
    "a number above 0": (
        [
            "model.init_std",
            "model.posterior_std",
            "model.lengthscale",
            "model.init_scale",
            "model.alpha",
            "model.kappa",
            "model.a_delta",
        ]
        + ["model.ard_shape", "model.ard_rate", "model.offset_precision"],
        lambda value: number(value) and value > 0,
    ),
    "a number above 0 and at most 1e4": (
        ["likelihood.zeta"],
        lambda value: number(value) and 0 < value <= LARGEST_ZETA,
    ),
    "a number above 0 and at most 1": (["rho"], lambda value: number(value) and 0 < value <= 1),
    "a number from 0": (
        ["checkpoint_seconds", "model.jitter", "model.tolerance", "model.penalty", "model.kappa_tolerance"]
        + ["model.factor_decay", "model.weight_decay", "model.core_decay"],
        lambda value: number(value) and value >= 0,
    ),
    "a number from 1": (["model.lengthscale_ratio"], lambda value: number(value) and value >= 1),
    "a number from 0 and below 1": (["protocol.held_out"], lambda value: number(value) and 0 <= value < 1),
    "masked or zeros": (["missing", "model.missing"], lambda value: value in ("masked", "zeros")),
    "map or variational": (["model.factors"], lambda value: value in ("map", "variational")),
    "fixed, rbf or ard": (["model.kernel"], lambda value: value in ("fixed", "rbf", "ard")),
    "gaussian or data": (["model.inducing_inputs"], lambda value: value in ("gaussian", "data")),
    "zero, constant, effects or degrees": (
        ["model.mean"],
        lambda value: value in ("zero", "constant", "effects", "degrees"),
    ),
    "poisson or likelihood": (["model.regression"], lambda value: value in ("poisson", "likelihood")),
    "arithmetic or geometric": (["model.estimate"], lambda value: value in ("arithmetic", "geometric")),
    "a list of shares of the epochs, each above 0 and at most 1": (["protocol.milestones", "model.milestones"], shares),
    "a number or all": (["fold"], lambda value: value == "all" or whole(value)),
    "true or false": (
        ["force", "model.sparse_gradients", "model.annealing", "likelihood.learned", "likelihood.quadrature"],
        lambda value: type(value) is bool,
    ),
    "false, or true where there is a C++ compiler": (
        ["compile"],
        lambda value: type(value) is bool and (not value or any(map(shutil.which, ("g++", "clang++")))),
    ),
    "null or folds": (["replicas"], lambda value: value in (None, "folds")),
    "the name of a folder": (["runs_dir"], lambda value: value not in (None, "")),
    "a name without a /": (
        ["dataset.name"],
        lambda value: value not in (None, "", ".", "..") and "/" not in str(value),
    ),
    "float32 or float64": (["dtype"], lambda value: value in ("float32", "float64")),
    "auto or ddp": (["trainer.strategy"], lambda value: value in ("auto", "ddp")),
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
                raise InputError(f"{as_typed(name, settings[name])}: it must be {rule}")
    for name in TAKEN_BY_MODEL:
        ours = settings.get(f"model.{name}", settings[name])
        if ours != settings[name]:
            given = as_typed(name, ours)
            raise InputError(f"model.{given}: set {given}, which the model takes from there")
