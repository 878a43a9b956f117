"""What the README shows works, and its numbers are those in results/."""

import io
import re
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from training import Command

from baselines.main_effects import MainEffects
from ented.datasets import Flights
from ented.likelihoods import NegativeBinomial
from ented.metrics import CompletionMetrics

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
TEXTS = [f"results/{file.name}" for file in (ROOT / "results").glob("*.md")]


def block(language: str, marker: str) -> str:
    """The code block that contains a marker."""
    (code,) = (code for code in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if marker in code)
    return code


@pytest.fixture
def command(monkeypatch, capfd, tmp_path) -> Command:
    monkeypatch.chdir(tmp_path)
    return Command(capfd)


def test_your_own_table(command, capfd):
    """The commands, on a longer table with the columns of the one shown."""
    shown = pd.read_csv(io.StringIO(block("", "user,item,week,count")))
    random = np.random.default_rng(0)
    cells = pd.MultiIndex.from_product(
        [shown.user.unique(), shown.item.unique(), range(1, 13)], names=shown.columns[:3]
    )
    table = pd.DataFrame({"count": random.poisson(2, len(cells))}, index=cells).reset_index()
    table.sample(40, random_state=0).to_csv("events.csv", index=False)
    shown.drop(columns="count").to_csv("cells.csv", index=False)
    (train,) = re.findall(r"    python src/train\.py (.*events\.csv.*)", README)
    (predict,) = re.findall(r"    python src/predict\.py (.*cells\.csv.*)", README)
    code, _, err = command(*shlex.split(train), "epochs=2", "inducing=8")
    assert code == 0, err
    assert Command(capfd, ROOT / "src/predict.py")(*shlex.split(predict)) == (0, "", "")
    predicted = pd.read_csv("predicted.csv")
    assert predicted[["user", "item", "week"]].equals(shown[["user", "item", "week"]])
    assert (predicted.lower <= predicted.upper).all() and (predicted["mean"] > 0).all()


def test_your_own_method(command, tmp_path, monkeypatch):
    (tmp_path / "effects.py").write_text(block("python", "class Effects"))
    monkeypatch.syspath_prepend(tmp_path)
    conf = tmp_path / "conf/model/effects.yaml"
    conf.parent.mkdir(parents=True)
    conf.write_text(block("yaml", "effects.Effects"))
    code, out, err = command("model=effects", "epochs=2", "lr=0.1", f"hydra.searchpath=[file://{tmp_path}/conf]")
    assert code == 0, err
    assert "flights  effects" in out
    assert list(tmp_path.rglob("metrics.json"))


@pytest.mark.parametrize("text", [f for f in ("README.md", *TEXTS) if "<!-- python" in (ROOT / f).read_text()])
def test_the_tables_are_those_of_the_results(monkeypatch, tmp_path, capfd, text):
    copy = tmp_path / "text.md"
    copy.write_text((ROOT / text).read_text())
    monkeypatch.chdir(ROOT)
    assert Command(capfd, ROOT / "src/report.py")("--renew", copy) == (0, "", "")
    assert copy.read_text() == (ROOT / text).read_text()


def test_the_variants_of_the_ablation_are_those_that_there_are():
    table = pd.read_csv(ROOT / "results/ablation.csv")
    assert set(table.variant) <= {file.stem for file in (ROOT / "conf/variant").glob("*.yaml")}
    assert all(f"variant={row.variant} " in row.command for row in table.itertuples())


def test_the_rows_of_the_flights_tensor(float64):
    rows = {line[4:17].strip(): line[17:].split() for line in README.splitlines() if line.startswith("    ")}
    names = rows["fold 0 seed 0"]
    results = pd.read_csv(ROOT / "results/runs.csv").query("dataset == 'flights'").set_index("metric").value
    assert rows["ented"] == [f"{results[name]:.4f}" for name in names]
    train, test = Flights().load(0)
    effects = MainEffects(train.shape, NegativeBinomial(1))  # where ENTED starts
    effects.initialise(train.indices, train.values)
    mean = effects.predictive(test.indices)
    fitted = effects.fit(train, epochs=500).predictive(test.indices)
    for row, predictive in {"overall mean": mean, "main effects": fitted}.items():
        metrics = CompletionMetrics("count")
        metrics.update(predictive, test.values)
        assert rows[row] == [f"{metrics.compute()[name]:.4f}" for name in names]
