"""W&B sweeps: the command lines that `wandb agent` starts, without a server."""

import json
import math
import re
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import wandb
import yaml
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from training import ROOT, TRAIN, cells, counts
from wandb import wandb_agent

from ented.runs import RunFolder, flat, material
from ented.settings import check

SWEEPS = {file.stem: yaml.safe_load(file.read_text()) for file in sorted((ROOT / "sweeps").glob("*.yaml"))}
KEYS = {"program", "entity", "project", "description", "name", "method", "metric", "parameters", "early_terminate"}
KEYS |= {"command", "run_cap"}
MACROS = {"${env}", "${interpreter}", "${program}", "${args_no_hyphens}"}  # the agent drops one that it does not know
BENCHMARK = ["benchmark_binary", "benchmark_count", "benchmark_dblp"]


def values(parameter: dict) -> list:
    """All values of a discrete parameter; of a range its ends, and one between."""
    if "distribution" not in parameter:
        return parameter["values"] if "values" in parameter else [parameter["value"]]
    assert parameter["distribution"] == "log_uniform_values"
    low, high = parameter["min"], parameter["max"]
    return [low, math.exp(0.7 * math.log(low) + 0.3 * math.log(high)), high]


def drawn(sweep: dict) -> list[dict]:
    """The settings of each run, of a grid of all."""
    names = sorted(sweep["parameters"])  # W&B's order
    return [
        dict(zip(names, cell, strict=True)) for cell in product(*(values(sweep["parameters"][name]) for name in names))
    ]


def started(sweep: dict, runs: list[dict]) -> list[list[str]]:
    """The command line that the agent starts for each run's settings."""
    lines = []

    def start(**process) -> SimpleNamespace:
        lines.append(process["command"])
        return SimpleNamespace()

    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_DIR", "WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):  # the agent sets them
            patch.setenv(name, folder)
        patch.setattr(wandb_agent, "AgentProcess", start)
        agent = wandb_agent.Agent(api=None, queue=None)
        agent._sweep_command = list(sweep["command"])
        for settings in runs:
            arguments = {name: {"value": value} for name, value in settings.items()}
            agent._command_run({"run_id": "run", "program": sweep["program"], "args": arguments})
    return lines


def composed(*overrides: str, **options) -> DictConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("config", list(overrides), **options)


def folds(dataset: str) -> range:
    return range(instantiate(composed(f"dataset={dataset}").dataset.source).folds)


@pytest.mark.parametrize("name", SWEEPS)
def test_a_file_holds_what_wandb_knows(name):
    sweep = SWEEPS[name]
    assert (ROOT / f"sweeps/{name}.yaml").read_text().startswith(f"# wandb sweep sweeps/{name}.yaml\n")
    assert {"program", "method", "parameters", "command"} <= set(sweep) <= KEYS
    assert ROOT / sweep["program"] == TRAIN and TRAIN.exists()
    assert sweep["project"] == yaml.safe_load((ROOT / "conf/logger/wandb.yaml").read_text())["project"]
    assert {part for part in sweep["command"] if re.fullmatch(r"\$\{.*\}", part)} == MACROS
    assert "logger=wandb" in sweep["command"]
    discrete = [{"value"}, {"values"}]
    if sweep["method"] == "grid":
        assert all(set(parameter) in discrete for parameter in sweep["parameters"].values())
    else:
        assert sweep["method"] in ("random", "bayes")
        assert sweep["run_cap"] >= 1  # it would never end
        assert set(sweep["metric"]) == {"name", "goal"} and sweep["metric"]["goal"] in ("minimize", "maximize")
        ranges = [*discrete, {"distribution", "min", "max"}]
        assert all(set(parameter) in ranges for parameter in sweep["parameters"].values())


@pytest.mark.parametrize("name", SWEEPS)
def test_the_command_lines_are_runs(name):
    """Of each grid all datasets with all models, and with each of these pairs another rank and fold."""
    sweep = SWEEPS[name]
    runs = drawn(sweep)
    lines = started(sweep, runs)
    assert len(set(map(tuple, lines))) == len(lines) == len(runs)
    assert all(line[:3] == ["/usr/bin/env", "python", "src/train.py"] for line in lines)
    groups: dict[tuple, list] = {}
    for settings, line in zip(runs, lines, strict=True):
        others = tuple(value for name, value in settings.items() if name not in ("rank", "fold"))
        groups.setdefault(others, []).append((settings, line[3:]))
    chosen = [group[i % len(group)] for i, group in enumerate(groups.values())]
    for parameter in sweep["parameters"]:
        assert {settings[parameter] for settings, _ in chosen} == {settings[parameter] for settings in runs}
    held = {}  # what decides the numbers of the run in each folder
    for settings, overrides in chosen:
        cfg = composed(*overrides)
        config = OmegaConf.to_container(cfg, resolve=True)
        check(config)
        arrived = {"dataset": config["dataset"]["name"], "model": config["model"]["name"]} | flat(config)
        assert {name: arrived[name] for name in settings} == settings
        assert config["logger"]["_target_"].endswith("WandbLogger")
        assert config["fold"] in range(instantiate(cfg.dataset.source).folds)
        same = config | {"fold": 0}
        assert held.setdefault(RunFolder(same).path, material(same)) == material(same)


def test_the_benchmark_sweeps_have_every_run_of_the_experiment_once():
    params = composed("experiment=benchmark", return_hydra_config=True).hydra.sweeper.params
    runs = [settings for name in BENCHMARK for settings in drawn(SWEEPS[name])]
    for name in params:
        assert {str(settings[name]) for settings in runs} == set(params[name].split(","))
    taken = cells("benchmark")
    swept = [(*cell, run["fold"]) for run in runs if (cell := (run["dataset"], run["model"], run["rank"])) in taken]
    folds_of = {dataset: folds(dataset) for dataset in params.dataset.split(",")}
    assert sorted(swept) == sorted((*cell, fold) for cell in taken for fold in folds_of[cell[0]])
    for name in BENCHMARK:
        assert f"experiment=benchmark_{'count' if name == 'benchmark_count' else 'binary'}" in SWEEPS[name]["command"]


def test_the_inducing_sweep_is_the_experiment():
    params = composed("experiment=inducing", return_hydra_config=True).hydra.sweeper.params
    sweep = SWEEPS["inducing"]
    swept = {name: list(map(str, values(parameter))) for name, parameter in sweep["parameters"].items()}
    expected = {name: str(params[name]).split(",") for name in params}
    assert swept == expected | {"fold": list(map(str, folds(params.dataset)))}
    assert "experiment=inducing" in sweep["command"]


@pytest.mark.parametrize("name", [name for name, sweep in SWEEPS.items() if "metric" in sweep])
def test_the_metric_is_one_that_a_run_logs_of_held_out_training_entries(command, tiny, monkeypatch, name):
    for variable in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NETRC", str(tiny / "no-netrc"))
    logged = set()
    monkeypatch.setattr(wandb.Run, "log", lambda run, data, *_, **__: logged.update(data))
    sweep = SWEEPS[name]
    (line,) = started(sweep, drawn(sweep)[:1])
    code, _, err = command(*line[3:], *counts(tiny))
    wandb.teardown()  # its process, which the next test with a tracker would share
    assert code == 0, err
    (result,) = Path().rglob("metrics.json")
    assert json.loads(result.read_text())["protocol"] == "validation"
    assert sweep["metric"]["name"] in logged
