"""Fit a model to a tensor, test it, and leave the results in a folder; with -m, a grid of them.

    python src/train.py
    python src/train.py dataset=enron rank=3 protocol=paper
    python src/train.py -m dataset=digg,enron rank=3,5,10

Every setting is listed in conf/config.yaml. Started again, a command does only what is missing.
"""

import json
import logging
import math
import os
import sys
import warnings
from pathlib import Path

import hydra
import lightning as L
import pandas as pd
import torch
from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ented.datamodule import COODataModule
from ented.datasets import Dataset
from ented.likelihoods import PolyaGamma, Predictive
from ented.metrics import CompletionMetrics
from ented.naive import main_effects, overall_mean
from ented.recorder import Recorder, best_epoch
from ented.runs import RunFolder, join, write, write_summary
from ented.tensor import COOTensor, InputError

log = logging.getLogger("ented")
failed = False


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(cfg: DictConfig) -> None:
    global failed
    try:
        train(cfg)
    except (InputError, InstantiationException) as error:
        if cause(error) is None:
            raise
        print(f"error: {cause(error)}", file=sys.stderr)  # the other cells of a grid go on
        failed = True


def train(cfg: DictConfig) -> None:
    """Run every fold asked for, and print what they have in common."""
    check(cfg)
    dataset: Dataset = instantiate(cfg.dataset.source)
    folds = range(dataset.folds) if cfg.fold == "all" else [cfg.fold]
    results = [run_fold(cfg, dataset, fold) for fold in folds]
    if cfg.fold == "all":
        summary = write_summary(OmegaConf.to_container(cfg, resolve=True), results)
        if len(results) > 1:
            metrics = "  ".join(f"{name} {m['mean']:.4f} ± {m['std']:.4f}" for name, m in summary.items())
            log.info("%s  %d folds  %s", title(cfg), len(results), metrics)


# least values of whole numbers; numbers above 0; numbers from 0
WHOLE = {"rank": 1, "inducing": 1, "model.blocks": 1, "epochs": 1, "batch_size": 1, "protocol.patience": 1, "seed": 0}
POSITIVE = ["lr", "rho", "model.init_std", "likelihood.zeta"]
NOT_NEGATIVE = ["model.jitter", "protocol.holdout", "checkpoint_seconds"]


def check(cfg: DictConfig) -> None:
    """Raise InputError where a setting is not what it must be."""
    if cfg.protocol.name == "paper" and cfg.dataset.paper is None:
        raise InputError(f"dataset={cfg.dataset.name} has no published settings: use protocol=holdout")
    for name in [*WHOLE, *POSITIVE, *NOT_NEGATIVE]:
        value = OmegaConf.select(cfg, name)
        if value is None:  # not a setting of this model, likelihood or protocol
            continue
        if name in WHOLE and (type(value) is not int or value < WHOLE[name]):
            raise InputError(f"{name}={value}: it must be a whole number, {WHOLE[name]} or more")
        number = type(value) in (int, float) and math.isfinite(value)
        if not number or value < 0 or (name in POSITIVE and value == 0):
            raise InputError(f"{name}={value}: it must be a number {'above 0' if name in POSITIVE else 'from 0'}")
    if cfg.rho > 1 or cfg.protocol.holdout >= 1:
        raise InputError(f"rho={cfg.rho} must be at most 1, protocol.holdout={cfg.protocol.holdout} below 1")
    if cfg.fold != "all" and type(cfg.fold) is not int:
        raise InputError(f"fold={cfg.fold}: it must be a number or all")
    if cfg.dtype not in ("float32", "float64"):
        raise InputError(f"dtype={cfg.dtype}: choose float32 or float64")


def run_fold(cfg: DictConfig, dataset: Dataset, fold: int) -> dict:
    """Do what is missing of one fold's run and return its metrics.json."""
    run = RunFolder(OmegaConf.to_container(cfg, resolve=True) | {"fold": fold})
    if not cfg.force:
        run.check()
        if run.metrics:
            log.info("%s is finished", run.path)
            return run.metrics
    with run.logging():
        train, test = dataset.load(fold)
        likelihood: PolyaGamma = instantiate(cfg.likelihood)
        likelihood.check(torch.cat([train.values, test.values]))
        log.info("%s, fold %d: %d training entries, %d test entries", dataset.name, fold, len(train), len(test))
        if cfg.inducing > len(train):
            log.warning("inducing=%d is more than the %d training entries", cfg.inducing, len(train))
        dtype = getattr(torch, cfg.dtype)

        def data(holdout: float) -> COODataModule:
            return COODataModule(train, test, cfg.batch_size, cfg.seed, holdout, dtype)

        def module() -> L.LightningModule:
            L.seed_everything(cfg.seed, verbose=False)
            settings = {key: value for key, value in cfg.model.items() if key != "name"}
            return instantiate(settings, shape=dataset.shape, likelihood=likelihood).to(dtype)

        # made before the folder, so that settings which do not fit leave nothing behind
        fitted, all_entries, held_out = module(), data(0), data(cfg.protocol.holdout)
        run.open(cfg.force)
        epochs = cfg.epochs
        if cfg.protocol.holdout:
            epochs = choose_epochs(cfg, run.path / "holdout", module(), held_out)
        recorder = Recorder(run.path, cfg.checkpoint_seconds)
        logger = tracker(cfg, run)
        trainer = fit(cfg, recorder, fitted, all_entries, epochs, logger)
        (tested,) = trainer.test(fitted, all_entries, verbose=False)
        metrics = {name.removeprefix("test_"): value for name, value in tested.items()}
        run.write_predictions(dataset.modes, test, join(trainer.predict(fitted, all_entries)))
        log.info("%s", comparison(cfg, metrics, train, test, likelihood))
        if logger:
            logger.experiment.finish()
        result = run.finish(metrics, epochs, trainer.global_step, recorder.seconds)
        numbers = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        log.info(
            "%s  fold %d  %s  %d epochs  %.1f s  %s",
            title(cfg),
            fold,
            numbers,
            epochs,
            recorder.seconds,
            run.path,
        )
    return result


