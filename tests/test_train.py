"""The command line: runs, grids, what is done again and what is not."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from filelock import FileLock
from files_by_hand import write_folds
from matplotlib.pyplot import imread
from scipy.stats import nbinom
from sklearn.metrics import roc_auc_score
from training import TRAIN, binary, counts, finished


def numbers(run: Path) -> dict:
    """metrics.json without the time it took."""
    result = json.loads((run / "metrics.json").read_text())
    del result["train_seconds"]
    return result


@pytest.mark.parametrize("protocol", ["paper", "holdout"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_run_of_counts_leaves_its_folder(command, tiny, protocol, dtype):
    one = "model.components=1"  # f of a mixture is no Gaussian
    code, out, err = command(*counts(tiny), f"protocol={protocol}", f"dtype={dtype}", "fold=1", "seed=4", one)
    assert code == 0, err
    run = tiny.parent / "runs/counts/ented/rank=2/fold=1/seed=4"
    expected = {"config.yaml", "train.log", "epochs.csv", "last.ckpt", "predictions.csv", "metrics.json"}
    assert {file.name for file in run.iterdir()} == expected

    result = json.loads((run / "metrics.json").read_text())
    head = ["dataset", "model", "rank", "fold", "seed", "protocol"]
    assert [result[key] for key in head] == ["counts", "ented", 2, 1, 4, protocol]
    epochs = pd.read_csv(run / "epochs.csv")
    assert result["epochs"] == len(epochs) == epochs.epoch.iloc[-1]
    assert result["steps"] == result["epochs"] * 1  # 90 entries are one batch
    assert result["train_seconds"] > 0 and result["version"]

    # the metrics again, from the posterior of f alone
    table = pd.read_csv(run / "predictions.csv")
    test = np.load(tiny / "counts/fold-1.npz")["test"]
    np.testing.assert_array_equal(table[["a", "b", "c", "value"]], test)
    zeta = epochs.zeta.iloc[-1] if protocol == "holdout" else 20
    x, mu, s2 = table.value, table.f_mean, table.f_std**2
    mean = zeta * np.exp(mu + s2 / 2)
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    f = mu.to_numpy()[:, None] + table.f_std.to_numpy()[:, None] * nodes

    def pmf(k):
        return nbinom.pmf(k, zeta, 1 / (1 + np.exp(f))) @ weights / weights.sum()

    density, mass = pmf(x.to_numpy()[:, None]), np.array([pmf(k) / (k + 1) for k in range(500)]).cumsum(0)
    # the median of p(x) / (x + 1) is that of 256 draws, whose share below a point is off by about 1 / (2 sqrt(256))
    near = [abs(x - (mass < q * mass[-1]).sum(0)) / (x + 1) for q in np.linspace(0.45, 0.55, 21)]
    plugin = zeta * np.exp(mu)
    expected = {
        "rmse": np.sqrt(((x - mean) ** 2).sum() / (x**2).sum()),
        "nll": -np.log(density).mean(),
        "nll_plugin": -nbinom.logpmf(x, zeta, 1 / (1 + np.exp(mu))).mean(),
        "rmse_plugin": np.sqrt(((x - plugin) ** 2).sum() / (x**2).sum()),
        "mape_plugin": (abs(x - plugin) / (x + 1)).mean(),
    }
    assert np.min(near, 0).mean() <= result["metrics"].pop("mape") <= np.max(near, 0).mean()
    assert result["metrics"] == pytest.approx(expected, rel=1e-4)  # the table has six digits
    assert (table.lower <= table.upper).all()
    for row in ("ented", "main effects", "overall mean"):
        assert row in out


def test_all_folds_of_a_binary_tensor_and_their_summary(command, tiny):
    code, out, err = command(*binary(tiny), "protocol=paper")
    assert code == 0, err
    aucs = []
    for fold in range(2):
        run = tiny.parent / f"runs/ones/ented/rank=2/fold={fold}/seed=0"
        table = pd.read_csv(run / "predictions.csv")
        aucs.append(roc_auc_score(table.value, table["mean"]))
        metrics = json.loads((run / "metrics.json").read_text())["metrics"]
        assert metrics.keys() == {"auc", "nll", "nll_plugin"}
        assert metrics["auc"] == pytest.approx(aucs[-1], abs=1e-6)
        likelihood = np.where(table.value == 1, table["mean"], 1 - table["mean"])
        assert metrics["nll"] == pytest.approx(-np.log(likelihood).mean(), rel=1e-4)
    summary = json.loads((tiny.parent / "runs/ones/ented/rank=2/summary-seed=0.json").read_text())
    auc = summary["metrics"]["auc"]
    assert auc == pytest.approx({"mean": np.mean(aucs), "std": np.std(aucs, ddof=1)}, abs=1e-6)
    assert f"seed 0  2 folds  auc {auc['mean']:.4f} ± {auc['std']:.4f}" in out


def test_a_summary_keeps_other_seeds(command, tiny):
    folder = tiny.parent / "runs/ones/ented/rank=2"
    assert command(*binary(tiny))[0] == 0
    first = (folder / "summary-seed=0.json").read_bytes()
    assert command(*binary(tiny), "seed=1")[0] == 0
    assert (folder / "summary-seed=0.json").read_bytes() == first
    assert json.loads((folder / "summary-seed=1.json").read_text())["seed"] == 1


def test_a_grid_started_again_does_only_what_is_missing(command, tiny):
    grid = ["-m", *binary(tiny, "ones,zeros"), "rank=1,2", "model=ented,gptf_pg"]
    assert command(*grid)[0] == 0
    runs = tiny.parent / "runs"
    first = finished(runs)
    assert len(first) == 2 * 2 * 2 * 2
    assert command(*grid)[0] == 0
    assert finished(runs) == first

    lost = runs / "zeros/gptf_pg/rank=2/fold=1/seed=0"
    before = numbers(lost)
    subprocess.run(["rm", "-r", lost], check=True)
    assert command(*grid)[0] == 0
    second = finished(runs)
    assert {run for run in second if second[run] != first[run]} == {str(lost)}
    assert numbers(lost) == before


def test_other_settings_are_not_taken_for_a_finished_run(command, tiny):
    arguments = [*binary(tiny), "fold=0"]
    assert command(*arguments)[0] == 0
    run = tiny.parent / "runs/ones/ented/rank=2/fold=0/seed=0"
    before = numbers(run)
    code, _, err = command(*arguments, "lr=0.5")
    assert code == 1 and "lr=0.01" in err and "lr=0.5" in err and "force=true" in err
    assert numbers(run) == before
    assert command(*arguments, "lr=0.5", "force=true")[0] == 0
    assert numbers(run) != before
    assert yaml.safe_load((run / "config.yaml").read_text())["lr"] == 0.5


class Interruption(BaseException):
    """Nothing catches it, as a kill."""


class Interrupt(L.Callback):
    """Fails in the third epoch, as if the machine did."""

    def on_train_epoch_start(self, trainer, pl_module) -> None:
        if trainer.current_epoch == 2:
            raise Interruption


INTERRUPT = "+callbacks.interrupt._target_=test_train.Interrupt"


def test_replicas_of_which_one_has_other_entries_start_afresh(command, tiny):
    settings = [*binary(tiny), "replicas=folds", "protocol.held_out=0", "checkpoint_seconds=0"]
    with pytest.raises(Interruption):
        command(*settings, INTERRUPT)
    (state,) = tiny.parent.rglob("replicas-*/*/last.ckpt")
    first = (tiny / "ones/fold-0.npz").read_bytes()
    write_folds(tiny, "ones", 5, 1)
    (tiny / "ones/fold-0.npz").write_bytes(first)
    for folder in "runs", "anew":
        code, _, err = command(*settings, f"runs_dir={folder}")
        assert code == 0, err
    assert not state.exists()
    for run, anew in zip(*(sorted((tiny.parent / folder).rglob("fold=*")) for folder in ("runs", "anew")), strict=True):
        assert numbers(run / "seed=0") == numbers(anew / "seed=0")


def test_force_removes_all_runs_first_so_that_others_are_never_taken_for_new_ones(command, tiny):
    assert command(*binary(tiny))[0] == 0
    old = finished(tiny.parent)
    with pytest.raises(Interruption):
        command(*binary(tiny), "lr=0.5", "force=true", INTERRUPT)
    assert not finished(tiny.parent)
    code, out, err = command(*binary(tiny), "lr=0.5")
    assert code == 0, err
    assert finished(tiny.parent).keys() == old.keys() and "afresh" not in out


@pytest.mark.parametrize("force", ["false", "true"])
def test_a_second_command_on_a_run_ends_with_one_line(command, tiny, force):
    run = tiny.parent / "runs/ones/ented/rank=2/fold=1/seed=0"
    run.parent.mkdir(parents=True)
    with FileLock(run.with_name(".seed=0.lock")):  # as the first command holds it
        code, _, err = command(*binary(tiny), "fold=1", f"force={force}")
    assert code == 1 and err.count("\n") == 1 and f"{run.relative_to(tiny.parent)}: another command works" in err
    assert not run.exists()
    assert command(*binary(tiny), "fold=1", f"force={force}")[0] == 0


def test_a_fold_with_mistakes_lets_force_remove_nothing(command, tiny):
    assert command(*binary(tiny))[0] == 0
    old = finished(tiny.parent)
    (tiny / "ones/fold-1.npz").write_bytes(b"damaged")
    code, _, err = command(*binary(tiny), "force=true")
    assert code == 1 and "fold-1.npz is not an npz file" in err
    assert finished(tiny.parent) == old


def test_an_unfinished_run_with_other_settings_starts_afresh(command, tiny):
    """So that the advice to change a setting after a failure can be followed."""
    code, _, err = command(*binary(tiny), "fold=0", "model.jitter=0", "model.init_std=1e-9")
    assert code == 1 and "raise model.jitter" in err
    run = tiny.parent / "runs/ones/ented/rank=2/fold=0/seed=0"
    assert run.exists() and not (run / "metrics.json").exists()
    code, out, err = command(*binary(tiny), "fold=0", "model.init_std=1e-9")
    assert code == 0, err
    assert (
        "an unfinished run with model.jitter=0, asked for is model.jitter=0.0001" in out and "is started afresh" in out
    )


def test_an_unfinished_run_of_other_entries_starts_afresh(command, tiny):
    """Its checkpoint is not resumed; where only the place has changed, it is."""
    arguments = ["fold=0", "checkpoint_seconds=0", "protocol=paper"]
    run = tiny.parent / "runs/ones/ented/rank=2/fold=0/seed=0"

    def start(data: Path) -> str:
        code, out, err = command(*binary(data), *arguments)
        assert code == 0, err
        return out

    start(tiny)
    expected = numbers(run)
    (run / "metrics.json").unlink()
    write_folds(tiny, "ones", 5, 1)
    assert "an unfinished run with other training entries, is started afresh" in start(tiny)
    assert numbers(run)["metrics"] != expected["metrics"]
    other = numbers(run)
    (run / "metrics.json").unlink()
    assert "afresh" not in start(tiny.rename(tiny.with_name("moved")))
    assert numbers(run) == other


def test_a_folder_without_its_settings_is_not_taken_for_the_run(command, tiny):
    arguments = [*binary(tiny), "fold=0"]
    assert command(*arguments)[0] == 0
    run = tiny.parent / "runs/ones/ented/rank=2/fold=0/seed=0"
    (run / "config.yaml").unlink()
    code, _, err = command(*arguments)
    assert code == 1 and "no readable config.yaml" in err and err.count("\n") == 1
    (run / "metrics.json").unlink()
    code, out, _ = command(*arguments, "lr=0.02")
    assert code == 0 and "is started afresh" in out


def test_damaged_files_of_a_run(command, tiny):
    arguments = [*binary(tiny), "fold=0"]
    assert command(*arguments)[0] == 0
    run = tiny.parent / "runs/ones/ented/rank=2/fold=0/seed=0"
    before = numbers(run)
    (run / "metrics.json").write_text("{")
    code, _, err = command(*arguments)
    assert code == 1 and "metrics.json is damaged" in err and err.count("\n") == 1
    (run / "metrics.json").unlink()
    (run / "last.ckpt").write_bytes((run / "last.ckpt").read_bytes()[:1000])
    code, out, _ = command(*arguments)
    assert code == 0 and "last.ckpt cannot be read" in out
    assert numbers(run) == before


def test_a_changed_fold_takes_its_summary_away(command, tiny):
    assert command(*binary(tiny))[0] == 0
    assert list(tiny.parent.rglob("summary-*"))
    assert command(*binary(tiny), "fold=0", "batch_size=20", "force=true")[0] == 0
    assert not list(tiny.parent.rglob("summary-*"))


def test_a_metric_that_is_not_defined_in_a_fold_is_null(command, tiny):
    rows = np.load(tiny / "ones/fold-0.npz")
    test = rows["test"][rows["test"][:, 3] == 1]
    np.savez(tiny / "ones/fold-0.npz", train=rows["train"], test=test)
    code, out, err = command(*binary(tiny))
    assert code == 0 and "Warn" not in err and "2 folds  auc –  nll 0." in out
    metrics = numbers(tiny.parent / "runs/ones/ented/rank=2/fold=0/seed=0")["metrics"]
    assert metrics["auc"] is None and metrics["nll"] > 0
    summary = json.loads((tiny.parent / "runs/ones/ented/rank=2/summary-seed=0.json").read_text())["metrics"]
    assert summary["auc"] == {"mean": None, "std": None} and summary["nll"]["mean"] > 0


def test_settings_that_change_no_number_do_not_matter(command, tiny):
    arguments = [*binary(tiny), "fold=0"]
    assert command(*arguments)[0] == 0
    first = finished(tiny.parent)
    moved = tiny.rename(tiny.with_name("moved"))
    assert command(*binary(moved), "fold=0", "checkpoint_seconds=3", "logger=wandb")[0] == 0
    assert finished(tiny.parent) == first


@pytest.mark.parametrize("blocks", [1, 3])
def test_any_number_of_blocks(command, tiny, blocks):
    assert command(*binary(tiny), "fold=0", f"model.blocks={blocks}", "inducing=9", "model.components=1")[0] == 0
    checkpoint = torch.load(tiny.parent / "runs/ones/ented/rank=2/fold=0/seed=0/last.ckpt")
    assert checkpoint["state_dict"]["model.q.precision"].shape == (blocks, 9 // blocks, 9 // blocks)


@pytest.mark.parametrize("model", ["ented", "gptf_pg", "gptf"])
def test_sparse_gradients_with_all_entries_in_each_batch_make_the_same_run(command, tiny, model):
    runs = []
    for sparse in "false", "true":
        settings = ["fold=0", "batch_size=all", f"model.sparse_gradients={sparse}", f"runs_dir=sparse-{sparse}"]
        code, _, err = command(*counts(tiny), f"model={model}", *settings)
        assert code == 0, err
        runs.append(pd.read_csv(tiny.parent / f"sparse-{sparse}/counts/{model}/rank=2/fold=0/seed=0/predictions.csv"))
    pd.testing.assert_frame_equal(*runs, rtol=1e-4)


def test_a_setting_that_the_model_does_not_have_is_a_warning(command, tiny):
    code, out, err = command(*counts(tiny), "fold=0", "model=main_effects", "compile=true", "epochs=3")
    assert code == 0, err
    assert "compile=true has no effect: model=main_effects has no such setting" in out
    assert "epochs=3 has no effect" not in out


def test_one_block_is_gptf_pg(command, tiny):
    """Of the paper's ENTED."""
    settings = [*binary(tiny), "fold=0", "protocol=paper"]
    assert command(*settings, "model.blocks=1")[0] == 0
    assert command(*settings, "model=gptf_pg")[0] == 0
    one, other = (numbers(tiny.parent / f"runs/ones/{name}/rank=2/fold=0/seed=0") for name in ("ented", "gptf_pg"))
    assert one["metrics"] == other["metrics"]


