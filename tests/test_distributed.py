"""Two processes of torchrun, against one process with the same settings."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

TRAIN = Path(__file__).parent.parent / "src/train.py"


def run(folder: Path, processes: int, *settings: str) -> subprocess.CompletedProcess:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *(torchrun if processes > 1 else []), TRAIN, *settings, "fold=0", f"runs_dir={folder}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.parametrize(("model", "batch_size"), [("ented", 1111), ("gptf", 1111), ("gptf_pg", "all")])
def test_two_processes_make_the_run_of_one(tmp_path, model, batch_size):
    """Also where batches and test entries have odd numbers, of which one process has one more than the other."""
    settings = [f"model={model}", "dataset=flights", "epochs=2", "inducing=10", f"batch_size={batch_size}", "lr=0.01"]
    runs = []
    for processes, trainer in (1, "cpu"), (2, "ddp"):
        settings_of_trainer = [f"trainer={trainer}", "trainer.accelerator=cpu"]
        done = run(tmp_path / trainer, processes, *settings, *settings_of_trainer)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(" epochs  ") == 1
        (folder,) = (tmp_path / trainer).rglob("seed=0")
        runs.append(folder)
    expected, actual = (torch.load(folder / "last.ckpt", weights_only=True)["state_dict"] for folder in runs)
    assert any(name.startswith(("model.q", "q.")) for name in expected)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)
    for file in ("epochs.csv", "holdout/epochs.csv"):
        expected, actual = (pd.read_csv(folder / file).drop(columns="seconds") for folder in runs)
        pd.testing.assert_frame_equal(actual, expected, rtol=1e-6)
    expected, actual = (pd.read_csv(folder / "predictions.csv") for folder in runs)
    pd.testing.assert_frame_equal(actual, expected, rtol=1e-4)  # the file has six digits
    expected, actual = (json.loads((folder / "metrics.json").read_text())["metrics"] for folder in runs)
    assert actual == pytest.approx(expected, rel=1e-6)


def test_ddp_without_torchrun_ends_with_one_line(tmp_path):
    done = run(tmp_path, 1, "trainer=ddp")
    assert done.returncode == 1 and not list(tmp_path.iterdir())
    assert done.stderr.startswith("error: trainer=ddp and torchrun need each other") and done.stderr.count("\n") == 1
