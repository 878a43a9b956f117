"""The command line: runs and grids, and what they leave."""

import json
import os
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.pyplot import imread
from scipy.stats import nbinom
from sklearn.metrics import roc_auc_score
from training import TRAIN, binary, counts, finished, numbers


@pytest.mark.parametrize("protocol", ["paper", "holdout"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_run_of_counts_leaves_its_folder(command, tiny, protocol, dtype):
    one = "model.components=1"  # f of a mixture is no Gaussian
    code, out, err = command(*counts(tiny), f"protocol={protocol}", f"dtype={dtype}", "fold=1", "seed=4", one)
    assert code == 0, err
    run = tiny.parent / "runs/counts/ented/rank=2/fold=1/seed=4"
    expected = {"config.yaml", "modes.json", "train.log", "epochs.csv", "last.ckpt", "predictions.csv", "metrics.json"}
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


def test_the_command_of_a_run_has_its_seed_where_an_experiment_gives_several(command, tiny):
    experiment = tiny.parent / "conf/experiment/seeds.yaml"
    experiment.parent.mkdir(parents=True)
    experiment.write_text("# @package _global_\nseed: [0, 1]\n")
    search = f"hydra.searchpath=[file://{experiment.parents[1]}]"
    code, _, err = command(*binary(tiny), search, "experiment=seeds", "fold=0")
    assert code == 0, err
    for seed in 0, 1:
        result = json.loads((tiny.parent / f"runs/ones/ented/rank=2/fold=0/seed={seed}/metrics.json").read_text())
        assert result["command"].endswith(f" seed={seed} fold=0")


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


@pytest.mark.parametrize(("model", "reads"), [("main_effects", True), ("vbgcp", True), ("gcp", False)])
def test_a_smallest_count_has_its_effect_or_a_warning(command, tiny, model, reads):
    """Of a table without zeros in one fold, and with zeros in the other."""
    rows = dict(np.load(tiny / "counts/fold-1.npz"))
    for part in rows.values():
        part[:, 3] += 1
    np.savez(tiny / "counts/fold-1.npz", **rows)
    settings = f"model={model}", "likelihood.smallest=auto", "epochs=3", "rank=2"
    code, out, err = command(*counts(tiny), "fold=1", *settings)
    assert code == 0, err
    assert ("likelihood.smallest=auto has no effect" in out) is not reads
    assert ("no training entry is 0, and so no prediction is" in out) is reads
    code, _, err = command(*counts(tiny), "force=true", *settings)
    assert code == (1 if reads else 0), err
    hint = "no training entry is 0: with likelihood.smallest=auto no prediction is either"
    for protocol in "holdout", "paper":
        arguments = f"model={model}", f"protocol={protocol}", "fold=1", "epochs=3", f"runs_dir={protocol}"
        assert (hint in command(*counts(tiny), *arguments)[1]) is (reads and protocol == "holdout")


def test_an_error_that_is_not_defined_is_a_dash_in_every_row(command, tiny):
    rows = dict(np.load(tiny / "counts/fold-0.npz"))
    rows["test"][:, 3] = 0  # the relative error divides by their squares
    np.savez(tiny / "counts/fold-0.npz", **rows)
    code, out, err = command(*counts(tiny), "fold=0", "epochs=3")
    assert code == 0, err
    lines = [line.split() for line in out.splitlines() if line.startswith(("ented  ", "main effects", "overall mean"))]
    assert [line[-6] for line in lines] == ["–"] * 3


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


def test_the_default_beats_the_naive_predictors(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = command("epochs=15")
    assert code == 0
    lines = out.splitlines()
    (head,) = (number for number, line in enumerate(lines) if line.startswith("fold 0 seed 0   rmse"))
    rows = {line[:14].strip(): [float(value) for value in line[14:].split()] for line in lines[head + 1 : head + 4]}
    for naive in ("main effects", "overall mean"):
        for metric in range(3):
            assert rows["ented"][metric] < rows[naive][metric]


def test_the_naive_predictors_are_evaluated_in_parts(command, tiny, monkeypatch):
    def rows(*settings):
        code, out, err = command(*counts(tiny), "fold=0", *settings)
        assert code == 0, err
        return [line for line in out.splitlines() if line.startswith(("main effects", "overall mean"))]

    together = rows()
    monkeypatch.setattr("ented.datamodule.EVALUATION_BATCH", 3)
    assert rows("force=true") == together and len(together) == 2


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
