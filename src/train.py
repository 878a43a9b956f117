"""Fit a model to a tensor, test it, and leave the results in a folder; with -m, a grid of them.

    python src/train.py
    python src/train.py dataset=enron rank=3 protocol=paper
    python src/train.py -m dataset=digg,enron rank=3,5,10

The settings are listed in conf/. Started again, a command does only what is missing.
"""

import json
import logging
import os
import re
import shlex
import signal
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import hydra
import lightning as L
import pandas as pd
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from baselines.main_effects import MainEffects
from ented.datamodule import COODataModule
from ented.datasets import Dataset
from ented.distributed import (
    connect,
    from_first,
    is_distributed,
    is_first,
    processes,
    processes_of_node,
    started_by_torchrun,
    wait_for_all,
)
from ented.lightning import GaussianProcessModule, SummedStrategy
from ented.likelihoods import PolyaGamma
from ented.metrics import CompletionMetrics
from ented.predictive import Predictive
from ented.recorder import History, Recorder, best_epoch, held_out_score
from ented.runs import PLACES, RunFolder, finite, read_json, write, write_summary
from ented.settings import check
from ented.tensor import COOTensor, InputError

log = logging.getLogger("ented")
FULL_ERROR = bool(os.environ.get("HYDRA_FULL_ERROR"))  # the user asks for tracebacks
failed = False


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(cfg: DictConfig) -> None:
    global failed
    try:
        train(cfg)
    except (InputError, HydraException, OmegaConfBaseException) as error:
        if FULL_ERROR:
            raise
        print(f"error: {one_line(error)}", file=sys.stderr)  # the other cells of a grid go on
        if processes() > 1:  # but not without this process
            sys.exit(1)
        failed = True


def train(cfg: DictConfig) -> None:
    """Run every fold asked for, and print what they have in common."""
    if cfg.protocol.name == "paper" and cfg.dataset.paper is None:
        raise InputError(f"dataset={cfg.dataset.name} has no published settings: use protocol=holdout")
    if "missing=zeros" in overrides_given() and "missing" not in cfg.model:
        raise InputError(f"missing=zeros: model={cfg.model.name} takes masked only")
    for override in HydraConfig.get().overrides.task:
        # Hydra's way to add a setting; nothing would read it, but for another callback
        if override.startswith("+") and not override.lstrip("+").startswith("callbacks."):
            raise InputError(f"{override}: there is no such setting; those that there are stand in conf/")
    config = OmegaConf.to_container(cfg, resolve=True)
    check(config)
    torch.set_num_threads(cfg.threads)
    join(cfg)
    dataset: Dataset = instantiate(cfg.dataset.source)
    if len(dataset.shape) < 2:
        raise InputError(f"dataset={cfg.dataset.name} has one mode: a decomposition needs two or more")
    folds = range(dataset.folds) if cfg.fold == "all" else [cfg.fold]
    results = [run_fold(cfg, config | {"fold": fold}, dataset) for fold in folds]
    if cfg.fold == "all":
        summary = write_summary(config, results)
        if len(results) > 1:
            metrics = "  ".join(f"{name} {m['mean']:.4f} ± {m['std']:.4f}" for name, m in summary.items())
            log.info("%s  %d folds  %s", title(cfg), len(results), metrics)


