"""Entries in shards: every one once an epoch, in an order that the seed decides, and what a run makes of them."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from test_train import Command
from training import fit, run

import ented.shards
from ented.datamodule import EpochBatches
from ented.gaussian_process import ENTEDModule
from ented.likelihoods import NegativeBinomial
from ented.shards import InOrder, Lane, Minibatches, NpyBlock, ParquetBlock, Shards, StreamDataModule
from ented.tensor import COOTensor, InputError

SHAPE = (50_000, 7)


def table(n: int, start: int = 0) -> np.ndarray:
    """Rows that can be told apart by their value and by their index."""
    number = np.arange(start, start + n)
    return np.column_stack([number, number % 7, number])


def write(folder: Path, rows: np.ndarray, shards: int = 1, form: str = "npy", group: int = 7) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(np.array_split(rows, shards)):
        if form == "npy":
            np.save(folder / f"{number}.npy", part)
        else:
            columns = {f"c{d}": column for d, column in enumerate(part.T)}
            pq.write_table(pa.table(columns), folder / f"{number}.parquet", row_group_size=group)
    return folder


@pytest.fixture
def small(monkeypatch):
    """Blocks of 7 rows, which are shuffled 20 at a time."""
    monkeypatch.setattr(ented.shards, "BLOCK", 7)
    monkeypatch.setattr(ented.shards, "BUFFER", 20)


def lane(shards, batch_size, process=0, processes=1, worker=0, workers=1, seed=0, epoch=0) -> list[list[int]]:
    """The values in the batches of one worker, without starting it."""
    batches = EpochBatches(len(shards), batch_size, seed, process, processes)
    batches.set_epoch(epoch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ented.shards, "get_worker_info", lambda: SimpleNamespace(id=worker, num_workers=workers))
        return [values.int().tolist() for _, values in Lane(shards, batches, torch.float64)]


def epoch(loader: Minibatches, number: int = 0) -> list[list[int]]:
    loader.sampler.set_epoch(number)
    return [values.int().tolist() for _, values in loader]


def minibatches(shards, batch_size=8, seed=0, workers=0) -> Minibatches:
    return Minibatches(shards, EpochBatches(len(shards), batch_size, seed), torch.float64, workers)


# an epoch


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize(("entries", "shards"), [(1, 1), (2, 1), (20, 1), (101, 4), (98, 7)])
@pytest.mark.parametrize("batch_size", [1, 3, 8, 200])
def test_every_entry_comes_once_in_batches_of_the_sizes_in_memory(
    small, tmp_path, entries, shards, batch_size, processes, workers
):
    stream = Shards.open(write(tmp_path, table(entries), shards), SHAPE)
    seen = []
    for process in range(processes):
        lanes = [lane(stream, batch_size, process, processes, worker, workers) for worker in range(workers)]
        sizes = [len(rows) for rows in EpochBatches(entries, batch_size, 0, process, processes)]
        assert [len(batches) for batches in lanes] == [len(sizes[worker::workers]) for worker in range(workers)]
        assert [len(lanes[i % workers][i // workers]) for i in range(len(sizes))] == sizes
        seen += sum((sum(batches, []) for batches in lanes), [])
    assert sorted(seen) == list(range(entries))


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_workers_take_turns(small, tmp_path, workers):
    stream = Shards.open(write(tmp_path, table(101), 4), SHAPE)
    lanes = [lane(stream, 8, worker=worker, workers=max(1, workers)) for worker in range(max(1, workers))]
    batches = epoch(minibatches(stream, workers=workers))
    assert batches == [lanes[i % len(lanes)][i // len(lanes)] for i in range(13)]


def test_order_depends_on_seed_and_epoch_alone(small, tmp_path):
    stream = Shards.open(write(tmp_path, table(50)), SHAPE)
    loader = minibatches(stream, seed=3)
    first, reference = epoch(loader, 0), epoch(loader, 5)
    torch.manual_seed(1)
    assert epoch(minibatches(Shards.open(tmp_path, SHAPE), seed=3), 5) == reference
    assert epoch(loader, 0) == first
    orders = {tuple(sum(epoch(minibatches(stream, seed=seed), e), [])) for seed in range(4) for e in range(4)}
    assert len(orders) == 16


@pytest.mark.parametrize("workers", [0, 1])
def test_epoch_counts_when_the_first_batch_is_asked_for(small, tmp_path, workers):
    """A resumed fit makes the iterator before it sets the epoch."""
    stream = Shards.open(write(tmp_path, table(50)), SHAPE)
    loader = minibatches(stream, workers=workers)
    iterator = iter(loader)
    loader.sampler.set_epoch(3)
    assert [values.int().tolist() for _, values in iterator] == epoch(minibatches(stream), 3)


def test_batches_hold_the_cells_and_values_of_their_rows_in_the_models_dtype(small, tmp_path):
    data = StreamDataModule(
        Shards.open(write(tmp_path, table(60)), SHAPE), COOTensor.from_rows(table(5), SHAPE), 8, 0, 0.2, torch.float32
    )
    for loader, dtype in ((data.train_dataloader(), torch.float32), (data.val_dataloader(), torch.float64)):
        for indices, values in loader:
            assert (indices.dtype, values.dtype) == (torch.int64, dtype)
            assert indices.tolist() == [[value, value % 7] for value in values.tolist()]


def test_sorted_shards_are_mixed(monkeypatch, tmp_path):
    monkeypatch.setattr(ented.shards, "BLOCK", 50)
    monkeypatch.setattr(ented.shards, "BUFFER", 800)
    batches = epoch(minibatches(Shards.open(write(tmp_path, table(8000), 3), SHAPE), batch_size=100))
    order = np.concatenate(batches)
    assert abs(np.corrcoef(order, np.arange(8000))[0, 1]) < 0.15
    # neighbours of the table are far from one another, and a batch holds entries of many blocks
    assert np.median(abs(np.diff(order))) > 500
    assert np.mean([len({value // 50 for value in batch}) for batch in batches]) > 12


def test_what_is_read_ahead_is_bounded_and_a_block_is_read_once(small, tmp_path, monkeypatch):
    stream = Shards.open(write(tmp_path, table(300), 2, "parquet"), SHAPE)
    read = []
    rows = ParquetBlock.rows
    monkeypatch.setattr(ParquetBlock, "rows", lambda block: read.append(block) or rows(block))
    given = 0
    for _, values in minibatches(stream):
        assert sum(map(len, read)) - given < 20 + 7
        given += len(values)
    assert len(read) == len({(block.file, block.group) for block in read}) == len(stream.blocks) == 44


def test_npy_and_parquet_agree(small, tmp_path):
    npy = Shards.open(write(tmp_path / "npy", table(50).astype(np.int16), 3), SHAPE)
    columns = Shards.open(write(tmp_path / "parquet", table(50).astype(float), 3, "parquet"), SHAPE)
    assert isinstance(npy.blocks[0], NpyBlock) and isinstance(columns.blocks[0], ParquetBlock)
    assert epoch(minibatches(npy)) == epoch(minibatches(columns))
    assert torch.equal(npy.load().indices, columns.load().indices)
    assert npy.load().indices.tolist() == table(50)[:, :2].tolist()


def test_only_shards_are_read_and_an_empty_one_has_nothing(small, tmp_path):
    write(tmp_path, table(29), 2)
    np.save(tmp_path / "2.npy", table(0))
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / ".0.npy.crc").touch()
    (tmp_path / ".hidden.npy").touch()
    stream = Shards.open(tmp_path, SHAPE)
    assert stream.load().values.tolist() == list(range(29)) and len(stream) == 29 and stream.range == (0, 28)


# parts


@pytest.mark.parametrize(("share", "size"), [(0.1, 10), (0.25, 25), (0.018, 2), (0.99, 99)])
def test_holdout_is_a_partition_of_the_training_entries(small, tmp_path, share, size):
    train, test = Shards.open(write(tmp_path, table(100), 3), SHAPE), COOTensor.from_rows(table(5), SHAPE)
    data = StreamDataModule(train, test, 8, 0, share)
    fitted = sum(epoch(data.train_dataloader()), [])
    validation = torch.cat([values for _, values in data.val_dataloader()]).tolist()
    assert len(validation) == len(data.validation) == size and len(fitted) == len(data.train) == 100 - size
    assert sorted(fitted + validation) == list(range(100))
    for first in range(0, 34, 7):  # from each block in proportion
        count = sum(first <= value < first + 7 for value in validation if value < 34)
        assert abs(count - share * min(7, 34 - first)) < 1
    again = StreamDataModule(train, test, 8, 0, share).validation.load().values
    other = StreamDataModule(train, test, 8, 1, share).validation.load().values
    assert again.tolist() == data.validation.load().values.tolist() != other.tolist()


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_processes_divide_the_validation(small, tmp_path, monkeypatch, processes):
    monkeypatch.setattr(ented.shards, "EVALUATION_BATCH", 4)
    stream = Shards.open(write(tmp_path, table(50), 3), SHAPE)
    parts = [[len(x) for _, x in InOrder(stream, process, processes)] for process in range(processes)]
    assert max(map(max, parts)) == 4 and max(map(sum, parts)) - min(map(sum, parts)) <= 1
    values = [x for process in range(processes) for _, x in InOrder(stream, process, processes)]
    assert torch.cat(values).tolist() == list(range(50))


def test_a_sample_has_all_entries_where_they_fit(small, tmp_path):
    few = Shards.open(write(tmp_path / "few", table(19)), SHAPE).sample()
    assert sorted(few.values.tolist()) == list(range(19))
    many = Shards.open(write(tmp_path / "many", table(200)), SHAPE)
    sample = many.sample()
    assert len(set(sample.values.tolist())) == len(sample) == 20
    assert torch.equal(sample.values, many.sample().values) and sample.values.max() > 40


def test_rows_are_counted_as_in_memory(small, tmp_path):
    shards, in_memory = Shards.open(write(tmp_path, table(50), 3), SHAPE), COOTensor.from_rows(table(50), SHAPE)
    assert torch.equal(shards.degrees(), in_memory.degrees())
    (rest, held_out) = shards.split(10, seed=0)
    assert torch.equal(rest.degrees() + held_out.degrees(), in_memory.degrees())


def test_an_empty_part_is_refused(small, tmp_path):
    train, test = Shards.open(write(tmp_path, table(10)), SHAPE), COOTensor.from_rows(table(5), SHAPE)
    with pytest.raises(InputError, match="holding out 0.01 of 10 training entries leaves an empty part"):
        StreamDataModule(train, test, 8, 0, 0.01)


def test_an_interrupted_fit_ends_with_the_same_numbers(small, tmp_path):
    random = np.random.default_rng(0)
    rows = np.column_stack([random.integers(0, 9, 200), random.integers(0, 5, 200), random.poisson(2, 200)])
    write(tmp_path / "train", rows, 3)

    def go_on(folder: str, epochs: int) -> dict:
        torch.manual_seed(0)
        module = ENTEDModule((9, 5), NegativeBinomial(20), 2, 8, 2, 0.5, 1e-4, 1e-2, 0.1).double()
        train, test = Shards.open(tmp_path / "train", (9, 5)), COOTensor.from_rows(rows[:20], (9, 5))
        fit(module, StreamDataModule(train, test, 16, 0, 0.1), epochs, tmp_path / folder)
        return module.state_dict()

    whole = go_on("whole", 5)
    go_on("cut", 2)
    torch.testing.assert_close(go_on("cut", 5), whole, rtol=0, atol=0)


# runs


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


@pytest.mark.parametrize(
    "model", ["ented", "ented model.sparse_gradients=true", "gptf_pg", "gptf", "costco", "sbtr likelihood=bernoulli"]
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
        "test",
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
        "dataset=stream is binary: use likelihood=bernoulli",
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
