"""Layers models of TensorFlow.js, in folders and in archives."""

from __future__ import annotations

import hashlib
import json
import tarfile

import numpy as np
import pytest

from bsam.core.errors import BsamError
from bsam.models.tfjs import read_archive, read_folder

TENSORS = {"a/kernel": np.arange(24).reshape(2, 3, 4), "a/bias": np.array([0.5, -2.0]), "b/gamma": np.array([7.0])}


@pytest.fixture
def package(tmp_path):
    """An unpacked package whose shards are cut within a tensor, as real ones are."""
    content = b"".join(value.astype("<f4").tobytes() for value in TENSORS.values())
    folder = tmp_path / "package" / "ResNet50"
    folder.mkdir(parents=True)
    for i, name in enumerate(("s1.bin", "s2.bin", "s3.bin")):
        (folder / name).write_bytes(content[44 * i : 44 * (i + 1)])
    weights = [{"name": name, "shape": list(value.shape), "dtype": "float32"} for name, value in TENSORS.items()]
    manifest = {"weightsManifest": [{"paths": ["s1.bin", "s2.bin", "s3.bin"], "weights": weights}]}
    (folder / "model.json").write_text(json.dumps(manifest))
    return tmp_path


def packed(folder):
    path = folder / "a.tgz"
    with tarfile.open(path, "w:gz") as archive:
        for name in ("s2.bin", "s10.bin", "s1.bin", "model.json", "s3.bin"):  # in no order
            if (folder / "package/ResNet50" / name).exists():
                archive.add(folder / "package/ResNet50" / name, f"package/ResNet50/{name}")
        archive.add(folder / "package/ResNet50/s1.bin", "package/other/s2.bin")
    return path


def test_folders_and_archives_hold_the_same(package):
    inside = package / "package" / "ResNet50"
    digest = hashlib.sha256(b"".join((inside / n).read_bytes() for n in ("model.json", "s1.bin", "s2.bin", "s3.bin")))
    for folder in (package, package / "package", inside):
        arrays, sha256 = read_folder(folder)
        assert sha256 == digest.hexdigest()
        assert list(arrays) == list(TENSORS)
        assert all(np.array_equal(arrays[name], value) for name, value in TENSORS.items())
    again = read_archive(packed(package))
    assert all(np.array_equal(again[name], value) for name, value in TENSORS.items())


DAMAGES = {
    "cut short": (lambda f: (f / "s2.bin").write_bytes(b"123"), r"67 bytes in place of 108: s2.bin is cut short"),
    "last cut": (lambda f: (f / "s3.bin").write_bytes(b"1234"), r"92 bytes in place of 108: s3.bin is cut short"),
    "longer": (
        lambda f: (f / "s3.bin").write_bytes(b"1" * 44),
        r"132 bytes in place of 108: one is cut short or damaged",
    ),
    "missing": (lambda f: (f / "s2.bin").unlink(), r"has no s2.bin, one of the 3 shards"),
    "no json": (lambda f: (f / "model.json").write_text("{"), r"model.json of .* is not of a layers model"),
    "other json": (lambda f: (f / "model.json").write_text("[1]"), r"model.json of .* is not of a layers model"),
    "no model": (lambda f: (f / "model.json").unlink(), r"no model.json|without model.json"),
    "bytes": (
        lambda f: (f / "model.json").write_text((f / "model.json").read_text().replace("float32", "uint8")),
        r"weights that are not float32, such as a/kernel",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_models_are_refused(damage, package):
    change, words = DAMAGES[damage]
    change(package / "package" / "ResNet50")
    with pytest.raises(BsamError, match=words):
        read_folder(package)
    with pytest.raises(BsamError, match=words):
        read_archive(packed(package))


def test_an_archive_that_is_cut_short_is_refused(package):
    path = packed(package)
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(BsamError, match=r"a.tgz is a damaged archive .*: download it again"):
        read_archive(path)
