"""The runs of a command: what each needs, its search and fit, by itself or as a replica, and what it leaves."""

import hashlib
import json
import logging
import math
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import joblib
import lightning as L
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf

from ented.datamodule import COODataModule, batch_sizes
from ented.datasets import Dataset
from ented.distributed import from_first, is_distributed, own_gpu, processes, processes_of_node
from ented.errors import InputError
from ented.gaussian_process import ENTEDModule, GaussianProcessModule, SummedStrategy
from ented.lightning import CompletionModule, SweepModule
from ented.recorder import History, Recorder, ascending, best_epoch, held_out_score
from ented.replicas import ReplicaData, ReplicasModule
from ented.runs import VERSION, RunFolder, finite, read_json, replacing, write
from ented.tensor import COOTensor, TrainingEntries
from modules import method_of, new_likelihood, new_module
from tracking import log_figures, tracker

log = logging.getLogger("ented")
STEPS, ENTRIES, MOST_STEPS = 6000, 2**16, 10**5  # of a fit with epochs=auto: so many steps for up to so many entries


def jobs_at_once(accelerator: str, threads: int) -> int:
    """How many runs a machine has room for: one for each GPU, or for each share of the CPU."""
    gpus = 0 if accelerator == "cpu" else torch.cuda.device_count()
    return gpus or max(1, joblib.cpu_count() // threads)


OmegaConf.register_new_resolver("jobs_at_once", jobs_at_once, replace=True)
OmegaConf.register_new_resolver("stem", lambda file: Path(str(file)).stem, replace=True)  # events of data/events.csv


class RunsFailed(Exception):
    """Some runs of a cell failed; what there is to say of it has been said."""


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
    command : the command line that makes this run.
    """

    def __init__(self, cfg: DictConfig, config: dict, dataset: Dataset, command: str):
        self.cfg, self.config, self.dataset, self.command = cfg, config, dataset, command
        self.fold, self.seed = config["fold"], config["seed"]
        self.folder = RunFolder(config)
        self.holdout = self.folder.path / "holdout"
        self.rates: list[float] = list(cfg.lr) if several(cfg.lr) else [cfg.lr]
        self.train: TrainingEntries | None = None
        self.result: dict | None = None  # what metrics.json holds
        self.choice: dict | None = None  # what was chosen by the held-out entries, as in holdout/chosen.json

    def take_result(self) -> None:
        """Take the result of an earlier start, where there is one."""
        self.result = from_first(lambda: self.folder.metrics)
        if self.result:
            by = self.result.get("version")
            log.info("%s  finished before%s", self.line(), "" if by == VERSION else f" by version {by} of the code")

    def check_method(self) -> None:
        """Raise InputError where the method does not go with the other settings."""
        cfg, method = self.cfg, method_of(self.cfg)
        if method.all_entries and self.dataset.streamed:
            raise InputError(
                f"model={cfg.model.name} needs all entries at once, and those of dataset={cfg.dataset.name} stay in "
                "their files: choose model=ented, gptf_pg, gptf, costco or sbtr"
            )
        if cfg.protocol.name == "validation" and self.dataset.streamed:
            raise InputError(
                "protocol=validation: the entries that it holds out are in memory, unlike those of dataset=stream: "
                "use protocol=holdout"
            )
        if method.all_entries and cfg.batch_size != "all":
            raise InputError(f"batch_size={cfg.batch_size}: model={cfg.model.name} needs batch_size=all")
        if cfg.replicas and self.dataset.streamed:
            raise InputError(f"replicas={cfg.replicas}: the entries of replicas are in memory, unlike dataset=stream")
        if cfg.replicas and not issubclass(method, ENTEDModule):
            raise InputError(f"replicas={cfg.replicas} is for model=ented and gptf_pg, not {cfg.model.name}")
        if is_distributed() and not issubclass(method, GaussianProcessModule):
            raise InputError(f"trainer=ddp is for model=ented, gptf_pg and gptf, not {cfg.model.name}")

    def load(self) -> None:
        """Read the data, once, and see whether all fits together, before anything is written."""
        if self.train:
            return
        self.check_method()
        cfg, dataset = self.cfg, self.dataset
        self.train, self.test = dataset.load(self.fold)
        self.smallest = self.train.range[0]
        if cfg.protocol.name == "validation":
            parts = COODataModule(self.train, self.test, "all", self.seed, cfg.protocol.held_out)
            self.train, self.test = parts.train, parts.validation
        self.batch_size, self.epochs = sizes_of(cfg, len(self.train))
        self.likelihood = new_likelihood(cfg, self.smallest)
        self.likelihood.check(torch.tensor([*self.train.range, *self.test.range]))
        sizes = len(self.train), len(self.test)
        log.info("%s, fold %d: %d training entries, %d test entries", dataset.name, self.fold, *sizes)
        self.tell_of_rows_and_zeros()
        if dataset.kind != self.likelihood.kind:
            other = {"binary": "bernoulli", "count": "negative_binomial"}[dataset.kind]
            kind = f", or set dataset.source.kind={self.likelihood.kind}" if "kind" in cfg.dataset.source else ""
            raise InputError(f"dataset={cfg.dataset.name} is of kind {dataset.kind}: use likelihood={other}{kind}")
        self.module(self.rates[0])  # which raises what is wrong with its settings
        part = self.data(cfg.protocol.held_out if searches_first(cfg) else 0)
        if processes() > min(len(self.test), len(part.validation or self.test)):
            raise InputError(f"{processes()} processes are more than the entries to evaluate: start fewer")

    def tell_of_rows_and_zeros(self) -> None:
        """Log what else there is to know of the entries for one who reads the predictions."""
        if isinstance(self.train, COOTensor):
            of_modes = zip(self.train.degrees().split(self.train.shape), self.test.indices.T, strict=True)
            unseen = [(degrees[indices] == 0).sum().item() for degrees, indices in of_modes]
            if any(unseen):
                modes = ", ".join(f"{n} of {mode}" for mode, n in zip(self.dataset.modes, unseen, strict=True) if n)
                log.info("test entries of a row without training entries: %s", modes)
        if self.smallest > 0 and "smallest" in method_of(self.cfg).likelihood_settings:
            setting = self.cfg.likelihood.get("smallest")
            if setting == "auto":
                log.info("no training entry is 0, and so no prediction is: likelihood.smallest=0 makes them possible")
            elif setting == 0 and self.cfg.protocol.name != "paper":
                log.info("no training entry is 0: with likelihood.smallest=auto no prediction is either")

    def open_folder(self) -> None:
        """Make the folder of what is missing, or take the result where another command has finished it meanwhile."""
        self.result = from_first(lambda: self.folder.open(self.train.fingerprint(), self.smallest, self.dataset.layout))

    def data(self, held_out: float) -> COODataModule:
        """The entries, of which a share is held out from training."""
        dtype = getattr(torch, self.cfg.dtype)
        return self.dataset.data_module(self.train, self.test, self.batch_size, self.seed, held_out, dtype)

    def module(self, lr: float) -> CompletionModule:
        """A new module, always with the same initial values."""
        L.seed_everything(self.seed, verbose=False)
        return new_module(self.cfg, self.dataset.shape, self.smallest, lr)

    def searches(self) -> list[Fit]:
        """The fits to a part of the training entries, one for each learning rate, by which `choose` chooses."""
        protocol, fits = self.cfg.protocol, []
        for lr in self.rates:
            folder = self.holdout / (f"lr={lr}" if len(self.rates) > 1 else "")
            history = History(None if self.result else folder, self.epochs, protocol.patience)
            fits.append(Fit(self.module(lr), self.data(protocol.held_out), history))
        return fits

    def choose(self, searches: list[Fit]) -> None:
        """Choose the number of epochs with the lowest score on the held-out entries, and the learning rate.

        The score is the NLL, and the RMSE of a method that has no NLL.
        """
        name = held_out_score(searches[0].history.rows)
        epochs = [best_epoch(fit.history.rows, self.cfg.protocol.patience) for fit in searches]
        scores = [fit.history.rows[best - 1][name] for fit, best in zip(searches, epochs, strict=True)]
        i = min(range(len(scores)), key=lambda i: ascending(scores[i]))
        choice = {"lr": self.rates[i]} if len(self.rates) > 1 else {}
        self.choice = choice | {"epochs": epochs[i], name: finite(scores[i])}
        if self.result:
            return
        write(self.holdout / "chosen.json", json.dumps(self.choice) + "\n")
        if not math.isfinite(scores[i]):
            log.warning("%s  %s on held-out training entries is not a finite number after any epoch", self.about, name)
        if epochs[i] == self.epochs and self.cfg.protocol.patience:
            log.warning(
                "%s  %s on held-out training entries was still falling after epochs=%d", self.about, name, epochs[i]
            )

    def take_choice(self) -> None:
        """Take what an earlier start has chosen, where it came to that."""
        chosen = self.holdout / "chosen.json"
        self.choice = from_first(lambda: read_json(chosen) if chosen.exists() else None)

    def final(self) -> Fit:
        """The fit to all training entries."""
        if self.choice:
            choice = "  ".join(f"{name} {value}" for name, value in self.choice.items())
            log.info("%s  the fit of lowest score on held-out training entries: %s", self.about, choice)
        choice = self.choice or {}
        module = self.module(choice.get("lr", self.rates[0]))
        folder = None if self.result else self.folder.path
        return Fit(module, self.data(0), History(folder, choice.get("epochs", self.epochs)))

    def test_and_write(self, fit: Fit, trainer: L.Trainer) -> None:
        """Test what was fitted, and write the results."""
        epochs, seconds = len(fit.history.rows), fit.history.seconds  # fewer epochs where the method has converged
        # a sweep makes no step of an optimiser
        steps = 0 if isinstance(fit.module, SweepModule) else epochs * len(fit.data.train_dataloader())
        (tested,) = trainer.test(fit.module, fit.data, verbose=False)
        if self.cfg.replicas:  # whose checkpoints were of all of them; the test has given the trainer this one's module
            with replacing(self.folder.path / "last.ckpt") as partial:
                trainer.save_checkpoint(partial, weights_only=True)
        metrics = {name.removeprefix("test_"): value for name, value in tested.items()}
        self.folder.write_predictions(
            self.dataset.cells(self.test.indices), self.test.values, trainer.predict(fit.module, fit.data)
        )
        self.result = self.folder.write_metrics(metrics, epochs, steps, seconds, self.command)
        log.info("%s", self.line())

    @property
    def about(self) -> str:
        return f"fold {self.fold}  seed {self.seed}"

    def line(self) -> str:
        """The result in one line."""
        result = self.result
        numbers = [f"{name} {'–' if value is None else f'{value:.4f}'}" for name, value in result["metrics"].items()]
        spent = [f"{result['epochs']} epochs", f"{result['train_seconds']:.1f} s", str(self.folder.path)]
        return "  ".join([title(self.cfg), self.about, *numbers, *spent])


def prepare(runs: list[Run]) -> None:
    """Make the folders of what is missing. Replicas need the data of what is finished too."""
    for run in runs:
        with run.folder.logging():
            run.load()
    for run in runs:
        if not run.result:
            with run.folder.logging():
                run.open_folder()


def search_fit_test(cfg: DictConfig, runs: list[Run]) -> None:
    """Do what is missing of the runs; as replicas they are trained with those that are finished."""
    missing = [run for run in runs if not run.result]
    if searches_first(cfg):
        search(cfg, runs, missing)
    fits = []
    for run in runs:
        with run.folder.logging():
            fits.append(run.final())
    with tracker(runs[0].config, runs[0].folder.path) as logger:
        folder = replicas_state(runs) if cfg.replicas else fits[0].history.folder
        trainer = train_fits(cfg, missing, fits, folder, logger)
        for run, fit in zip(runs, fits, strict=True):
            if not run.result:
                with run.folder.logging():
                    run.test_and_write(fit, trainer)
                if logger:
                    log_figures(logger, run.folder.path)


def search(cfg: DictConfig, runs: list[Run], missing: list[Run]) -> None:
    """Let the held-out entries choose for each run, unless they have."""
    for run in runs:
        run.take_choice()
    if all(run.choice for run in runs):
        return
    of_runs = [run.searches() for run in runs]
    fits = [fit for searches in of_runs for fit in searches]
    if cfg.replicas:
        train_fits(cfg, missing, fits, replicas_state(runs) / "holdout")
    else:
        for fit in fits:
            train_fits(cfg, missing, [fit], fit.history.folder)
    for run, searches in zip(runs, of_runs, strict=True):
        with run.folder.logging():
            run.choose(searches)


def train_fits(cfg: DictConfig, logged: list[Run], fits: list[Fit], folder: Path, logger=False) -> L.Trainer:
    """Train until the histories end, from the folder's checkpoint where there is one; the runs' logs tell of it."""
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
        devices=devices(cfg),
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
        for run in logged:
            logs.enter_context(run.folder.logging())
        trainer.fit(module, data, ckpt_path=from_first(lambda: usable(recorder.checkpoint)))
    if cfg.replicas:
        module.unstack()
    return trainer


def replicas_folder(runs: list[Run]) -> Path:
    """Where the state of just these replicas is kept, while they are trained."""
    return runs[0].folder.path / f"replicas-{digest([(run.fold, run.seed) for run in runs])}"


def replicas_state(runs: list[Run]) -> Path:
    """The part of it that was trained on just these entries."""
    return replicas_folder(runs) / digest([run.train.fingerprint() for run in runs])


def digest(content: list) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:8]


def accelerator(cfg: DictConfig) -> str:
    """Not Lightning's own choice, which takes Apple's GPU too; that has no float64."""
    if cfg.trainer.accelerator == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return cfg.trainer.accelerator


def devices(cfg: DictConfig) -> int | list[int]:
    """How many devices of this machine a fit has, or which: each of a grid's jobs takes one GPU for itself."""
    if accelerator(cfg) == "cuda" and not is_distributed():
        return [own_gpu(torch.cuda.device_count())]
    return processes_of_node()


def sizes_of(cfg: DictConfig, entries: int) -> tuple[int | str, int]:
    """Batch size and epochs for so many training entries, where the settings leave them open."""
    batch_size, epochs = cfg.batch_size, cfg.epochs
    if batch_size == "auto":  # a power of two near a thirty-second of the entries, from 128 to 2048
        batch_size = 2 ** min(max(round(math.log2(entries / 32)), 7), 11)
    if epochs == "auto":
        steps = min(STEPS * max(entries / ENTRIES, 1), MOST_STEPS)
        epochs = math.ceil(steps / (1 if batch_size == "all" else len(batch_sizes(entries, batch_size))))
    return batch_size, epochs


def usable(checkpoint: Path) -> Path | None:
    """The checkpoint, None where there is none or it is damaged."""
    if not checkpoint.exists():
        return None
    try:
        content = BytesIO(checkpoint.read_bytes())
    except OSError as error:
        raise InputError(f"{checkpoint} cannot be read ({error.strerror}): start again when it can") from None
    try:
        state = torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:  # torch, zipfile and pickle raise many kinds, of OSError too
        log.warning("%s is damaged, training starts anew (%s)", checkpoint, type(error).__name__)
        return None
    if "optimizer_states" not in state:
        return None  # what replicas leave cannot be resumed from
    log.info("%s: from after epoch %d on", checkpoint, state["epoch"] + 1)
    return checkpoint


def searches_first(cfg: DictConfig) -> bool:
    """Whether held-out entries choose something: the number of epochs, or one of several learning rates."""
    return bool(cfg.protocol.held_out) and (cfg.protocol.patience is not None or several(cfg.lr))


def several(setting) -> bool:
    """Whether a setting is a list of values."""
    return isinstance(setting, ListConfig)


def title(cfg: DictConfig) -> str:
    rank = f"  rank {cfg.model.rank}" if "rank" in cfg.model else ""
    return f"{cfg.dataset.name}  {cfg.model.name}{rank}"
