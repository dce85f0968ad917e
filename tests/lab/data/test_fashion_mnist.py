from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from bsam.lab.data.downloads import read_fashion_mnist

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
