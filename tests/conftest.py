import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of the six benchmark tensors; tests that need it are skipped where it is not named."""
    folder = os.environ.get("ENTED_DATA")
    if not folder:
        pytest.skip("needs the benchmark tensors: name their folder by ENTED_DATA")
    if not Path(folder).is_dir():
        pytest.fail(f"ENTED_DATA={folder} is not a folder")
    return Path(folder)
