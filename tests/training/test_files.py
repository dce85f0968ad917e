import errno
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

import bsam
from bsam import cli
from bsam.training.files import LOCK, RunLocked, locked, read_json, read_json_lines, refuse_other_files, write


def test_a_folder_is_held_by_one_at_a_time(tmp_path):
    folder = tmp_path / "new" / "folder"
    with locked(folder, "training"):
        message = f"{folder}: another process is measuring there. Wait for it, or choose another folder"
        with pytest.raises(RunLocked, match=message), locked(folder, "measuring"):
            pass
    with pytest.raises(ZeroDivisionError), locked(folder, "training"):
        raise ZeroDivisionError
    with locked(folder, "training"):
        assert [path.name for path in folder.iterdir()] == [LOCK]


def test_those_who_wait_take_turns(tmp_path):
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


def test_a_refused_run_leaves_no_lock_in_the_way(tmp_path, capsys):
    out = tmp_path / "run"
    assert cli.main(["train", "--method", "sgd", "--batch", "100000", "--device", "cpu", "--out", str(out)]) == 2
    assert "batch must be at most" in capsys.readouterr().err
    refuse_other_files(out)


def test_an_error_of_the_disk_is_reported_and_the_old_content_kept(tmp_path, monkeypatch):
    write(tmp_path / "file", b"old")

    def failing(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(bsam.BsamError, match=r"file could not be written \(Read-only .*make the folder writable"):
            write(tmp_path / "file", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"old"}
    write(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[1]", None])
def test_a_file_that_cannot_be_read_is_named_with_what_to_do(content, tmp_path):
    file = tmp_path / "file"
    file.mkdir() if content is None else file.write_bytes(content)
    message = r"file cannot be read \((Is a directory|\w+Error)\): remove it"
    with pytest.raises(bsam.BsamError, match=message):
        read_json(file, dict, "remove it")
    with pytest.raises(bsam.BsamError, match=message):
        read_json_lines(file, "remove it")


def test_other_files_are_refused_with_the_first_three_names(tmp_path):
    for name in (LOCK, "half.draft", "own.json"):
        (tmp_path / name).touch()
    refuse_other_files(tmp_path, ["own.json"])
    with pytest.raises(bsam.BsamError, match=r"holds files of something else \(own\.json\): choose another folder"):
        refuse_other_files(tmp_path)
    for name in "abcd":
        (tmp_path / name).touch()
    with pytest.raises(bsam.BsamError, match=r"\(a, b, c\)"):
        refuse_other_files(tmp_path, ["own.json"])
