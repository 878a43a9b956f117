"""Fit a model to a tensor, test it, and leave the results in a folder; with -m, a grid of them.

    python src/train.py
    python src/train.py dataset=enron rank=3 protocol=paper
    python src/train.py -m dataset=digg,enron rank=3,5,10

The settings are listed in conf/. Started again, a command does only what is missing.
"""

import logging
import math
import os
import re
import shlex
import shutil
import signal
import sys
import traceback
import warnings
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress

import hydra
import pandas as pd
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from baselines.main_effects import MainEffects
from ented.datamodule import EVALUATION_BATCH
from ented.datasets import Dataset
from ented.distributed import connect, from_first, is_first, processes, started_by_torchrun
from ented.errors import InputError
from ented.likelihoods import check_comparable
from ented.metrics import CompletionMetrics
from ented.runs import CONTENT, TAKEN_BY_MODEL, WITHOUT_EFFECT, Busy, clear, write_summary
from ented.settings import check
from experiment import Run, RunsFailed, accelerator, prepare, replicas_folder, search_fit_test, several, title
from modules import method_of, parameters_in

log = logging.getLogger("ented")
LARGE = 10**6  # entries or rows, from where on the additive model can take longer than the method
HYDRA_ERRORS = HydraException, OmegaConfBaseException  # what these raise is about the command line or the configuration
FULL_ERROR = os.environ.get("HYDRA_FULL_ERROR") == "1"  # the user asks for tracebacks


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(cfg: DictConfig) -> None:
    be_quiet()
    try:
        train(cfg)
    except (RunsFailed, InputError, *HYDRA_ERRORS) as error:
        if isinstance(error, Busy) and cfg.methods and "rank" not in cfg.model:
            log.info("%s: by another cell of this grid, or another command", title(cfg))
            return  # the cells of all ranks are one run
        if FULL_ERROR:
            raise
        # torchrun's processes all find the same
        if not isinstance(error, RunsFailed) and os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {reason(error)}", file=sys.stderr)
        if processes() > 1 or HydraConfig.get().mode == RunMode.RUN:
            sys.exit(1)
        raise RunsFailed from None  # which Hydra keeps until the other cells of the grid are done


def train(cfg: DictConfig) -> None:
    """Run every fold and seed asked for, and print what the folds have in common."""
    if cfg.protocol.name == "paper" and cfg.dataset.paper is None:  # the settings then refer to nothing
        raise InputError(f"dataset={cfg.dataset.name} has no published settings: use protocol=holdout")
    config = OmegaConf.to_container(cfg, resolve=True)
    check(config)
    check_together(cfg)
    torch.set_num_threads(cfg.threads)
    if cfg.compile:
        torch.compiler.reset()  # PyTorch keeps 8 programs of a step, then goes on without; each cell needs its own
    join(cfg)
    of_likelihood = set(cfg.likelihood) - {"_target_", *method_of(cfg).likelihood_settings}
    without_effect = TAKEN_BY_MODEL - set(cfg.model) | {f"likelihood.{name}" for name in of_likelihood}
    for setting in overrides_given():
        if setting.split("=")[0] in without_effect:
            log.warning("%s has no effect: model=%s has no such setting", setting, cfg.model.name)
    dataset: Dataset = instantiate(cfg.dataset.source)
    if cfg.methods and cfg.model.name not in cfg.methods[dataset.kind]:
        return
    if len(dataset.shape) < 2:
        raise InputError(f"dataset={cfg.dataset.name} has one mode: a decomposition needs two or more")
    config[CONTENT] = dataset.content
    if config[CONTENT] != from_first(lambda: dataset.content):
        raise InputError(f"dataset={cfg.dataset.name}: its files are not the same for all processes")
    folds = range(dataset.folds) if cfg.fold == "all" else [cfg.fold]
    seeds = cfg.seed if several(cfg.seed) else [cfg.seed]
    cells = [config | {"fold": fold, "seed": seed} for seed in seeds for fold in folds]
    runs = [Run(cfg, cell, dataset, command(cell, several(cfg.seed))) for cell in cells]
    do_missing(cfg, runs)
    if not all(run.result for run in runs):
        raise RunsFailed
    if is_first():
        shutil.rmtree(replicas_folder(runs), ignore_errors=True)
    if cfg.fold == "all":
        for seed in seeds:
            summarise(cfg, [run for run in runs if run.seed == seed])


def do_missing(cfg: DictConfig, runs: list[Run]) -> None:
    """Do what is missing of the runs; with force=true, all.

    Mistakes in the data are raised before anything is written or removed.
    """
    force = cfg.force and not restarted_by_slurm()
    for run in runs:
        if not force:
            run.take_result()
        if not run.result:
            with run.folder.logging():
                run.load()
    check_comparable([run.likelihood for run in runs if not run.result])
    try:
        if force:
            from_first(lambda: clear([run.folder for run in runs]))
        for group in [runs] if cfg.replicas else [[run] for run in runs]:
            if not all(run.result for run in group):
                do_group(cfg, group)
            for run in group:
                run.folder.unlock()
    finally:
        for run in runs:
            run.folder.unlock()


