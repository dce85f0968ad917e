from __future__ import annotations

import hashlib
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import bsam
from bsam.data import cifar
from bsam.data.cifar import CIFAR10, CIFAR100, CifarFile, cifar10, cifar100, read_cifar

N = 20  # images per file of CIFAR-10 here; 200 and 100 of CIFAR-100
SMALL10 = replace(
    CIFAR10,
    train=tuple(replace(file, records=N, sha256=None) for file in CIFAR10.train),
    test=replace(CIFAR10.test, records=N, sha256=None),
)
SMALL100 = replace(CIFAR100, train=(CifarFile("train", 200),), test=CifarFile("test", 100))
both_sets = pytest.mark.parametrize("kind", [SMALL10, SMALL100], ids=["cifar10", "cifar100"])
both_layouts = pytest.mark.parametrize("layout", ["binary", "python"])


def content(kind):
    """For each file the labels, balanced and in random order, and the pixels."""
    random = np.random.default_rng(5)
    return {
        file.name: (
            random.permutation(np.arange(file.records) % kind.classes).astype(np.uint8),
            random.integers(0, 256, (file.records, 3072), np.uint8),
        )
        for file in (*kind.train, kind.test)
    }


def write(kind, folder: Path, layout: str, change=None, coarse: int = 3, **changed) -> Path:
    """Write all files of a layout; ``change`` gives other labels and pixels from those of a file, by its name."""
    place = folder / getattr(kind, layout)
    place.mkdir(parents=True)
    for name, (labels, pixels) in content(kind).items():
        if change is not None:
            labels, pixels = change(name, labels, pixels)
        if layout == "binary":
            head = [np.full_like(labels, coarse)] if kind.num_coarse_classes else []
            (place / f"{name}.bin").write_bytes(np.concatenate([np.stack([*head, labels], 1), pixels], 1).tobytes())
        else:
            names = [f"{i}.png" for i in range(len(labels))]
            entry = {"batch_label": name, kind.label_key: labels.tolist(), "data": pixels, "filenames": names} | changed
            (place / name).write_bytes(pickle.dumps({key.encode(): value for key, value in entry.items()}, protocol=2))
    return place


def patch(path: Path, place: int, value: int) -> None:
    changed = bytearray(path.read_bytes())
    changed[place] = value
    path.write_bytes(changed)


@both_sets
@both_layouts
def test_both_layouts_give_what_was_written(kind, layout, tmp_path):
    place, written = write(kind, tmp_path, layout), content(kind)
    for folder in (tmp_path, place):
        data = read_cifar(kind, folder)
        assert (data.name, data.classes, data.validation) == (kind.name, kind.classes, None)
        for examples, files in ((data.train, kind.train), (data.test, [kind.test])):
            labels, pixels = (np.concatenate(parts) for parts in zip(*(written[f.name] for f in files), strict=True))
            assert (examples.x.dtype, examples.y.dtype) == (torch.uint8, torch.int64)
            assert examples.x.is_contiguous()
            assert examples.y.tolist() == labels.tolist()
            assert examples.x.flatten(1).tolist() == pixels.tolist()
            # planes of red, green and blue, each row by row
            assert examples.x[:, 1, 2, 3].tolist() == pixels[:, 1024 + 2 * 32 + 3].tolist()


def test_the_binary_layout_goes_first(tmp_path):
    write(SMALL10, tmp_path, "python")
    path = write(SMALL10, tmp_path, "binary") / "test_batch.bin"
    path.write_bytes(b"damaged")
    with pytest.raises(bsam.BsamError, match=r"test_batch\.bin"):
        read_cifar(SMALL10, tmp_path)
    path.unlink()
    assert len(read_cifar(SMALL10, tmp_path).test) == N  # of two layouts, the complete one


def test_coarse_labels_may_be_unknown_but_not_out_of_range(tmp_path):
    write(SMALL100, tmp_path, "binary", coarse=255)
    assert len(read_cifar(SMALL100, tmp_path).train) == 200
    write(SMALL100, tmp_path / "wrong", "binary", coarse=20)
    with pytest.raises(bsam.BsamError, match=r"train\.bin: record 0 has the coarse label 20"):
        read_cifar(SMALL100, tmp_path / "wrong")


@pytest.mark.parametrize(
    ("kind", "header", "wrong"), [(SMALL10, 1, 10), (SMALL10, 1, 255), (SMALL100, 2, 100), (SMALL100, 2, 255)]
)
def test_a_label_out_of_range_is_refused(kind, header, wrong, tmp_path):
    path = write(kind, tmp_path, "binary") / f"{kind.test.name}.bin"
    patch(path, 7 * (header + 3072) + header - 1, wrong)
    with pytest.raises(bsam.BsamError, match=rf"{path}: record 7 has the label {wrong}"):
        read_cifar(kind, tmp_path)


