"""Damaged files are noticed; what says nothing of a file's content is no damage."""

import errno
import io
import os
import random
import re
import zipfile

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from bsam.lab.common.stored_files import (
    DamagedFile,
    ReadFailed,
    WrongContent,
    inside,
    load_arrays,
    load_tensors,
    load_torch,
    read_bytes,
    reading,
    save_tensors,
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
