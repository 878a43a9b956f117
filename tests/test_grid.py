"""Grids: what a failing cell leaves, which cells there are, and the launchers."""

import json
import os
import re
from pathlib import Path

import lightning as L
import pandas as pd
import pytest
import torch
from filelock import FileLock
from joblib.externals.loky import get_reusable_executor
from training import ROOT, binary, cells, finished

from ented.distributed import own_gpu

FAIL = "+callbacks.fail._target_=test_grid.Fail"


class Fail(L.Callback):
    """An error that nobody foresaw, in fold 1."""

    def on_train_start(self, trainer, pl_module) -> None:
        if "fold=1" in str(trainer.callbacks[-1].checkpoint):
            raise RuntimeError("no\nroom")


def test_a_failing_run_says_why_and_the_others_go_on(command, tiny):
    code, out, err = command("-m", *binary(tiny), "rank=1,2", FAIL)
    assert code == 1
    assert [line for line in err.splitlines() if line.startswith("error: ")] == [
        f"error: RuntimeError: no room (error.txt in runs/ones/ented/rank={rank}/fold=1/seed=0)" for rank in (1, 2)
    ]
    assert err.endswith(
        "\nthe grid is not finished, see above: once that is mended, the same command does what is missing\n"
    )
    before = finished(Path("runs"))
    assert {Path(folder).parent.name for folder in before} == {"fold=0"} and len(before) == 2
    reason, _, trace = Path("runs/ones/ented/rank=1/fold=1/seed=0/error.txt").read_text().partition("\n\n")
    assert reason == "RuntimeError: no room" and trace.startswith("Traceback") and "test_grid.py" in trace
    assert not list(Path("runs").rglob("summary*"))
    # the same without the fault does the rest, and nothing says any more that it failed
    assert command("-m", *binary(tiny), "rank=1,2")[0] == 0
    after = finished(Path("runs"))
    assert len(after) == 4 and after.items() > before.items() and not list(Path("runs").rglob("error.txt"))


def test_replicas_fail_together(command, tiny):
    code, _, err = command(*binary(tiny), "replicas=folds", "lr=1e300")
    assert code == 1 and err.count("\n") == 1
    assert len(list(Path("runs").rglob("error.txt"))) == 2


def test_each_cell_compiles_its_step_anew(command, tiny, monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "compile", lambda step: calls.append("c") or step)
    monkeypatch.setattr(torch.compiler, "reset", lambda: calls.append("r"))
    assert command("-m", *binary(tiny), "rank=1,2", "protocol=paper", "compile=true", "replicas=folds")[0] == 0
    assert re.fullmatch("(rc+){2}", "".join(calls))


def test_cells_of_methods_that_do_not_take_part_are_passed_over(command, tiny):
    methods = "methods={binary:[gcp],count:[ncpd]}"
    code, out, err = command("-m", *binary(tiny), "model=gcp,ncpd,bcp", methods, "epochs=2")
    assert code == 0, err
    assert [Path(folder).parts[-4] for folder in finished(Path("runs"))] == ["gcp", "gcp"]


def test_the_benchmark_has_every_cell_of_the_papers_tables():
    paper = pd.read_csv(ROOT / "results/paper.csv")
    published = set(zip(paper.dataset, paper.method.str.lower(), paper["rank"], strict=True))
    ours = cells("benchmark")
    assert published < ours
    assert {model for _, model, _ in ours - published} == {"gptf_pg", "main_effects", "bcp"}  # bcp: on DBLP
    assert cells("benchmark_binary") | cells("benchmark_count") == ours
    assert {dataset for dataset, *_ in cells("benchmark_binary")} == {"digg", "enron", "dblp"}


def test_the_test_metrics_of_every_epoch(command, tiny):
    """The last one's are those of the test."""
    for model in ("ented", "gcp", "costco"):
        code, _, err = command(*binary(tiny), f"model={model}", "callbacks=convergence", "fold=0", "epochs=3")
        assert code == 0, err
        run = Path(f"runs/ones/{model}/rank=2/fold=0/seed=0")
        epochs, metrics = pd.read_csv(run / "epochs.csv"), json.loads((run / "metrics.json").read_text())["metrics"]
        assert epochs.test_auc.notna().all()
        assert {name: epochs[f"test_{name}"].iloc[-1] for name in metrics} == pytest.approx(metrics)