def run_fold(cfg: DictConfig, config: dict, dataset: Dataset) -> dict:
    """Do what is missing of one fold's run and return its metrics.json; `config` is cfg, resolved, with that fold."""
    run, fold = RunFolder(config), config["fold"]
    if not cfg.force and (result := from_first(run.metrics)):
        log.info("%s is finished", run.path)
        return result
    with run.logging():
        train, test = dataset.load(fold)
        likelihood: PolyaGamma = instantiate(cfg.likelihood)
        likelihood.check(torch.cat([train.values, test.values]))
        log.info("%s, fold %d: %d training entries, %d test entries", dataset.name, fold, len(train), len(test))

        def data(held_out: float) -> COODataModule:
            return COODataModule(train, test, cfg.batch_size, cfg.seed, held_out, getattr(torch, cfg.dtype))

        def module() -> L.LightningModule:
            L.seed_everything(cfg.seed, verbose=False)
            settings = {key: value for key, value in cfg.model.items() if key not in ("name", "training")}
            with parameters_in(getattr(torch, cfg.dtype)):
                return instantiate(settings, shape=dataset.shape, likelihood=likelihood)

        # made before the folder, so that settings which do not fit leave nothing behind
        fitted, all_entries, part = module(), data(0), data(cfg.protocol.held_out)
        if is_distributed() and not isinstance(fitted, GaussianProcessModule):
            raise InputError(f"trainer=ddp: model={cfg.model.name} runs on one device")
        if processes() > min(len(test), len(part.validation or test)):
            raise InputError(f"{processes()} processes are more than the entries to evaluate: start fewer")
        if fitted.all_entries and cfg.batch_size != "all":
            raise InputError(f"batch_size={cfg.batch_size}: model={cfg.model.name} needs batch_size=all")
        run.open(cfg.force)
        wait_for_all()  # until the first process has cleared away what another start left
        epochs = cfg.epochs
        if cfg.protocol.held_out:
            epochs = choose_epochs(cfg, run.path / "holdout", module(), part)
        history = History(run.path, epochs)
        with tracker(cfg, run) as logger:
            trainer = fit(cfg, [history], run.path, fitted, all_entries, logger)
            (tested,) = trainer.test(fitted, all_entries, verbose=False)
        metrics = {name.removeprefix("test_"): value for name, value in tested.items()}
        run.write_predictions(dataset.modes, test, trainer.predict(fitted, all_entries))
        log.info("%s", comparison(cfg, metrics, train, test, likelihood))
        epochs = len(history.rows)  # fewer where the method has converged
        result = run.finish(metrics, epochs, trainer.global_step, history.seconds, command(fold))
        numbers = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        log.info("%s  fold %d  %s  %d epochs  %.1f s  %s", title(cfg), fold, numbers, epochs, history.seconds, run.path)
    return result


def join(cfg: DictConfig) -> None:
    """Meet the other processes of torchrun, where trainer=ddp asks for them; only the first writes log lines."""
    if started_by_torchrun() != (cfg.trainer.strategy == "ddp"):
        raise InputError(
            "trainer=ddp and torchrun need each other: torchrun --nproc-per-node 4 src/train.py trainer=ddp"
        )
    if started_by_torchrun():
        connect("nccl" if accelerator(cfg) == "cuda" else "gloo")
    if not is_first():
        log.setLevel(logging.ERROR)


def accelerator(cfg: DictConfig) -> str:
    """Not Lightning's own choice, which takes Apple's GPU too; that has no float64."""
    if cfg.trainer.accelerator == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return cfg.trainer.accelerator


@contextmanager
def parameters_in(dtype: torch.dtype):
    """Make new parameters of a dtype. Metrics keep the double precision that they ask for."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def choose_epochs(cfg: DictConfig, folder: Path, module: L.LightningModule, data: COODataModule) -> int:
    """Fit with a part of the training entries held out; return the number of epochs with the lowest score on them.

    The score is the NLL, and the RMSE of a method that has no NLL.
    """
    chosen = folder / "chosen.json"
    choice = from_first(read_json(chosen) if chosen.exists() else None)
    if choice is None:
        history = History(folder, cfg.epochs, cfg.protocol.patience)
        fit(cfg, [history], folder, module, data)
        epochs = best_epoch(history.rows, cfg.protocol.patience)
        score = held_out_score(history.rows)
        best = finite(history.rows[epochs - 1][score])
        choice = {"epochs": epochs, score: best}
        write(chosen, json.dumps(choice) + "\n")
        if best is None:
            log.warning("%s, on held-out training entries, is not a finite number after any epoch", score)
        if epochs == cfg.epochs:
            log.warning("%s, on held-out training entries, was still falling after epochs=%d", score, epochs)
    log.info("the fit of lowest score on held-out training entries: %s", choice)
    return choice["epochs"]


def fit(cfg, histories: list[History], folder: Path, module, data, logger=False) -> L.Trainer:
    """Train until the histories end, from the folder's checkpoint where there is one."""
    recorder = Recorder(histories, folder, cfg.checkpoint_seconds)
    trainer = L.Trainer(
        accelerator=accelerator(cfg),
        strategy=SummedStrategy() if is_distributed() else "auto",
        devices=processes_of_node(),
        num_nodes=processes() // processes_of_node(),
        max_epochs=max(history.epochs for history in histories),
        logger=logger,
        callbacks=[*filter(None, instantiate(cfg.callbacks).values()), recorder],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        log_every_n_steps=10**9,  # everything is logged by epoch
    )
    L.seed_everything(cfg.seed, verbose=False)  # the same draws, whatever ran before in this process
    trainer.fit(module, data, ckpt_path=from_first(usable(recorder.checkpoint)))
    return trainer


