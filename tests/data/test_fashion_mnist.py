from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

import bsam
from bsam.data.fashion_mnist import fashion_mnist, read_fashion_mnist

COUNTS = {"train": 30, "t10k": 10}
RANDOM = np.random.default_rng(2)
IMAGES = {part: RANDOM.integers(0, 256, (n, 28, 28), np.uint8) for part, n in COUNTS.items()}
LABELS = {part: RANDOM.integers(0, 10, n).astype(np.uint8) for part, n in COUNTS.items()}


def write(folder: Path, zipped: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, n in COUNTS.items():
        files = {f"{part}-images-idx3-ubyte": struct.pack(">IIII", 2051, n, 28, 28) + IMAGES[part].tobytes()}
        files[f"{part}-labels-idx1-ubyte"] = struct.pack(">II", 2049, n) + LABELS[part].tobytes()
        for name, content in files.items():
            (folder / (name + ".gz" * zipped)).write_bytes(gzip.compress(content) if zipped else content)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("below", [".", "FashionMNIST/raw", "fashion-mnist"])
def test_reads_what_was_written(zipped, below, tmp_path):
    write(tmp_path / below, zipped)
    data = read_fashion_mnist(tmp_path, 30, 10)
    for examples, part in ((data.train, "train"), (data.test, "t10k")):
        assert examples.x.shape == (COUNTS[part], 1, 28, 28)
        assert (examples.x.dtype, examples.y.dtype) == (torch.uint8, torch.int64)
        assert examples.x.tolist() == IMAGES[part][:, None].tolist()
        assert examples.y.tolist() == LABELS[part].tolist()
    assert (data.name, data.classes, data.validation) == ("fashion_mnist", 10, None)
    assert (data.mean, data.std) == ((0.2860,), (0.3530,))


IMAGE_FILE, LABEL_FILE = "train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
DAMAGE = {
    "truncated": (lambda c: c[:-1], "must have 23,536 bytes, an idx file of 30 x 28 x 28 bytes, and has 23,535;"),
    "labels for images": (lambda c: struct.pack(">II", 2049, 30) + bytes(30), "has 38;"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_refused(damage, tmp_path):
    write(tmp_path, zipped=False)
    change, message = DAMAGE[damage]
    path = tmp_path / IMAGE_FILE
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(bsam.BsamError, match=rf"^{path} .*{message}"):
        read_fashion_mnist(tmp_path, 30, 10)


@pytest.mark.parametrize("change", [lambda c: c[:-9], lambda c: c[:-6] + bytes(6), lambda c: b"text"])
def test_corrupt_gz_is_refused(change, tmp_path):
    write(tmp_path, zipped=True)
    path = tmp_path / f"{IMAGE_FILE}.gz"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(bsam.BsamError, match=rf"^{path} cannot be read"):
        read_fashion_mnist(tmp_path, 30, 10)


def test_a_missing_file_is_named_and_small_sets_are_not_the_published_one(tmp_path):
    write(tmp_path, zipped=True)
    with pytest.raises(bsam.BsamError, match="an idx file of 60000 x 28 x 28 bytes, and has 23,536"):
        fashion_mnist(tmp_path)
    (tmp_path / f"{LABEL_FILE}.gz").unlink()
    missing = rf"no Fashion-MNIST in {tmp_path}: {LABEL_FILE} or {LABEL_FILE}\.gz is missing; --download"
    with pytest.raises(bsam.BsamError, match=missing):
        read_fashion_mnist(tmp_path, 30, 10)
