"""Reading of every dataset, and its folds."""

import csv
import gzip
import hashlib
import json
import logging
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from dataset_configs import BENCHMARKS, CONF, configured
from omegaconf import OmegaConf
from scipy.io import loadmat

import ented.datasets
from ented.datasets import DBLP, Flights, NpzFolds
from ented.errors import InputError

PACKAGE = Path(ented.datasets.__file__).parent

# Rows of train and test after cleaning, for each fold.
SIZES = {
    "digg": [(1329, 334)] * 5,
    "enron": [(1009, 254)] * 5,
    "article": [(33110, 8278)] * 3 + [(33111, 8277)] * 2,
    "ems": [(1922, 481)] * 3 + [(1923, 480)] * 2,
    "jhu": [(6288, 25148)] + [(6287, 25149)] * 4,
}
DISTINCT_CELLS = {"digg": 1663, "enron": 1263, "article": 41388, "ems": 2403, "jhu": 31436}
# The one cell that the source has twice, its value, and the folds where both rows are in train.
# In the other folds one row is in train and one in test.
REPEATED = {"digg": ((403, 116, 45), 1, {0, 1, 2}), "enron": ((6, 172, 12), 1, {0, 1, 3})}


def as_dict(tensor):
    return dict(zip(map(tuple, tensor.indices.tolist()), tensor.values.tolist(), strict=True))


def raw_dict(rows):
    return {tuple(map(int, row[:-1])): round(row[-1]) for row in rows.tolist()}


# Benchmarks in npz files


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmark_files(name, data_dir):
    """What the files hold, read without the package."""
    shape, kind, fold_0_rows, value_range = BENCHMARKS[name]
    for fold in range(5):
        arrays = np.load(data_dir / name / f"fold-{fold}.npz")
        train, test = arrays["train"], arrays["test"]
        both = np.concatenate([train, test])
        if fold == 0:
            assert (len(train), len(test)) == fold_0_rows
        assert (both[:, :-1].min(axis=0) >= 0).all() and (both[:, :-1].max(axis=0) < shape).all()
        assert (round(both[:, -1].min()), both[:, -1].max()) == value_range
        assert len(raw_dict(both)) == DISTINCT_CELLS[name]
        if kind == "binary":
            assert (train[:, -1].mean(), test[:, -1].mean()) == (0.5, 0.5)

        cells = Counter(map(tuple, train[:, :-1].astype(int).tolist()))
        repeats = {cell for cell, count in cells.items() if count > 1}
        shared = cells.keys() & raw_dict(test)
        if name in REPEATED:
            cell, value, train_folds = REPEATED[name]
            assert (repeats, shared) == (({cell}, set()) if fold in train_folds else (set(), {cell}))
            assert raw_dict(both)[cell] == value
        else:
            assert not repeats and not shared


def test_jhu_files_hold_epsilons_for_zeros(data_dir):
    values = np.load(data_dir / "jhu" / "fold-0.npz")["train"][:, -1]
    assert 8e-16 < values.min() < 9e-16
    assert DISTINCT_CELLS["jhu"] < np.prod(BENCHMARKS["jhu"][0]) == 58752


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmark_folds(name, data_dir, caplog):
    dataset = configured(name, str(data_dir))
    for fold in range(dataset.folds):
        caplog.clear()
        with caplog.at_level(logging.INFO, "ented"):
            train, test = dataset.load(fold)

        arrays = np.load(data_dir / name / f"fold-{fold}.npz")
        test_raw = raw_dict(arrays["test"])
        train_raw = {cell: x for cell, x in raw_dict(arrays["train"]).items() if cell not in test_raw}
        assert as_dict(train) == train_raw and as_dict(test) == test_raw
        assert (len(train), len(test)) == (len(train_raw), len(test_raw)) == SIZES[name][fold]

        if name not in REPEATED:
            assert not caplog.messages
        else:
            repeats, shared = (1, 0) if fold in REPEATED[name][2] else (0, 1)
            assert caplog.messages == [
                f"{name}, fold {fold}: dropped from train {repeats} repeated and {shared} also in test"
            ]


