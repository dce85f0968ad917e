import errno
import fcntl
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

import bsam
from bsam.lab.common.stored_files import DamagedFile
from bsam.lab.training import files
from bsam.lab.training.files import (
    LOCK,
    RunLocked,
    locked,
    read_json,
    read_json_lines,
    refuse_other_files,
    write,
    write_json_lines,
)


def test_a_folder_is_locked_by_one_at_a_time(tmp_path):
    folder = tmp_path / "new" / "folder"
    with locked(folder, "training"), pytest.raises(RunLocked, match="measuring"), locked(folder, "measuring"):
        pass
    with pytest.raises(ZeroDivisionError), locked(folder, "training"):
        raise ZeroDivisionError
    with locked(folder, "training"):
        assert [path.name for path in folder.iterdir()] == [LOCK]


@pytest.mark.filterwarnings("ignore:flock not supported")
def test_a_lock_left_by_another_machine_names_its_file_its_machine_and_what_to_do(tmp_path, monkeypatch):
    """On a file system without flock, where the file itself is the lock."""

    def unsupported(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    monkeypatch.setattr(files, "LONGEST_WAIT", 0.1)
    with locked(tmp_path, "training"):
        (tmp_path / "copy").write_text((tmp_path / LOCK).read_text().replace(platform.node(), "node17"))
    (tmp_path / "copy").rename(tmp_path / LOCK)
    for wait in (False, True):
        with pytest.raises(RunLocked) as error, locked(tmp_path, "training", wait=wait):
            pass
        message = str(error.value)
        assert f"process {os.getpid()} on node17 is training there. " in message
        assert f"remove {tmp_path / LOCK} if that process has ended" in message
    (tmp_path / LOCK).unlink()
    with locked(tmp_path, "training"):
        pass


def test_only_a_new_folder_that_is_still_empty_is_removed(tmp_path):
    (tmp_path / "old").mkdir()
    for name in ("new", "written", "old"):
        with locked(tmp_path / name, "training"):
            if name == "written":
                (tmp_path / name / "file").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "written"]


def test_waiting_threads_take_turns(tmp_path):
    """Threads lock each other out as processes do."""
    number = tmp_path / "number"
    number.write_text("0")

    def count(times):
        for _ in range(times):
            with locked(tmp_path, "counting", wait=True):
                number.write_text(str(int(number.read_text()) + 1))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(count, [5] * 4)) == [None] * 4
    assert number.read_text() == "20"


def test_a_failed_write_keeps_the_old_content(tmp_path, monkeypatch):
    write(tmp_path / "file", b"old")

    def fail(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(bsam.BsamError, match="Read-only"):
            write(tmp_path / "file", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"old"}
    write(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[1]", None])
def test_a_file_that_cannot_be_read(content, tmp_path):
    file = tmp_path / "file"
    file.mkdir() if content is None else file.write_bytes(content)
    message = r"file cannot be read \(.*\): remove it"
    with pytest.raises(DamagedFile, match=message):
        read_json(file, dict, "remove it")
    with pytest.raises(DamagedFile, match=message):
        read_json_lines(file, "remove it")


def test_a_missing_key_is_damage(tmp_path):
    write(tmp_path / "file", b'{"task": 1}\n')
    assert read_json(tmp_path / "file", dict, "remove it", ["task"]) == {"task": 1}
    for read in (partial(read_json, kind=dict), read_json_lines):
        with pytest.raises(DamagedFile, match=r"file cannot be read \(it has no 'data'\): remove it"):
            read(tmp_path / "file", hint="remove it", keys=["task", "data"])


def test_two_writers_never_tear_a_file(tmp_path):
    """They wrote into each other's draft where both named it ``FILE.draft``, and could not rename it."""
    file = tmp_path / "page.html"
    pages = [letter.encode() * size for letter, size in (("a", 300_000), ("b", 100_000))]
    write(file, pages[0])
    seen = set()

    def write_often(page):
        for _ in range(40):
            write(file, page)
            seen.add(file.read_bytes())

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(write_often, pages)) == [None, None]
    assert seen <= set(pages)
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_written_file_has_ordinary_permissions_and_is_flushed_before_it_is_renamed(tmp_path, monkeypatch):
    calls = []
    for owner, name in ((os, "fsync"), (Path, "replace")):
        ordinary = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, name=name, call=ordinary: (calls.append(name), call(*a))[1])
    write(tmp_path / "file", b"content")
    write_json_lines(tmp_path / "rows", [{}])
    assert calls == ["fsync", "replace"] * 2
    (tmp_path / "other").write_bytes(b"")
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1


def test_other_files_are_refused_but_not_locks_and_drafts(tmp_path):
    for name in (LOCK, "half.draft", "log.txt"):
        (tmp_path / name).touch()
    refuse_other_files(tmp_path, ["log.txt"])
    with pytest.raises(bsam.BsamError, match=r"log\.txt"):
        refuse_other_files(tmp_path)
