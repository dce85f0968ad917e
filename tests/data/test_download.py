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
from bsam import data
from bsam.data.download import Source, fetch

NAME = "cifar-10-batches-bin"


def archive(members: dict[str, bytes | str]) -> bytes:
    """Files by their content, and links by what they lead to."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            if isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
                tar.addfile(member)
            else:
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
    return Source(url, hashlib.md5(content).hexdigest(), len(content), NAME)


def test_an_archive_is_fetched_checked_and_unpacked(serve, tmp_path):
    told = []
    made = fetch(source(serve(GOOD)), tmp_path / "new" / "folder", lambda come, whole: told.append((come, whole)))
    assert made == tmp_path / "new" / "folder" / NAME
    assert {path.name: path.read_bytes() for path in made.iterdir()} == {
        "data_batch_1.bin": b"one" * 1000,
        "test_batch.bin": b"test",
    }
    assert [path.name for path in made.parent.iterdir()] == [NAME]  # neither the archive nor a temporary folder stays
    assert told[-1] == (len(GOOD), len(GOOD))


def test_a_plain_file_is_fetched_as_it_is(serve, tmp_path):
    url = serve(b"labels").replace("tar.gz", "gz")
    assert fetch(replace(source(url, b"labels"), makes="labels.gz"), tmp_path).read_bytes() == b"labels"


def test_what_is_there_stays(tmp_path):
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "mine").touch()
    assert fetch(source("http://127.0.0.1:1/never.tar.gz"), tmp_path) == tmp_path / NAME
    assert (tmp_path / NAME / "mine").exists()


@pytest.mark.parametrize(
    "served", [GOOD[:-1] + bytes([GOOD[-1] ^ 1]), bytes(len(GOOD)), GOOD + b"x", GOOD + bytes(50_000_000)]
)
def test_another_content_is_refused_before_it_is_unpacked(served, serve, tmp_path, monkeypatch):
    told: list[int] = []
    monkeypatch.setattr(tarfile, "open", lambda *_: pytest.fail("unpacked before it was checked"))
    with pytest.raises(
        bsam.BsamError,
        match=r"is not the file that its authors published: its MD5 is [0-9a-f]{32}, not [0-9a-f]{32}; nothing of it was kept",
    ):
        fetch(source(serve(served)), tmp_path, lambda come, whole: told.append(come))
    assert told[-1] <= 2**20  # of a file that is too long not all is taken
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("announced", [len(GOOD), 100])
def test_an_interrupted_transfer_leaves_nothing_and_says_how_to_go_on(announced, serve, tmp_path):
    with pytest.raises(
        bsam.BsamError, match=rf"it stopped after 100 of {len(GOOD):,} bytes.*try again.*{tmp_path / NAME} is there"
    ):
        fetch(source(serve(GOOD, sent=100, announced=announced)), tmp_path)
    assert not list(tmp_path.iterdir())


def test_without_a_server_the_refusal_says_which_file_goes_where(serve, tmp_path):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}/cifar-10-binary.tar.gz"
    for url in (nobody, serve(GOOD, status=404)):
        with pytest.raises(
            bsam.BsamError,
            match=rf"{url} could not be had \(.+\).*unpack it in {tmp_path}, so that {tmp_path / NAME} is there",
        ):
            fetch(source(url), tmp_path)
        assert not list(tmp_path.iterdir())


def test_paths_and_links_that_lead_elsewhere_are_not_followed(serve, tmp_path):
    folder = tmp_path / "inside"
    evil = {
        "../outside": b"x",
        f"{NAME}/../../outside": b"x",
        f"{NAME}/..": b"x",
        str(tmp_path / "outside"): b"x",
        f"{NAME}/deep/outside": b"x",
        "other/outside": b"x",
        f"{NAME}/link": str(tmp_path / "outside"),
        f"{NAME}/link2": "/etc/passwd",
        f"{NAME}/good.bin": b"good",
    }
    content = archive(evil)
    made = fetch(source(serve(content), content), folder)
    assert [path.name for path in made.iterdir()] == ["good.bin"]
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == [
        "inside",
        f"inside/{NAME}",
        f"inside/{NAME}/good.bin",
    ]


@pytest.mark.parametrize(
    "content",
    [b"no archive at all", GOOD[:60], archive({"other/file": b"x"}), archive({})],
    ids=["text", "truncated", "other", "empty"],
)
def test_a_broken_or_foreign_archive_is_refused(content, serve, tmp_path):
    with pytest.raises(bsam.BsamError, match=rf"cannot be unpacked|holds no {NAME}"):
        fetch(source(serve(content), content), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(serve, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(bsam.BsamError, match=rf"{tmp_path / 'file' / NAME} could not be written"):
        fetch(source(serve(GOOD)), tmp_path / "file")


def test_another_process_may_be_faster(serve, tmp_path):
    def meanwhile(come: int, whole: int) -> None:
        (tmp_path / NAME).mkdir(exist_ok=True)
        (tmp_path / NAME / "theirs").touch()

    assert [path.name for path in fetch(source(serve(GOOD)), tmp_path, meanwhile).iterdir()] == ["theirs"]


def test_a_stop_by_hand_leaves_nothing(serve, tmp_path):
    def stop(come: int, whole: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(source(serve(GOOD)), tmp_path, stop)
    assert not list(tmp_path.iterdir())


def test_a_data_set_is_downloaded_by_its_name_from_all_its_sources(serve, tmp_path, monkeypatch):
    url = serve(b"labels").replace("tar.gz", "gz")
    sources = tuple(replace(source(url, b"labels"), makes=name) for name in ("one.gz", "two.gz"))
    monkeypatch.setitem(data.DATASETS, "cifar10", replace(data.DATASETS["cifar10"], sources=sources))
    data.download("cifar10", str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.gz", "two.gz"]
    with pytest.raises(bsam.BsamError, match="data must be one of"):
        data.download("cifar", tmp_path)


CIFAR10_NAMES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
FASHION_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
PLACES = {
    "binary": ("cifar10", [f"cifar-10-batches-bin/{name}.bin" for name in CIFAR10_NAMES]),
    "python": ("cifar10", [f"cifar-10-batches-py/{name}" for name in CIFAR10_NAMES]),
    "binary itself": ("cifar10", [f"{name}.bin" for name in CIFAR10_NAMES]),
    "python itself": ("cifar10", list(CIFAR10_NAMES)),
    "of CIFAR-100": ("cifar100", ["cifar-100-python/train", "cifar-100-python/test"]),
    "of CIFAR-100 itself": ("cifar100", ["train.bin", "test.bin"]),
    "unpacked": ("fashion_mnist", list(FASHION_NAMES)),
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


def test_the_digits_are_everywhere(tmp_path):
    assert data.DATASETS["digits"].is_in(tmp_path)


def test_the_published_sources():
    for name, entry in data.DATASETS.items():
        for each in entry.sources:
            assert len(each.md5) == 32
            assert each.url.startswith(
                "https://www.cs.toronto.edu/~kriz/" if name.startswith("cifar") else "http://fashion-mnist."
            )
    assert data.download("digits", "/nowhere") is None  # nothing to get