@pytest.mark.parametrize("name", [*BENCHMARKS, "dblp", "flights"])
def test_config(name):
    text = (CONF / f"{name}.yaml").read_text()
    assert text.startswith(f"# python src/train.py dataset={name}\n")
    config, dataset = OmegaConf.create(text), configured(name)
    assert config.name == dataset.name == name
    likelihood = {"binary": "bernoulli", "count": "negative_binomial"}[dataset.kind]
    assert f"likelihood: {likelihood}\n" in text
    assert len(dataset.modes) == len(dataset.shape)
    if name in BENCHMARKS:
        assert (dataset.shape, dataset.kind, dataset.folds) == (*BENCHMARKS[name][:2], 5)
    if name == "flights":
        assert config.paper is None
    else:
        assert all(isinstance(config.paper[key], float) for key in ("lr", "rho"))
        assert isinstance(config.paper.epochs, int) and all(0 < m < 1 for m in config.paper.milestones)


# DBLP


@pytest.fixture(scope="module")
def dblp_file(data_dir):
    """What dblp.mat holds, read field by field: ones of train, held-out ones, test cells and their values."""
    data = loadmat(data_dir / "dblp" / "dblp.mat")["data"][0, 0]
    blocks = [block[0, 0] for block in data["test"].ravel()]
    assert len(blocks) == 50
    for block in blocks:
        assert block["subs"].shape == (2000, 3)
        assert sorted(block["Ymiss"].ravel().tolist()) == [0] * 1800 + [1] * 200
    return (
        data["nzind"].astype(int) - 1,
        data["test_ind_all"].astype(int) - 1,
        np.vstack([block["subs"] for block in blocks]).astype(int) - 1,
        np.concatenate([block["Ymiss"].ravel() for block in blocks]),
    )


def tuples(cells):
    return list(map(tuple, cells.tolist()))


def test_dblp_file(dblp_file):
    ones, held_out, test, values = dblp_file
    assert len(ones) == len(set(tuples(ones))) == 155185
    assert len(held_out) == len(set(tuples(held_out))) == 38797
    assert (len(test), len(set(tuples(test)))) == (100000, 98811)
    assert set(tuples(test[values == 1])) <= set(tuples(held_out))
    for cells in (ones, held_out, test):
        assert cells.min() >= 0 and (cells.max(axis=0) < DBLP.shape).all()


def test_dblp(dblp_file, data_dir, caplog):
    ones, _, test_cells, test_values = dblp_file
    with caplog.at_level(logging.INFO, "ented"):
        train, test = DBLP(str(data_dir)).load(0)
    assert not caplog.messages
    assert test.indices.tolist() == test_cells.tolist() and test.values.tolist() == test_values.tolist()

    assert len(train) == 2 * 155185
    is_one = (train.values == 1).numpy()
    assert train.indices[is_one].tolist() == ones.tolist()
    zeros = train.indices[~is_one].numpy()
    zero_cells = set(tuples(zeros))
    assert len(zero_cells) == len(zeros) == 155185
    assert zero_cells.isdisjoint(tuples(ones)) and zero_cells.isdisjoint(tuples(test_cells))
    # Uniform in each mode: ten bins expect 15518.5 cells each, with standard deviation 118.
    for mode, size in enumerate(DBLP.shape):
        counts = np.bincount(zeros[:, mode] * 10 // size)
        assert len(counts) == 10 and np.abs(counts - 15518.5).max() < 5 * 118

    again, _ = DBLP(str(data_dir)).load(0)
    assert again.indices.equal(train.indices)


def test_dblp_draws_around_the_taken_cells():
    dblp = DBLP()
    dblp.shape = (4, 3, 5)
    cells = np.argwhere(np.ones(dblp.shape))
    taken, free = cells[::2], cells[1::2]
    assert dblp._draw_zeros(len(free), taken).tolist() == free.tolist()


@pytest.fixture
def dblp_text(data_dir, tmp_path):
    """A data folder with dblp.mat and the path of a text file that is still to be written."""
    (tmp_path / "dblp").mkdir()
    (tmp_path / "dblp" / "dblp.mat").symlink_to(data_dir / "dblp" / "dblp.mat")
    return tmp_path, tmp_path / "dblp" / "dblp-large-tensor.txt"


def test_dblp_text_file(dblp_file, dblp_text, caplog):
    ones, _, test_cells, _ = dblp_file
    folder, file = dblp_text
    free = [(0, 0, 0), (9999, 199, 9999)]
    assert set(free).isdisjoint(tuples(ones)) and set(free).isdisjoint(tuples(test_cells))
    table = [(*ones[0], 1), *((*cell, 0) for cell in free), (*free[0], 0), (*test_cells[0], 0)]
    file.write_text("".join("\t".join(map(str, row)) + "\n" for row in table))
    with caplog.at_level(logging.INFO, "ented"):
        train, test = DBLP(str(folder)).load(0)
    assert tuples(train.indices[train.values == 0]) == free
    assert train.indices[train.values == 1].tolist() == ones.tolist()
    assert len(test) == 100000
    assert caplog.messages == [
        f"dblp: the zeros of train are those of {file}",
        "dblp, fold 0: dropped from train 1 repeated and 1 also in test",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\t2\t0\n", "rows have shape (1, 3); give 4 columns"),
        ("0\t0\t0\t0\n1\t2\t0\n", "the number of columns changed from 4 to 3"),
        ("0\t0\t0\t0\n1\t200\t3\t0\n", "row 1, mode 1: index 200 is outside 0..199"),
        ("0\t0\tx\t0\n", "could not convert string 'x'"),
        ("0\t0\t0\t2\n", "the last column holds 2; it must be 0 or 1"),
        ("0\t0\t0\t1\n", "has no zeros; remove it to have zeros drawn"),
    ],
)
def test_dblp_text_file_malformed(dblp_text, text, message):
    folder, file = dblp_text
    file.write_text(text)
    with pytest.raises(InputError) as error:
        DBLP(str(folder)).load(0)
    assert str(error.value).startswith(str(file)) and message in str(error.value)


