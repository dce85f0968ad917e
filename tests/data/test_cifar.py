from __future__ import annotations

import hashlib
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import bsam
from bsam.data import cifar, load
from bsam.data.cifar import CIFAR10, CIFAR100, Batch, cifar10, cifar100, read_cifar

N = 20  # images a file of CIFAR-10 here; 200 of CIFAR-100
SMALL10 = replace(
    CIFAR10,
    train=tuple(replace(batch, records=N, sha256=None) for batch in CIFAR10.train),
    test=replace(CIFAR10.test, records=N, sha256=None),
)
SMALL100 = replace(CIFAR100, train=(Batch("train", 200),), test=Batch("test", 100))
KINDS = {"cifar10": SMALL10, "cifar100": SMALL100}


def content(kind):
    """For each file the labels, balanced and in random order, and the pixels."""
    random = np.random.default_rng(5)
    return {
        batch.name: (
            random.permutation(np.arange(batch.records) % kind.classes).astype(np.uint8),
            random.integers(0, 256, (batch.records, 3072), np.uint8),
        )
        for batch in (*kind.train, kind.test)
    }


def write_binary(kind, folder: Path, coarse: int = 3) -> Path:
    place = folder / kind.binary
    place.mkdir(parents=True)
    for name, (labels, pixels) in content(kind).items():
        head = [np.full_like(labels, coarse)] if kind.coarse else []
        (place / f"{name}.bin").write_bytes(np.concatenate([np.stack([*head, labels], 1), pixels], 1).tobytes())
    return place


def write_python(kind, folder: Path, **changed) -> Path:
    place = folder / kind.python
    place.mkdir(parents=True)
    for name, (labels, pixels) in content(kind).items():
        entry = {
            "batch_label": name,
            kind.key: labels.tolist(),
            "data": pixels,
            "filenames": [f"{i}.png" for i in range(len(labels))],
        } | changed
        (place / name).write_bytes(pickle.dumps({key.encode(): value for key, value in entry.items()}, protocol=2))
    return place


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_both_layouts_give_what_was_written(kind, tmp_path):
    places = [write_binary(kind, tmp_path / "b"), write_python(kind, tmp_path / "p")]
    written = content(kind)
    for folder in (*places, *(place.parent for place in places)):
        data = read_cifar(kind, folder)
        assert (data.name, data.classes, data.validation) == (kind.name, kind.classes, None)
        for examples, names in ((data.train, [batch.name for batch in kind.train]), (data.test, [kind.test.name])):
            assert (examples.x.dtype, examples.y.dtype) == (torch.uint8, torch.int64)
            assert examples.x.is_contiguous()
            i = 0
            for name in names:
                for label, pixels in zip(*written[name], strict=True):
                    assert int(examples.y[i]) == label
                    assert bytes(examples.x[i].flatten().tolist()) == pixels.tobytes()
                    assert (
                        examples.x[i, 1, 2, 3] == pixels[1024 + 2 * 32 + 3]
                    )  # planes of red, green and blue, each row by row
                    i += 1
            assert i == len(examples)


def test_the_binary_layout_goes_first(tmp_path):
    write_python(SMALL10, tmp_path)
    (write_binary(SMALL10, tmp_path) / "test_batch.bin").write_bytes(b"damaged")
    with pytest.raises(bsam.BsamError, match=r"test_batch\.bin"):
        read_cifar(SMALL10, tmp_path)
    (tmp_path / SMALL10.binary / "test_batch.bin").unlink()
    assert len(read_cifar(SMALL10, tmp_path).test) == N  # of two layouts, the whole one


def test_coarse_labels_may_be_unknown_but_not_out_of_range(tmp_path):
    write_binary(SMALL100, tmp_path, coarse=255)
    assert len(read_cifar(SMALL100, tmp_path).train) == 200
    write_binary(SMALL100, tmp_path / "wrong", coarse=20)
    with pytest.raises(bsam.BsamError, match=r"train\.bin: record 0 has the coarse label 20"):
        read_cifar(SMALL100, tmp_path / "wrong")