@both_sets
def test_a_label_in_range_but_wrong_breaks_the_balance(kind, tmp_path):
    path, header = write(kind, tmp_path, "binary") / f"{kind.test.name}.bin", 2 if kind.num_coarse_classes else 1
    patch(path, header - 1, (path.read_bytes()[header - 1] + 1) % kind.classes)
    with pytest.raises(bsam.BsamError, match=rf"class \d+ has \d+ images in {kind.test.name}"):
        read_cifar(kind, tmp_path)


SIZES = {
    "one byte less": lambda c: c[:-1],
    "one byte more": lambda c: c + b"x",
    "empty": lambda c: b"",
    "cut": lambda c: c[:3073],
    "long": lambda c: c + bytes(10_000_000),
}


@both_layouts
@pytest.mark.parametrize("size", SIZES)
def test_files_of_another_size_are_refused(size, layout, tmp_path):
    path = write(SMALL10, tmp_path, layout) / f"data_batch_3{'.bin' if layout == 'binary' else ''}"
    path.write_bytes(SIZES[size](path.read_bytes()))
    message = {
        "binary": rf"{path} must have 61,460 bytes, 20 records of 3073, and has (more|61,459|0|3,073); get it again$",
        "python": rf"{path}(: not a pickle of| has more than 128,000 bytes)",
    }
    with pytest.raises(bsam.BsamError, match=message[layout]):
        read_cifar(SMALL10, tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"data": np.zeros((N, 3071), np.uint8)}, r"20 x 3072 bytes, found \(20, 3071\)"),
        ({"data": np.zeros((N, 3, 32, 32), np.uint8)}, "20 x 3072 bytes, found"),
        ({"data": np.zeros((N, 3072), np.int16)}, "uint8"),
        ({"data": np.full((N, 10), None)}, "uint8"),
        ({"data": [[0] * 3072] * N}, "no array"),
        ({"data": b"0" * 3072 * N}, "no array"),
        ({"labels": [0] * (N - 1)}, "list of 20 integers"),
        ({"labels": tuple([0] * N)}, "list of 20 integers"),
        ({"labels": [0] * (N - 1) + [True]}, "list of 20 integers"),
        ({"labels": [0] * (N - 1) + ["1"]}, "list of 20 integers"),
        ({"labels": np.zeros(N, np.uint8)}, "list of 20 integers"),
        ({"labels": [0] * (N - 1) + [10]}, "record 19 has the label 10"),
        ({"labels": [0] * (N - 1) + [-1]}, "record 19 has the label -1"),
        ({"labels": [0, 256] + [0] * (N - 2)}, "record 1 has the label 256"),
        ({"labels": [2**2000] * N}, "record 0 has the label"),
    ],
)
def test_pickles_of_other_things_are_refused(changed, message, tmp_path):
    path = write(SMALL10, tmp_path, "python", **changed) / "data_batch_1"
    with pytest.raises(bsam.BsamError, match=rf"^{path}.*{message}"):
        read_cifar(SMALL10, tmp_path)


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_crafted_pickle_is_refused_and_not_executed(tmp_path):
    path = write(SMALL10, tmp_path, "python", filenames=[Trap(tmp_path / "trap")]) / "data_batch_1"
    with pytest.raises(bsam.BsamError, match=rf"^{path}: not a pickle of .*: it asks for .*; unpack https"):
        read_cifar(SMALL10, tmp_path)
    assert not (tmp_path / "trap").exists()


def with_digests(kind, *names):
    """The same with the digests of the content, computed here in another way."""

    def known(file):
        labels, pixels = content(kind)[file.name]
        records = [b"%c" % label + image.tobytes() for label, image in zip(labels.tolist(), pixels, strict=True)]
        each = sorted(hashlib.sha256(record).hexdigest() for record in records)
        digests = {"sha256": b"".join(records), "unordered_sha256": bytes.fromhex("".join(each))}
        return replace(file, **{name: hashlib.sha256(digests[name]).hexdigest() for name in names})

    return replace(kind, train=tuple(map(known, kind.train)), test=known(kind.test))


STRICT10, STRICT100 = with_digests(SMALL10, "sha256"), with_digests(SMALL100, "unordered_sha256")


def swap_labels(labels, pixels):
    other = int((labels != labels[0]).argmax())
    labels[0], labels[other] = labels[other], labels[0]
    return labels, pixels


def flip_a_bit(labels, pixels):
    pixels[17, 3000] ^= 1
    return labels, pixels


def double_an_image(labels, pixels):
    pixels[1] = pixels[0]
    return labels, pixels