def test_more_inducing_points_than_entries_is_a_warning(command, tiny):
    code, out, _ = command(*binary(tiny), "fold=0", "inducing=100")
    assert code == 0
    assert "inducing=100 is more than the 90 training entries" in out


def test_wandb_without_a_key_is_offline_and_asks_nothing(command, tiny, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tiny / "no-netrc"))
    assert command(*binary(tiny), "fold=0", "logger=wandb")[0] == 0
    folder = tiny.parent / "runs/ones/ented/rank=2/fold=0/seed=0/wandb"
    content, deadline = b"", time.monotonic() + 60
    while b"test_auc" not in content and time.monotonic() < deadline:
        time.sleep(0.1)  # a process of wandb's own writes it, and may do so after the run has ended
        content = b"".join(log.read_bytes() for log in folder.glob("offline-run-*/run-*.wandb"))
    assert b"dataset.name" in content  # of the settings
    assert b"elbo" in content and b"test_auc" in content and b"ones/ented/rank=2" in content
    (figure,) = folder.rglob("*.png")
    assert figure.name.startswith("test_calibration") and imread(figure).std() > 0


def test_killed_and_started_again_ends_with_the_same_numbers(command, tiny):
    settings = ["fold=0", "epochs=40", "lr=0.03", "model.annealing=false", "checkpoint_seconds=0", "batch_size=10"]
    settings += ["protocol.patience=30"]
    arguments = [*binary(tiny), *settings]

    def run_folder(runs_dir: str) -> Path:
        return tiny.parent / runs_dir / "ones/ented/rank=2/fold=0/seed=0"

    assert command(*arguments, "runs_dir=whole")[0] == 0
    killed = run_folder("killed")
    # once in the search for the number of epochs, once in the fit
    for epochs in (killed / "holdout" / "epochs.csv", killed / "epochs.csv"):
        process = subprocess.Popen([sys.executable, TRAIN, *arguments, "runs_dir=killed"])
        deadline = time.monotonic() + 120
        while not (epochs.exists() and len(epochs.read_text().splitlines()) > 5):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (killed / "metrics.json").exists()
    assert command(*arguments, "runs_dir=killed")[0] == 0
    assert numbers(killed) == numbers(run_folder("whole"))
    for name in ("predictions.csv", "holdout/chosen.json"):
        assert (killed / name).read_bytes() == (run_folder("whole") / name).read_bytes()

    # killed after the last epoch, before the results were written
    (killed / "metrics.json").unlink()
    (killed / "predictions.csv").unlink()
    assert command(*arguments, "runs_dir=killed")[0] == 0
    assert numbers(killed) == numbers(run_folder("whole"))