def patched(path: Path, place: int, value: int) -> None:
    changed = bytearray(path.read_bytes())
    changed[place] = value
    path.write_bytes(changed)


@pytest.mark.parametrize(
    ("kind", "header", "wrong"), [(SMALL10, 1, 10), (SMALL10, 1, 255), (SMALL100, 2, 100), (SMALL100, 2, 255)]
)
def test_a_wrong_label_byte_is_refused(kind, header, wrong, tmp_path):
    path = write_binary(kind, tmp_path) / f"{kind.test.name}.bin"
    patched(path, 7 * (header + 3072) + header - 1, wrong)
    with pytest.raises(bsam.BsamError, match=rf"{path}: record 7 has the label {wrong}"):
        read_cifar(kind, tmp_path)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_label_in_range_but_wrong_breaks_the_balance(kind, tmp_path):
    path, header = write_binary(kind, tmp_path) / f"{kind.test.name}.bin", 2 if kind.coarse else 1
    patched(path, header - 1, (path.read_bytes()[header - 1] + 1) % kind.classes)
    with pytest.raises(bsam.BsamError, match=rf"class \d+ has \d+ images in {kind.test.name}"):
        read_cifar(kind, tmp_path)


@pytest.mark.parametrize(
    "change", [lambda c: c[:-1], lambda c: c + b"x", lambda c: b"", lambda c: c[:3073], lambda c: c * 2]
)
def test_binary_files_of_another_size_are_refused(change, tmp_path):
    path = write_binary(SMALL10, tmp_path) / "data_batch_3.bin"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(
        bsam.BsamError,
        match=r"data_batch_3\.bin must have 61,460 bytes, 20 records of 3073, and has (more|61,459|0|3,073)$",
    ):
        read_cifar(SMALL10, tmp_path)


@pytest.mark.parametrize(
    "change", [lambda c: c[:-1], lambda c: c[:1000], lambda c: c + b"x", lambda c: b"", lambda c: c + bytes(10_000_000)]
)
def test_pickles_of_another_size_are_refused(change, tmp_path):
    path = write_python(SMALL10, tmp_path) / "data_batch_3"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(bsam.BsamError, match=r"data_batch_3 (was refused: a|has more than)"):
        read_cifar(SMALL10, tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"data": np.zeros((N, 3071), np.uint8)}, "20 x 3072 bytes, found"),
        ({"data": np.zeros((N, 3, 32, 32), np.uint8)}, "20 x 3072 bytes, found"),
        ({"data": np.zeros((N, 3072), np.int16)}, "uint8"),
        ({"data": np.full((N, 10), None)}, "uint8"),
        ({"data": [[0] * 3072] * N}, "no array"),
        ({"data": b"0" * 3072 * N}, "no array"),
        ({"labels": [0] * (N - 1)}, "list of 20 whole numbers"),
        ({"labels": tuple([0] * N)}, "list of 20 whole numbers"),
        ({"labels": [0] * (N - 1) + [True]}, "list of 20 whole numbers"),
        ({"labels": [0] * (N - 1) + ["1"]}, "list of 20 whole numbers"),
        ({"labels": [0] * (N - 1) + [10]}, "record 19 has the label 10"),
        ({"labels": [0] * (N - 1) + [-1]}, "record 19 has the label -1"),
        ({"labels": [0, 256] + [0] * (N - 2)}, "record 1 has the label 256"),
        ({"labels": [2**2000] * N}, "record 0 has the label"),
        ({"labels": np.zeros(N, np.uint8)}, "list of 20 whole numbers"),
    ],
)
def test_pickles_of_other_things_are_refused(changed, message, tmp_path):
    write_python(SMALL10, tmp_path, **changed)
    with pytest.raises(bsam.BsamError, match=message) as refused:
        read_cifar(SMALL10, tmp_path)
    assert "data_batch_1" in str(refused.value)


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_crafted_batch_is_refused_and_does_nothing(tmp_path):
    trap = tmp_path / "trap"
    write_python(SMALL10, tmp_path, filenames=[Trap(trap)])
    with pytest.raises(bsam.BsamError, match=r"data_batch_1 was refused: a pickle that asks for"):
        read_cifar(SMALL10, tmp_path)
    assert not trap.exists()


