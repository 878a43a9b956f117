"""Entries in shards: every one once an epoch, in an order that the seed decides."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from files_by_hand import table, write
from training import fit

import ented.shards
from ented.datamodule import EpochBatches
from ented.errors import InputError
from ented.gaussian_process import ENTEDModule
from ented.likelihoods import NegativeBinomial
from ented.shards import InOrder, Lane, Minibatches, NpyBlock, ParquetBlock, Shards, StreamDataModule
from ented.tensor import COOTensor

SHAPE = (50_000, 7)


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
