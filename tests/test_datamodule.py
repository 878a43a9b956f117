from types import SimpleNamespace

import pytest
import torch

from ented.datamodule import EVALUATION_BATCH, COODataModule, EpochBatches, generator
from ented.errors import InputError
from ented.tensor import COOTensor


def make(n, start=0):
    """Entries that can be told apart by their value and by their index."""
    rows = torch.arange(start, start + n)
    return COOTensor(torch.stack([rows, rows % 7], 1), rows.double(), (20_000, 7))


def epoch(batches, number=0):
    batches.set_epoch(number)
    return [rows.tolist() for rows in batches]


def values(loader):
    return torch.cat([x for _, x in loader]).tolist()


# minibatches of an epoch


@pytest.mark.parametrize(("entries", "batch_size"), [(10, 3), (12, 4), (13, 4), (1, 5), (7, 7), (7, 100), (101, 10)])
def test_every_entry_comes_once_in_batches_of_nearly_equal_size(entries, batch_size):
    sampler = EpochBatches(entries, batch_size, seed=0)
    batches = epoch(sampler)
    sizes = [len(batch) for batch in batches]
    assert sorted(sum(batches, [])) == list(range(entries))
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= batch_size
    # no more batches than needed
    assert len(sampler) == len(batches) and batch_size * (len(batches) - 1) < entries


def test_order_depends_on_seed_and_epoch_alone():
    reference = epoch(EpochBatches(50, 8, seed=3), 5)
    torch.manual_seed(1)
    sampler = EpochBatches(50, 8, seed=3)
    first = epoch(sampler, 0)
    torch.rand(10)
    assert epoch(sampler, 5) == epoch(sampler, 5) == reference
    assert epoch(sampler, 0) == first


def test_orders_of_other_epochs_and_seeds_differ():
    orders = [tuple(sum(epoch(EpochBatches(50, 8, seed), e), [])) for seed in range(5) for e in range(5)]
    assert len(set(orders)) == 25
    assert tuple(range(50)) not in orders


def test_an_epoch_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    epoch(EpochBatches(50, 8, seed=0))
    COODataModule(make(50), make(5), 8, seed=0, held_out=0.2)
    assert torch.equal(torch.get_rng_state(), before)


def test_generator_depends_on_every_number():
    seeds = {generator(a, b).initial_seed() for a in range(10) for b in range(10)}
    assert len(seeds) == 100


# several processes


def in_each_process(data, processes):
    """The data module, once as each process sees it."""
    for process in range(processes):
        data.trainer = SimpleNamespace(global_rank=process, world_size=processes)
        yield data


@pytest.mark.parametrize("batch_size", [8, 50, "all"])
@pytest.mark.parametrize("processes", [2, 3])
def test_parts_of_all_processes_are_the_batches_of_one(batch_size, processes):
    data = COODataModule(make(50), make(5), batch_size, seed=0)
    whole = [x.tolist() for _, x in data.train_dataloader()]
    loaders = [each.train_dataloader() for each in in_each_process(data, processes)]
    for batch, (expected, *parts) in enumerate(zip(whole, *loaders, strict=True)):
        parts = [x.tolist() for _, x in parts]
        assert sum(parts, []) == expected
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        assert data.scale(batch) == 50 / len(expected)


@pytest.mark.parametrize("processes", [2, 3])
def test_each_entry_is_evaluated_by_one_process(processes):
    n = 2 * EVALUATION_BATCH + 5
    data = COODataModule(make(100), make(n), 8, seed=0, held_out=0.1)
    validation, test = data.validation.values.tolist(), list(range(n))
    for loader, expected in (data.val_dataloader, validation), (data.test_dataloader, test):
        parts = [values(loader()) for _ in in_each_process(data, processes)]
        assert sum(parts, []) == expected
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    # what is written to predictions.csv is not divided
    assert all(values(each.predict_dataloader()) == test for each in in_each_process(data, processes))


# parts of the data


@pytest.mark.parametrize(("holdout", "size"), [(0.1, 10), (0.25, 25), (0.018, 2), (0.99, 99)])
def test_holdout_is_a_partition_of_the_training_entries(holdout, size):
    data = COODataModule(make(100), make(5, start=100), 8, seed=0, held_out=holdout)
    train, validation = values(data.train_dataloader()), values(data.val_dataloader())
    assert len(validation) == size
    assert sorted(train + validation) == list(range(100))
    assert validation != sorted(validation)  # drawn at random
    assert values(data.test_dataloader()) == [100, 101, 102, 103, 104]


def test_holdout_depends_on_the_seed_alone():
    def held_out(seed):
        torch.rand(3)
        data = COODataModule(make(100), make(5), 8, seed=seed, held_out=0.2)
        return tuple(sorted(data.validation.values.tolist()))

    assert held_out(1) == held_out(1)
    assert len({held_out(seed) for seed in range(10)}) == 10


def test_without_holdout_all_entries_are_trained_on():
    data = COODataModule(make(20), make(5), 8, seed=0)
    assert sorted(values(data.train_dataloader())) == list(range(20))
    assert data.val_dataloader() == []


@pytest.mark.parametrize(
    ("entries", "holdout"), [(100, 0.004), (100, 0.996), (1, 0.4), (1, 0.6), (10, 1.0), (10, -0.2)]
)
def test_an_empty_part_is_refused(entries, holdout):
    with pytest.raises(InputError, match=f"holding out {holdout:g} of {entries} training entries leaves an empty part"):
        COODataModule(make(entries), make(5), 8, seed=0, held_out=holdout)


# batches


def test_batches_hold_the_cells_and_values_of_their_rows():
    data = COODataModule(make(20), make(10), 8, seed=0, held_out=0.3)
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()):
        for indices, x in loader:
            assert indices.dtype == torch.int64
            assert indices.tolist() == [[value, value % 7] for value in x.tolist()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_training_values_have_the_models_dtype_and_evaluation_is_in_float64(dtype):
    data = COODataModule(make(20), make(10), 8, seed=0, held_out=0.2, dtype=dtype)
    assert all(x.dtype == dtype for _, x in data.train_dataloader())
    for loader in (data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()):
        assert all(x.dtype == torch.float64 for _, x in loader)


def test_batch_size_is_that_of_training():
    data = COODataModule(make(20), make(10), 8, seed=0)
    assert [len(x) for _, x in data.train_dataloader()] == [7, 7, 6]
    assert [len(x) for _, x in data.test_dataloader()] == [10]


def test_evaluation_keeps_the_order_over_several_batches():
    n = EVALUATION_BATCH + 5
    data = COODataModule(make(20), make(n), 8, seed=0)
    assert [len(x) for _, x in data.test_dataloader()] == [EVALUATION_BATCH, 5]
    assert values(data.test_dataloader()) == list(range(n))


def test_training_order_follows_the_epoch_set_by_the_trainer():
    loader = COODataModule(make(50), make(5), 8, seed=0).train_dataloader()
    first = values(loader)
    loader.sampler.set_epoch(1)
    second = values(loader)
    assert first != second and sorted(first) == sorted(second)


def test_epoch_counts_when_the_first_batch_is_asked_for():
    """A resumed fit makes the iterator before it sets the epoch."""
    sampler = EpochBatches(50, 8, seed=0)
    iterator = iter(sampler)
    sampler.set_epoch(3)
    assert [rows.tolist() for rows in iterator] == epoch(EpochBatches(50, 8, seed=0), 3)