def test_the_content_is_held_to_one_digest_in_both_layouts(tmp_path):
    write_binary(SMALL10, tmp_path / "b")
    write_python(SMALL10, tmp_path / "p")
    digests = {
        name: hashlib.sha256(b"".join(bytes([label]) + pixels.tobytes() for label, pixels in zip(*batch, strict=True)))
        for name, batch in content(SMALL10).items()
    }
    held = replace(
        SMALL10, train=tuple(replace(batch, sha256=digests[batch.name].hexdigest()) for batch in SMALL10.train)
    )
    for folder in ("b", "p"):
        assert len(read_cifar(held, tmp_path / folder).train) == 5 * N
    patched(
        tmp_path / "b" / held.binary / "data_batch_5.bin",
        3073 * 4 + 100,
        content(SMALL10)["data_batch_5"][1][4, 99] ^ 1,
    )
    pixels = content(SMALL10)["data_batch_5"][1].tobytes()
    path = tmp_path / "p" / held.python / "data_batch_5"
    entry = pickle.loads(path.read_bytes())  # written by this file
    entry[b"data"] = np.frombuffer(pixels, np.uint8).reshape(N, 3072) ^ 1
    path.write_bytes(pickle.dumps(entry, protocol=2))
    for folder in ("b", "p"):
        with pytest.raises(
            bsam.BsamError,
            match=r"data_batch_5(\.bin)? is not the one of CIFAR-10 that was published: its SHA256 differs",
        ):
            read_cifar(held, tmp_path / folder)


def held_in_any_order(kind):
    """Held to a digest that is computed here in another way."""

    def digest(batch):
        labels, pixels = content(kind)[batch.name]
        each = [
            hashlib.sha256(b"%c" % label + image.tobytes()).hexdigest()
            for label, image in zip(labels.tolist(), pixels, strict=True)
        ]
        return replace(batch, any_order=hashlib.sha256(bytes.fromhex("".join(sorted(each)))).hexdigest())

    return replace(kind, train=tuple(map(digest, kind.train)), test=digest(kind.test))


def rewritten(kind, folder: Path, name: str, change) -> Path:
    """Both layouts, in one file of which labels and pixels are changed."""
    (labels, pixels), header = (part.copy() for part in content(kind)[name]), 2 if kind.coarse else 1
    labels, pixels = change(labels, pixels)
    path = write_binary(kind, folder / "b") / f"{name}.bin"
    head = np.full((len(labels), header - 1), 255, np.uint8)
    path.write_bytes(np.concatenate([head, labels[:, None], pixels], 1).tobytes())
    path = write_python(kind, folder / "p") / name
    path.write_bytes(pickle.dumps({kind.key: labels.tolist(), "data": np.ascontiguousarray(pixels)}, protocol=2))
    return folder


def swapped(labels, pixels):
    other = int((labels != labels[0]).argmax())
    labels[0], labels[other] = labels[other], labels[0]
    return labels, pixels


def flipped(labels, pixels):
    pixels[17, 3000] ^= 1
    return labels, pixels


def doubled(labels, pixels):
    pixels[1] = pixels[0]
    return labels, pixels


def black(labels, pixels):
    return labels, np.zeros_like(pixels)


@pytest.mark.parametrize("name", ["train", "test"])
@pytest.mark.parametrize("change", [swapped, flipped, doubled, black])
def test_other_labels_or_pixels_are_refused_in_both_layouts(change, name, tmp_path):
    rewritten(SMALL100, tmp_path, name, change)
    for layout, file in (("b", f"cifar-100-binary/{name}.bin"), ("p", f"cifar-100-python/{name}")):
        path = tmp_path / layout / file
        with pytest.raises(
            bsam.BsamError,
            match=rf"^{path} is not the one of CIFAR-100 that was published: some of its labels or pixels differ; unpack https.*",
        ):
            read_cifar(held_in_any_order(SMALL100), tmp_path / layout)


