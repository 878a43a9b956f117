"""Runs on entries in shards: what they leave, and a user's mistakes."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from files_by_hand import table, write
from training import Command, run

from ented.gaussian_process import ENTEDModule


@pytest.fixture
def command(monkeypatch, capfd, tmp_path) -> Command:
    monkeypatch.chdir(tmp_path)
    return Command(capfd)


@pytest.fixture
def events(tmp_path) -> np.ndarray:
    """events/ with 90 training and 30 test entries of a tensor of counts, six by five by four; and as npz file."""
    random = np.random.default_rng(0)
    cells = np.array([(i, j, k) for i in range(6) for j in range(5) for k in range(4)])
    rows = np.column_stack([cells, random.poisson(3, len(cells))])[random.permutation(len(cells))]
    write(tmp_path / "events/train", rows[:90], 3)
    write(tmp_path / "events/test", rows[90:], 1, "parquet")
    np.savez(tmp_path / "events/fold-0.npz", train=rows[:90], test=rows[90:])
    return rows


@pytest.fixture
def ones(events, tmp_path) -> np.ndarray:
    """The same with zeros and ones."""
    rows = events // [1, 1, 1, 3] % [9, 9, 9, 2]
    write(tmp_path / "events/train", rows[:90], 3)
    write(tmp_path / "events/test", rows[90:], 1, "parquet")
    return rows


STREAM = ["dataset=stream", "dataset.source.folder=events", "dataset.source.shape=[6,5,4]"]
SMALL = ["inducing=8", "rank=2", "lr=0.01"]
# draws of factors, and where inducing inputs start, go with the place of an entry among the others
ANY_ORDER = ["model.factors=map", "model.inducing_inputs=gaussian"]


def results(folder: Path) -> tuple[pd.DataFrame, dict]:
    (file,) = folder.rglob("metrics.json")
    return pd.read_csv(file.with_name("predictions.csv")), json.loads(file.read_text())["metrics"]


BINARY = "dataset.source.kind=binary likelihood=bernoulli"


@pytest.mark.parametrize(
    "model", ["ented", "ented model.sparse_gradients=true", "gptf_pg", "gptf", "costco", f"sbtr {BINARY}"]
)
def test_a_run_leaves_what_others_do(small, command, tmp_path, model, request):
    events = request.getfixturevalue("ones" if "bernoulli" in model else "events")
    code, out, err = command(*STREAM, *SMALL, *f"model={model}".split(), "epochs=3", "batch_size=16")
    assert code == 0, err
    predictions, metrics = results(tmp_path)
    assert predictions[["mode-0", "mode-1", "mode-2", "value"]].to_numpy().tolist() == events[90:].tolist()
    assert metrics and all(np.isfinite(value) for value in metrics.values())
    assert "90 training entries, 30 test entries" in out
    assert "overall mean" in out and "main effects" not in out  # which takes all entries at once


def test_one_batch_is_that_of_memory(command, events, tmp_path):
    """With all entries in each batch, only their order differs."""
    one = [*SMALL, *ANY_ORDER, "batch_size=90", "epochs=4"]
    memory = ["dataset=ems", "dataset.name=events", "data_dir=.", "dataset.source.url=null", "dataset.source.folds=1"]
    memory += ["dataset.source.modes=[mode-0,mode-1,mode-2]", "dataset.source.shape=[6,5,4]"]
    for settings, folder in ((memory, "memory"), (STREAM, "stream")):
        code, _, err = command(*settings, *one, "protocol.held_out=0", f"runs_dir={folder}")
        assert code == 0, err
    (expected, expected_metrics), (actual, metrics) = results(tmp_path / "memory"), results(tmp_path / "stream")
    pd.testing.assert_frame_equal(actual, expected, rtol=1e-4)
    assert metrics == pytest.approx(expected_metrics, rel=1e-6)


def test_two_processes_make_the_run_of_one(events, tmp_path, monkeypatch):
    """In one batch; a smaller one holds other entries where there are other processes."""
    monkeypatch.chdir(tmp_path)
    for processes, trainer in (1, "cpu"), (2, "ddp"):
        settings = [*STREAM, *SMALL, *ANY_ORDER, "epochs=2", "batch_size=100", "protocol.held_out=0"]
        done = run(tmp_path / trainer, processes, *settings, f"trainer={trainer}", "trainer.accelerator=cpu")
        assert done.returncode == 0, done.stderr
    (expected, expected_metrics), (actual, metrics) = results(tmp_path / "cpu"), results(tmp_path / "ddp")
    pd.testing.assert_frame_equal(actual, expected, rtol=1e-4)
    assert metrics == pytest.approx(expected_metrics, rel=1e-6)


def replace(file: str, *, cell: tuple[int, int], value: int):
    def fault(folder: Path) -> None:
        rows = np.load(folder / file)
        rows[cell] = value
        np.save(folder / file, rows)

    return fault


def text_column(folder: Path) -> None:
    pq.write_table(pa.table({"a": [1], "b": [1], "c": ["one"], "value": [1]}), folder / "test/9.parquet")


def absent_value(folder: Path) -> None:
    pq.write_table(pa.table({"a": [1, 1], "b": [1, 1], "c": [1, 2], "value": [1, None]}), folder / "test/9.parquet")


def zeros(folder: Path) -> None:
    write(folder / "train", np.zeros((90, 4)), 3)
    write(folder / "test", np.zeros((9, 4)), 1, "parquet")


# what is wrong -> how the data are made so, settings, what the line says
MISTAKES = {
    "no folder setting": (None, ["dataset=stream"], "dataset.source.folder has no default"),
    "no shape setting": (None, STREAM[:2], "dataset.source.shape has no default"),
    "one size": (None, [*STREAM, "dataset.source.shape=6"], "dataset.source.shape=6: give the size of each mode"),
    "no folder": (None, [*STREAM, "dataset.source.folder=nope"], "nope/train is not a folder"),
    "letters in the shape": (None, [*STREAM, "dataset.source.shape=[6,5,a]"], "give whole numbers from 1"),
    "both kinds": (
        lambda folder: pq.write_table(pa.table({"a": [1]}), folder / "train/9.parquet"),
        STREAM,
        "events/train has npy and Parquet files: keep one kind",
    ),
    "folders": (
        lambda folder: write(folder / "test/week=1", table(1), 1, "parquet"),
        STREAM,
        "events/test/week=1 has files that would not be read",
    ),
    "index": (
        lambda folder: pd.DataFrame(np.ones((9, 4)), index=[*range(9, 0, -1)], columns=list("abcd")).to_parquet(
            folder / "test/9.parquet"
        ),
        STREAM,
        "test/9.parquet: __index_level_0__ is the index of a pandas table: write it with index=False",
    ),
    "no shards": (lambda folder: (folder / "test/0.parquet").unlink(), STREAM, "events/test has no entries"),
    "no rows": (
        lambda folder: np.save(folder / "test/0.npy", []) or (folder / "test/0.parquet").unlink(),
        STREAM,
        "events/test has no entries",
    ),
    "outside": (
        replace("train/1.npy", cell=(8, 2), value=4),
        STREAM,
        "train/1.npy, in the rows from 7: row 1, mode 2: index",
    ),
    "value": (
        replace("train/2.npy", cell=(0, 3), value=-1),
        STREAM,
        "train/2.npy, in the rows from 0: row 0: value -1",
    ),
    "text": (text_column, STREAM, "test/9.parquet: column c holds string; give numbers"),
    "null": (absent_value, STREAM, "test/9.parquet, in row group 0: row 1: value nan is not finite"),
    "names": (lambda folder: np.save(folder / "train/9.npy", np.array([["a"] * 4])), STREAM, "train/9.npy"),
    "scalar": (lambda folder: np.save(folder / "train/9.npy", 3), STREAM, "train/9.npy is not an npy file"),
    "one axis": (
        lambda folder: np.save(folder / "train/9.npy", np.arange(4)),
        STREAM,
        "9.npy, in the rows from 0: rows have",
    ),
    "columns": (None, [*STREAM, "dataset.source.shape=[6,5]"], "row group 0: rows have shape (7, 4)"),
    "damaged": (
        lambda folder: (folder / "test/9.parquet").write_bytes(b"PAR1PAR1"),
        STREAM,
        "9.parquet is not a Parquet file",
    ),
    "cut": (
        lambda folder: (folder / "train/9.npy").write_bytes(b"\x93NUMPY"),
        STREAM,
        "train/9.npy is not an npy file",
    ),
    "binary": (None, [*STREAM, "dataset.source.kind=binary"], "a binary dataset holds the value"),
    "no likelihood": (
        zeros,
        [*STREAM, "dataset.source.kind=binary"],
        "dataset=stream is of kind binary: use likelihood=bernoulli",
    ),
    "likelihood": (None, [*STREAM, "likelihood=bernoulli"], "use likelihood=negative_binomial"),
    "modes": (None, [*STREAM, "dataset.source.modes=[a,b]"], "2 modes for 3 sizes"),
    "workers": (
        None,
        [*STREAM, "dataset.source.workers=-1"],
        "dataset.source.workers=-1: it must be a whole number from 0",
    ),
    "protocol": (None, [*STREAM, "protocol=paper"], "no published settings"),
    "batch": (None, [*STREAM, "batch_size=all"], "give a number"),
    "replicas": (None, [*STREAM, "replicas=folds"], "the entries of replicas are in memory, unlike dataset=stream"),
    "method": (None, [*STREAM, "model=gcp"], "choose model=ented, gptf_pg, gptf, costco or sbtr"),
    "method with a batch size": (None, [*STREAM, "model=gcp", "batch_size=9"], "choose model=ented, gptf_pg, gptf,"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_with_one_line_and_nothing_written(small, command, events, tmp_path, mistake):
    spoil, settings, message = MISTAKES[mistake]
    if spoil:
        spoil(tmp_path / "events")
    code, _, err = command(*settings)
    assert code == 1 and err.startswith("error: ") and err.count("\n") == 1, err
    assert message in err
    assert [path.name for path in tmp_path.iterdir()] == ["events"]


def test_the_methods_that_are_named_take_minibatches():
    from baselines.costco import CoSTCo
    from baselines.gptf import GPTF
    from baselines.sbtr import SBTR

    assert not any(method.all_entries for method in (ENTEDModule, GPTF, CoSTCo, SBTR))
