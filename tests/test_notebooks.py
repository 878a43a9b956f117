"""The notebooks run from top to bottom, and are committed with their outputs, which

jupyter nbconvert --execute --inplace --ExecutePreprocessor.record_timing=False notebooks/*.ipynb

renews.
"""

import re
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from nbmake.nb_run import NotebookRun

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
of_each = pytest.mark.parametrize("file", NOTEBOOKS, ids=[file.stem for file in NOTEBOOKS])


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(notebook: NotebookNode) -> list[str]:
    """What the cells wrote, without figures and tables of pandas."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return [output.get("text") or output.data.get("text/markdown", "") for output in outputs]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a notebook without the benchmark tensors, and find nothing left of it."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.delenv("ENTED_DATA", raising=False)
    monkeypatch.setenv("TMPDIR", str(temporary))
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))

    def run(file: Path) -> NotebookNode:
        before = sorted(FOLDER.iterdir())
        result = NotebookRun(file, default_timeout=300).execute()
        assert result.error is None, result.error.trace
        assert sorted(FOLDER.iterdir()) == before
        assert not list(temporary.iterdir())
        return result.nb

    return run


def ented_row(notebook: NotebookNode) -> list[float]:
    """The metrics of the run of the quick start."""
    (row,) = re.findall(r"^ented +(\d.*)$", "\n".join(texts(notebook)), re.MULTILINE)
    return [float(number) for number in row.split()]


@of_each
def test_runs(run, file):
    made, stored = run(file), nbformat.read(file, 4)
    if file.stem == "benchmark":  # the others train, and say how long that took
        assert texts(made) == texts(stored), "results/ have changed: renew the notebook's outputs"
    if file.stem == "quick_start":  # the same numbers, but for what rounding makes of 60 epochs
        assert ented_row(made) == pytest.approx(ented_row(stored), rel=5e-3)
        assert f"has an RMSE of {ented_row(stored)[0]:.3f}." in (FOLDER.parent / "README.md").read_text()


@of_each
def test_is_committed_with_its_outputs(file):
    notebook = nbformat.read(file, 4)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)
    assert not any(
        output.output_type == "error" or output.get("name") == "stderr" for c in cells for output in c.outputs
    )
    assert not re.search(r"/(tmp|home|root|work|Users)/", str(notebook))