def test_a_method_without_a_rank_is_one_run_of_the_benchmark(command, tiny):
    """While another cell is at it, that of another rank has nothing to do."""
    settings = [*binary(tiny), "model=main_effects", "fold=0"]
    run = tiny.parent / "runs/ones/main_effects/fold=0/seed=0"
    run.parent.mkdir(parents=True)
    with FileLock(run.with_name(".seed=0.lock")):
        code, out, err = command(*settings, "methods={binary:[main_effects],count:[]}")
        assert code == 0 and not err and "by another cell of this grid" in out
        code, _, err = command(*settings)
        assert code == 1 and "another command works on this run" in err
    assert not finished(Path("runs"))


@pytest.fixture
def new_workers():
    """joblib's, which would be kept for the next grid of this process, with the streams of the first one's test."""
    yield
    get_reusable_executor().shutdown()


def metrics(runs_dir: str) -> dict[str, dict]:
    return {
        str(file.relative_to(runs_dir)): json.loads(file.read_text())["metrics"]
        for file in Path(runs_dir).rglob("metrics.json")
    }


def test_a_parallel_grid_is_the_same_grid(command, tiny, new_workers):
    grid = ["-m", *binary(tiny), "model=ented,gcp", "rank=1,2", "epochs=2"]
    assert command(*grid, "runs_dir=serial")[0] == 0
    code, out, err = command(*grid, "launcher=parallel", "jobs=2", "runs_dir=parallel")
    assert code == 0 and not err, err
    assert metrics("parallel") == metrics("serial") and len(metrics("serial")) == 8
    before = finished(Path("parallel"))
    code, out, _ = command(*grid, "launcher=parallel", "jobs=2", "runs_dir=parallel")
    assert code == 0 and finished(Path("parallel")) == before and out.count("finished before") == 8


def test_a_failing_cell_of_a_parallel_grid(command, tiny, new_workers):
    grid = ["-m", *binary(tiny), "model=gcp,ented", "fold=0", "rank=0,1", "launcher=parallel", "jobs=2"]
    code, _, err = command(*grid)
    assert code == 1 and err.count("error: rank=0: it must be a whole number from 1") == 2 and "Traceback" not in err
    assert len(metrics("runs")) == 2


SBATCH = """#!/bin/sh
# runs the tasks of the array here, one after the other
export SLURM_ARRAY_JOB_ID=7 SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1 SLURM_NODEID=0 SLURM_JOB_NODELIST=here
export SLURM_PROCID=0 SLURM_LOCALID=0
cp "$1" "$0.script"
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$0.script")
(
    for task in $(seq 0 "$last"); do
        SLURM_ARRAY_TASK_ID=$task SLURM_JOB_ID=7_$task sh "$0.script"
    done
    touch "$0.done"
) </dev/null >/dev/null 2>&1 &
echo "Submitted batch job 7"
"""
SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do
    case $1 in --output|--error) shift ;; esac
    shift
done
exec "$@"
"""
SACCT = """#!/bin/sh
[ -e "$(dirname "$0")/sbatch.done" ] && state=COMPLETED || state=RUNNING
printf 'JobID|State|NodeList\\n'
for task in $(seq 0 99); do printf '7_%s|%s|here\\n' "$task" $state; done
"""


def test_slurm_jobs(command, tiny, monkeypatch, tmp_path):
    """With the three programs of SLURM that submitit calls played by scripts."""
    (tmp_path / "bin").mkdir()
    for name, script in {"sbatch": SBATCH, "srun": SRUN, "sacct": SACCT}.items():
        (tmp_path / "bin" / name).write_text(script)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    settings = ["launcher=slurm", "hydra.launcher.partition=short", "hydra.launcher.setup=['export OMP_NUM_THREADS=1']"]
    code, _, err = command("-m", *binary(tiny), "rank=1,2", "epochs=2", *settings)
    assert code == 0, err
    assert len(metrics("runs")) == 4
    assert "#SBATCH --partition=short" in (tmp_path / "bin/sbatch.script").read_text()


def test_every_process_has_a_gpu_for_itself_while_there_are_enough(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    taken = []
    monkeypatch.setattr("ented.distributed._taken", taken)
    # each call is another process's
    assert [own_gpu.__wrapped__(3) for _ in range(3)] == [0, 1, 2]
    assert own_gpu.__wrapped__(3) in range(3)
    taken[1].release()  # as its end does
    assert own_gpu.__wrapped__(3) == 1
