import errno
import fcntl
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

import bsam
from bsam import cli
from bsam.training.files import refuse_other_files
from bsam.training.lock import LOCK, RunLocked, locked


def test_a_folder_is_held_by_one_and_the_file_goes_with_the_lock(tmp_path):
    folder = tmp_path / "new" / "folder"
    with locked(folder, "training"):
        assert [path.name for path in folder.iterdir()] == [LOCK]
        message = f"{folder}: another process is measuring there. Wait for it, or choose another folder"
        with pytest.raises(RunLocked, match=message), locked(folder, "measuring"):
            pass
        assert [path.name for path in folder.iterdir()] == [LOCK]
    assert not any(folder.iterdir())
    with pytest.raises(ZeroDivisionError), locked(folder, "training"):
        raise ZeroDivisionError
    assert not any(folder.iterdir())


def test_a_file_that_a_killed_process_left_blocks_nobody(tmp_path):
    (tmp_path / LOCK).touch()
    with locked(tmp_path, "training"):
        pass
    assert not any(tmp_path.iterdir())


def test_a_file_named_lock_and_one_that_is_not_empty_stay_as_they_are(tmp_path):
    for name in ("lock", LOCK):
        (tmp_path / name).write_text("precious")
    with locked(tmp_path, "training"), pytest.raises(RunLocked), locked(tmp_path, "training"):
        pass
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"lock": "precious", LOCK: "precious"}


@pytest.mark.parametrize("name", ["lock", LOCK])
def test_a_link_is_not_followed(name, tmp_path):
    target, folder = tmp_path / "target", tmp_path / "folder"
    target.write_text("precious")
    folder.mkdir()
    (folder / name).symlink_to(target)
    if name == LOCK:
        message = r"folder/\.bsam-lock is a symbolic link, which is not followed: remove it"
        with pytest.raises(bsam.BsamError, match=message), locked(folder, "training"):
            pass
    else:
        with locked(folder, "training"):
            pass
    assert (folder / name).is_symlink()
    assert target.read_text() == "precious"


def test_those_who_wait_take_turns_although_each_removes_the_file(tmp_path):
    """One may wait for the lock of a file that its holder then removes. Threads lock each other out as processes do."""
    number = tmp_path / "number"
    number.write_text("0")

    def count(times):
        for _ in range(times):
            with locked(tmp_path, "counting", wait=True):
                number.write_text(str(int(number.read_text()) + 1))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(count, [250] * 4)) == [None] * 4
    assert number.read_text() == "1000"


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    message = r"\.bsam-lock cannot be locked \(No locks available\)"
    with pytest.raises(bsam.BsamError, match=message), locked(tmp_path, "training"):
        pass


def test_a_refused_run_leaves_no_lock_in_the_way(tmp_path, capsys):
    out = tmp_path / "run"
    assert cli.main(["train", "--method", "sgd", "--batch", "100000", "--device", "cpu", "--out", str(out)]) == 2
    assert "batch must be at most" in capsys.readouterr().err
    assert not any(out.iterdir())
    refuse_other_files(out)
