"""Fit a model to a tensor, test it, and leave the results in a folder; with -m, a grid of them.

    python src/train.py
    python src/train.py dataset=enron rank=3 protocol=paper
    python src/train.py -m dataset=digg,enron rank=3,5,10

The settings are listed in conf/. Started again, a command does only what is missing.
"""

import hashlib
import json
import logging
import math
import os
import re
import shlex
import shutil
import signal
import sys
import warnings
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import hydra
import lightning as L
import pandas as pd
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

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
from ented.lightning import ENTEDModule, GaussianProcessModule, SummedStrategy
from ented.likelihoods import PolyaGamma
from ented.metrics import CompletionMetrics
from ented.predictive import Predictive
from ented.recorder import History, Recorder, best_epoch, held_out_score
from ented.replicas import ReplicaData, ReplicasModule
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
    if several(cfg.lr) and not cfg.protocol.held_out:
        raise InputError(f"lr={cfg.lr}: only protocol=holdout chooses one of several, by held-out training entries")
    if several(cfg.lr) and "lr" not in cfg.model:
        raise InputError(f"lr={cfg.lr}: model={cfg.model.name} has no learning rate")
    if cfg.model.get("sparse_gradients") and (cfg.replicas or cfg.trainer.strategy == "ddp"):
        raise InputError("model.sparse_gradients=true goes with one run at a time and one device")
    if cfg.replicas and (cfg.logger or cfg.trainer.strategy == "ddp"):
        raise InputError(f"replicas={cfg.replicas} goes with logger=csv and one device")
    torch.set_num_threads(cfg.threads)
    join(cfg)
    dataset: Dataset = instantiate(cfg.dataset.source)
    if len(dataset.shape) < 2:
        raise InputError(f"dataset={cfg.dataset.name} has one mode: a decomposition needs two or more")
    folds = range(dataset.folds) if cfg.fold == "all" else [cfg.fold]
    seeds = cfg.seed if several(cfg.seed) else [cfg.seed]
    runs = [Run(cfg, config | {"fold": fold, "seed": seed}, dataset) for seed in seeds for fold in folds]
    if not cfg.force:
        for run in runs:
            run.look()
    for group in [runs] if cfg.replicas else [[run] for run in runs]:
        if not all(run.result for run in group):
            complete(cfg, group)
    if cfg.replicas and is_first():
        shutil.rmtree(replicas_folder(runs), ignore_errors=True)
    if cfg.fold == "all":
        for seed in seeds:
            results = [run.result for run in runs if run.config["seed"] == seed]
            summary = write_summary(config, results)
            if len(results) > 1:
                metrics = "  ".join(f"{name} {m['mean']:.4f} ± {m['std']:.4f}" for name, m in summary.items())
                log.info("%s  %d folds  %s", title(cfg), len(results), metrics)


class Fit(NamedTuple):
    """What a trainer needs."""

    module: L.LightningModule
    data: COODataModule
    history: History


