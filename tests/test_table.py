"""A user's table with names: reading it, fitting it, and predictions by name."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from training import finished, numbers

from ented.datasets import Table

TABLE = ["dataset=table", "dataset.source.file=events.csv", "epochs=3", "inducing=8"]
# names that look like something else: a missing value, a number, two columns
USERS, ITEMS = ["NA", "007", "7", "null", "Zoë", "b"], ["tea", "ice, cream", 'the "best"', "10", "9"]


@pytest.fixture
def events(monkeypatch, tmp_path) -> pd.DataFrame:
    """100 of 6 x 5 x 4 cells, and files of them in the current folder."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    cells = pd.MultiIndex.from_product([USERS, ITEMS, [9, 10, 11, 101]], names=["user", "item", "week"])
    table = pd.DataFrame({"count": random.poisson(2, len(cells))}, index=cells).reset_index()
    table = table.sample(100, random_state=0).reset_index(drop=True)
    table.to_csv("events.csv", index=False)
    table.to_parquet("events.parquet", index=False)
    table.set_index(["user", "item", "week"]).to_parquet("indexed.parquet")
    return table


def rows(dataset: Table, tensor) -> list[tuple]:
    return list(dataset.cells(tensor.indices).assign(count=tensor.values.numpy()).itertuples(index=False, name=None))


def as_text(table: pd.DataFrame) -> list[tuple]:
    return list(table.astype({"week": str}).itertuples(index=False, name=None))


@pytest.mark.parametrize("file", ["events.csv", "events.parquet", "indexed.parquet"])
def test_every_row_is_tested_by_once(events, file):
    dataset = Table("events", file, folds=3)
    assert dataset.modes == ["user", "item", "week"] and dataset.shape == (6, 5, 4)
    assert dataset.labels["week"] == ["10", "101", "11", "9"]
    assert dataset.labels["user"] == ["007", "7", "NA", "Zoë", "b", "null"]
    tested = []
    for fold in range(3):
        train, test = (rows(dataset, tensor) for tensor in dataset.load(fold))
        assert sorted(train + test) == sorted(as_text(events)) and len(test) in (33, 34)
        tested += test
    assert sorted(tested) == sorted(as_text(events))


@pytest.mark.parametrize("sep", [";", "\t"])
def test_semicolons_and_tabs(events, sep):
    events.to_csv("other.csv", index=False, sep=sep)
    train, _ = Table("other", "other.csv").load(0)
    expected, _ = Table("events", "events.csv").load(0)
    assert train.fingerprint() == expected.fingerprint()


def test_what_is_said_of_the_entries(command, events):
    events = events[events["item"] != "tea"].assign(count=events["count"] + 1)
    events[:60].to_csv("events.csv", index=False)
    tea = events[60:].assign(item=["tea"] * 5 + events["item"][65:].tolist())
    tea.to_csv("after.csv", index=False)
    code, out, _ = command(*TABLE, "dataset.source.test=after.csv")
    assert code == 0 and "test entries of a row without training entries: 5 of item" in out
    assert "no training entry is 0, and so no prediction is" in out
    events.assign(count=events["count"] % 2).to_csv("ones.csv", index=False)
    code, out, _ = command(*TABLE, "dataset.source.file=ones.csv", "fold=0", "epochs=1")
    assert "of zeros and ones only: dataset.source.kind=binary" in out and "no training entry is 0" not in out


def test_columns_are_chosen_by_name(events):
    events[["week", "count", "item", "user"]].assign(note="").to_csv("other.csv", index=False)
    dataset = Table("events", "other.csv", value="count", modes=["week", "user", "item"], folds=2)
    assert dataset.shape == (4, 6, 5)
    _, test = dataset.load(1)
    assert {(user, item, week, count) for week, user, item, count in rows(dataset, test)} < set(as_text(events))


def test_another_file_to_test_by(events):
    events[:80].to_csv("before.csv", index=False)
    after = events[79:].sample(frac=1, random_state=1)  # one cell is in both
    after[["count", "week", "user", "item"]].to_csv("after.csv", index=False)
    dataset = Table("events", "before.csv", test="after.csv", value="count")
    train, test = dataset.load(0)
    assert dataset.folds == 1 and dataset.shape == (6, 5, 4)
    assert rows(dataset, train) == as_text(events[:79]) and rows(dataset, test) == as_text(after)


