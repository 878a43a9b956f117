"""What a run sends to an experiment tracker."""

import os
from contextlib import contextmanager
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from hydra.utils import instantiate
from lightning.pytorch.loggers import WandbLogger

import figures
from ented.distributed import is_first
from ented.runs import flat


@contextmanager
def tracker(config: dict, folder: Path):
    """The logger that the run's settings ask for, False (Lightning's word) for none; closed at the end, or an error."""
    if not config["logger"] or not is_first():
        yield False
        return
    import wandb

    has_key = wandb.login(prompt=False)
    mode = os.environ.get("WANDB_MODE") or ("online" if has_key else "offline")
    name = folder.relative_to(config["runs_dir"]).as_posix()
    logger = instantiate(config["logger"], save_dir=folder, name=name, mode=mode)
    logger.log_hyperparams(flat(config))  # a sweep keeps the names of its parameters, such as dataset, for itself
    try:
        yield logger
    except BaseException:
        wandb.finish(exit_code=1)
        raise
    wandb.finish()


def log_figures(logger: WandbLogger, folder: Path) -> None:
    """Send the figures of a finished run."""
    matplotlib.use("Agg")  # no window
    for name, figure in figures.of_run(folder).items():
        logger.log_image(f"test_{name}", [figure])
        plt.close(figure)