def do_group(cfg: DictConfig, runs: list[Run]) -> None:
    """Do what is missing of runs that are trained together, or of one.

    Where the fit fails, the folders of the runs say why, and the next runs can go on.
    """
    prepare(runs)
    missing = [run for run in runs if not run.result]
    if not missing:  # another command has done them meanwhile
        return
    try:
        search_fit_test(cfg, runs)
    except Exception as error:  # a mistake in the settings, memory that ran out, or an error in the code
        unfinished = [run for run in missing if not run.result]
        for run in unfinished:
            run.folder.fail(reason(error), traceback.format_exc())
        if FULL_ERROR or processes() > 1 or not unfinished:
            raise
        folders = ", ".join(str(run.folder.path) for run in unfinished)
        print(f"error: {reason(error)} (error.txt in {folders})", file=sys.stderr)
    for run in missing:
        if run.result:
            compare(run)


def restarted_by_slurm() -> bool:
    """Whether this job was started again, after its time ran out: with force=true it would remove what it has done."""
    return int(os.environ.get("SLURM_RESTART_COUNT", 0)) > 0


def check_together(cfg: DictConfig) -> None:
    """Raise InputError where settings, each right by itself, do not go together."""
    for override in HydraConfig.get().overrides.task:
        # Hydra's way to add a setting; nothing would read it, but for another callback
        if override.startswith("+") and not override.lstrip("+").startswith("callbacks."):
            raise InputError(f"{override}: there is no such setting; those that there are stand in conf/")
    launcher = HydraConfig.get().runtime.choices.get("launcher")
    if launcher != "serial" and HydraConfig.get().mode == RunMode.RUN:
        raise InputError(f"launcher={launcher} is for a grid: put -m before the settings")
    variant = HydraConfig.get().runtime.choices.get("variant")
    if variant and cfg.model.name != "ented":
        raise InputError(f"variant={variant} is one of model=ented, not of {cfg.model.name}")
    if "missing=zeros" in overrides_given() and "missing" not in cfg.model:
        raise InputError(f"missing=zeros: model={cfg.model.name} takes masked only")
    if cfg.protocol.name == "validation" and not cfg.protocol.held_out:
        raise InputError("protocol.held_out=0: protocol=validation tests what it holds out; give a share above 0")
    if several(cfg.lr) and not cfg.protocol.held_out:
        raise InputError(
            f"lr={cfg.lr}: only protocol=holdout and validation choose one of several, by held-out training entries"
        )
    if several(cfg.lr) and "lr" not in cfg.model:
        raise InputError(f"lr={cfg.lr}: model={cfg.model.name} has no learning rate")
    for name, remedy in {"annealing": "model.annealing=false", "milestones": "protocol.milestones=[]"}.items():
        if cfg.model.get(name) and cfg.protocol.held_out and cfg.protocol.patience is not None:
            raise InputError(
                f"protocol.patience={cfg.protocol.patience}: a search that ends early says nothing of a fit whose "
                f"steps fall over its epochs: set {remedy} or protocol.patience=null"
            )
    if cfg.model.get("sparse_gradients") and (cfg.replicas or cfg.trainer.strategy == "ddp"):
        raise InputError("model.sparse_gradients=true goes with one run at a time and one device")
    if cfg.replicas and "convergence" in cfg.callbacks:
        raise InputError(f"replicas={cfg.replicas}: callbacks=convergence goes with one run at a time")
    if cfg.replicas and (cfg.logger or cfg.trainer.strategy == "ddp"):
        raise InputError(f"replicas={cfg.replicas} goes with logger=csv and one device")


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


def compare(run: Run) -> None:
    """Log the run's metrics beside those of the overall mean and of an additive model, where that is not LARGE."""
    if not is_first():
        return
    train, test, likelihood = run.train, run.test, run.likelihood

    def evaluate(effects: MainEffects) -> dict[str, float]:
        naive = CompletionMetrics(likelihood.kind, sync_on_compute=False)
        batches = zip(test.indices.split(EVALUATION_BATCH), test.values.split(EVALUATION_BATCH), strict=True)
        for indices, values in batches:
            naive.update(effects.predictive(indices), values)
        return {name: value.item() for name, value in naive.compute().items()}

    with parameters_in(torch.float64):
        effects = MainEffects(train.shape, likelihood)
    sample = train.sample()
    effects.initialise(sample.indices, sample.values)
    mean = evaluate(effects)
    rows = {run.cfg.model.name: run.result["metrics"]}
    if len(sample) == len(train) and max(len(train), sum(train.shape)) <= LARGE:
        with suppress(InputError):  # its optimum is not one of numbers
            rows["main effects"] = evaluate(effects.fit(sample, epochs=500))
    rows["overall mean"] = mean
    with run.folder.logging():
        table = pd.DataFrame(rows).T.astype(float).replace(math.inf, math.nan)
        table = table.rename_axis(columns=f"fold {run.fold} seed {run.seed}")
        log.info("%s", table.to_string(float_format="{:.4f}".format, na_rep="–"))