@pytest.mark.parametrize(
    ("signum", "force", "same"),
    [(signal.SIGINT, "false", "the same command"), (signal.SIGTERM, "true", "the same command without force=true")],
)
def test_a_signal_ends_a_run_with_one_line(tiny, signum, force, same):
    settings = [f"force={force}", "fold=0", "protocol=paper", "checkpoint_seconds=0", "epochs=100000"]
    arguments = [sys.executable, str(TRAIN), *(a for a in binary(tiny) if a != "epochs=3"), *settings]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(tiny.parent.rglob("last.ckpt")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signum)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert err == f"stopped: {same} goes on where this one was\n"


def test_the_default_beats_the_naive_predictors(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = command("epochs=15")
    assert code == 0
    lines = out.splitlines()
    (head,) = (number for number, line in enumerate(lines) if line.split()[:3] == ["rmse", "mape", "nll"])
    rows = {line[:13].strip(): [float(value) for value in line[13:].split()] for line in lines[head + 1 : head + 4]}
    for naive in ("main effects", "overall mean"):
        for metric in range(3):
            assert rows["ented"][metric] < rows[naive][metric]


def test_enron_under_the_published_protocol(command, tmp_path, monkeypatch, data_dir):
    monkeypatch.chdir(tmp_path)
    assert command("dataset=enron", "rank=3", "protocol=paper", f"data_dir={data_dir}")[0] == 0
    metrics = json.loads((tmp_path / "runs/enron/ented/rank=3/summary-seed=0.json").read_text())["metrics"]
    # the paper has 0.926 and 0.381
    assert metrics["auc"]["mean"] >= 0.94
    assert metrics["nll_plugin"]["mean"] <= 0.32


def test_the_grid_of_two_datasets_and_three_ranks(command, tmp_path, monkeypatch, data_dir):
    monkeypatch.chdir(tmp_path)
    grid = ["-m", "dataset=digg,enron", "rank=3,5,10", f"data_dir={data_dir}", "epochs=2"]
    code, _, err = command(*grid)
    assert code == 0, err
    first = finished(tmp_path)
    assert len(first) == 2 * 3 * 5
    assert len(list(tmp_path.rglob("summary-seed=0.json"))) == 2 * 3
    subprocess.run(["rm", "-r", tmp_path / "runs/digg/ented/rank=5/fold=2"], check=True)
    assert command(*grid)[0] == 0
    second = finished(tmp_path)
    assert sum(second[run] != first[run] for run in first) == 1


def test_no_setting_of_the_environment_is_needed(tmp_path):
    """From another folder, in a process of its own."""
    environment = {key: value for key, value in os.environ.items() if key not in ("ENTED_DATA", "HYDRA_FULL_ERROR")}
    done = subprocess.run(
        [sys.executable, TRAIN, "rank=0"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stderr.startswith("error: rank=0") and done.stderr.count("\n") == 1
