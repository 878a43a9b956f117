"""Every method of conf/model from the command line: runs, resumes, and the entries that it does not take."""

import inspect
import json
import shlex
from pathlib import Path

import lightning as L
import pandas as pd
import pytest
import yaml
from hydra.utils import get_class
from training import binary, counts, finished

MODELS = sorted(file.stem for file in (Path(__file__).parent.parent / "conf/model").glob("*.yaml"))
ONLY = {"binary": {"bcp", "sbtr"}, "count": {"ncpd", "bpcp", "vbgcp", "mdtf"}}
SWEEPS = {"main_effects", "gcp", "bcp", "ncpd", "bpcp", "vbgcp"}  # no optimiser, and so no step
POINT = {("costco", "count"), ("mdtf", "count")}  # no distribution
PAIRS = [
    (model, kind)
    for model in MODELS
    for kind, other in (("binary", "count"), ("count", "binary"))
    if model not in ONLY[other]
]
DATA = {"binary": binary, "count": counts}
pairs = pytest.mark.parametrize("model, kind", PAIRS, ids=["-".join(pair) for pair in PAIRS])


class Interrupt(L.Callback):
    """Fails in the fourth epoch of the search for epochs and of the final fit, once each, as if the machine did."""

    left: set[str] = set()

    def on_train_epoch_start(self, trainer, pl_module):
        phase = "search" if trainer.datamodule.validation else "final"
        if phase in self.left and trainer.current_epoch == 3:
            self.left.remove(phase)
            raise OSError("interrupted")


def test_every_method_is_known_here():
    assert set(MODELS) == {
        *["ented", "main_effects", "gptf", "gptf_pg", "gcp", "bcp", "sbtr", "costco", "ncpd", "bpcp", "vbgcp", "mdtf"]
    }


@pairs
def test_a_run_of_each_protocol(command, tiny, model, kind):
    nll = [] if (model, kind) in POINT else ["nll", "nll_plugin"]
    names = ["auc", *nll] if kind == "binary" else ["rmse", "mape", *nll, "rmse_plugin", "mape_plugin"]
    for protocol, dtype in (("paper", "float64"), ("holdout", "float32")):
        settings = [f"model={model}", f"protocol={protocol}", f"dtype={dtype}", "fold=0", f"runs_dir={protocol}"]
        code, out, err = command(*DATA[kind](tiny), *settings)
        assert code == 0, err
        (run,) = finished(tiny.parent / protocol)
        assert ("rank=2" in run) == (model != "main_effects")
        result = json.loads((Path(run) / "metrics.json").read_text())
        assert list(result["metrics"]) == names
        assert all(value is not None for value in result["metrics"].values())
        assert 1 <= result["epochs"] <= 3
        assert result["steps"] == (0 if model in SWEEPS else result["epochs"])  # 90 entries are one batch
        assert result["rank"] == (None if model == "main_effects" else 2)
        zeros = protocol == "paper" and kind == "count" and model in ("gcp", "ncpd", "bpcp")
        assert result["missing"] == ("zeros" if zeros else "masked")
        assert f"model={model}" in result["command"] and "runs_dir" not in result["command"]
        predictions = pd.read_csv(Path(run) / "predictions.csv")
        assert len(predictions) == 30 and predictions["mean"].notna().all()
        assert ("log_prob" in predictions) == bool(nll)


@pairs
def test_an_interrupted_run_ends_with_the_same_numbers(command, tiny, model, kind, monkeypatch):
    arguments = [
        *DATA[kind](tiny),
        *[f"model={model}", "fold=0", "epochs=6", "checkpoint_seconds=0", "dtype=float64"],
        "+callbacks.interrupt._target_=test_baselines.Interrupt",
    ]
    assert command(*arguments, "runs_dir=whole")[0] == 0
    monkeypatch.setattr(Interrupt, "left", {"search", "final"})
    for _ in range(2):
        try:
            command(*arguments, "runs_dir=parts")
        except OSError as error:
            assert "interrupted" in str(error)
    # the final fit may have fewer epochs, main effects are found in three, and ENTED does not search for their number
    assert "search" not in Interrupt.left or model in ("main_effects", "ented")
    assert command(*arguments, "runs_dir=parts")[0] == 0
    results = []
    for folder in ("whole", "parts"):
        (run,) = finished(tiny.parent / folder)
        result = json.loads((Path(run) / "metrics.json").read_text())
        results.append((result["metrics"], result["epochs"], result["steps"]))
    assert results[0] == results[1]


def test_a_run_that_had_just_converged_is_not_trained_further(command, tiny):
    """Killed between its last checkpoint and its results."""
    arguments = [*counts(tiny), "model=bpcp", "protocol=paper", "fold=0", "epochs=500", "model.tolerance=0.01"]
    assert command(*arguments)[0] == 0
    (run,) = map(Path, finished(tiny.parent / "runs"))
    expected = json.loads((run / "metrics.json").read_text())
    assert expected["epochs"] < 500
    (run / "metrics.json").unlink()
    assert command(*arguments)[0] == 0
    actual = json.loads((run / "metrics.json").read_text())
    assert {**actual, "train_seconds": 0} == {**expected, "train_seconds": 0}