def summarise(cfg: DictConfig, runs: list[Run]) -> None:
    """Write, and of several folds log, what the runs of a seed have in common."""
    summary = write_summary(runs[0].config, [run.result for run in runs])
    if len(runs) > 1:
        metrics = "  ".join(
            f"{name} –" if of_folds["mean"] is None else f"{name} {of_folds['mean']:.4f} ± {of_folds['std']:.4f}"
            for name, of_folds in summary.items()
        )
        log.info("%s  seed %d  %d folds  %s", title(cfg), runs[0].seed, len(runs), metrics)


def command(config: dict, one_of_several_seeds: bool) -> str:
    """The command line that makes one run, without what does not change its numbers."""
    given = [(re.split(r"[.=]", override)[0], override) for override in overrides_given()]
    kept = [override for key, override in given if key not in {*WITHOUT_EFFECT, "seed", "fold"}]
    seed = [f"seed={config['seed']}"] if one_of_several_seeds or "seed" in dict(given) else []
    return shlex.join(["python", "src/train.py", *kept, *seed, f"fold={config['fold']}"])


def overrides_given() -> list[str]:
    """The settings on the command line, of this cell of a grid."""
    return [override.lstrip("+") for override in HydraConfig.get().overrides.task]


def reason(error: BaseException) -> str:
    """What is wrong with the data, the command line or the configuration."""
    if isinstance(error, MissingConfigException) and error.options:
        return f"there is no {error.missing_cfg_file}: choose from {', '.join(error.options)}"
    if missing := re.search(r"Missing mandatory value: (\S+)", str(error)):
        return f"{missing[1]} has no default: give {missing[1]}= on the command line"
    if unknown := re.match(r"Could not override '(.+)'", str(error)):
        of_one = "some of them for one dataset=, model= or launcher= only"
        return f"{unknown[1]}: there is no such setting; those that there are stand in conf/, {of_one}"
    if ambiguous := re.match(r"Ambiguous value for argument '(.+?)'", str(error)):
        return f"{ambiguous[1]} is a list of cells, for a grid: put -m before the settings"
    if isinstance(error, OverrideParseException):
        if "=" not in error.override:
            return f"cannot read {error.override}: a setting is name=value"
        examples = "'key=\"my table.csv\"' or 'key=[\"my shop\",item]'"
        return f"cannot read {error.override}: quote a value that holds spaces, = or other signs, as in {examples}"
    mistake: BaseException | None = error
    while mistake is not None and not isinstance(mistake, InputError):
        mistake = mistake.__cause__  # Hydra wraps what an object that it makes raises
    text = " ".join(str(mistake or error).split())
    return text if mistake or isinstance(error, HYDRA_ERRORS) else f"{type(error).__name__}: {text}"


def be_quiet() -> None:
    """Leave the terminal to this project's own lines, in every process that has a part in a grid."""
    logging.raiseExceptions = False  # no traceback where the output is a pipe that was closed
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning|torch._inductor|torch.utils.data")


def stop(signum: int, _) -> None:
    """End at once and say so: a run can be killed at any moment."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        sys.exit(128 + signum)
    same = "the same command without force=true" if "force=true" in sys.argv else "the same command"
    print(f"stopped: {same} goes on where this one was", file=sys.stderr)
    sys.exit(128 + signum)


if __name__ == "__main__":
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors come here instead of being printed with a traceback
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, stop)
    path = [os.path.dirname(os.path.abspath(__file__)), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))  # where other processes find `experiment`
    try:
        main()
    except RunsFailed:
        sys.exit("the grid is not finished, see above: once that is mended, the same command does what is missing")
    except BrokenProcessPool:  # of launcher=parallel
        sys.exit(
            "error: a process of the grid was killed, perhaps because memory ran out: give fewer jobs=; "
            "what was finished stays, and the command goes on where this one was"
        )
    except HYDRA_ERRORS as error:
        sys.exit(f"error: {reason(error)}")
    except ValueError as error:
        if not str(error).startswith(("Config group override", "n_jobs")):  # Hydra's, for dataset=null; joblib's
            raise
        sys.exit(f"error: {error}")
