"""What a run's folder says of itself."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from training import ROOT, Command

from ented.runs import FILES, IMMATERIAL, IMMATERIAL_BELOW, code_version, flat, write


def test_what_does_not_tell_runs_apart_are_settings():
    """Or else one of another name would, unseen."""
    names = {folder.name for folder in (ROOT / "conf").iterdir()}
    written = {"training_entries", "smallest_entry", "version"}  # by `RunFolder.open`
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        for choice in "dataset=dblp", "dataset=table", "dataset=stream", "model=vbgcp", "launcher=parallel":
            names |= flat(OmegaConf.to_container(compose("config", [choice]))).keys()
    for name in (IMMATERIAL - written) | {*IMMATERIAL_BELOW, *FILES}:
        assert any(f"{setting}.".startswith(f"{name}.") for setting in names), name


def git(folder, *arguments) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    return subprocess.run(["git", "-C", folder, *who, *arguments], capture_output=True, text=True, check=True).stdout


def test_the_version_holds_the_checkouts_commit(tmp_path):
    file, package = tmp_path / "a.py", version("ented")
    git(tmp_path, "init")
    file.write_text("x = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "a")
    git(tmp_path, "tag", "v1")  # changes nothing
    commit = git(tmp_path, "rev-parse", "HEAD")[:8]
    assert code_version(tmp_path) == f"{package}+{commit}"
    file.write_text("x = 2\n")
    assert code_version(tmp_path) == f"{package}+{commit}.changed"


def test_without_a_checkout_it_is_the_packages(tmp_path, monkeypatch):
    assert code_version(tmp_path) == version("ented")
    (tmp_path / ".git").mkdir()  # of no repository
    assert code_version(tmp_path) == version("ented")
    monkeypatch.setenv("PATH", str(tmp_path))  # without git
    assert code_version(tmp_path) == version("ented")


@pytest.mark.parametrize("force", ["false", "true"])
@pytest.mark.parametrize("place", ["runs", "runs/flights", "runs/flights/ented/rank=3/fold=0/seed=0"])
def test_a_file_where_a_folder_should_be(capfd, tmp_path, monkeypatch, place, force):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("mine")
    code, _, err = Command(capfd)("epochs=1", f"force={force}")
    assert code == 1 and err.startswith("error: cannot write to runs/flights/") and err.count("\n") == 1, err
    assert "choose another runs_dir=" in err and file.read_text() == "mine"


def test_a_file_is_written_where_a_link_points_and_into_a_pipe(tmp_path):
    real, link, pipe = tmp_path / "real.csv", tmp_path / "link.csv", tmp_path / "pipe"
    link.symlink_to(real)
    write(link, "a")
    assert link.is_symlink() and real.read_text() == "a"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as threads:
        read = threads.submit(pipe.read_text)
        write(pipe, "b")
        assert read.result() == "b" and pipe.is_fifo()
