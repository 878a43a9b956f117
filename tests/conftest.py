import os
from pathlib import Path

import pytest
import torch
from files_by_hand import write_folds
from training import Command

import ented.shards


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of the six benchmark tensors; tests that need it are skipped where it is not named."""
    folder = os.environ.get("ENTED_DATA")
    if not folder:
        pytest.skip("needs the benchmark tensors: name their folder by ENTED_DATA")
    if not Path(folder).is_dir():
        pytest.fail(f"ENTED_DATA={folder} is not a folder")
    return Path(folder)


@pytest.fixture
def float64():
    """New tensors are in double precision, and random ones the same in every run."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def command(capfd) -> Command:
    return Command(capfd)


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> Path:
    """A data folder with two binary tensors and one of counts, six by five by four."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data"
    folder.mkdir()
    write_folds(folder, "ones", 0, 1)
    write_folds(folder, "zeros", 1, 1)
    write_folds(folder, "counts", 2, 9)
    return folder


@pytest.fixture
def predict(capfd) -> Command:
    return Command(capfd, Path(__file__).parent.parent / "src/predict.py")


@pytest.fixture
def report(capfd) -> Command:
    return Command(capfd, Path(__file__).parent.parent / "src/report.py")


@pytest.fixture
def small(monkeypatch):
    """Blocks of 7 rows, which are shuffled 20 at a time."""
    monkeypatch.setattr(ented.shards, "BLOCK", 7)
    monkeypatch.setattr(ented.shards, "BUFFER", 20)
