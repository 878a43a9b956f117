"""The datasets of conf/dataset."""

from pathlib import Path

from hydra.utils import instantiate
from omegaconf import OmegaConf

CONF = Path(__file__).parents[1] / "conf" / "dataset"

# name: shape, kind, rows of train and test in the file of fold 0, smallest and largest value
BENCHMARKS = {
    "digg": ((581, 124, 48), "binary", (1330, 334), (0, 1)),
    "enron": ((203, 203, 200), "binary", (1010, 254), (0, 1)),
    "article": ((5, 1895, 2987), "count", (33110, 8278), (1, 76)),
    "ems": ((72, 69), "count", (1922, 481), (1, 477)),
    "jhu": ((51, 3, 48, 8), "count", (6288, 25148), (0, 6527)),
}


def configured(name, data_dir=None):
    """The dataset as its config file describes it."""
    config = OmegaConf.create({"data_dir": data_dir, "dataset": OmegaConf.load(CONF / f"{name}.yaml")})
    return instantiate(config.dataset.source)
