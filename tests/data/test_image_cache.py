from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

import numpy as np
import PIL
import pytest
import torch
from PIL import Image

from bsam.core.errors import BsamRuntimeError, BsamValueError
from bsam.data import image_blocks, image_cache
from bsam.data.examples import Dataset
from bsam.data.image_decoding import Resize, decode, decode_bytes
from bsam.data.image_files import read_folder
from bsam.host.processes import worker_pool
from processes import Script

BLOCK, SIZE = 3, 8
COUNTS = {"train": 5, "val": 1, "test": 2}  # images of each of the two classes: 16, in 6 blocks
TOTAL = 16
RESIZE = Resize(SIZE)


@pytest.fixture
def folder(tmp_path):
    """Images whose sorted names, class by class, are not the order in which they were drawn."""
    random = np.random.default_rng(0)
    for part, count in COUNTS.items():
        for name in ("wolf", "cat"):
            (tmp_path / "images" / part / name).mkdir(parents=True)
            for i in range(count):
                path = tmp_path / "images" / part / name / f"{i}.png"
                Image.fromarray(random.integers(0, 256, (10, 12, 3), np.uint8)).save(path)
    return tmp_path / "images"


@pytest.fixture(autouse=True)
def decoded(monkeypatch):
    """The names of the images that this process decodes, in blocks of three."""
    names = []

    def counted(content, name, resize):
        names.append(name)
        return decode_bytes(content, name, resize)

    monkeypatch.setattr(image_blocks, "decode_bytes", counted)
    monkeypatch.setattr(image_cache, "BLOCK", BLOCK)
    return names


def load(folder: Path, resize: Resize = RESIZE, **options) -> tuple[Dataset, list[str]]:
    return image_cache.load_images(read_folder(folder), resize, mean=(0.5,), std=(0.25,), **options)


def cache(folder: Path, suffix: str) -> Path:
    (path,) = (folder / ".bsam-cache").glob(f"*{suffix}")
    return path


def assert_correct(data: Dataset, folder: Path, without: tuple[str, ...] = ()) -> None:
    for part, examples in (("train", data.train), ("val", data.validation), ("test", data.test)):
        paths = sorted((folder / part).glob("*/*"))
        paths = [path for path in paths if path.relative_to(folder).as_posix() not in without]
        want = np.stack([decode(path, RESIZE) for path in paths]).transpose(0, 3, 1, 2)
        assert torch.equal(examples.x, torch.from_numpy(want.copy()))
        assert examples.y.tolist() == [["cat", "wolf"].index(path.parent.name) for path in paths]
        assert examples.x.is_contiguous(memory_format=torch.channels_last)


def test_the_data_set_has_the_decoded_images_in_order_and_the_second_call_decodes_nothing(folder, decoded):
    seen = []
    data, left_out = load(folder, progress=lambda *done: seen.append(done))
    assert_correct(data, folder)
    assert (data.name, data.classes, data.class_names) == ("images", 2, ("cat", "wolf"))
    assert (data.mean, data.std, data.split) == ((0.5,), (0.25,), "folders train, val and test")
    assert left_out == []
    assert seen == [(n, TOTAL) for n in (3, 6, 9, 12, 15, 16)]
    assert len(decoded) == len(set(decoded)) == TOTAL
    again, _ = load(folder, progress=lambda *done: seen.append(done))
    assert (len(seen), len(decoded)) == (6, TOTAL)
    assert_correct(again, folder)
    assert again.digest == data.digest

    one = again.train.x.untyped_storage().data_ptr()  # parts of one file, without a copy
    assert [part.x.untyped_storage().data_ptr() for part in (again.validation, again.test)] == [one, one]
    before = cache(folder, ".npy").read_bytes()
    assert np.array_equal(np.load(cache(folder, ".npy"))[:10].transpose(0, 3, 1, 2), data.train.x.numpy())
    again.train.x.zero_()
    assert cache(folder, ".npy").read_bytes() == before
    assert_correct(load(folder)[0], folder)


def test_the_digest_is_that_of_pixels_labels_and_order(folder, tmp_path):
    digests = [load(folder)[0].digest, load(folder, cache_dir=tmp_path / "elsewhere")[0].digest]
    assert digests[0] == digests[1]
    assert cache(folder, ".npy").exists()
    files = read_folder(folder)
    other = replace(files, train=replace(files.train, labels=files.train.labels[::-1]))
    digests.append(image_cache.load_images(other, RESIZE, mean=(0.5,), std=(0.25,))[0].digest)
    first, second = folder / "train/cat/0.png", folder / "train/cat/1.png"
    content = first.read_bytes(), second.read_bytes()
    first.write_bytes(content[1])
    digests.append(load(folder)[0].digest)
    second.write_bytes(content[0])
    digests.append(load(folder)[0].digest)
    first.replace(folder / "train/wolf/00.png")
    digests.append(load(folder)[0].digest)
    assert len(set(digests)) == 5


