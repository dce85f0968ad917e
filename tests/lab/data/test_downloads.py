from __future__ import annotations

import hashlib
import io
import socket
import tarfile
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import bsam
from bsam.common.errors import BsamValueError
from bsam.lab import data
from bsam.lab.data.downloads import Source, fetch

NAME = "cifar-10-batches-bin"


def archive(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


GOOD = archive({f"{NAME}/data_batch_1.bin": b"one" * 1000, f"{NAME}/test_batch.bin": b"test"})


@pytest.fixture
def serve(monkeypatch):
    """Serves one content under every path; ``sent`` cuts it short, ``announced`` says another length."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    servers = []

    def start(content: bytes, sent: int | None = None, announced: int | None = None, status: int = 200) -> str:
        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self):
                self.send_response(status)
                self.send_header("Content-Length", str(len(content) if announced is None else announced))
                self.end_headers()
                self.wfile.write(content[:sent])

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}/cifar-10-binary.tar.gz"

    yield start
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join(10)


def source(url: str, content: bytes = GOOD) -> Source:
    return Source(url, hashlib.sha256(content).hexdigest(), NAME)


def test_an_archive_is_downloaded_checked_and_unpacked(serve, tmp_path, capsys):
    made = fetch(source(serve(GOOD)), tmp_path / "new" / "folder", progress=True)
    assert made == tmp_path / "new" / "folder" / NAME
    content = {path.name: path.read_bytes() for path in made.iterdir()}
    assert content == {"data_batch_1.bin": b"one" * 1000, "test_batch.bin": b"test"}
    assert [path.name for path in made.parent.iterdir()] == [NAME]  # neither the archive nor a temporary folder stays
    assert "100%" in capsys.readouterr().err
    fetch(source(serve(GOOD)), tmp_path / "quiet")
    assert capsys.readouterr() == ("", "")


SERVED = {
    "another byte": {"content": GOOD[:-1] + bytes([GOOD[-1] ^ 1])},
    "interrupted": {"content": GOOD, "sent": 100},
    "shorter": {"content": GOOD, "sent": 100, "announced": 100},
}


@pytest.mark.parametrize("served", SERVED)
def test_another_or_an_incomplete_content_is_refused_before_it_is_unpacked(served, serve, tmp_path, monkeypatch):
    monkeypatch.setattr(tarfile, "open", lambda *_: pytest.fail("unpacked before it was checked"))
    with pytest.raises(bsam.BsamError, match="incomplete"):
        fetch(source(serve(**SERVED[served])), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("why", ["closed", "missing", "silent"])
def test_without_a_server_the_error_says_which_file_goes_where(why, serve, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listening:  # answers nobody
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/cifar-10-binary.tar.gz"
        if why == "closed":
            listening.close()
        url = serve(GOOD, status=404) if why == "missing" else url
        with pytest.raises(bsam.BsamError, match=f"{url}.*{tmp_path / NAME}"):
            fetch(source(url), tmp_path, timeout=0.2)
    assert not list(tmp_path.iterdir())
    assert socket.getdefaulttimeout() is None


def test_an_interruption_leaves_nothing(serve, tmp_path, monkeypatch):
    def stop(tar: tarfile.TarFile, folder: Path, filter: str) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(tarfile.TarFile, "extractall", stop)
    with pytest.raises(KeyboardInterrupt):
        fetch(source(serve(GOOD)), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_data_set_is_downloaded_by_its_name_from_all_its_sources(serve, tmp_path, monkeypatch):
    url = serve(b"labels").replace("tar.gz", "gz")
    sources = tuple(replace(source(url, b"labels"), makes=name) for name in ("one.gz", "two.gz"))
    monkeypatch.setitem(data.DATASETS, "cifar10", replace(data.DATASETS["cifar10"], sources=sources))
    data.download("cifar10", str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.gz", "two.gz"]


@pytest.mark.parametrize(
    ("name", "reason"), [("digits", "scikit-learn"), ("flowers102", "cannot be downloaded"), ("folder:a", "cannot")]
)
def test_a_data_set_without_a_download_is_an_error(name, reason, tmp_path):
    with pytest.raises(BsamValueError, match=f"{name}.*{reason}"):
        data.download(name, tmp_path)
    assert not list(tmp_path.iterdir())


CIFAR10_NAMES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
FASHION_NAMES = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
PLACES = {
    "binary": ("cifar10", [f"cifar-10-batches-bin/{name}.bin" for name in CIFAR10_NAMES]),
    "python": ("cifar10", [f"cifar-10-batches-py/{name}" for name in CIFAR10_NAMES]),
    "binary itself": ("cifar10", [f"{name}.bin" for name in CIFAR10_NAMES]),
    "of CIFAR-100": ("cifar100", ["cifar-100-python/train", "cifar-100-python/test"]),
    "unpacked": ("fashion_mnist", FASHION_NAMES),
    "of torchvision": ("fashion_mnist", [f"FashionMNIST/raw/{name}.gz" for name in FASHION_NAMES]),
}


def touched(folder: Path, files: list[str]) -> list[Path]:
    paths = [folder / file for file in files]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return paths


@pytest.mark.parametrize("place", PLACES)
def test_what_the_loader_finds_is_not_downloaded(place, tmp_path, monkeypatch):
    name, files = PLACES[place]
    asked = []
    monkeypatch.setattr(data, "fetch", lambda source, folder, progress: asked.append(source.makes))
    paths = touched(tmp_path, files)
    assert data.DATASETS[name].is_in(tmp_path)
    data.download(name, tmp_path)
    assert not asked
    for path in paths:
        path.unlink()
        assert not data.DATASETS[name].is_in(tmp_path)
        data.download(name, tmp_path)
        assert asked == [source.makes for source in data.DATASETS[name].sources]
        asked.clear()
        path.touch()