def usable(checkpoint: Path) -> Path | None:
    """The checkpoint, None where there is none or it is damaged."""
    if not checkpoint.exists():
        return None
    try:
        torch.load(checkpoint, map_location="cpu", weights_only=True)
    except Exception as error:  # torch, zipfile and pickle raise many kinds
        log.warning("%s cannot be read, training starts anew (%s)", checkpoint, " ".join(str(error).split()))
        return None
    return checkpoint


@contextmanager
def tracker(cfg: DictConfig, run: RunFolder):
    """The experiment tracker that the config asks for, False for none; closed at the end, also after an error."""
    if not cfg.logger or not is_first():
        yield False
        return
    import wandb

    has_key = wandb.login(prompt=False)
    mode = os.environ.get("WANDB_MODE") or ("online" if has_key else "offline")
    name = run.path.relative_to(str(cfg.runs_dir)).as_posix()
    logger = instantiate(cfg.logger, save_dir=run.path, name=name, mode=mode)
    logger.log_hyperparams(run.config)
    try:
        yield logger
    finally:
        wandb.finish()


def comparison(cfg, metrics: dict, train: COOTensor, test: COOTensor, likelihood: PolyaGamma) -> str:
    """The model's metrics beside those of an additive model, before and after its fit, as text."""

    def evaluate(predictive: Predictive) -> dict[str, float]:
        naive = CompletionMetrics(likelihood.kind)
        naive.update(predictive, test.values)
        return {name: value.item() for name, value in naive.compute().items()}

    with parameters_in(torch.float64):
        effects = MainEffects(train.shape, likelihood)
    effects.initialise(train.indices, train.values)
    mean = evaluate(effects.predictive(test.indices))
    fitted = evaluate(effects.fit(train, epochs=500).predictive(test.indices))
    rows = {cfg.model.name: metrics, "main effects": fitted, "overall mean": mean}
    return pd.DataFrame(rows).T.to_string(float_format="{:.4f}".format)


def title(cfg: DictConfig) -> str:
    rank = f"  rank {cfg.model.rank}" if "rank" in cfg.model else ""
    return f"{cfg.dataset.name}  {cfg.model.name}{rank}"


def command(fold: int) -> str:
    """The command line that makes the run of one fold, without what does not change its numbers."""
    overrides = [override for override in overrides_given() if re.split(r"[.=]", override)[0] not in {*PLACES, "fold"}]
    return shlex.join(["python", "src/train.py", *overrides, f"fold={fold}"])


def overrides_given() -> list[str]:
    """The settings on the command line, of this cell of a grid."""
    return [override.lstrip("+") for override in HydraConfig.get().overrides.task]


def one_line(error: BaseException) -> str:
    """What is wrong with the data, the command line or the configuration."""
    if isinstance(error, MissingConfigException) and error.options:
        return f"there is no {error.missing_cfg_file}: choose from {', '.join(error.options)}"
    if unknown := re.match(r"Could not override '(.+)'", str(error)):
        return f"{unknown[1]}: there is no such setting; those that there are stand in conf/"
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override}: quote the value if it holds = or other signs, as in 'key=\"a=b\"'"
    mistake: BaseException | None = error
    while mistake is not None and not isinstance(mistake, InputError):
        mistake = mistake.__cause__  # Hydra wraps what an object that it makes raises
    return " ".join(str(mistake or error).split())


def stop(signum: int, _) -> None:
    """End at once and say so: a run can be killed at any moment."""
    print("stopped: the same command goes on where this one was", file=sys.stderr)
    sys.exit(128 + signum)


if __name__ == "__main__":
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors come here instead of being printed with a traceback
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, stop)
    logging.raiseExceptions = False  # no traceback where the output is a pipe that was closed
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(f"error: {one_line(error)}")
    except ValueError as error:
        if not str(error).startswith("Config group override"):  # Hydra's, for dataset=null
            raise
        sys.exit(f"error: {one_line(error)}")
    sys.exit(1 if failed else 0)
