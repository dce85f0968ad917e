from __future__ import annotations

import hashlib
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import bsam
from bsam.lab.data.downloads import CIFAR10, CIFAR100, CifarFile, read_cifar

N = 20  # images per file
LAYOUTS = ("binary", "python")


def content(layout, file):
    """Labels in random order, and pixels."""
    random = np.random.default_rng(len(file.name) + ord(file.name[-1]))
    labels = random.permutation(np.arange(N) % layout.classes).astype(np.uint8)
    return labels, random.integers(0, 256, (N, 3072), np.uint8)


def pickled(layout, labels, pixels) -> bytes:
    return pickle.dumps({layout.label_key: labels.tolist(), "data": pixels})


def small(layout):
    """The layout with few images, and with their digests, computed here in another way."""

    def known(file):
        labels, pixels = content(layout, file)
        records = [b"%c" % label + image.tobytes() for label, image in zip(labels.tolist(), pixels, strict=True)]
        digests = sorted(hashlib.sha256(record).hexdigest() for record in records)
        return CifarFile(
            file.name,
            N,
            hashlib.sha256(pickled(layout, labels, pixels)).hexdigest(),
            file.records_sha256 and hashlib.sha256(b"".join(records)).hexdigest(),
            file.sorted_sha256 and hashlib.sha256(bytes.fromhex("".join(digests))).hexdigest(),
        )

    return replace(layout, train=tuple(map(known, layout.train)), test=known(layout.test))


SMALL10, SMALL100 = small(CIFAR10), small(CIFAR100)
both_sets = pytest.mark.parametrize("kind", [SMALL10, SMALL100], ids=["cifar10", "cifar100"])
both_layouts = pytest.mark.parametrize("layout", LAYOUTS)


def write(kind, folder: Path, layout: str, change=lambda name, *parts: parts, coarse: int = 3) -> Path:
    """Write all files of a layout; ``change`` gives other labels and pixels from those of a file, by its name."""
    place = folder / getattr(kind, layout)
    place.mkdir(parents=True)
    for file in (*kind.train, kind.test):
        labels, pixels = change(file.name, *content(kind, file))
        if layout == "binary":
            head = [np.full_like(labels, coarse)] * (kind.label_bytes - 1)
            records = np.concatenate([np.stack([*head, labels], 1), pixels], 1)
            (place / f"{file.name}.bin").write_bytes(records.tobytes())
        else:
            (place / file.name).write_bytes(pickled(kind, labels, pixels))
    return place


@both_sets
@both_layouts
def test_both_layouts_give_what_was_written(kind, layout, tmp_path):
    place = write(kind, tmp_path, layout)
    for folder in (tmp_path, place):
        data = read_cifar(kind, folder)
        assert (data.name, data.classes, data.validation) == (kind.name, kind.classes, None)
        for examples, files in ((data.train, kind.train), (data.test, [kind.test])):
            labels, pixels = (np.concatenate(parts) for parts in zip(*(content(kind, f) for f in files), strict=True))
            assert (examples.x.dtype, examples.y.dtype) == (torch.uint8, torch.int64)
            assert examples.x.is_contiguous()
            assert examples.y.tolist() == labels.tolist()
            assert examples.x.flatten(1).tolist() == pixels.tolist()
            # planes of red, green and blue, each row by row
            assert examples.x[:, 1, 2, 3].tolist() == pixels[:, 1024 + 2 * 32 + 3].tolist()


def flip_a_bit(labels, pixels):
    pixels[17, 3000] ^= 1
    return labels, pixels


def reverse(labels, pixels):
    return labels[::-1], pixels[::-1]


@both_layouts
@both_sets
@pytest.mark.parametrize("where", ["train", "test"])
def test_other_pixels_are_refused(where, kind, layout, tmp_path):
    damaged = {"train": kind.train[-1], "test": kind.test}[where].name
    place = write(kind, tmp_path, layout, lambda name, *parts: flip_a_bit(*parts) if name == damaged else parts)
    path = place / (damaged + (".bin" if layout == "binary" else ""))
    with pytest.raises(bsam.BsamError, match=str(path)):
        read_cifar(kind, tmp_path)


def test_the_order_of_binary_records_and_coarse_labels_do_not_matter_for_cifar_100(tmp_path):
    for kind in (SMALL10, SMALL100):
        write(kind, tmp_path, "binary", lambda name, *parts: reverse(*parts), coarse=255)
    written = content(SMALL100, SMALL100.train[0])[0].tolist()
    assert read_cifar(SMALL100, tmp_path).train.y.tolist() == written[::-1]
    with pytest.raises(bsam.BsamError, match="CIFAR-10"):
        read_cifar(SMALL10, tmp_path)


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_crafted_pickle_is_refused_and_not_executed(tmp_path):
    path = write(SMALL10, tmp_path, "python") / "data_batch_1"
    path.write_bytes(pickle.dumps({"data": Trap(tmp_path / "trap")}))
    with pytest.raises(bsam.BsamError, match="data_batch_1"):
        read_cifar(SMALL10, tmp_path)
    assert not (tmp_path / "trap").exists()
