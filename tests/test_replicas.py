"""Replicas trained together, against each of them trained by itself."""

import copy
import json
import shutil

import lightning as L
import pandas as pd
import pytest
import torch
from files_by_hand import write_folds
from torch.testing import assert_close
from training import ALL, assert_same_run, binary, fit, kill, run, train

from ented.datamodule import COODataModule
from ented.errors import InputError
from ented.gaussian_process import ENTEDModule
from ented.likelihoods import Bernoulli, NegativeBinomial
from ented.recorder import History
from ented.replicas import ReplicaData, ReplicasModule
from ented.tensor import COOTensor

SHAPE = (7, 6, 5)
# of each replica: entries (at 15 a batch, one has fewer batches than the others), seed, learning rate, epochs
REPLICAS = [(41, 0, 0.01, 4), (29, 1, 0.03, 6), (45, 2, 0.003, 5)]


def make(kind: str, entries: int, seed: int, lr: float, batch_size=15, held_out=0.0, **settings):
    random = torch.Generator().manual_seed(seed)
    indices = torch.stack([torch.randint(size, (entries,), generator=random) for size in SHAPE], 1)
    values = torch.randint(2 if kind == "binary" else 9, (entries,), generator=random).double()
    tensor = COOTensor(indices, values, SHAPE)
    torch.manual_seed(seed)
    learned = bool(settings)  # all options, or none
    likelihood = Bernoulli() if kind == "binary" else NegativeBinomial(20, learned=learned, quadrature=learned)
    module = ENTEDModule(SHAPE, likelihood, 2, 8, 2, 0.5, 1e-4, lr, 0.3, milestones=(0.3, 0.6), **settings).double()
    return module, COODataModule(tensor, tensor, batch_size, seed, held_out)


def fit_together(modules, datas, histories, folder, *callbacks, **settings):
    data = ReplicaData(datas, histories)
    together = ReplicasModule(modules, data, **settings)
    train(together, data, histories, folder, *callbacks)
    together.unstack()


def assert_same(together, alone, histories, expected):
    for module, single, history, of_single in zip(together, alone, histories, expected, strict=True):
        # rounding, 2e-16, times the condition of k(X, X), at most points / jitter = 8e4, and some steps
        assert_close(module.model.state_dict(), single.model.state_dict(), rtol=1e-9, atol=1e-11)
        rows, of_single = (pd.DataFrame(one.rows).drop(columns="seconds") for one in (history, of_single))
        pd.testing.assert_frame_equal(rows, of_single, rtol=1e-9)
        assert history.seconds > 0


@pytest.mark.parametrize(
    ("kind", "batch_size", "settings"),
    [
        *[("binary", 15, {}), ("binary", "all", {}), ("count", 15, {}), ("count", "all", {})],
        *[("binary", 15, ALL), ("count", 15, ALL), ("count", "all", ALL)],
    ],
)
def test_each_replica_ends_where_it_ends_alone(tmp_path, kind, batch_size, settings):
    alone, expected, together, datas, histories = [], [], [], [], []
    for i, (entries, seed, lr, epochs) in enumerate(REPLICAS):
        module, data = make(kind, entries, seed, lr, batch_size, **settings)
        together.append(copy.deepcopy(module))
        expected.append(fit(module, data, epochs, tmp_path / f"alone {i}"))
        alone.append(module)
        datas.append(data)
        histories.append(History(tmp_path / f"together {i}", epochs))
    fit_together(together, datas, histories, tmp_path)
    assert_same(together, alone, histories, expected)
    assert (tmp_path / "together 2/epochs.csv").read_text().count("\n") == 6


def test_the_search_for_epochs_ends_for_each_by_itself(tmp_path):
    """Each has its own held-out entries, and ends after two epochs without a lower NLL."""
    alone, expected, together, datas, histories = [], [], [], [], []
    for i, (entries, seed, _, _) in enumerate(REPLICAS):
        module, data = make("binary", entries, seed, 0.3, held_out=0.3)
        together.append(copy.deepcopy(module))
        expected.append(fit(module, data, 30, tmp_path / f"alone {i}", patience=2))
        alone.append(module)
        datas.append(data)
        histories.append(History(tmp_path / f"together {i}", 30, patience=2))
    fit_together(together, datas, histories, tmp_path)
    assert_same(together, alone, histories, expected)
    assert len({len(history.rows) for history in histories}) > 1 and len(histories[0].rows) < 30


