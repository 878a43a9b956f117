"""The module of a run: a new one, as the settings have it, and that of a finished run."""

from contextlib import contextmanager
from pathlib import Path

import torch
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf

from ented.errors import InputError
from ented.lightning import CompletionModule
from ented.likelihoods import PolyaGamma
from ented.runs import needs, read_json
from ented.tensor import Layout


def method_of(cfg: DictConfig) -> type[CompletionModule]:
    """The class of the method."""
    return get_class(cfg.model._target_)


def new_likelihood(cfg: DictConfig, smallest: float) -> PolyaGamma:
    """For entries of which the smallest is this."""
    settings = dict(cfg.likelihood)
    if settings.get("smallest") == "auto":
        settings["smallest"] = int(smallest > 0 and "smallest" in method_of(cfg).likelihood_settings)
    return instantiate(settings)


def new_module(cfg: DictConfig, shape: tuple[int, ...], smallest: float, lr: float) -> CompletionModule:
    """A module with random initial values, for a tensor of this shape whose smallest entry is this."""
    settings = {key: value for key, value in cfg.model.items() if key not in ("name", "training", "likelihood")}
    settings |= {"lr": lr} if "lr" in settings else {}
    with parameters_in(getattr(torch, cfg.dtype)):
        return instantiate(settings, shape=shape, likelihood=new_likelihood(cfg, smallest))


@contextmanager
def parameters_in(dtype: torch.dtype):
    """Make new parameters of a dtype. Metrics keep the double precision that they ask for."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def load(folder: Path) -> tuple[CompletionModule, Layout]:
    """The trained module of a finished run, and the layout of its tensor.

    Raises
    ------
    InputError : files of the run are missing or damaged.
    """
    needs(folder, "config.yaml", "modes.json", "last.ckpt")
    try:
        layout = Layout(**read_json(folder / "modes.json"))
        layout = layout._replace(shape=tuple(layout.shape))
        sizes = dict(zip(layout.modes, layout.shape, strict=True))
        if any(len(names) != sizes[mode] for mode, names in layout.labels.items()):
            raise ValueError
    except (ValueError, TypeError, AttributeError, KeyError):  # an InputError is a ValueError
        raise InputError(f"{folder / 'modes.json'} is damaged: run its command again with force=true") from None
    try:
        cfg = OmegaConf.load(folder / "config.yaml")
        module = new_module(cfg, layout.shape, cfg.smallest_entry, lr=1e-3)  # with which nothing is trained
    except Exception as error:  # of YAML, OmegaConf and Hydra, or of a method that is not there any more
        raise InputError(
            f"{folder / 'config.yaml'} is damaged, of an older version, or of a method that cannot be imported "
            f"({type(error).__name__}): run its command again with force=true"
        ) from None
    try:
        checkpoint = torch.load(folder / "last.ckpt", map_location="cpu", weights_only=True)
        module.load_state_dict(checkpoint["state_dict"])
    except Exception as error:  # torch, zipfile and pickle raise many kinds, some with long texts
        raise InputError(
            f"{folder / 'last.ckpt'} is damaged or of an older version ({type(error).__name__}): run its command again "
            "with force=true"
        ) from None
    return module.eval(), layout