def test_the_cache_of_other_content_settings_or_software_is_not_used(folder, decoded, monkeypatch):
    load(folder)
    path = folder / "test/cat/0.png"
    before, (content, other) = path.stat(), (path.read_bytes(), (folder / "test/cat/1.png").read_bytes())
    path.write_bytes(other)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert_correct(load(folder)[0], folder)
    path.write_bytes(content)
    assert len(decoded) == 2 * TOTAL
    load(folder)
    assert len(decoded) == 2 * TOTAL
    for number, resize in enumerate((Resize(SIZE, 0.8), Resize(SIZE, 1.0, "bicubic"), Resize(7)), 3):
        data, _ = load(folder, resize)
        assert np.array_equal(data.train.x[0].permute(1, 2, 0), decode(folder / "train/cat/0.png", resize))
        assert len(decoded) == number * TOTAL
    monkeypatch.setattr(PIL, "__version__", "0.1")
    load(folder)
    assert len(decoded) == 6 * TOTAL


def test_the_files_of_another_cache_under_the_name_of_this_one_are_not_used(folder, decoded):
    load(folder)
    (own,) = (folder / ".bsam-cache").glob("*.npy")
    path = folder / "test/cat/0.png"
    content = path.read_bytes()
    path.write_bytes((folder / "test/cat/1.png").read_bytes())
    load(folder)
    (other,) = set((folder / ".bsam-cache").glob("*.npy")) - {own}
    path.write_bytes(content)
    for suffix in (".npy", ".jsonl"):
        own.with_suffix(suffix).write_bytes(other.with_suffix(suffix).read_bytes())
    assert_correct(load(folder)[0], folder)
    assert len(decoded) == 3 * TOTAL


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def cut(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])


