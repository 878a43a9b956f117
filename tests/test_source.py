"""Data files: the local folder, the download, and the checksums."""

import hashlib
import logging
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from dataset_configs import BENCHMARKS, configured

from ented.datasets import source
from ented.errors import InputError

CONTENT = b"the published file"
PATH = "set/file.bin"


class Server:
    """A public home on this machine. `requests` lists what was asked for."""

    def __init__(self, folder):
        self.requests = []
        requests = self.requests

        class Handler(SimpleHTTPRequestHandler):
            def log_message(self, *args):
                requests.append(self.path)

        self.httpd = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder))
        self.url = f"http://127.0.0.1:{self.httpd.server_port}/{PATH}"
        threading.Thread(target=self.httpd.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self):
        self.httpd.shutdown()
        self.httpd.server_close()


@pytest.fixture
def server(tmp_path):
    file = tmp_path / "server" / PATH
    file.parent.mkdir(parents=True)
    file.write_bytes(CONTENT)
    server = Server(tmp_path / "server")
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty download cache for each test, and a checksum for the file of these tests."""
    monkeypatch.setattr(source.pooch, "os_cache", lambda project: tmp_path / "cache")
    monkeypatch.setitem(source.CHECKSUMS, PATH, hashlib.sha256(CONTENT).hexdigest())
    return tmp_path / "cache"


@pytest.fixture
def local(tmp_path, monkeypatch):
    """A local data folder that holds the file, and no ENTED_DATA."""
    monkeypatch.delenv("ENTED_DATA", raising=False)
    file = tmp_path / "local" / PATH
    file.parent.mkdir(parents=True)
    file.write_bytes(CONTENT)
    return tmp_path / "local"


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_published_checksums(data_dir):
    for path, checksum in source.CHECKSUMS.items():
        if path != PATH:
            assert hashlib.sha256((data_dir / path).read_bytes()).hexdigest() == checksum


def test_each_benchmark_file_has_a_checksum():
    expected = {f"{name}/fold-{fold}.npz" for name in BENCHMARKS for fold in range(5)} | {"dblp/dblp.mat"}
    assert source.CHECKSUMS.keys() - {PATH} == expected


def test_local_file_comes_first(local, server, tmp_path, monkeypatch):
    monkeypatch.setenv("ENTED_DATA", str(tmp_path))
    assert source.fetch(PATH, server.url, str(local)) == local / PATH
    assert not server.requests


def test_environment_folder_comes_second(local, server, tmp_path, monkeypatch):
    monkeypatch.setenv("ENTED_DATA", str(local))
    (tmp_path / "empty").mkdir()
    assert source.fetch(PATH, server.url, None) == local / PATH
    assert source.fetch(PATH, server.url, str(tmp_path / "empty")) == local / PATH
    assert not server.requests


def test_download_happens_once(local, server, cache, caplog):
    (local / PATH).unlink()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert source.fetch(PATH, server.url, str(local)) == cache / PATH
    assert (cache / PATH).read_bytes() == CONTENT
    assert len(server.requests) == 1
    assert [m for m in caplog.messages if "ownload" in m] == [f"downloading {server.url} to {cache / PATH}"]
    assert files(local) == []


def test_damaged_cache_is_downloaded_again(local, server, cache):
    (local / PATH).unlink()
    (cache / PATH).parent.mkdir(parents=True)
    (cache / PATH).write_bytes(b"damaged")
    assert source.fetch(PATH, server.url, None).read_bytes() == CONTENT


def test_wrong_checksum_from_the_server(local, server, cache, tmp_path):
    (local / PATH).unlink()
    (tmp_path / "server" / PATH).write_bytes(b"something else")
    with pytest.raises(InputError, match=f"cannot be downloaded; put it at {local / PATH}, .*hash") as error:
        source.fetch(PATH, server.url, str(local))
    assert "\n" not in str(error.value)
    assert files(cache) == files(local) == []


def test_unreachable_server(local, server, cache):
    (local / PATH).unlink()
    server.stop()
    with pytest.raises(InputError) as error:
        source.fetch(PATH, server.url, None)
    message = str(error.value)
    assert message.startswith(
        f"{PATH} cannot be downloaded; put it at {cache / PATH}, or name the folder that holds {PATH} "
        f"by data_dir= or ENTED_DATA ({server.url}: "
    )
    assert "refused" in message and "\n" not in message
    assert files(cache) == []


def test_file_missing_on_the_server(local, server, cache, tmp_path):
    (local / PATH).unlink()
    (tmp_path / "server" / PATH).unlink()
    with pytest.raises(InputError, match="cannot be downloaded; .* 404"):
        source.fetch(PATH, server.url, None)
    assert files(cache) == []


def test_corrupt_local_file(local, server):
    (local / PATH).write_bytes(b"corrupt")
    with pytest.raises(InputError, match=f"^{local / PATH} differs from the published file"):
        source.fetch(PATH, server.url, str(local))


def test_folder_that_does_not_exist(local, tmp_path, monkeypatch):
    absent = tmp_path / "absent"
    with pytest.raises(InputError, match=f"^data_dir={absent} is not a folder"):
        source.fetch(PATH, None, str(absent))
    monkeypatch.setenv("ENTED_DATA", str(absent))
    with pytest.raises(InputError, match=f"^ENTED_DATA={absent} is not a folder"):
        source.fetch(PATH, None, None)


def test_file_without_checksum_is_not_downloaded(local, server):
    path = "own/fold-0.npz"
    for url in (None, server.url):
        with pytest.raises(InputError, match=f"^{path} not found; put it at {local / path} and name the folder"):
            source.fetch(path, url, str(local))
        with pytest.raises(InputError, match=f"^{path} not found; put it at <folder>/{path} and name the"):
            source.fetch(path, url, None)
    assert not server.requests


def test_datasets_download_from_their_public_home(monkeypatch, local, tmp_path):
    """Each dataset asks for the file that its checksum is listed for."""
    asked = []

    def refuse(url, *args, **kwargs):
        asked.append(url)
        raise OSError("no network")

    monkeypatch.setattr(source.pooch, "retrieve", refuse)
    for name in ("enron", "dblp"):
        with pytest.raises(InputError, match=f"^{name}/.* cannot be downloaded; .*no network"):
            configured(name).load(0)
    home = "https://raw.githubusercontent.com"
    assert asked == [
        f"{home}/taozerui/gptd/3517ec58a6303a4b02811225927b290506c9ce52/dataset/processed/enron/fold-0.npz",
        f"{home}/yishuaidu/POST/f7ee2fd3fe21b8046f852dfb9f54bb8dac8ff802/code/DBLP/tensor-data-large/dblp.mat",
    ]