class Run:
    """One fold and one seed: the data, the module, and the folder with the results.

    Parameters
    ----------
    cfg : all settings.
    config : the same, resolved, with the run's own fold and seed.
    dataset : where the data come from.
    """

    def __init__(self, cfg: DictConfig, config: dict, dataset: Dataset):
        self.cfg, self.config, self.dataset = cfg, config, dataset
        self.folder = RunFolder(config)
        self.holdout = self.folder.path / "holdout"
        self.rates: list[float] = list(cfg.lr) if several(cfg.lr) else [cfg.lr]
        self.result: dict | None = None  # what metrics.json holds

    def look(self) -> None:
        """Take the result of an earlier start, where there is one."""
        self.result = from_first(lambda: self.folder.metrics)
        if self.result:
            log.info("%s is finished", self.folder.path)

    def load(self) -> None:
        """Read the data, and see whether all fits together, before anything is written."""
        cfg, dataset, fold = self.cfg, self.dataset, self.config["fold"]
        self.train, self.test = dataset.load(fold)
        self.likelihood: PolyaGamma = instantiate(cfg.likelihood)
        self.likelihood.check(torch.tensor([self.train.largest, self.test.largest]))
        sizes = len(self.train), len(self.test)
        log.info("%s, fold %d: %d training entries, %d test entries", dataset.name, fold, *sizes)
        module, part = self.module(self.rates[0]), self.data(cfg.protocol.held_out)
        if cfg.replicas and not (isinstance(module, ENTEDModule) and isinstance(self.train, COOTensor)):
            about = f"model={cfg.model.name} and dataset={cfg.dataset.name}"
            raise InputError(f"replicas={cfg.replicas}: runs of {about} are trained one by one")
        if is_distributed() and not isinstance(module, GaussianProcessModule):
            raise InputError(f"trainer=ddp: model={cfg.model.name} runs on one device")
        if processes() > min(len(self.test), len(part.validation or self.test)):
            raise InputError(f"{processes()} processes are more than the entries to evaluate: start fewer")
        if module.all_entries and cfg.batch_size != "all":
            raise InputError(f"batch_size={cfg.batch_size}: model={cfg.model.name} needs batch_size=all")

    def data(self, held_out: float) -> COODataModule:
        seed, dtype = self.config["seed"], getattr(torch, self.cfg.dtype)
        return self.dataset.data_module(self.train, self.test, self.cfg.batch_size, seed, held_out, dtype)

    def module(self, lr: float) -> L.LightningModule:
        L.seed_everything(self.config["seed"], verbose=False)
        settings = {key: value for key, value in self.cfg.model.items() if key not in ("name", "training")}
        settings |= {"lr": lr} if "lr" in settings else {}
        with parameters_in(getattr(torch, self.cfg.dtype)):
            return instantiate(settings, shape=self.dataset.shape, likelihood=self.likelihood)

    def searches(self) -> list[Fit]:
        """The fits to a part of the training entries, one for each learning rate, by which `choose` chooses."""
        protocol, fits = self.cfg.protocol, []
        for lr in self.rates:
            folder = self.holdout / (f"lr={lr}" if len(self.rates) > 1 else "")
            history = History(None if self.result else folder, self.cfg.epochs, protocol.patience)
            fits.append(Fit(self.module(lr), self.data(protocol.held_out), history))
        return fits

    def choose(self, searches: list[Fit]) -> None:
        """Write down the number of epochs with the lowest score on the held-out entries, and the learning rate.

        The score is the NLL, and the RMSE of a method that has no NLL.
        """
        name = held_out_score(searches[0].history.rows)
        epochs = [best_epoch(fit.history.rows, self.cfg.protocol.patience) for fit in searches]
        scores = [fit.history.rows[best - 1][name] for fit, best in zip(searches, epochs, strict=True)]
        # a nan is larger than every number
        i = min(range(len(scores)), key=lambda i: (math.isnan(scores[i]), scores[i]))
        choice = {"lr": self.rates[i]} if len(self.rates) > 1 else {}
        write(self.holdout / "chosen.json", json.dumps(choice | {"epochs": epochs[i], name: finite(scores[i])}) + "\n")
        if not math.isfinite(scores[i]):
            log.warning("%s, on held-out training entries, is not a finite number after any epoch", name)
        if epochs[i] == self.cfg.epochs:
            log.warning("%s, on held-out training entries, was still falling after epochs=%d", name, epochs[i])

    def choice(self) -> dict | None:
        """What was chosen by the held-out entries, None if nothing was yet."""
        chosen = self.holdout / "chosen.json"
        return from_first(lambda: read_json(chosen) if chosen.exists() else None)

    def last(self) -> Fit:
        """The fit to all training entries."""
        choice = {}
        if self.cfg.protocol.held_out:
            choice = self.choice()
            log.info("the fit of lowest score on held-out training entries: %s", choice)
        module = self.module(choice.get("lr", self.rates[0]))
        folder = None if self.result else self.folder.path
        return Fit(module, self.data(0), History(folder, choice.get("epochs", self.cfg.epochs)))

    def finish(self, fit: Fit, trainer: L.Trainer) -> None:
        """Test what was fitted, and write the results."""
        epochs, seconds = len(fit.history.rows), fit.history.seconds  # fewer epochs where the method has converged
        steps = epochs * len(fit.data.train_dataloader()) if trainer.optimizers else 0
        (tested,) = trainer.test(fit.module, fit.data, verbose=False)
        if self.cfg.replicas:
            partial = self.folder.path / "last.ckpt.partial"
            trainer.save_checkpoint(partial, weights_only=True)
            os.replace(partial, self.folder.path / "last.ckpt")
        metrics = {name.removeprefix("test_"): value for name, value in tested.items()}
        self.folder.write_predictions(self.dataset.modes, self.test, trainer.predict(fit.module, fit.data))
        log.info("%s", comparison(self.cfg, metrics, self.train, self.test, self.likelihood))
        self.result = self.folder.finish(metrics, epochs, steps, seconds, command(self.config))
        numbers = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        about = title(self.cfg), self.config["fold"], numbers, epochs, seconds, self.folder.path
        log.info("%s  fold %d  %s  %d epochs  %.1f s  %s", *about)


def complete(cfg: DictConfig, runs: list[Run]) -> None:
    """Do what is missing of the runs; as replicas they are trained as one, with those that are finished."""
    missing = [run for run in runs if not run.result]
    for run in runs:
        with run.folder.logging():
            run.load()
    for run in missing:
        with run.folder.logging():
            run.folder.open(cfg.force)
    wait_for_all()  # until the first process has cleared away what another start left
    folder = replicas_folder(runs) if cfg.replicas else runs[0].folder.path
    if cfg.protocol.held_out and not all([run.choice() for run in runs]):
        searches = [run.searches() for run in runs]
        fits = [fit for of_run in searches for fit in of_run]
        for group in [fits] if cfg.replicas else [[fit] for fit in fits]:
            train_fits(cfg, missing, group, folder / "holdout" if cfg.replicas else group[0].history.folder)
        for run, of_run in zip(runs, searches, strict=True):
            if not run.result:
                with run.folder.logging():
                    run.choose(of_run)
    fits = []
    for run in runs:
        with run.folder.logging():
            fits.append(run.last())
    with tracker(cfg, runs[0]) as logger:
        trainer = train_fits(cfg, missing, fits, folder, logger)
        for run, fit in zip(runs, fits, strict=True):
            if not run.result:
                with run.folder.logging():
                    run.finish(fit, trainer)


