"""Predictions of a finished run for cells that it is asked for."""

from pathlib import Path

import pandas as pd
import pytest
from training import binary, counts

from ented.datasets import Flights
from ented.predictive import COLUMNS


def same_as_its_test(predict, run: Path) -> pd.DataFrame:
    """What the run predicts for its test entries, which are the numbers of its own predictions.csv."""
    expected = pd.read_csv(run / "predictions.csv")
    modes = expected.columns[: expected.columns.get_loc("value")]
    assert set(expected.columns) - set(modes) <= COLUMNS
    expected = expected.assign(when=1700000000.123 + expected.index)  # a column of the user's own
    cells = expected[[*modes, "when"]].assign(mean=0)  # and one that is replaced
    cells.iloc[::-1].to_csv("cells.csv", index=False)
    note = "the predictions take the place of cells.csv's own mean\n"
    assert predict(run, "cells.csv", "out.csv") == (0, "", note)
    actual = pd.read_csv("out.csv").iloc[::-1].reset_index(drop=True)
    pd.testing.assert_frame_equal(actual, expected[actual.columns], rtol=2e-5)
    pd.testing.assert_series_equal(actual.when, expected.when, rtol=1e-15)
    assert set(expected.columns) - set(actual.columns) <= {"value", "log_prob"}
    return actual


@pytest.mark.parametrize("model", ["ented", "gptf_pg", "gptf", "ncpd", "bpcp", "vbgcp", "mdtf", "main_effects"])
def test_counts(command, predict, tiny, model):
    """Without the data, which are gone."""
    rank = "main_effects" if model == "main_effects" else f"{model}/rank=2"
    assert command(*counts(tiny), f"model={model}", "fold=0")[0] == 0
    (tiny / "counts/fold-0.npz").unlink()
    columns = same_as_its_test(predict, Path(f"runs/counts/{rank}/fold=0/seed=0")).columns
    assert ("lower" in columns) == (model in ("ented", "gptf_pg", "vbgcp", "main_effects"))


@pytest.mark.parametrize("model", ["ented", "gcp", "bcp", "sbtr", "costco"])
def test_ones_and_zeros(command, predict, tiny, model):
    settings = ["fold=1"] if model != "ented" else ["replicas=folds", "protocol=paper", "epochs=2"]
    assert command(*binary(tiny), f"model={model}", *settings)[0] == 0
    same_as_its_test(predict, Path(f"runs/ones/{model}/rank=2/fold=1/seed=0"))


def test_the_names_of_rows(command, predict, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command("epochs=1", "inducing=8", "model.components=1")[0] == 0
    flights, run = Flights(), Path("runs/flights/ented/rank=3/fold=0/seed=0")
    same_as_its_test(predict, run)
    named = pd.read_csv(run / "predictions.csv", dtype=str)[flights.modes]
    codes = named.apply(lambda names: names.map(flights.labels[names.name].index))
    assert codes.to_numpy().tolist() == flights.load(0)[1].indices.tolist()


def test_mistakes_end_with_one_line(command, predict, tiny):
    assert command(*counts(tiny), "fold=0", "epochs=1")[0] == 0
    run = Path("runs/counts/ented/rank=2/fold=0/seed=0")
    tables = {
        "few.csv": "a,b\n1,1\n",
        "outside.csv": "a,b,c\n0,0,0\n0,0,4\n",
        "half.csv": "a,b,c\n0,0.5,0\n",
        "text.csv": "a,b,c\n0,x,0\n",
        "none.csv": "a,b,c\n",
        "empty.csv": "",
    }
    for name, text in tables.items():
        Path(name).write_text(text)
    (tiny / "run").mkdir()
    for arguments, message in [
        ([tiny / "run", "few.csv", "out.csv"], "run is not the folder of a finished run\n"),
        (["runs", "few.csv", "out.csv"], f"finished run: name the folder of one, such as {run}\n"),
        ([run, "few.csv", "out.csv"], "few.csv has no column c; it has a, b"),
        ([run, "outside.csv", "out.csv"], "outside.csv, row 1, mode 2: index 4 is outside"),
        ([run, "half.csv", "out.csv"], "half.csv, row 0, mode 1: index 0.5 is not an integer"),
        ([run, "text.csv", "out.csv"], "text.csv, row 0: b is x, which is no number"),
        ([run, "none.csv", "out.csv"], "none.csv has no rows"),
        ([run, "empty.csv", "out.csv"], "empty.csv is not a CSV"),
        ([run, "nowhere.csv", "out.csv"], "nowhere.csv: No such file"),
        ([run, "cells.csv", "gone/out.csv"], "gone/out.csv: there is no folder gone"),
    ]:
        code, out, err = predict(*arguments)
        assert code == 1 and not out and err.startswith("error: ") and err.count("\n") == 1, err
        assert message in err, err
    layout = (run / "modes.json").read_text()
    for text in ("junk", "{}", layout.replace('"labels": {', '"labels": {"a": ["x"]')):
        (run / "modes.json").write_text(text)
        code, _, err = predict(run, "cells.csv", "out.csv")
        assert code == 1 and "modes.json is damaged: run its command again with force=true" in err, err
    (run / "modes.json").write_text(layout)
    config = (run / "config.yaml").read_text()
    for text in ("[", "a: 1", config.replace("init_std", "init"), config.replace("ENTEDModule", "Gone")):
        (run / "config.yaml").write_text(text)
        code, _, err = predict(run, "cells.csv", "out.csv")
        assert code == 1 and "config.yaml is damaged, of an older version, or" in err and err.count("\n") == 1, err
    (run / "config.yaml").write_text(config)
    (run / "last.ckpt").write_text("junk")
    code, _, err = predict(run, "cells.csv", "out.csv")
    assert code == 1 and "last.ckpt is damaged or of an older version (" in err and err.count("\n") == 1, err
    assert not Path("out.csv").exists()