@pytest.mark.parametrize(
    "change",
    [lambda labels, pixels: (labels, pixels), lambda labels, pixels: (labels[::-1], pixels[::-1])],
    ids=["as it was", "reversed"],
)
def test_the_same_records_in_any_order_are_taken_in_both_layouts(change, tmp_path):
    rewritten(SMALL100, tmp_path, "train", change)
    for layout in ("b", "p"):
        data = read_cifar(held_in_any_order(SMALL100), tmp_path / layout)
        assert data.train.y.tolist() == change(*content(SMALL100)["train"])[0].tolist()


def test_a_pickle_is_held_to_its_md5_before_it_is_read(tmp_path, monkeypatch):
    path = write_python(SMALL100, tmp_path) / "train"
    held = replace(SMALL100, train=(Batch("train", 200, md5=hashlib.md5(path.read_bytes()).hexdigest()),))
    assert len(read_cifar(held, tmp_path).train) == 200
    patched(path, 5000, path.read_bytes()[5000] ^ 1)
    monkeypatch.setattr(cifar, "read_pickle", lambda content: pytest.fail("read before it was checked"))
    with pytest.raises(bsam.BsamError, match="train is not the one of CIFAR-100 that was published: its MD5 differs"):
        read_cifar(held, tmp_path)


def test_the_published_sets_are_the_strict_ones(tmp_path):
    """Of the right size, with the right labels, but not the images."""
    place = tmp_path / "cifar-10-batches-bin"
    place.mkdir()
    records = np.zeros((10_000, 3073), np.uint8)
    records[:, 0] = np.arange(10_000) % 10
    for batch in (*CIFAR10.train, CIFAR10.test):
        (place / f"{batch.name}.bin").write_bytes(records.tobytes())
    with pytest.raises(bsam.BsamError, match=r"data_batch_1\.bin is not the one of CIFAR-10"):
        load("cifar10", tmp_path)
    assert all(batch.sha256 for batch in (*CIFAR10.train, CIFAR10.test))
    assert all(batch.md5 and batch.any_order for batch in (*CIFAR100.train, CIFAR100.test))


def test_black_images_are_not_the_published_ones_of_cifar_100(tmp_path):
    """Of the right size, with the right labels."""
    records = np.zeros((10_000, 3074), np.uint8)
    records[:, 1] = np.arange(10_000) % 100
    records.tofile(tmp_path / "test.bin")
    with pytest.raises(bsam.BsamError, match=r"test\.bin is not the one of CIFAR-100 that was published"):
        read_cifar(replace(CIFAR100, train=(CIFAR100.test,)), tmp_path)


def test_missing_files_are_named(tmp_path):
    place = write_binary(SMALL10, tmp_path)
    (place / "data_batch_2.bin").unlink()
    (place / "test_batch.bin").unlink()
    with pytest.raises(
        bsam.BsamError,
        match=rf"{place} has only some files of CIFAR-10: data_batch_2\.bin, test_batch\.bin missing; unpack https://www\.cs\.toronto",
    ):
        read_cifar(SMALL10, tmp_path)


@pytest.mark.parametrize(
    ("read", "names"),
    [(cifar10, ("cifar-10-batches-bin", "cifar-10-batches-py")), (cifar100, ("cifar-100-binary", "cifar-100-python"))],
)
def test_a_folder_without_it_is_told_what_belongs_there(read, names, tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        (tmp_path / "file").touch()
        with pytest.raises(bsam.BsamError) as refused:
            read(folder)
        for word in (str(folder), *names, "--download", "https://www.cs.toronto.edu/~kriz/"):
            assert word in str(refused.value)


def test_directories_named_like_files_are_none(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "test").mkdir()
    with pytest.raises(bsam.BsamError, match="no CIFAR-100 in"):
        cifar100(tmp_path)


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    write_binary(SMALL10, tmp_path)

    def denied(self, mode):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(bsam.BsamError, match=r"data_batch_1\.bin cannot be read: Permission denied"):
        read_cifar(SMALL10, tmp_path)
