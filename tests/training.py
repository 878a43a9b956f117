"""Fits without the settings of `src/train.py`; and its runs, in this process or in others."""

import io
import json
import os
import runpy
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import lightning as L
import pandas as pd
import pytest
import torch
from hydra import compose, initialize_config_dir

from ented.recorder import History, Recorder

ROOT = Path(__file__).parent.parent
TRAIN = ROOT / "src" / "train.py"
TINY = ["epochs=3", "inducing=8", "rank=2", "dataset.source.shape=[6,5,4]", "dataset.source.folds=2"]
ALL = {  # what ENTED has besides the paper's, as keywords of `ENTEDModule`
    **{"factors": "variational", "kernel": "ard", "lengthscale_ratio": 2.0, "mean": "degrees"},
    **{"inducing_inputs": "data", "annealing": True, "components": 2},
}
KILL = "+callbacks.kill._target_=training.Kill"


def fit(module, data, epochs: int, folder: Path, *callbacks: L.Callback, patience: int | None = None) -> History:
    """Train, or go on from the checkpoint that an interrupted fit left in the folder."""
    history = History(folder, epochs, patience)
    train(module, data, [history], folder, *callbacks)
    return history


def train(module, data, histories: list[History], folder: Path, *callbacks: L.Callback) -> None:
    """The same for a module with several histories."""
    recorder = Recorder(histories, folder, checkpoint_seconds=0)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=max(history.epochs for history in histories),
        logger=False,
        callbacks=[*callbacks, recorder],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
    trainer.fit(module, data, ckpt_path=recorder.checkpoint if recorder.checkpoint.exists() else None)


def start(script: Path, *arguments: str | Path) -> int | str:
    """The exit code, or message, of a script in this process, which saves the seconds that the imports take."""
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        patch.delenv("HYDRA_FULL_ERROR", raising=False)
        try:
            runpy.run_path(str(script), run_name="__main__")
            return 0
        except SystemExit as exit:
            return exit.code or 0
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)


class Command:
    """`python src/train.py`, or another script, in this process."""

    def __init__(self, capfd, script: Path = TRAIN):
        self.capfd, self.script = capfd, script

    def __call__(self, *arguments: str | Path) -> tuple[int, str, str]:
        self.capfd.readouterr()
        code = start(self.script, *arguments)
        out, err = self.capfd.readouterr()
        if isinstance(code, str):  # what Python itself does with such an exit
            return 1, out, err + code + "\n"
        return code, out, err

    def mistake(self, *arguments: str | Path) -> str:
        """The one line that a user's mistake ends with."""
        code, _, err = self(*arguments)
        assert code == 1 and err.startswith("error: ") and err.count("\n") == 1, err
        return err


def run(folder: Path, processes: int, *settings: str) -> subprocess.CompletedProcess:
    """`src/train.py` in this process, in one of its own where it is to be killed, or in several by torchrun."""
    if processes == 1 and KILL not in settings:
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            code = start(TRAIN, *settings, f"runs_dir={folder}")
        if isinstance(code, str):  # what Python itself does with such an exit
            err.write(f"{code}\n")
            code = 1
        return subprocess.CompletedProcess(settings, code, out.getvalue(), err.getvalue())
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *(torchrun if processes > 1 else []), TRAIN, *settings, f"runs_dir={folder}"]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])  # for Kill
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    environment.pop("HYDRA_FULL_ERROR", None)  # which other tests leave behind
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def binary(folder: Path, name: str = "ones") -> list[str]:
    return ["dataset=enron", f"dataset.name={name}", f"data_dir={folder}", "dataset.source.url=null", *TINY]


def counts(folder: Path) -> list[str]:
    return [
        *["dataset=ems", "dataset.name=counts", f"data_dir={folder}", "dataset.source.url=null"],
        *["dataset.source.modes=[a,b,c]", *TINY],
    ]


def cells(experiment: str) -> set[tuple[str, str, int]]:
    """The dataset, method and rank of every cell that the grid does not pass over."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("config", [f"experiment={experiment}"], return_hydra_config=True)
        params = config.hydra.sweeper.params
        kinds = {}
        for dataset in params.dataset.split(","):
            source = compose("config", [f"dataset={dataset}"]).dataset.source
            kinds[dataset] = source.get("kind", "binary")  # DBLP's is not a setting
    return {
        (dataset, model, int(rank))
        for dataset in kinds
        for model in params.model.split(",")
        for rank in str(params.rank).split(",")
        if model in config.methods[kinds[dataset]]
    }


def finished(runs_dir: Path) -> dict[str, float]:
    """When each finished run below a folder was finished."""
    return {str(file.parent): file.stat().st_mtime_ns for file in runs_dir.rglob("metrics.json")}


def numbers(folder: Path) -> dict:
    """metrics.json without the time it took."""
    result = json.loads((folder / "metrics.json").read_text())
    del result["train_seconds"]
    return result


class Kill(L.Callback):
    """A kill after three epochs of the search or of the fit, in the second test, or before the results are written."""

    def __init__(self, moment: str):
        self.moment, self.tests = moment, 0

    def on_train_epoch_start(self, trainer, pl_module) -> None:
        moment = "search" if trainer.datamodule.val_dataloader() else "fit"
        if trainer.current_epoch == 3 and self.moment == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_test_start(self, trainer, pl_module) -> None:
        self.tests += 1
        if self.tests == 2 and self.moment == "test":
            os.kill(os.getpid(), signal.SIGKILL)

    def on_predict_start(self, trainer, pl_module) -> None:
        if self.moment == "predict":
            os.kill(os.getpid(), signal.SIGKILL)


def kill(moment: str) -> list[str]:
    """The settings for `run` that add `Kill`."""
    return [KILL, f"+callbacks.kill.moment={moment}"]


def assert_same_run(actual: Path, expected: Path) -> None:
    """In all that two run folders hold; sums are rounded in another order."""
    runs = actual, expected
    histories = [file.relative_to(expected) for file in expected.rglob("epochs.csv")]
    actual, expected = (torch.load(folder / "last.ckpt", weights_only=True)["state_dict"] for folder in runs)
    assert any(name.startswith(("model.q", "q.")) for name in expected)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)
    for file in histories:
        actual, expected = (pd.read_csv(folder / file).drop(columns="seconds") for folder in runs)
        pd.testing.assert_frame_equal(actual, expected, rtol=1e-6)
    actual, expected = (pd.read_csv(folder / "predictions.csv") for folder in runs)
    pd.testing.assert_frame_equal(actual, expected, rtol=1e-4)  # the file has six digits
    actual, expected = (json.loads((folder / "metrics.json").read_text()) for folder in runs)
    assert actual["metrics"] == pytest.approx(expected["metrics"], rel=1e-6)
    assert (actual["epochs"], actual["steps"]) == (expected["epochs"], expected["steps"])
