"""Two processes of torchrun, against one process with the same settings."""

import json

import pandas as pd
import pytest
from files_by_hand import write_folds
from training import assert_same_run, binary, kill, run

FLIGHTS = ["dataset=flights", "epochs=2", "inducing=10", "lr=0.01"]


def trainer(processes: int) -> list[str]:
    return [f"trainer={'ddp' if processes > 1 else 'cpu'}", "trainer.accelerator=cpu"]


@pytest.mark.parametrize(
    ("model", "dataset", "batch_size"),
    [
        ("ented", "flights", 1111),
        ("gptf", "ones", 20),
        ("gptf_pg", "ones", "all"),
        ("ented", "ones", 20),
    ],
)
def test_two_processes_make_the_run_of_one(tmp_path, model, dataset, batch_size):
    """Also where batches and test entries have odd numbers, of which one process has one more than the other."""
    write_folds(tmp_path, "ones", 0, 1)
    settings = FLIGHTS if dataset == "flights" else [*binary(tmp_path), "lr=0.01"]
    runs = []
    for processes in (2, 1):
        folder = tmp_path / str(processes)
        done = run(
            folder,
            processes,
            *settings,
            "fold=0",
            *f"model={model}".split(),
            f"batch_size={batch_size}",
            *trainer(processes),
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(" epochs  ") == 1
        runs += folder.rglob("seed=0")
    assert_same_run(*runs)


def test_a_killed_run_goes_on_with_another_number_of_processes(tmp_path):
    """The second process has an empty folder to look into, like a node that sees the files of the first one late."""
    write_folds(tmp_path, "ones", 0, 1)
    settings = [*binary(tmp_path), "epochs=8", "lr=0.03", "batch_size=10", "checkpoint_seconds=0"]
    settings += ["protocol.patience=20", "model.annealing=false"]
    assert run(tmp_path / "whole", 1, *settings, "fold=0", *trainer(1)).returncode == 0
    (whole,) = (tmp_path / "whole").rglob("seed=0")
    assert json.loads((whole / "metrics.json").read_text())["epochs"] > 3

    place = tmp_path / "killed/${oc.env:RANK,0}"
    killed = tmp_path / "killed/0" / whole.relative_to(tmp_path / "whole")
    parts = {}
    for processes, moment, file in (2, "search", "holdout/epochs.csv"), (1, "fit", "epochs.csv"):
        assert run(place, processes, *settings, "fold=0", *trainer(processes), *kill(moment)).returncode != 0
        parts[file] = pd.read_csv(killed / file)
        assert len(parts[file]) == 3 and not (killed / "metrics.json").exists()
    done = run(place, 2, *settings, "fold=0", *trainer(2))
    assert done.returncode == 0, done.stderr
    assert not [file for file in (tmp_path / "killed/1").rglob("*") if file.is_file()]  # only the first writes
    assert_same_run(killed, whole)
    for file, table in parts.items():  # the time of the first epochs too: they were not done again
        pd.testing.assert_frame_equal(pd.read_csv(killed / file).head(2), table.head(2))


def test_ddp_without_torchrun_ends_with_one_line(tmp_path):
    done = run(tmp_path, 1, "trainer=ddp")
    assert done.returncode == 1 and not list(tmp_path.iterdir())
    assert done.stderr.startswith("error: trainer=ddp and torchrun need each other") and done.stderr.count("\n") == 1