def blacken(labels, pixels):
    return labels, np.zeros_like(pixels)


def reverse(labels, pixels):
    return labels[::-1], pixels[::-1]


@both_layouts
@pytest.mark.parametrize(
    ("kind", "difference"),
    [(STRICT10, "its SHA256 differs"), (STRICT100, "some of its labels or pixels differ")],
    ids=["cifar10", "cifar100"],
)
@pytest.mark.parametrize("change", [swap_labels, flip_a_bit, double_an_image, blacken])
@pytest.mark.parametrize("where", ["train", "test"])
def test_other_labels_or_pixels_are_refused(where, change, kind, difference, layout, tmp_path):
    damaged = {"train": kind.train[-1], "test": kind.test}[where].name
    place = write(kind, tmp_path, layout, lambda name, *parts: change(*parts) if name == damaged else parts)
    path = place / (damaged + (".bin" if layout == "binary" else ""))
    message = rf"^{path} is not the published file of {kind.title}: {difference}; unpack https.* again"
    with pytest.raises(bsam.BsamError, match=message):
        read_cifar(kind, tmp_path)


@both_layouts
def test_the_order_of_records_matters_for_cifar_10_alone(layout, tmp_path):
    for kind in (STRICT10, STRICT100):
        written = content(kind)[kind.train[-1].name][0].tolist()
        write(kind, tmp_path / kind.name / "same", layout)
        assert read_cifar(kind, tmp_path / kind.name / "same").train.y.tolist()[-len(written) :] == written
        write(kind, tmp_path / kind.name / "reversed", layout, lambda name, *parts: reverse(*parts))
    assert read_cifar(kind, tmp_path / kind.name / "reversed").train.y.tolist() == written[::-1]
    with pytest.raises(bsam.BsamError, match="its SHA256 differs"):
        read_cifar(STRICT10, tmp_path / "cifar10" / "reversed")


def test_the_md5_of_a_pickle_is_compared_before_it_is_read(tmp_path, monkeypatch):
    path = write(SMALL100, tmp_path, "python") / "train"
    strict = replace(SMALL100, train=(CifarFile("train", 200, md5=hashlib.md5(path.read_bytes()).hexdigest()),))
    assert len(read_cifar(strict, tmp_path).train) == 200
    patch(path, 5000, path.read_bytes()[5000] ^ 1)
    monkeypatch.setattr(cifar, "read_pickle", lambda content: pytest.fail("read before it was compared"))
    with pytest.raises(bsam.BsamError, match="train is not the published file of CIFAR-100: its MD5 differs"):
        read_cifar(strict, tmp_path)


@pytest.mark.parametrize("kind", [CIFAR10, CIFAR100], ids=["cifar10", "cifar100"])
def test_black_images_with_the_right_labels_are_not_the_published_ones(kind, tmp_path):
    header, n = 2 if kind.num_coarse_classes else 1, kind.test.records
    records = np.zeros((n, header + 3072), np.uint8)
    records[:, header - 1] = np.arange(n) % kind.classes
    records.tofile(tmp_path / f"{kind.test.name}.bin")
    with pytest.raises(bsam.BsamError, match=rf"{kind.test.name}\.bin is not the published file of {kind.title}"):
        read_cifar(replace(kind, train=(kind.test,)), tmp_path)
    assert all(file.sha256 or (file.md5 and file.unordered_sha256) for file in (*kind.train, kind.test))


def test_missing_files_are_named(tmp_path):
    place = write(SMALL10, tmp_path, "binary")
    (place / "data_batch_2.bin").unlink()
    (place / "test_batch.bin").unlink()
    missing = r"data_batch_2\.bin, test_batch\.bin missing; unpack https://www\.cs\.toronto"
    with pytest.raises(bsam.BsamError, match=rf"CIFAR-10 in {place} is incomplete: {missing}"):
        read_cifar(SMALL10, tmp_path)


@pytest.mark.parametrize(
    ("read", "names"),
    [(cifar10, ("cifar-10-batches-bin", "cifar-10-batches-py")), (cifar100, ("cifar-100-binary", "cifar-100-python"))],
)
def test_a_folder_without_the_files_is_an_error_that_names_them(read, names, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "train").mkdir()  # directories are no files
    (tmp_path / "test").mkdir()
    for folder in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(bsam.BsamError, match=rf"^no CIFAR-100? in {folder}: ") as refused:
            read(folder)
        for word in (*names, "--download", "https://www.cs.toronto.edu/~kriz/"):
            assert word in str(refused.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    write(SMALL10, tmp_path, "binary")

    def denied(self, mode):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(bsam.BsamError, match=r"data_batch_1\.bin cannot be read: Permission denied"):
        read_cifar(SMALL10, tmp_path)