@pytest.mark.parametrize("kind", ["binary", "count"])
def test_entries_that_a_method_does_not_take_end_with_one_line(command, tiny, kind):
    other = {"binary": "count", "count": "binary"}[kind]
    for model in ONLY[other]:
        code, out, err = command(*DATA[kind](tiny), f"model={model}", "fold=0")
        assert code == 1
        assert err.startswith("error: ") and err.count("\n") == 1
        assert f"is for {other} entries, these are {kind}: choose another model=" in err
    assert not (tiny.parent / "runs").exists()


@pytest.mark.parametrize("model", ["gcp", "mdtf"])
def test_a_part_of_the_entries_is_refused_where_all_are_needed(command, tiny, model):
    code, out, err = command(*counts(tiny), f"model={model}", "fold=0", "batch_size=10")
    assert (code, err) == (1, f"error: batch_size=10: model={model} needs batch_size=all\n")
    assert not (tiny.parent / "runs").exists()


def test_zeros_are_refused_where_a_method_cannot_take_them(command, tiny):
    code, out, err = command(*counts(tiny), "model=vbgcp", "fold=0", "missing=zeros")
    assert (code, err) == (1, "error: missing=zeros: model=vbgcp takes masked only\n")


def test_a_tensor_of_one_mode_is_refused(command, tiny):
    code, out, err = command(*counts(tiny), "dataset.source.shape=[6]", "dataset.source.modes=[a]")
    assert (code, err) == (1, "error: dataset=counts has one mode: a decomposition needs two or more\n")


def test_a_loss_that_is_not_finite_ends_with_one_line(command, tiny):
    code, out, err = command(*counts(tiny), "model=costco", "fold=0", "lr=1e300")
    assert code == 1 and err.count("\n") == 1 and "the loss is not finite in epoch" in err
    assert not finished(tiny.parent / "runs")


def test_the_command_of_a_run_can_be_given_to_a_shell(command, tiny):
    code, out, err = command(*counts(tiny), "model=mdtf", "model.hidden=[4, 3]", "fold=1", "threads=1")
    assert code == 0, err
    (run,) = finished(tiny.parent / "runs")
    arguments = shlex.split(json.loads((Path(run) / "metrics.json").read_text())["command"])[2:]
    assert "model.hidden=[4, 3]" in arguments and "threads=1" not in arguments and "fold=1" in arguments


@pytest.mark.parametrize(
    ("model", "setting", "message"),
    [
        ("bcp", "alpha=0", "a number above 0"),
        ("bpcp", "estimate=median", "arithmetic or geometric"),
        ("costco", "channels=0", "a whole number from 1"),
        ("gcp", "sample=1.5", "a whole number from 1"),
        ("gcp", "missing=ones", "masked or zeros"),
        ("main_effects", "regression=gamma", "poisson or likelihood"),
        ("main_effects", "penalty=-1", "a number from 0"),
        ("mdtf", "hidden=[3,0]", "a list of whole numbers from 1"),
        ("ncpd", "tolerance=small", "a number from 0"),
        ("sbtr", "init_scale=null", "a number above 0"),
        ("vbgcp", "ard_rate=-1", "a number above 0"),
    ],
)
def test_a_setting_that_makes_no_sense_ends_with_one_line(command, tmp_path, monkeypatch, model, setting, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = command(f"model={model}", f"model.{setting}")
    assert (code, err) == (1, f"error: model.{setting}: it must be {message}\n")
    assert not list(tmp_path.iterdir())


def test_every_number_of_a_method_has_a_rule():
    from ented.settings import RULES

    ruled = {name for names, _ in RULES.values() for name in names}
    for model in MODELS:
        settings = yaml.safe_load((Path(__file__).parent.parent / f"conf/model/{model}.yaml").read_text())
        own = {f"model.{name}" for name, value in settings.items() if not str(value).startswith("${")}
        no_numbers = {f"model.{name}" for name in ("defaults", "_target_", "name", "training", "likelihood")}
        assert own - no_numbers <= ruled, model


def test_main_effects_are_fitted_once_for_all_ranks(command, tiny):
    code, out, _ = command("-m", *[a for a in binary(tiny) if "rank" not in a], "model=main_effects", "rank=2,3")
    assert code == 0
    assert len(finished(tiny.parent / "runs")) == 2  # folds
    summary = tiny.parent / "runs/ones/main_effects/summary-seed=0.json"
    assert json.loads(summary.read_text())["rank"] is None


def test_a_default_of_a_class_is_that_of_its_configuration():
    for model in MODELS:
        settings = yaml.safe_load((Path(__file__).parent.parent / f"conf/model/{model}.yaml").read_text())
        if "_target_" in settings:
            for name, parameter in inspect.signature(get_class(settings["_target_"])).parameters.items():
                if parameter.default is not parameter.empty and not str(settings[name]).startswith("${"):
                    default = list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
                    assert float(settings[name]) == default if isinstance(default, float) else settings[name] == default


def test_each_configuration_names_its_command():
    for model in MODELS:
        text = (Path(__file__).parent.parent / f"conf/model/{model}.yaml").read_text()
        assert text.startswith(f"# python src/train.py model={model}")
        assert yaml.safe_load(text)["name"] == model