@pytest.mark.parametrize(("epoch", "settings"), [(3, {}), (5, {}), (6, {}), (3, ALL)])
def test_an_interrupted_fit_goes_on_as_if_it_had_not_been(tmp_path, epoch, settings):
    """While all train or one has ended, and when all have."""

    class Interrupt(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.current_epoch == epoch and batch_idx == 1:
                raise OSError("interrupted")

    def start(folder, *callbacks):
        pairs = [make("count", entries, seed, lr, **settings) for entries, seed, lr, _ in REPLICAS]
        modules, datas = zip(*pairs, strict=True)
        histories = [History(folder, epochs) for *_, epochs in REPLICAS]
        fit_together(list(modules), list(datas), histories, folder, *callbacks)
        return modules, histories

    expected, rows = start(tmp_path / "whole")
    if epoch < 6:
        with pytest.raises(OSError, match="interrupted"):
            start(tmp_path / "parts", Interrupt())
    else:
        start(tmp_path / "parts")
    actual, resumed_rows = start(tmp_path / "parts")
    for module, single in zip(actual, expected, strict=True):
        assert_close(module.state_dict(), single.state_dict(), rtol=0, atol=0)
    for history, one in zip(resumed_rows, rows, strict=True):
        assert [row | {"seconds": 0} for row in history.rows] == [row | {"seconds": 0} for row in one.rows]


def test_counts_that_start_at_different_numbers_make_no_replicas():
    pairs = [make("count", *replica[:3]) for replica in REPLICAS]
    for (module, _), smallest in zip(pairs, (0, 1, 0), strict=True):
        module.model.likelihood = NegativeBinomial(20, smallest)
    modules, datas = zip(*pairs, strict=True)
    with pytest.raises(InputError, match="set likelihood.smallest=0"):
        ReplicasModule(modules, ReplicaData(datas, [History(None, 1)] * 3))


def test_a_compiled_step_trains_the_same_replicas(tmp_path):
    results = []
    for compile in False, True:
        pairs = [make("count", entries, seed, lr, **ALL) for entries, seed, lr, _ in REPLICAS]
        modules, datas = map(list, zip(*pairs, strict=True))
        histories = [History(tmp_path / str(compile), 2) for _ in REPLICAS]
        fit_together(modules, datas, histories, tmp_path / str(compile), compile=compile)
        results.append([module.state_dict() for module in modules])
    assert_close(*results, rtol=1e-7, atol=1e-9)


# from the command line


SETTINGS = [
    "seed=[0,3]",
    "lr=[0.01,0.1]",
    "epochs=9",
    "protocol.patience=4",
    "model.annealing=false",
    "batch_size=13",
    "checkpoint_seconds=0",
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Two folds and two seeds, one by one, each with two learning rates to choose from."""
    folder = tmp_path_factory.mktemp("alone")
    write_folds(folder, "ones", 0, 1)
    done = run(folder / "runs", 1, *binary(folder), *SETTINGS)
    assert done.returncode == 0, done.stderr
    return folder


def run_folders(runs_dir):
    return sorted(runs_dir.rglob("seed=*"))


@pytest.mark.parametrize("moment", ["never", "search", "fit", "test"])
def test_a_command_with_replicas_makes_the_runs_that_it_makes_without(alone, tmp_path, moment):
    """Also where it was killed and started again."""
    command = [*binary(alone), *SETTINGS, "replicas=folds"]
    if moment != "never":
        assert run(tmp_path, 1, *command, *kill(moment)).returncode == -9
    done = run(tmp_path, 1, *command)
    assert done.returncode == 0, done.stderr
    expected, actual = run_folders(alone / "runs"), run_folders(tmp_path)
    assert len(actual) == 4
    for one, other in zip(actual, expected, strict=True):
        assert_same_run(one, other)
        assert {file.name for file in one.iterdir()} == {file.name for file in other.iterdir()}
        chosen, rates = (json.loads((folder / "holdout/chosen.json").read_text()) for folder in (one, other))
        assert chosen == pytest.approx(rates, rel=1e-6)
        assert json.loads((one / "metrics.json").read_text())["command"].count("seed=") == 1
    for seed in 0, 3:
        summary, of_alone = (
            json.loads((folder / f"ones/ented/rank=2/summary-seed={seed}.json").read_text())["metrics"]
            for folder in (tmp_path, alone / "runs")
        )
        for name, value in summary.items():
            assert value == pytest.approx(of_alone[name], rel=1e-6)


@pytest.mark.parametrize("moment", ["search", "predict"])
def test_replicas_that_were_killed_can_be_finished_one_by_one(alone, tmp_path, moment):
    command = [*binary(alone), *SETTINGS]
    assert run(tmp_path, 1, *command, "replicas=folds", *kill(moment)).returncode == -9
    done = run(tmp_path, 1, *command)
    assert done.returncode == 0, done.stderr
    for one, other in zip(run_folders(tmp_path), run_folders(alone / "runs"), strict=True):
        assert_same_run(one, other)
    assert not list(tmp_path.rglob("replicas-*"))


def test_what_is_finished_stays_as_it_is(alone, tmp_path):
    """Where another run is missing; and with force, where the data of another are damaged."""
    shutil.copytree(alone / "runs", tmp_path / "runs")
    first, *others = run_folders(tmp_path / "runs")
    shutil.rmtree(first)
    before = {file: file.read_bytes() for folder in others for file in folder.rglob("*") if file.is_file()}
    done = run(tmp_path / "runs", 1, *binary(alone), *SETTINGS, "replicas=folds")
    assert done.returncode == 0, done.stderr
    assert_same_run(first, run_folders(alone / "runs")[0])

    shutil.copytree(alone / "ones", tmp_path / "ones")
    (tmp_path / "ones/fold-1.npz").write_bytes(b"damaged")
    damaged = run(tmp_path / "runs", 1, *binary(tmp_path), *SETTINGS, "replicas=folds", "force=true")
    assert damaged.returncode == 1 and damaged.stderr.count("\n") == 1
    assert {file: file.read_bytes() for file in before} == before


def test_the_learning_rate_of_the_lowest_held_out_score_is_chosen(alone):
    for folder in run_folders(alone / "runs"):
        lowest = {lr: pd.read_csv(folder / f"holdout/lr={lr}/epochs.csv").val_nll.min() for lr in (0.01, 0.1)}
        chosen = json.loads((folder / "holdout/chosen.json").read_text())
        assert chosen["lr"] == min(lowest, key=lowest.get)
        assert chosen["val_nll"] == pytest.approx(min(lowest.values()))