def test_the_numbers_are_those_of_the_same_entries_without_names(command, events):
    events[:80].to_csv("before.csv", index=False)
    events[80:].to_csv("after.csv", index=False)
    users = ["007", "7", "NA", "Zoë", "b", "null"]
    items = ["10", "9", "ice, cream", "tea", 'the "best"']
    names = {"user": users, "item": items, "week": [10, 101, 11, 9]}
    codes = np.column_stack([events[mode].map(values.index) for mode, values in names.items()] + [events["count"]])
    Path("coded").mkdir()
    np.savez("coded/fold-0.npz", train=codes[:80], test=codes[80:])
    source = ["dataset.source.file=before.csv", "dataset.source.test=after.csv", "dataset.name=events"]
    assert command(*TABLE, *source)[0] == 0
    npz = ["dataset=ems", "dataset.source.url=null", "dataset.source.shape=[6,5,4]", "dataset.source.folds=1"]
    npz += ["dataset.name=coded", "data_dir=.", "dataset.source.modes=[user,item,week]", "epochs=3", "inducing=8"]
    assert command(*npz)[0] == 0
    actual, expected = (Path(f"runs/{name}/ented/rank=3/fold=0/seed=0") for name in ("events", "coded"))
    assert numbers(actual)["metrics"] == numbers(expected)["metrics"]
    by_name, by_index = (pd.read_csv(run / "predictions.csv", keep_default_na=False) for run in (actual, expected))
    pd.testing.assert_frame_equal(by_name.iloc[:, 3:], by_index.iloc[:, 3:])
    tested = by_name.iloc[:, :4].rename(columns={"value": "count"})
    pd.testing.assert_frame_equal(tested, events[80:].reset_index(drop=True))


def test_predictions_by_name_without_the_table(command, predict, events):
    assert command(*TABLE, "fold=1")[0] == 0
    Path("events.csv").unlink()
    run = Path("runs/events/ented/rank=3/fold=1/seed=0")
    tested = pd.read_csv(run / "predictions.csv", dtype=str, keep_default_na=False)
    cells = tested[["week", "user", "item"]].assign(note="0012", time="1e3")
    for file in ("cells.csv", "cells.parquet"):
        getattr(cells, "to_csv" if file.endswith("csv") else "to_parquet")(file, index=False)
        assert predict(run, file, "out.csv") == (0, "", "")
        out = pd.read_csv("out.csv", dtype=str, keep_default_na=False)
        pd.testing.assert_frame_equal(out[list(cells)], cells)
        np.testing.assert_allclose(out["mean"].astype(float), tested["mean"].astype(float), rtol=2e-5)


def test_a_table_that_has_changed_is_noticed(command, events):
    assert command(*TABLE, "fold=0")[0] == 0
    before = finished(Path("runs"))
    Path("elsewhere").mkdir()
    events.to_parquet("elsewhere/events.pq")
    for file in ("events.csv", f"{Path.cwd()}/elsewhere/events.pq"):
        code, out, _ = command(*TABLE, f"dataset.source.file={file}", "fold=0")
        assert code == 0 and "finished before" in out
    events.assign(count=events["count"] + (events.index == 5)).to_csv("events.csv", index=False)
    assert "holds a run with another content of its files" in command.mistake(*TABLE, "fold=0")
    changed = command.mistake(*TABLE, "fold=0", "dataset.source.folds=4")
    assert "holds a run with dataset.source.folds=null, asked for is dataset.source.folds=4" in changed
    assert finished(Path("runs")) == before
    assert command(*TABLE, "fold=0", "force=true")[0] == 0
    assert finished(Path("runs")) != before


def test_zeros_and_ones(command, events):
    events.assign(count=events["count"] > 1).to_csv("events.csv", index=False)
    assert "is of kind count: use likelihood=negative_binomial, or set dataset.source.kind=binary" in command.mistake(
        *TABLE, "likelihood=bernoulli"
    )
    assert not Path("runs").exists()
    code, out, err = command(*TABLE, "dataset.source.kind=binary", "likelihood=bernoulli")
    assert code == 0 and "auc" in out, err
    assert len(finished(Path("runs"))) == 5


def test_the_figure_of_factors_shows_any_name(command, report, events):
    events.assign(item=events["item"].replace("tea", "$\\no $1$"), year=2013).to_csv("events.csv", index=False)
    assert command(*TABLE, "dataset.source.value=count", "fold=0")[0] == 0
    run = "runs/events/ented/rank=3/fold=0/seed=0"
    assert report(run, "--factors", "item", "item.png")[::2] == (0, "")
    assert Path("item.png").stat().st_size > 10_000
    assert "error: item says no format: let its name end with .png" in report.mistake(run, "--factors", "item", "item")
    assert "1 of year: the figure needs two directions" in report.mistake(run, "--factors", "year", "year.png")


