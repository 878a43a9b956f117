"""The benchmarks run: a small cell of each, and the arithmetic that benchmarks/scaling.py counts."""

import csv
import json
import logging
import runpy
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ented.factors import FactorTable
from ented.likelihoods import Bernoulli
from ented.model import ENTED

ROOT = Path(__file__).parent.parent
FAST = ["--rounds", "2", "--turn", "0.01"]


@pytest.fixture
def benchmark(monkeypatch):
    """`python benchmarks/NAME.py` in this process, which saves the seconds that the imports take."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    lightning = logging.getLogger("lightning.pytorch")
    level = lightning.level

    def run(name: str, *arguments: str) -> dict:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        return runpy.run_path(str(ROOT / f"benchmarks/{name}.py"), run_name="__main__")

    yield run
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    lightning.setLevel(level)


@pytest.mark.parametrize(
    ("name", "cell", "rows", "columns"),
    [
        (
            "step",
            ["--points", "8", "--batch", "32", "--dtype", "float64", "--threads", "1", "--methods", "ented"],
            2,
            "method,points,batch,dtype,threads,milliseconds,gpytorch_ratio,torch,gpytorch,lightning",
        ),
        (
            "replicas",
            ["--replicas", "1", "3", "--points", "8", "--batch", "16", "--methods", "ented"],
            4,
            "method,replicas,points,batch,dtype,threads,milliseconds,alone_milliseconds,ratio,torch,lightning",
        ),
        (
            "scaling",
            ["--variables", "points", "sparse rows", "--values", "16", "64"],
            4,
            "variable,value,milliseconds,floor_milliseconds,arithmetic_milliseconds,product_gflops,torch",
        ),
    ],
)
def test_a_grid_is_written_once(benchmark, tmp_path, capsys, name, cell, rows, columns):
    path = tmp_path / "times.csv"
    benchmark(name, *cell, *FAST, "--csv", str(path))
    with path.open() as file:
        written = list(csv.DictReader(file))
    assert len(written) == rows and list(written[0]) == columns.split(",")
    for row in written:
        assert float(row["milliseconds"]) > 0 and row["torch"] == torch.__version__
        if name == "replicas":
            ratio = float(row["alone_milliseconds"]) / float(row["milliseconds"])
            assert float(row["ratio"]) == pytest.approx(ratio, rel=1e-2)
        if name == "scaling":
            assert 0 < float(row["arithmetic_milliseconds"]) < float(row["floor_milliseconds"])
    before = path.read_text()
    capsys.readouterr()
    benchmark(name, *cell, *FAST, "--csv", str(path))
    assert path.read_text() == before
    assert "milliseconds" not in capsys.readouterr().out


@pytest.mark.parametrize(("batch", "points", "rank", "modes"), [(128, 100, 3, 3), (50, 16, 2, 4)])
def test_the_products_of_a_step_are_counted(benchmark, batch, points, rank, modes):
    from scaling import products

    model = ENTED(FactorTable((20,) * modes, rank), Bernoulli(), points)
    indices, values = torch.randint(20, (batch, modes)), torch.randint(2, (batch,)).to(model.Z.dtype)
    with FlopCounterMode(display=False) as counter:
        model.step(indices, values, 10.0, 0.1)
    assert products(batch, points, modes * rank) == counter.get_total_flops()


def test_the_line_through_times(benchmark):
    """Times that are made of an overhead and twice the floor; they are equal where the floor takes half of it."""
    from scaling import tables

    rows = [
        {"variable": "rows", "value": str(value), "milliseconds": str(5 + 2 * floor), "floor_milliseconds": str(floor)}
        | {"arithmetic_milliseconds": str(floor / 4)}
        for value, floor in [(10, 0.1), (100, 1), (1000, 10)]
    ]
    text = tables(rows[::-1])
    assert "| rows | 5.00 | 2.0 | 250 |" in text
    assert text.index("| rows | 10 | 5.2 | 0.1 | 25% | 52.0 |") < text.index("| rows | 1000 |")


def test_the_tables_are_those_of_the_results(benchmark):
    from scaling import tables

    with (ROOT / "results/scaling.csv").open() as file:
        text = tables(list(csv.DictReader(file)))
    assert text in (ROOT / "results/scaling.md").read_text()
    speed = (ROOT / "results/speed.md").read_text()
    for name, column, value in ("step", "method", "gpytorch_ratio"), ("replicas", "replicas", "ratio"):
        table = import_module("common").Table(
            ROOT / f"results/{'speed' if name == 'step' else name}.csv", import_module(name).KEY, []
        )
        assert table.wide(column, value) in speed


@pytest.mark.parametrize("form", ["npy", "parquet"])
def test_the_epochs_of_files_are_checked(float64, tmp_path, form):
    stream = runpy.run_path(str(ROOT / "benchmarks/stream.py"))
    stream["write"](tmp_path / "test", 0, 1000, form)
    stream["write"](tmp_path / "train", 1000, 3000, form)
    first, again, other = (stream["fingerprint"](tmp_path, 64, seed, 0) for seed in (0, 0, 1))
    assert first["each_once"] and first == again and first["order"] != other["order"]
    assert stream["measure_stream"](tmp_path, 64, 0).keys() == {"per_second", "load_seconds", "peak_mb"}
    assert stream["measure_memory"](2000, 64)["memory_per_second"] > 0
    if form == "npy":
        (file,) = (tmp_path / "train").iterdir()
        rows = np.load(file)
        rows[7] = rows[8]
        np.save(file, rows)
        assert not stream["fingerprint"](tmp_path, 64, 0, 0)["each_once"]


def test_a_device_is_needed(benchmark, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="^no CUDA device$"):
        benchmark("gpu")


def test_the_steps_of_a_device_on_the_cpu(benchmark, tmp_path):
    """That it runs; the comparison with the CPU says something on another device only."""
    path = tmp_path / "gpu.json"
    sizes = ["--points", "8", "--batch", "16", "--replicas", "1", "3"]
    benchmark("gpu", "--device", "cpu", "--methods", "eager", "gpytorch", *sizes, *FAST, "--json", str(path))
    result = json.loads(path.read_text())
    assert result["device"] == "cpu" and not result["left_out"]
    for of_dtype in result["same_as_cpu"].values():
        assert of_dtype["same"] and set(of_dtype["differences"].values()) == {0}
    assert [row["done"] >= row["returned"] > 0 for row in result["host"]] == [True, True]
    steps = [(row["method"], row["replicas"], "ratio" in row) for row in result["steps"]]
    assert steps == [("eager", 1, False), ("gpytorch", 1, False), ("eager", 3, True)]

    benchmark("gpu", "--device", "cpu", "--methods", "eager", *sizes, "--budget", "0", "--json", str(path))
    assert len(json.loads(path.read_text())["left_out"]) == 2
