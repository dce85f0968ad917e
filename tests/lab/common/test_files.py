"""Damaged files are noticed; what says nothing of a file's content is no damage."""

import errno
import fcntl
import io
import os
import platform
import random
import re
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

import bsam
from bsam.lab.common import files
from bsam.lab.common.files import (
    LOCK,
    DamagedFile,
    ReadFailed,
    RunLocked,
    WrongContent,
    inside,
    load_arrays,
    load_tensors,
    load_torch,
    locked,
    read_bytes,
    read_json,
    read_json_lines,
    reading,
    refuse_other_files,
    save_tensors,
    write,
    write_json_lines,
)

TENSORS = {"w": torch.arange(30.0), "v": torch.ones(2, 2, dtype=torch.int8), "b": torch.zeros((), dtype=torch.bfloat16)}
STATE = {"network": TENSORS, "epochs": [{"epoch": 1, "loss": 2.5}]}
ARRAYS = {"confusion": np.arange(100).reshape(10, 10), "names": np.array(["a", "bc"]), "pixels": np.ones((2, 8), "u1")}


def saved_state():
    file = io.BytesIO()
    torch.save(STATE, file)
    return file.getvalue()


def archive_of_arrays():
    file = io.BytesIO()
    np.savez_compressed(file, **ARRAYS)
    return file.getvalue()


FILES = {
    "checkpoint": (saved_state(), load_torch, STATE),
    "network": (save_tensors(TENSORS, {"run": '{"lr": 0.1}'}), lambda content: load_tensors(content)[0], TENSORS),
    "predictions": (archive_of_arrays(), load_arrays, ARRAYS),
}


def same(a, b):
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return np.array_equal(a, b) and a.dtype == b.dtype if isinstance(a, np.ndarray) else a == b


@pytest.mark.parametrize("kind", FILES)
def test_a_flipped_bit_is_an_error_or_changes_nothing(kind):
    """It may hit padding, dates and permissions."""
    content, load, expected = FILES[kind]
    assert same(load(content), expected)
    chosen = random.Random(0).sample(range(8 * len(content)), 300)
    errors = 0
    for bit in chosen:
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << (bit % 8)
        try:
            with reading("file", "remove it"):
                got = load(bytes(flipped))
        except DamagedFile:
            errors += 1
        else:
            assert same(got, expected), bit
    assert errors > len(chosen) / 3


@pytest.mark.parametrize(("offset", "bit"), [(38, 4), (31, 2)], ids=["folder", "length"])
@pytest.mark.parametrize("kind", ["checkpoint", "predictions"])
def test_damage_to_the_directory_of_an_archive(kind, offset, bit):
    """Torch reads a folder's entry as uninitialised memory; a wrong length hides the next entry."""
    content, load, _ = FILES[kind]
    for place in list(re.finditer(rb"PK\x01\x02", content))[:-1]:
        flipped = bytearray(content)
        flipped[place.start() + offset] ^= 1 << bit
        with pytest.raises((WrongContent, zipfile.BadZipFile)):
            load(bytes(flipped))


def test_torch_itself_does_not_notice_a_flipped_bit():
    """Otherwise the CRCs need not be compared here."""
    content = FILES["checkpoint"][0]
    place = content.index(np.float32(7.0).tobytes())
    flipped = content[:place] + b"\1" + content[place + 1 :]
    assert not same(torch.load(io.BytesIO(flipped), weights_only=True), STATE)
    with pytest.raises(WrongContent, match="CRC"):
        load_torch(flipped)


def test_files_of_other_programs_are_read_as_before(tmp_path):
    tensors, metadata = load_tensors(save(TENSORS, {"format": "pt"}))
    assert same(tensors, TENSORS)
    assert metadata == {"format": "pt"}
    old = io.BytesIO()
    torch.save(STATE, old, _use_new_zipfile_serialization=False)
    assert same(load_torch(old.getvalue()), STATE)
    (tmp_path / "ours").write_bytes(FILES["network"][0])
    with safe_open(tmp_path / "ours", "pt") as file:  # other programs read ours
        assert file.metadata()["run"] == '{"lr": 0.1}'
        assert same({name: file.get_tensor(name) for name in file.keys()}, TENSORS)  # noqa: SIM118 - it is no dict
    assert save_tensors(TENSORS, {"run": '{"lr": 0.1}'}) == FILES["network"][0]


TRANSIENT = {
    "stale": OSError(errno.ESTALE, os.strerror(errno.ESTALE)),
    "device": OSError(errno.EIO, os.strerror(errno.EIO)),
    "permission": PermissionError(errno.EACCES, os.strerror(errno.EACCES)),
    "memory": MemoryError(),
    "CPU": RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
    "device lost": RuntimeError("CUDA error: the launch timed out and was terminated"),
    "GPU": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
}


@pytest.mark.parametrize("error", TRANSIENT.values(), ids=TRANSIENT)
def test_what_says_nothing_of_the_content_is_no_damage(error):
    with (
        pytest.raises(ReadFailed, match=r"file cannot be read now .*keep it, and try again") as raised,
        reading("file", "remove it"),
    ):
        raise error
    assert "remove" not in str(raised.value)


@pytest.mark.parametrize("error", [zipfile.BadZipFile(), KeyError("task"), EOFError(), RuntimeError("size mismatch")])
def test_damage_says_what_to_do(error):
    with pytest.raises(DamagedFile, match=r"file cannot be read .*: remove it"), reading("file", "remove it"):
        raise error


def test_an_archive_that_would_fill_the_memory_is_not_decompressed():
    file = io.BytesIO()
    np.savez_compressed(file, a=np.zeros(2**20, "u1"), b=np.zeros(2**20, "u1"))
    assert len(file.getvalue()) < 10_000
    with pytest.raises(WrongContent, match="its arrays take 2 MB, more than 2 MB"):
        load_arrays(file.getvalue(), limit=2 * 10**6)
    assert load_arrays(file.getvalue())["b"].shape == (2**20,)


@pytest.mark.parametrize(("dtype", "count"), [("<f4", 2**40), ("<f4", 2), ("<f4", 4), ("|S0", 2**40), ("|O", 1)])
def test_headers_of_arrays_are_compared_with_their_sizes(dtype, count):
    """The reader of NumPy would allocate what the header says."""
    array = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(array, header)
    array.write(np.arange(3, dtype="f4").tobytes())
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.npy", array.getvalue())
    with pytest.raises(ValueError, match=r"does not agree with its size|pickle"):
        load_arrays(file.getvalue())


@pytest.mark.parametrize("kind", ["zero", "fifo", "folder", "large"])
def test_only_regular_files_of_bounded_size_are_read(kind, tmp_path):
    path = tmp_path / "file"
    if kind == "zero":
        path.symlink_to("/dev/zero")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"12345")
        assert read_bytes(path, 5) == b"12345"
    with pytest.raises(WrongContent, match="MB" if kind == "large" else "not a regular file"):
        read_bytes(path, 4)


def test_paths_that_leave_their_folder(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/link").symlink_to(tmp_path)
    (tmp_path / "in/loop").symlink_to("loop")
    assert inside(tmp_path / "in", "a/../b.jsonl") == tmp_path / "in/a/../b.jsonl"
    for name in ("/dev/zero", "../x", "a/../../x", "link/x", "x\0", 3, None, str(tmp_path / "in/x")):
        with pytest.raises(WrongContent, match="is not inside the folder"):
            inside(tmp_path / "in", name)


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
