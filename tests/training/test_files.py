import errno
import os

import pytest

import bsam
from bsam.training.files import LOCK, refuse_other_files, write


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EROFS, "Make the folder writable"),
        (errno.EDQUOT, "Free some space"),
        (errno.EIO, "Call again when the cause is removed"),
    ],
)
def test_an_error_of_the_disk_is_reported_and_the_old_content_kept(tmp_path, monkeypatch, number, words):
    write(tmp_path / "file", b"old")

    def failing(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(bsam.BsamError, match=rf"{os.strerror(number)}.*{words}"):
        write(tmp_path / "file", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"old"}
    write(tmp_path / "file", b"new", durable=False)
    assert (tmp_path / "file").read_bytes() == b"new"


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