def replicas_folder(runs: list[Run]) -> Path:
    """Where the state of just these replicas is kept, while they are trained."""
    cells = [(run.config["fold"], run.config["seed"]) for run in runs]
    return runs[0].folder.path / f"replicas-{hashlib.sha256(repr(cells).encode()).hexdigest()[:8]}"


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


def train_fits(cfg: DictConfig, runs: list[Run], fits: list[Fit], folder: Path, logger=False) -> L.Trainer:
    """Train until the histories end, from the folder's checkpoint where there is one; into the logs of the runs."""
    modules, datas, histories = map(list, zip(*fits, strict=True))
    if cfg.replicas:
        data = ReplicaData(datas, histories)
        module = ReplicasModule(modules, data, cfg.compile)
    else:
        (module,), (data,) = modules, datas
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
    L.seed_everything(datas[0].seed, verbose=False)  # the same draws, whatever ran before in this process
    with ExitStack() as logs:
        for run in runs:
            logs.enter_context(run.folder.logging())
        trainer.fit(module, data, ckpt_path=from_first(lambda: usable(recorder.checkpoint)))
    if cfg.replicas:
        module.unstack()
    return trainer


def usable(checkpoint: Path) -> Path | None:
    """The checkpoint, None where there is none or it is damaged."""
    if not checkpoint.exists():
        return None
    try:
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    except Exception as error:  # torch, zipfile and pickle raise many kinds
        log.warning("%s cannot be read, training starts anew (%s)", checkpoint, " ".join(str(error).split()))
        return None
    return checkpoint if "optimizer_states" in state else None  # what replicas leave cannot be resumed from


@contextmanager
def tracker(cfg: DictConfig, run: Run):
    """The experiment tracker that the config asks for, False for none; closed at the end, also after an error."""
    if not cfg.logger or not is_first():
        yield False
        return
    import wandb

    has_key = wandb.login(prompt=False)
    mode = os.environ.get("WANDB_MODE") or ("online" if has_key else "offline")
    name = run.folder.path.relative_to(str(cfg.runs_dir)).as_posix()
    logger = instantiate(cfg.logger, save_dir=run.folder.path, name=name, mode=mode)
    logger.log_hyperparams(run.config)
    try:
        yield logger
    finally:
        wandb.finish()


def comparison(cfg, metrics: dict, train: COOTensor, test: COOTensor, likelihood: PolyaGamma) -> str:
    """The model's metrics beside those of an additive model, before and after its fit, as text.

    The fit is left out where not all training entries fit in memory.
    """

    def evaluate(predictive: Predictive) -> dict[str, float]:
        naive = CompletionMetrics(likelihood.kind)
        naive.update(predictive, test.values)
        return {name: value.item() for name, value in naive.compute().items()}

    with parameters_in(torch.float64):
        effects = MainEffects(train.shape, likelihood)
    sample = train.sample()
    effects.initialise(sample.indices, sample.values)
    mean = evaluate(effects.predictive(test.indices))
    rows = {cfg.model.name: metrics}
    if len(sample) == len(train):
        rows["main effects"] = evaluate(effects.fit(sample, epochs=500).predictive(test.indices))
    rows["overall mean"] = mean
    return pd.DataFrame(rows).T.to_string(float_format="{:.4f}".format)


def several(setting) -> bool:
    """Whether a setting is a list of values."""
    return isinstance(setting, ListConfig)


def title(cfg: DictConfig) -> str:
    rank = f"  rank {cfg.model.rank}" if "rank" in cfg.model else ""
    return f"{cfg.dataset.name}  {cfg.model.name}{rank}"


def command(config: dict) -> str:
    """The command line that makes one run, without what does not change its numbers."""
    given = [(re.split(r"[.=]", override)[0], override) for override in overrides_given()]
    kept = [override for key, override in given if key not in {*PLACES, "seed", "fold"}]
    seed = [f"seed={config['seed']}"] if "seed" in dict(given) else []
    return shlex.join(["python", "src/train.py", *kept, *seed, f"fold={config['fold']}"])


def overrides_given() -> list[str]:
    """The settings on the command line, of this cell of a grid."""
    return [override.lstrip("+") for override in HydraConfig.get().overrides.task]


def one_line(error: BaseException) -> str:
    """What is wrong with the data, the command line or the configuration."""
    if isinstance(error, MissingConfigException) and error.options:
        return f"there is no {error.missing_cfg_file}: choose from {', '.join(error.options)}"
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} has no default: give {error.full_key}= on the command line"
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