def test_dblp_text_file_that_contradicts_the_ones(dblp_file, dblp_text):
    folder, file = dblp_text
    file.write_text("\t".join(map(str, dblp_file[0][7])) + "\t0\n")
    with pytest.raises(InputError, match="^dblp, fold 0, train: row 155185: cell .* 0, but 1 in row 7"):
        DBLP(str(folder)).load(0)


# Flights


def test_flights_table():
    with gzip.open(PACKAGE / "flights.csv.gz", "rt") as file:
        header, *rows = csv.reader(file)
    assert header == [*Flights.modes, "late"]
    late = [int(row[-1]) for row in rows]
    assert (len(rows), late.count(0)) == (14747, 2731)
    assert [len({row[mode] for row in rows}) for mode in range(4)] == [16, 104, 12, 19]

    train, test = Flights().load(0)
    assert as_dict(train) | as_dict(test) == {tuple(map(int, row[:-1])): int(row[-1]) for row in rows}


def test_flights_split_is_fixed():
    train, test = Flights().load(0)
    assert (len(train), len(test)) == (11798, 2949)
    assert as_dict(train).keys().isdisjoint(as_dict(test))
    # Checksum of the test rows: a changed split would make published numbers incomparable.
    rows = sorted((*cell, int(value)) for cell, value in as_dict(test).items())
    checksum = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    assert checksum == "80c51d20a42d40c9ac66d9d0b2a0867f11d138d05479c22999b5ac3bc1186c4d"


def test_flights_labels():
    labels = Flights().labels
    assert list(labels) == Flights.modes
    assert tuple(map(len, labels.values())) == Flights.shape
    assert labels["month"] == [str(month) for month in range(1, 13)]
    assert labels["hour"] == [str(hour) for hour in range(5, 24)]
    assert {"AA", "UA"} < set(labels["carrier"]) and {"ATL", "LAX"} < set(labels["destination"])


# A user's own folder of npz files