def choose_epochs(cfg: DictConfig, folder: Path, module: L.LightningModule, data: COODataModule) -> int:
    """Fit with a part of the training entries held out; return the number of epochs with the lowest NLL on them."""
    chosen = folder / "chosen.json"
    if not chosen.exists():
        folder.mkdir(exist_ok=True)
        recorder = Recorder(folder, cfg.checkpoint_seconds, cfg.protocol.patience)
        fit(cfg, recorder, module, data, cfg.epochs)
        epochs = best_epoch(recorder.rows, cfg.protocol.patience)
        write(chosen, json.dumps({"epochs": epochs, "val_nll": recorder.rows[epochs - 1]["val_nll"]}) + "\n")
        if epochs == cfg.epochs:
            log.warning("the NLL on held-out entries was still falling after epochs=%d", epochs)
    choice = json.loads(chosen.read_text())
    log.info("%(epochs)d epochs have the lowest NLL on held-out training entries, %(val_nll).4f", choice)
    return choice["epochs"]


def fit(cfg, recorder: Recorder, module, data: COODataModule, epochs: int, logger=False) -> L.Trainer:
    """Train for a number of epochs, from the recorder's checkpoint where there is one."""
    accelerator = cfg.trainer.accelerator
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    trainer = L.Trainer(
        accelerator=accelerator,
        devices=cfg.trainer.devices,
        max_epochs=epochs,
        logger=logger,
        callbacks=[*instantiate(cfg.callbacks).values(), recorder],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        log_every_n_steps=10**9,  # everything is logged by epoch
    )
    resume = recorder.checkpoint if recorder.checkpoint.exists() else None
    trainer.fit(module, data, ckpt_path=resume)
    return trainer


def tracker(cfg: DictConfig, run: RunFolder):
    """The experiment tracker that the config asks for, False for none."""
    if not cfg.logger:
        return False
    import wandb

    has_key = wandb.login(prompt=False)
    mode = os.environ.get("WANDB_MODE") or ("online" if has_key else "offline")
    logger = instantiate(cfg.logger, save_dir=run.path, name=run.path.relative_to(cfg.runs_dir).as_posix(), mode=mode)
    logger.log_hyperparams(run.config)
    return logger


def comparison(cfg, metrics: dict, train: COOTensor, test: COOTensor, likelihood: PolyaGamma) -> str:
    """The model's metrics beside those of the naive predictors, as text."""

    def evaluate(predictive: Predictive) -> dict[str, float]:
        naive = CompletionMetrics(likelihood.kind)
        naive.update(predictive, test.values)
        return {name: value.item() for name, value in naive.compute().items()}

    rows = {
        cfg.model.name: metrics,
        "main effects": evaluate(main_effects(train, likelihood, test.indices)),
        "overall mean": evaluate(overall_mean(train, likelihood, test.indices)),
    }
    return pd.DataFrame(rows).T.to_string(float_format="{:.4f}".format)


def title(cfg: DictConfig) -> str:
    return f"{cfg.dataset.name}  {cfg.model.name}  rank {cfg.rank}"


def cause(error: BaseException | None) -> InputError | None:
    """The user's mistake behind an error, None if there is none."""
    while error is not None and not isinstance(error, InputError):
        error = error.__cause__
    return error


def one_line(error: Exception) -> str:
    """What is wrong with the command line or the configuration."""
    if isinstance(error, MissingConfigException) and error.options:
        return f"there is no {error.missing_cfg_file}: choose from {', '.join(error.options)}"
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override}: quote the value if it holds = or other signs, as in 'key=\"a=b\"'"
    return " ".join(str(error).split())


if __name__ == "__main__":
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors come here instead of being printed with a traceback
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(f"error: {one_line(error)}")
    sys.exit(1 if failed else 0)