def test_runs_of_different_tables_are_not_averaged(command, report, events):
    settings = [*TABLE, "model=main_effects", "runs_dir=runs"]
    assert command(*settings, "fold=0")[0] == 0
    assert report("runs", "--table")[0] == 0
    assert command(*settings, "fold=1", "dataset.source.folds=20")[0] == 0
    assert "are of different tables, or folds, of one name" in report.mistake("runs", "--table")


MISTAKES = {
    "user,item,count\na,b,1\na,c,2\na,b,3\n": "events.csv: rows 0 and 2 are of the same cell (a, b); add up",
    "user,item,count\na,b,1\n,c,2\n": "events.csv, row 1: user is empty; fill it in, or leave the row out",
    "user,item,count\na,b,\na,c,2\n": "events.csv, row 0: count is empty",
    "user,item,count\na,b,1\na,c,many\n": "events.csv, row 1: count is many, which is no number; correct it",
    "user, user,count\na,b,1\na,c,1\n": "events.csv has two columns user: rename one of them",
    "user,item,count\na, ,1\na,c,1\n": "events.csv, row 0: item is empty",
    "user,item,count\na,b,1\na,b ,1\n": "events.csv: rows 0 and 1 are of the same cell (a, b)",
    "user,item,count\na,b,1\na,c,-2\n": "events.csv, row 1: value -2 is negative",
    "user,item,count,\na,b,1,\na,c,1,\n": "events.csv has a column without a name",
    "user,item,count\na,b,1\na,c,1.5\n": "events.csv, row 1: value 1.5 is not an integer",
    "user,item,count\na,b,1\na,c,inf\n": "events.csv, row 1: value inf is not finite",
    "user,item,count\na,b,1\n": "events.csv has one row: a fit and its test need one each",
    "user,count\na,1\nb,1\nc,1\nd,1\ne,1\n": "has one mode",
    "user,mean,count\na,b,1\n": "none that of a column of predictions.csv",
    ",user,item,count\n0,a,b,1\n1,a,c,2\n": "events.csv has a column without a name",
    "count\n1\n": "events.csv: column count holds the values; the modes need columns of their own",
    "user,item,count\n": "events.csv has no rows",
    "user,item,count\na,b,1,9\na,c,2,9\n": "events.csv has longer rows than its first one",
    "": "events.csv is not a CSV or Parquet file",
    "user,item,count\na,b,1\na,c,2,9\n": "Expected 3 fields in line 3, saw 4",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_in_the_table(command, tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    Path("events.csv").write_text(text)
    assert MISTAKES[text] in command.mistake(*TABLE)
    assert [path.name for path in tmp_path.iterdir()] == ["events.csv"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("dataset.source.file=nowhere.csv", "nowhere.csv: No such file"),
        ("dataset.source.file=/tmp", "error: /tmp: Is a directory"),
        ("dataset.source.file=???", "dataset.source.file has no default"),
        ("dataset.source.test=nowhere.csv", "nowhere.csv: No such file"),
        ("dataset.source.value=late", "events.csv has no column late; it has user, item, week, count"),
        ("dataset.source.modes=[user,shop]", "events.csv has no column shop; it has user, item, week, count"),
        ("dataset.source.modes=[user,count]", "column count holds the values; the modes need columns of their own"),
        ("dataset.source.modes=user", "give a list of names"),
        ("dataset.source.test=events.csv dataset.source.folds=5", "with dataset.source.test= there is one fold"),
        ("dataset.source.folds=1", "folds is 1; give a whole number from 2 to 100"),
        ("dataset.source.folds=two", "folds is two; give a whole number from 2 to 100"),
        ("dataset.source.kind=binary", "a binary dataset holds the value"),
        ("dataset.source.kind=words", "choose from binary, count"),
        ("likelihood=bernoulli", "use likelihood=negative_binomial"),
        ("fold=5", "choose from 0, 1, 2, 3, 4"),
    ],
)
def test_mistakes_in_the_settings(command, events, settings, message):
    assert message in command.mistake(*TABLE, *settings.split())
    assert not Path("runs").exists()


@pytest.mark.parametrize("model", ["ented", "gptf_pg", "gptf"])
def test_new_names_are_predicted_as_rows_without_training_entries(command, predict, events, model):
    assert command(*TABLE, f"model={model}", "fold=0")[0] == 0
    run = f"runs/events/{model}/rank=3/fold=0/seed=0"
    cells = pd.DataFrame({"user": ["b", "b ", "b", "new"], "item": ["tea", "gin", "rum", "tea"], "week": [9, 9, 9, 12]})
    cells.to_csv("cells.csv", index=False)
    code, out, err = predict(run, "cells.csv", "out.csv")
    assert (code, out) == (0, "")
    assert err == "3 of 4 cells have a name that the run does not have, item gin in row 1 first\n"
    table = pd.read_csv("out.csv")
    predicted = table[table.columns.drop(["user", "item", "week"])]
    assert predicted.iloc[1].equals(predicted.iloc[2].rename(1)) and not predicted.iloc[3].equals(predicted.iloc[1])
    # a known cell is what it is without new ones beside it
    cells[:1].to_csv("cells.csv", index=False)
    assert predict(run, "cells.csv", "known.csv") == (0, "", "")
    np.testing.assert_allclose(pd.read_csv("known.csv")[predicted.columns].iloc[0], predicted.iloc[0], rtol=1e-5)


def test_a_new_name_where_the_method_has_no_prior(command, predict, events):
    assert command(*TABLE, "model=gcp", "fold=0", "epochs=1", "batch_size=all")[0] == 0
    Path("cells.csv").write_text("user,item,week\nb,tea,9\nb,gin,9\n")
    assert predict.mistake("runs/events/gcp/rank=3/fold=0/seed=0", "cells.csv", "out.csv") == (
        "error: cells.csv, row 1: there is no item gin in the run (GCP predicts no rows that the run does not have): "
        "leave it out\n"
    )
    assert not Path("out.csv").exists()


def test_the_probability_of_large_counts_and_parquet(command, predict, events):
    assert command(*TABLE, "fold=0")[0] == 0
    run = Path("runs/events/ented/rank=3/fold=0/seed=0")
    events.drop(columns="count").to_parquet("cells.parquet", index=False)
    assert predict(run, "cells.parquet", "out.parquet", "--above=-1", "--above", "0", "--above=3") == (0, "", "")
    out = pd.read_parquet("out.parquet")
    pd.testing.assert_frame_equal(out[["user", "item", "week"]], events.drop(columns="count"))  # of the same types
    assert (out["above_-1"] == 1).all() and (out.above_0 > out.above_3).all()
    # a quantile is the smallest count with so much probability up to it
    assert ((out.above_3 <= 0.05) == (out.upper <= 3)).all() and ((out.above_0 <= 0.95) == (out.lower <= 0)).all()


def test_predictions_do_not_replace_what_they_come_of(command, predict, events):
    assert command(*TABLE, "fold=0")[0] == 0
    run = Path("runs/events/ented/rank=3/fold=0/seed=0")
    before = {file: file.read_bytes() for file in [*run.iterdir(), Path("events.csv")] if file.is_file()}
    for predicted in (run / "predictions.csv", "events.csv", f"{run}/../seed=0/mine.csv"):
        assert "would replace the cells or a part of the run" in predict.mistake(run, "events.csv", predicted)
    assert {file: file.read_bytes() for file in before} == before and not (run / "mine.csv").exists()
    said = predict.mistake(run, "events.csv", "nowhere/out.csv")
    assert said == "error: nowhere/out.csv: there is no folder nowhere\n"


def test_columns_and_names_that_look_the_same(command, predict, events):
    """Where they differ in spaces at the ends and in their Unicode form, also those of a run from elsewhere."""
    composed, decomposed = "Zo\u00eb", "Zoe\u0308"
    events.replace({"user": {"Zoë": decomposed}}).rename(columns={"user": "user "}).to_csv("events.csv", index=False)
    assert command(*TABLE, "fold=0", "dataset.source.modes=[user,item,week]")[0] == 0
    run = Path("runs/events/ented/rank=3/fold=0/seed=0")
    assert composed in (run / "modes.json").read_text()
    cells = pd.DataFrame({"user": [composed, decomposed, f" {composed}"], "item": "tea", "week": 9})
    cells.to_parquet("cells.parquet", index=False)
    for names in (composed, f" {decomposed}"):
        text = (run / "modes.json").read_text()
        (run / "modes.json").write_text(text.replace(f'"{composed}"', f'"{names}"'))
        assert predict(run, "cells.parquet", "out.csv") == (0, "", "")
        assert len(set(pd.read_csv("out.csv")["mean"])) == 1
    cells.assign(**{"user ": "b"}).to_parquet("cells.parquet", index=False)
    assert "cells.parquet has two columns user: rename one" in predict.mistake(run, "cells.parquet", "out.csv")


def test_a_mode_named_like_a_prediction(command, predict, events):
    events.rename(columns={"week": "above_3"}).to_csv("events.csv", index=False)
    assert command(*TABLE, "fold=0")[0] == 0
    run = Path("runs/events/ented/rank=3/fold=0/seed=0")
    assert predict(run, "events.csv", "out.csv", "--above=2")[0] == 0
    assert "above_3 is a mode" in predict.mistake(run, "events.csv", "out.csv", "--above=3")