TRAIN, TEST = [[0, 0, 1], [1, 2, 0], [0, 1, 1]], [[1, 1, 1]]


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Write a fold of a 2 x 3 dataset that has no published checksum, and return the dataset."""
    monkeypatch.delenv("ENTED_DATA", raising=False)
    (tmp_path / "toy").mkdir()

    def write(kind="binary", **arrays):
        np.savez(tmp_path / "toy" / "fold-0.npz", **{k: np.array(v) for k, v in arrays.items()})
        return NpzFolds("toy", [2, 3], ["row", "column"], kind, 1, data_dir=str(tmp_path))

    return write


def test_own_dataset(toy):
    train, test = toy(train=TRAIN, test=TEST).load(0)
    assert as_dict(train) == {(0, 0): 1, (1, 2): 0, (0, 1): 1} and as_dict(test) == {(1, 1): 1}


def test_cell_with_other_value_in_test_stays_in_test(toy):
    train, test = toy(train=TRAIN, test=[[0, 0, 0]]).load(0)
    assert as_dict(train) == {(1, 2): 0, (0, 1): 1} and as_dict(test) == {(0, 0): 0}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"train": TRAIN}, "fold-0.npz is not an npz file with arrays train and test ("),
        ({"train": TRAIN, "test": [None]}, "fold-0.npz is not an npz file with arrays train and test ("),
        ({"train": TRAIN, "test": [[0, 1]]}, "fold-0.npz, test: rows have shape (1, 2); give 3 columns"),
        ({"train": TRAIN, "test": np.zeros((0, 3))}, "fold-0.npz, test: the tensor has no entries"),
        ({"train": np.zeros((0, 3)), "test": TEST}, "fold-0.npz, train: the tensor has no entries"),
        ({"train": TRAIN, "test": [[0, 3, 1]]}, "fold-0.npz, test: row 0, mode 1: index 3 is outside"),
        ({"train": TRAIN, "test": [[0, 0, np.nan]]}, "fold-0.npz, test: row 0: value nan is not finite"),
        ({"train": TRAIN, "test": [[0, 0, -1]]}, "fold-0.npz, test: row 0: value -1 is negative"),
        ({"train": TRAIN, "test": TRAIN}, "toy, fold 0, train: no entry is left"),
        (
            {"train": TRAIN, "test": [[1, 1, 5]]},
            "toy, fold 0: a binary dataset holds the value 5; set dataset.source.kind=count",
        ),
        (
            {"train": [*TRAIN, [0, 1, 0]], "test": TEST},
            "toy, fold 0, train: row 3: cell (0, 1) has the value",
        ),
    ],
)
def test_own_dataset_invalid(toy, arrays, message):
    with pytest.raises(InputError) as error:
        toy(**arrays).load(0)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_counts_need_kind_count(toy):
    _, test = toy(kind="count", train=TRAIN, test=[[1, 1, 5]]).load(0)
    assert test.values.tolist() == [5]


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 a broken zip"])
def test_file_that_is_not_npz(toy, tmp_path, content):
    dataset = toy(train=TRAIN, test=TEST)
    (tmp_path / "toy" / "fold-0.npz").write_bytes(content)
    with pytest.raises(InputError, match="fold-0.npz is not an npz file with arrays train and test"):
        dataset.load(0)


def test_single_array_file(toy, tmp_path):
    dataset = toy(train=TRAIN, test=TEST)
    with open(tmp_path / "toy" / "fold-0.npz", "wb") as file:
        np.save(file, np.array(TRAIN))
    with pytest.raises(InputError, match="fold-0.npz is not an npz file with arrays train and test"):
        dataset.load(0)


@pytest.mark.parametrize("fold", [-1, 1, "all"])
def test_fold_out_of_range(toy, fold):
    with pytest.raises(InputError, match=f"^toy has no fold {fold}; choose from 0$"):
        toy(train=TRAIN, test=TEST).load(fold)
    with pytest.raises(InputError, match=f"^flights has no fold {fold}; choose from 0$"):
        Flights().load(fold)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modes": ["row"]}, "toy: 1 modes for 2 sizes; name each mode once"),
        ({"kind": "counts"}, "toy: kind 'counts' is unknown; choose from binary, count"),
        ({"folds": 0}, "toy: folds is 0; give the number of fold-K.npz files, at least 1"),
    ],
)
def test_inconsistent_description(changes, message):
    with pytest.raises(InputError) as error:
        NpzFolds("toy", [2, 3], **{"modes": ["row", "column"], "kind": "count", "folds": 1} | changes)
    assert str(error.value) == message
