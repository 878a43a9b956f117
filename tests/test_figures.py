"""The report's figures, from run folders made by hand."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from files_by_hand import fail_run, write_run
from matplotlib.pyplot import imread
from training import binary, counts

import figures
from results import collect_calibration, collect_epochs, collect_variants


@pytest.fixture
def studies(tmp_path) -> Path:
    random = np.random.default_rng(0)
    for fold in range(2):
        for model in ("ented", "gcp"):
            run = write_run(tmp_path / "convergence", "digg", fold, {"auc": 0.8}, model)
            epochs = pd.DataFrame({"epoch": [1, 2, 3], "test_auc": [0.5 + 0.1 * fold, 0.6, 0.7]})
            epochs.head(3 - fold).to_csv(run / "epochs.csv", index=False)
        for points in (8, 64):
            write_run(
                tmp_path / f"inducing/{points}",
                "article",
                fold,
                {"nll": 1.0, "rmse_plugin": 0.6 + 0.1 * fold},
                seconds=10,
            )
        p = np.sort(random.uniform(size=100))
        run = write_run(tmp_path / "runs", "digg", fold, {"auc": 0.8, "nll_plugin": 0.5})
        test = pd.DataFrame({"value": (random.uniform(size=100) < p).astype(int), "mean": p, "lower": p, "upper": p})
        test.sample(frac=1, random_state=0).to_csv(run / "predictions.csv", index=False)
        run = write_run(tmp_path / "runs", "ems", fold, {"rmse_plugin": 0.5})
        test = pd.DataFrame({"value": [1, 2, 9, 4] * 10, "mean": np.arange(40.0), "lower": 2, "upper": 4})
        test.to_csv(run / "predictions.csv", index=False)
    return tmp_path


def test_the_numbers_of_the_figures(studies):
    bins = collect_calibration(studies / "runs").set_index("dataset")
    of_digg, of_ems = bins.loc["digg"], bins.loc["ems"]
    assert len(of_digg) == len(of_ems) == 20 and of_digg.entries.sum() == 200
    tests = pd.concat(pd.read_csv(file) for file in (studies / "runs/digg").rglob("predictions.csv"))
    lowest = tests.nsmallest(10, "mean")  # a twentieth
    assert of_digg.predicted.iloc[0] == pytest.approx(lowest["mean"].mean())
    assert of_digg.observed.iloc[0] == pytest.approx(lowest.value.mean())
    # of 1, 2, 9, 4 from 2 to 4 are the second and the fourth; a bin has two numbers of each of two folds
    assert of_ems.observed.tolist() == [0.5] * 20 and of_ems.entries.tolist() == [4] * 20
    epochs = collect_epochs(studies / "convergence")
    assert len(epochs) == 10 and set(epochs.model) == {"ented", "gcp"}


def test_figures_show_what_they_say(studies):
    """Mean and deviation over folds, of which the shorter one keeps its last value; seconds of an epoch."""
    panel = figures.convergence(collect_epochs(studies / "convergence")).axes[0]
    ented = next(line for line in panel.lines if line.get_label() == "ENTED")
    assert ented.get_ydata() == pytest.approx([0.55, 0.6, 0.65])
    error, time = figures.inducing(collect_variants(studies / "inducing")).axes
    assert error.lines[0].get_xdata().tolist() == [8, 64] and error.lines[0].get_ydata() == pytest.approx([0.65] * 2)
    assert time.lines[0].get_ydata() == pytest.approx([2, 2])  # 10 seconds, 5 epochs
    binary, counts = figures.calibration(collect_calibration(studies / "runs")).axes
    assert counts.lines[0].get_ydata() == pytest.approx([0.5] * 20) and len(binary.lines[0].get_xdata()) == 20


def test_figures_of_the_report(report, studies, monkeypatch):
    monkeypatch.chdir(studies)
    (studies / "studies/inducing/8").mkdir(parents=True)  # one that was just begun
    code, _, err = report("runs", "--out", "without")
    assert code == 0, err
    assert {file.name for file in Path("without").glob("*.png")} == {"calibration.png"}
    sources = ["--convergence", "convergence", "--inducing", "inducing"]
    code, _, err = report("runs", "--out", "report", *sources)
    assert code == 0, err
    out = Path("report")
    for name in ("convergence", "inducing", "calibration"):
        assert imread(out / f"{name}.png").std() > 0 and (out / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        assert f"![{name}]({name}.png)" in (out / "report.md").read_text()
    # their CSVs make the same figures
    again = [part for name in ("convergence", "inducing", "calibration") for part in (f"--{name}", out / f"{name}.csv")]
    code, _, err = report("runs", "--out", "again", *again)
    assert code == 0, err
    for name in ("convergence", "inducing", "calibration"):
        assert (out / f"{name}.png").read_bytes() == (Path("again") / f"{name}.png").read_bytes()


def test_studies_without_other_runs_have_a_report(report, studies, monkeypatch):
    monkeypatch.chdir(studies)
    (studies / "runs").rename(studies / "elsewhere")
    code, _, err = report()
    assert code == 1 and "runs" in err  # there is nothing to report
    (studies / "studies").mkdir()
    (studies / "convergence").rename(studies / "studies/convergence")
    code, out, err = report()
    assert code == 0, err
    figure = {f"convergence.{kind}" for kind in ("csv", "png", "pdf")}
    assert {file.name for file in Path("report").iterdir()} == figure | {"report.md"}
    fail_run(studies / "runs", "ems", 0, "gcp")  # one that failed is no missing one
    code, out, err = report()
    assert code == 0, err
    assert "1 failed" in out


@pytest.mark.parametrize(
    ("model", "make", "expected"),
    [
        ("ented", binary, {"calibration"}),
        ("main_effects", binary, {"calibration"}),  # which has no rank
        ("costco", binary, {"calibration"}),
        ("ented", counts, {"observed"}),
        ("ncpd", counts, set()),
    ],
)
def test_figures_of_a_run(command, tiny, model, make, expected):
    assert command(*make(tiny), "fold=0", f"model={model}")[0] == 0
    (metrics,) = tiny.parent.rglob("metrics.json")
    made = figures.of_run(metrics.parent)
    assert set(made) == expected and all(figure.axes[0].lines for figure in made.values())
