import os
from pathlib import Path

import pytest
import torch


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
