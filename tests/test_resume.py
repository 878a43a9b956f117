"""Runs and grids started again: what is done again and what is not, after a kill and at any moment."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import pytest
import yaml
from filelock import FileLock
from files_by_hand import write_folds
from training import TRAIN, binary, finished, numbers

from ented.errors import InputError
from ented.runs import VERSION, RunFolder


def test_a_grid_started_again_does_only_what_is_missing(command, tiny):
    grid = ["-m", *binary(tiny, "ones,zeros"), "rank=1,2", "model=ented,gptf_pg"]
    assert command(*grid)[0] == 0
    runs = tiny.parent / "runs"
    first = finished(runs)
    assert len(first) == 2 * 2 * 2 * 2
    assert command(*grid)[0] == 0
    assert finished(runs) == first

    lost = runs / "zeros/gptf_pg/rank=2/fold=1/seed=0"
    before = numbers(lost)
    subprocess.run(["rm", "-r", lost], check=True)
    assert command(*grid)[0] == 0
    second = finished(runs)
    assert {run for run in second if second[run] != first[run]} == {str(lost)}
    assert numbers(lost) == before


def test_other_settings_are_not_taken_for_a_finished_run(command, tiny):
    arguments = [*binary(tiny), "fold=0"]
    assert command(*arguments)[0] == 0
    run = tiny.parent / "runs/ones/ented/rank=2/fold=0/seed=0"
    before = numbers(run)
    code, _, err = command(*arguments, "lr=0.5")
    assert code == 1 and "lr=0.01" in err and "lr=0.5" in err and "force=true" in err
    assert numbers(run) == before
    assert command(*arguments, "lr=0.5", "force=true")[0] == 0
    assert numbers(run) != before
    assert yaml.safe_load((run / "config.yaml").read_text())["lr"] == 0.5


class Interruption(BaseException):
    """Nothing catches it, as a kill."""


class Interrupt(L.Callback):
    """Fails in the third epoch, as if the machine did."""

    def on_train_epoch_start(self, trainer, pl_module) -> None:
        if trainer.current_epoch == 2:
            raise Interruption


INTERRUPT = "+callbacks.interrupt._target_=test_resume.Interrupt"


def test_a_run_that_goes_on_says_from_where(command, tiny):
    settings = [*binary(tiny), "fold=1", "checkpoint_seconds=0"]
    with pytest.raises(Interruption):
        command(*settings, INTERRUPT)
    _, out, _ = command(*settings)
    log = (tiny.parent / "runs/ones/ented/rank=2/fold=1/seed=0/train.log").read_text()
    assert "last.ckpt: from after epoch 2 on" in out and "last.ckpt: from after epoch 2 on" in log


def test_replicas_of_which_one_has_other_entries_start_afresh(command, tiny):
    settings = [*binary(tiny), "replicas=folds", "protocol.held_out=0", "checkpoint_seconds=0"]
    with pytest.raises(Interruption):
        command(*settings, INTERRUPT)
    (state,) = tiny.parent.rglob("replicas-*/*/last.ckpt")
    first = (tiny / "ones/fold-0.npz").read_bytes()
    write_folds(tiny, "ones", 5, 1)
    (tiny / "ones/fold-0.npz").write_bytes(first)
    for folder in "runs", "anew":
        code, _, err = command(*settings, f"runs_dir={folder}")
        assert code == 0, err
    assert not state.exists()
    for run, anew in zip(*(sorted((tiny.parent / folder).rglob("fold=*")) for folder in ("runs", "anew")), strict=True):
        assert numbers(run / "seed=0") == numbers(anew / "seed=0")


def test_force_removes_all_runs_first_so_that_others_are_never_taken_for_new_ones(command, tiny):
    assert command(*binary(tiny))[0] == 0
    old = finished(tiny.parent)
    with pytest.raises(Interruption):
        command(*binary(tiny), "lr=0.5", "force=true", INTERRUPT)
    assert not finished(tiny.parent)
    code, out, err = command(*binary(tiny), "lr=0.5")
    assert code == 0, err
    assert finished(tiny.parent).keys() == old.keys() and "afresh" not in out


def test_a_kill_while_force_removes_runs_leaves_none_that_counts(command, tiny, monkeypatch):
    assert command(*binary(tiny))[0] == 0
    removed = []

    def killed(path, **_) -> None:
        removed.append(path)
        raise Interruption

    with monkeypatch.context() as patch, pytest.raises(Interruption):
        patch.setattr(shutil, "rmtree", killed)
        command(*binary(tiny), "force=true")
    assert removed and not finished(tiny.parent)
    assert list(tiny.parent.rglob("last.ckpt")) and not list(tiny.parent.rglob("summary-*"))
    code, out, err = command(*binary(tiny))
    assert code == 0, err
    assert "from after epoch" not in out  # not even the old checkpoints are gone on with


def test_a_folder_that_cannot_be_removed_ends_with_one_line(command, tiny, monkeypatch):
    assert command(*binary(tiny), "fold=0")[0] == 0

    def refused(path, **_) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refused)
    assert "cannot write to runs/ones/ented/rank=2/fold=0/seed=0 (Permission denied)" in command.mistake(
        *binary(tiny), "fold=0", "force=true"
    )


class StopEarly(L.Callback):
    """As a signal does, before the first epoch."""

    def on_fit_start(self, trainer, pl_module) -> None:
        sys.exit(143)


def test_a_signal_before_the_first_epoch_is_no_failure_of_the_run(command, tiny):
    code, _, err = command(*binary(tiny), "+callbacks.early._target_=test_resume.StopEarly")
    assert code == 143 and not err
    assert not list(tiny.parent.rglob("error.txt"))


def test_another_version_of_the_code_is_named(command, tiny):
    arguments = [*binary(tiny), "fold=0", "checkpoint_seconds=0"]
    run = tiny.parent / "runs/ones/ented/rank=2/fold=0/seed=0"
    with pytest.raises(Interruption):
        command(*arguments, INTERRUPT)
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["version"] == VERSION
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"version": "0.0.1"}))
    code, out, err = command(*arguments)
    assert code == 0, err
    assert f"begun by another version of the code (0.0.1), goes on with {VERSION}" in out
    assert yaml.safe_load((run / "config.yaml").read_text())["version"] == "0.0.1"
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["version"] == VERSION
    assert " by version" not in command(*arguments)[1]
    (run / "metrics.json").write_text(json.dumps(metrics | {"version": "0.0.1"}))
    assert "finished before by version 0.0.1 of the code\n" in command(*arguments)[1]


@pytest.mark.parametrize("force", ["false", "true"])
def test_a_second_command_on_a_run_ends_with_one_line(command, tiny, force):
    run = tiny.parent / "runs/ones/ented/rank=2/fold=1/seed=0"
    run.parent.mkdir(parents=True)
    with FileLock(run.with_name(".seed=0.lock")):  # as the first command holds it
        code, _, err = command(*binary(tiny), "fold=1", f"force={force}")
    assert code == 1 and err.count("\n") == 1 and f"{run.relative_to(tiny.parent)}: another command works" in err
    assert not run.exists()
    assert command(*binary(tiny), "fold=1", f"force={force}")[0] == 0


def test_a_fold_with_mistakes_ends_the_command_first(command, tiny):
    whole = (tiny / "ones/fold-1.npz").read_bytes()
    (tiny / "ones/fold-1.npz").write_bytes(b"damaged")
    code, _, err = command(*binary(tiny))
    assert code == 1 and "fold-1.npz is not an npz file" in err and err.count("\n") == 1
    assert not (tiny.parent / "runs").exists()
    (tiny / "ones/fold-1.npz").write_bytes(whole)
    # with force=true nothing is removed
    assert command(*binary(tiny))[0] == 0
    old = finished(tiny.parent)
    (tiny / "ones/fold-1.npz").write_bytes(b"damaged")
    code, _, err = command(*binary(tiny), "force=true")
    assert code == 1 and "fold-1.npz is not an npz file" in err
    assert finished(tiny.parent) == old


def test_what_another_command_has_finished_meanwhile_stays(command, tiny):
    assert command(*binary(tiny), "fold=1", "lr=0.02")[0] == 0
    folder = tiny.parent / "runs/ones/ented/rank=2/fold=1/seed=0"
    before, config = finished(tiny.parent), yaml.safe_load((folder / "config.yaml").read_text())
    run = RunFolder(config)
    assert run.open("of the same entries", 0, {}) == json.loads((folder / "metrics.json").read_text())
    run.unlock()
    other = RunFolder(config | {"model": config["model"] | {"lr": 0.5}})
    with pytest.raises(InputError, match="model.lr=0.02, asked for is model.lr=0.5"):
        other.open("of the same entries", 0, {})
    other.unlock()
    assert finished(tiny.parent) == before


def test_a_job_that_slurm_starts_again_keeps_what_it_has_done(command, tiny, monkeypatch):
    assert command(*binary(tiny))[0] == 0
    before = finished(tiny.parent)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert command(*binary(tiny), "force=true")[0] == 0 and finished(tiny.parent) == before
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    assert command(*binary(tiny), "force=true")[0] == 0
    assert not set(finished(tiny.parent).items()) & set(before.items())


class OpenLogs(L.Callback):
    """How many files of the name train.log this process has open."""

    def on_test_start(self, trainer, pl_module) -> None:
        files = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        assert len([file for file in files if file.endswith("train.log")]) == 1


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="only Linux lists the files of a process")
def test_the_log_of_a_run_is_closed_before_the_next(command, tiny):
    code, _, err = command(*binary(tiny), "seed=[0,1]", "+callbacks.logs._target_=test_resume.OpenLogs")
    assert code == 0, err


def test_an_unfinished_run_with_other_settings_starts_afresh(command, tiny):
    """So that the advice to change a setting after a failure can be followed."""
    code, _, err = command(*binary(tiny), "fold=0", "model.jitter=0", "model.init_std=1e-9")
    assert code == 1 and "raise model.jitter" in err
    run = tiny.parent / "runs/ones/ented/rank=2/fold=0/seed=0"
    assert run.exists() and not (run / "metrics.json").exists()
    code, out, err = command(*binary(tiny), "fold=0", "model.init_std=1e-9")
    assert code == 0, err
    assert (
        "an unfinished run with model.jitter=0, asked for is model.jitter=0.0001" in out and "is started afresh" in out
    )


def test_an_unfinished_run_of_other_entries_starts_afresh(command, tiny):
    """Its checkpoint is not resumed; where only the place has changed, it is."""
    arguments = ["fold=0", "checkpoint_seconds=0", "protocol=paper"]
    run = tiny.parent / "runs/ones/ented/rank=2/fold=0/seed=0"

    def start(data: Path) -> str:
        code, out, err = command(*binary(data), *arguments)
        assert code == 0, err
        return out

    start(tiny)
    expected = numbers(run)
    (run / "metrics.json").unlink()
    write_folds(tiny, "ones", 5, 1)
    assert "an unfinished run with other training entries, is started afresh" in start(tiny)
    assert numbers(run)["metrics"] != expected["metrics"]
    other = numbers(run)
    (run / "metrics.json").unlink()
    assert "afresh" not in start(tiny.rename(tiny.with_name("moved")))
    assert numbers(run) == other


def test_a_folder_without_its_settings_is_not_taken_for_the_run(command, tiny):
    arguments = [*binary(tiny), "fold=0"]
    assert command(*arguments)[0] == 0
    run = tiny.parent / "runs/ones/ented/rank=2/fold=0/seed=0"
    (run / "config.yaml").unlink()
    code, _, err = command(*arguments)
    assert code == 1 and "no readable config.yaml" in err and err.count("\n") == 1
    (run / "metrics.json").unlink()
    code, out, _ = command(*arguments, "lr=0.02")
    assert code == 0 and "is started afresh" in out


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.9])
def test_damaged_files_of_a_run(command, tiny, share):
    arguments = [*binary(tiny), "fold=0"]
    assert command(*arguments)[0] == 0
    run = tiny.parent / "runs/ones/ented/rank=2/fold=0/seed=0"
    before = numbers(run)
    (run / "metrics.json").write_text("{")
    code, _, err = command(*arguments)
    assert code == 1 and "metrics.json is damaged" in err and err.count("\n") == 1
    (run / "metrics.json").unlink()
    checkpoint = (run / "last.ckpt").read_bytes()
    (run / "last.ckpt").write_bytes(checkpoint[: int(share * len(checkpoint))])
    code, out, _ = command(*arguments)
    assert code == 0 and "last.ckpt is damaged" in out
    assert numbers(run) == before


def test_a_summary_is_written_where_it_differs(command, tiny):
    assert command(*binary(tiny))[0] == 0
    summary = tiny.parent / "runs/ones/ented/rank=2/summary-seed=0.json"
    summary.with_name("summary-seed=0.json.partial").mkdir()  # nothing can be written there
    assert command(*binary(tiny))[0] == 0
    summary.unlink()
    code, _, err = command(*binary(tiny))
    assert code == 1 and err.startswith(f"error: cannot write to {summary.relative_to(tiny.parent)}"), err
    assert err.count("\n") == 1


def test_a_changed_fold_takes_its_summary_away(command, tiny):
    assert command(*binary(tiny))[0] == 0
    assert list(tiny.parent.rglob("summary-*"))
    assert command(*binary(tiny), "fold=0", "batch_size=20", "force=true")[0] == 0
    assert not list(tiny.parent.rglob("summary-*"))


def test_settings_that_change_no_number_do_not_matter(command, tiny):
    arguments = [*binary(tiny), "fold=0"]
    assert command(*arguments)[0] == 0
    first = finished(tiny.parent)
    moved = tiny.rename(tiny.with_name("moved"))
    assert command(*binary(moved), "fold=0", "checkpoint_seconds=3", "logger=wandb")[0] == 0
    assert finished(tiny.parent) == first
    # what is for other protocols and experiments, or has been given otherwise
    code, _, err = command(*binary(moved), "fold=0", "dataset.paper.lr=0.7", "dataset.paper.epochs=9")
    assert code == 0 and finished(tiny.parent) == first, err


def test_killed_and_started_again_ends_with_the_same_numbers(command, tiny):
    settings = ["fold=0", "epochs=40", "lr=0.03", "model.annealing=false", "checkpoint_seconds=0", "batch_size=10"]
    settings += ["protocol.patience=30"]
    arguments = [*binary(tiny), *settings]

    def run_folder(runs_dir: str) -> Path:
        return tiny.parent / runs_dir / "ones/ented/rank=2/fold=0/seed=0"

    assert command(*arguments, "runs_dir=whole")[0] == 0
    killed = run_folder("killed")
    # once in the search for the number of epochs, once in the fit
    for epochs in (killed / "holdout" / "epochs.csv", killed / "epochs.csv"):
        process = subprocess.Popen([sys.executable, TRAIN, *arguments, "runs_dir=killed"])
        deadline = time.monotonic() + 120
        while not (epochs.exists() and len(epochs.read_text().splitlines()) > 5):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (killed / "metrics.json").exists()
    assert command(*arguments, "runs_dir=killed")[0] == 0
    assert numbers(killed) == numbers(run_folder("whole"))
    for name in ("predictions.csv", "holdout/chosen.json"):
        assert (killed / name).read_bytes() == (run_folder("whole") / name).read_bytes()

    # killed after the last epoch, before the results were written
    (killed / "metrics.json").unlink()
    (killed / "predictions.csv").unlink()
    assert command(*arguments, "runs_dir=killed")[0] == 0
    assert numbers(killed) == numbers(run_folder("whole"))


@pytest.mark.parametrize(
    ("signum", "force", "same"),
    [(signal.SIGINT, "false", "the same command"), (signal.SIGTERM, "true", "the same command without force=true")],
)
def test_a_signal_ends_a_run_with_one_line(tiny, signum, force, same):
    settings = [f"force={force}", "fold=0", "protocol=paper", "checkpoint_seconds=0", "epochs=100000"]
    arguments = [sys.executable, str(TRAIN), *(a for a in binary(tiny) if a != "epochs=3"), *settings]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(tiny.parent.rglob("last.ckpt")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signum)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert err == f"stopped: {same} goes on where this one was\n"
