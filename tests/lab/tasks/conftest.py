"""Small files in the layout of CIFAR."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from bsam.lab.data import DATASETS
from bsam.lab.data.downloads import CIFAR10, CIFAR100, CifarFile, read_cifar

SMALL10 = replace(
    CIFAR10,
    train=tuple(replace(batch, records=20, records_sha256=None) for batch in CIFAR10.train),
    test=replace(CIFAR10.test, records=30, records_sha256=None),
)
SMALL100 = replace(CIFAR100, train=(CifarFile("train", 200, ""),), test=CifarFile("test", 100, ""))


@pytest.fixture
def small_cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with 100 + 30 images of CIFAR-10's shape and 200 + 100 of CIFAR-100's, as random bytes; the loader takes
    them for the real ones.
    """
    random, folder = np.random.default_rng(5), tmp_path / "cifar"
    for kind in (SMALL10, SMALL100):
        entry = replace(DATASETS[kind.name], read=partial(read_cifar, kind))
        monkeypatch.setitem(DATASETS, kind.name, entry)
        (folder / kind.binary).mkdir(parents=True)
        for batch in (*kind.train, kind.test):
            labels = random.permutation(np.arange(batch.records) % kind.classes).astype(np.uint8)
            columns = [labels[:, None], random.integers(0, 256, (batch.records, 3072), np.uint8)]
            head = [np.full_like(labels[:, None], 3)] * (kind.label_bytes - 1)
            (folder / kind.binary / f"{batch.name}.bin").write_bytes(np.concatenate([*head, *columns], 1).tobytes())
    return folder