IMAGE = SIZE * SIZE * 3
DAMAGES = {
    "a pixel of the second block": (lambda pixels, journal: flip(pixels, -12 * IMAGE), 3),
    "a pixel of the last block": (lambda pixels, journal: flip(pixels, -1), 1),
    "pixels cut short": (lambda pixels, journal: cut(pixels, -1), TOTAL),
    "pixels of another shape": (lambda pixels, journal: np.save(pixels, np.zeros((16, 8, 8), np.uint8)), TOTAL),
    "pixels of another type": (lambda pixels, journal: np.save(pixels, np.zeros((16, 8, 8, 3), np.int8)), TOTAL),
    "no pixels": (lambda pixels, journal: pixels.unlink(), TOTAL),
    "an empty file": (lambda pixels, journal: cut(pixels, 0), TOTAL),
    "a header only": (lambda pixels, journal: cut(pixels, 128), TOTAL),
    "something else": (lambda pixels, journal: pixels.write_bytes(b"something else"), TOTAL),
    "bytes after the pixels": (lambda pixels, journal: pixels.write_bytes(pixels.read_bytes() + b"1"), 0),
    "journal cut short": (lambda pixels, journal: cut(journal, -9), 1),
    "no journal": (lambda pixels, journal: journal.unlink(), TOTAL),
    "another journal": (lambda pixels, journal: journal.write_bytes(b"7\n[0]\n[[]]\n\xff\n" + b"[" * 99999), TOTAL),
    "corrupt images in the journal": (
        lambda pixels, journal: journal.write_text(journal.read_text().replace("[]]", '[[1, "no image"]]]', 1)),
        3,
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_parts_are_decoded_again(folder, decoded, damage):
    digest = load(folder)[0].digest
    pixels, want = cache(folder, ".npy"), cache(folder, ".npy").read_bytes()
    decoded.clear()
    change, count = DAMAGES[damage]
    change(pixels, cache(folder, ".jsonl"))
    data, _ = load(folder)
    assert_correct(data, folder)
    assert (data.digest, len(decoded)) == (digest, count)
    assert pixels.read_bytes()[: len(want)] == want
    load(folder)
    assert len(decoded) == count


KILLED = """
import os, signal, sys
from bsam.data import image_blocks, image_cache
from bsam.data.image_decoding import Resize, decode_bytes
from bsam.data.image_files import read_folder

def decode(content, name, resize):
    global calls
    calls += 1
    if calls == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    return decode_bytes(content, name, resize)

calls = 0
image_blocks.decode_bytes = decode
image_cache.BLOCK = 3
image_cache.load_images(read_folder(sys.argv[1]), Resize(8), mean=(0.5,), std=(0.25,))
"""


def test_a_call_after_a_killed_one_decodes_the_other_blocks_only(folder, decoded, tmp_path):
    whole, _ = load(folder, cache_dir=tmp_path / "whole")
    done = decoded[:6]  # two blocks
    decoded.clear()
    (tmp_path / "killed.py").write_text(KILLED)
    killed = Script(tmp_path / "killed.py", folder, output=tmp_path / "log")
    assert killed.wait() == -signal.SIGKILL
    data, _ = load(folder)
    assert sorted(decoded + done) == sorted({*decoded, *done})
    assert len(decoded) == TOTAL - 6
    assert data.digest == whole.digest
    (want,) = (tmp_path / "whole").glob("*.npy")
    assert cache(folder, ".npy").read_bytes() == want.read_bytes()


def test_interrupted_workers_leave_what_they_finished(folder, decoded, monkeypatch):
    monkeypatch.setattr(
        image_blocks, "worker_pool", lambda count: worker_pool(count - 1)
    )  # starting each takes seconds

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(folder, workers=2, progress=interrupt)
    assert decoded == []  # that was done by the workers
    assert_correct(load(folder, workers=1)[0], folder)
    assert len(decoded) in (TOTAL - 3, TOTAL - 1)  # one block was recorded, the first or perhaps the last


def test_of_two_calls_one_decodes_and_the_other_waits(folder, decoded, monkeypatch):
    began, waits, flock = threading.Event(), threading.Semaphore(0), fcntl.flock

    def observed(*arguments):
        waits.release()
        flock(*arguments)

    def slow(done: int, total: int) -> None:
        began.set()
        assert second_waits.wait(30)

    second_waits = threading.Event()
    monkeypatch.setattr(fcntl, "flock", observed)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(load, folder, progress=slow)
        assert began.wait(30)
        assert waits.acquire(timeout=30)
        second = threads.submit(load, folder)
        assert waits.acquire(timeout=30)
        assert not second.done()
        second_waits.set()
        assert first.result()[0].digest == second.result()[0].digest
    assert len(decoded) == TOTAL
    assert_correct(second.result()[0], folder)

    monkeypatch.setattr(fcntl, "flock", None)
    load(folder)  # a complete cache is read without a lock: its folder may be read-only


def spoil(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_bytes(b"not an image")


def test_images_that_cannot_be_decoded_are_named_or_left_out(folder, decoded):
    names = ("train/cat/1.png", "train/cat/notes.txt", "train/wolf/0.png", "test/wolf/1.png")
    spoil(folder, *names)
    with pytest.raises(BsamValueError, match=r"4 of 17 files in .* with --skip-corrupt") as caught:
        load(folder)
    lines = str(caught.value).splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(names)
    assert all("cannot be decoded: it is no image" in line for line in lines)
    decoded.clear()
    data, left_out = load(folder, skip_corrupt=True)
    assert decoded == []
    assert left_out == [line.strip() for line in lines]
    assert_correct(data, folder, without=names)
    (folder / "train/cat/notes.txt").unlink()
    assert load(folder, skip_corrupt=True)[0].digest != data.digest

    spoil(folder, "train/cat/0.png", "train/cat/2.png", "train/cat/3.png")
    with pytest.raises(BsamValueError) as caught:
        load(folder)
    lines = str(caught.value).splitlines()
    assert (lines[0].split()[0], len(lines), lines[-1]) == ("6", 7, "  and 1 others")
    spoil(folder, "train/cat/4.png")
    with pytest.raises(BsamValueError, match="no image of the class cat in the training set can be decoded"):
        load(folder, skip_corrupt=True)


def test_a_folder_that_cannot_be_written_is_an_error_that_says_which_option_helps(folder, tmp_path, monkeypatch):
    (folder / ".bsam-cache").write_text("a file")
    with pytest.raises(BsamRuntimeError, match=r"cannot be written to .*\.bsam-cache \(.*\(--cache-dir\)"):
        load(folder)
    assert_correct(load(folder, cache_dir=str(tmp_path / "new/folder"))[0], folder)

    def full(task):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(image_cache.BlockTask, "decode", full)
    with pytest.raises(BsamRuntimeError, match=r"\(No space left on device\): make room, or choose"):
        load(folder, cache_dir=tmp_path / "full")


def test_an_image_that_changes_meanwhile_is_an_error(folder):
    with pytest.raises(BsamRuntimeError, match=r"train.cat.4.png changed while the images were read: call again"):
        load(folder, progress=lambda done, total: spoil(folder, "train/cat/4.png"))
    (folder / "train/cat/4.png").unlink()
    (folder / "train/cat/4.png").symlink_to("nowhere")
    with pytest.raises(BsamValueError, match=r"4.png is not a file"):
        read_folder(folder)


def test_a_script_without_a_main_guard_does_not_wait_for_itself(folder, monkeypatch):
    """A worker imports the script first, which calls again, and would wait for the lock that its parent holds."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(BsamRuntimeError, match='put its code below `if __name__ == "__main__":`'):
        load(folder)
    monkeypatch.undo()
    load(folder)
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    load(folder)  # from the cache, where nothing is held


def test_a_killed_worker_and_a_wrong_number_of_workers_are_errors(folder, monkeypatch):
    def killed(*arguments):
        raise BrokenProcessPool

    monkeypatch.setattr(ProcessPoolExecutor, "submit", killed)
    with pytest.raises(BsamRuntimeError, match=r"memory ran out .call again with fewer workers., or the script"):
        load(folder, workers=2)
    with pytest.raises(BsamValueError, match="workers must be at least 1, got 0"):
        load(folder, workers=0)
