"""Files and arguments that data sets cannot be made of: the error says which."""

import gzip
import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from bsam.common.errors import BsamRuntimeError, BsamValueError
from bsam.lab.data import DATASETS, dataset_entry, digits
from bsam.lab.data.arrays import Examples
from bsam.lab.data.downloads import CIFAR10, Source, fetch, read_cifar, read_fashion_mnist
from bsam.lab.data.folders import read_flowers102, read_folder, read_oxford_pet, read_stanford_cars
from bsam.lab.data.images import Resize, check_box, decode_bytes
from bsam.lab.data.persons import read_lspet, read_mpii, stored_side
from bsam.lab.data.stick_figures import stick_figures

FOLDER = Path()


def encoded(pixels, kind="PNG"):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def decoded(content):
    return lambda: decode_bytes(content, "cat.jpg", Resize(8))


GREY = np.random.default_rng(0).integers(0, 256, (40, 60), np.uint8)  # more pixels than the test below allows
SMALL = GREY[:32, :32]
IDX = "train-images-idx3-ubyte"
ONE_PET = {"images/pug_1.jpg": b"", "annotations/trainval.txt": b"pug_2 1 2 1", "annotations/test.txt": b"pug_1 1 2 1"}
ROWS = {
    # files in the current folder; the call; the class of the error, and a word
    "name": ({}, lambda: dataset_entry("cifar"), BsamValueError, "'cifar'"),
    "no data folder": ({}, DATASETS["cifar10"].load, BsamRuntimeError, "--data-dir"),
    "no image folder": ({}, DATASETS["flowers102"].image_files, BsamRuntimeError, "--data-dir"),
    "no person folder": ({}, DATASETS["lspet"].person_files, BsamRuntimeError, "--data-dir"),
    "other classes": (
        {f"{part}/{name}/1.jpg": b"" for part in ("train", "test") for name in "ab"},
        lambda: DATASETS["flowers102"].image_files(FOLDER),
        BsamValueError,
        "102 classes",
    ),
    "few examples": ({}, lambda: Examples(torch.zeros(3, 1, 1, 1), torch.arange(3)).some(4), BsamValueError, "4"),
    "no examples": ({}, lambda: Examples(torch.zeros(3, 1, 1, 1), torch.arange(3)).some(0), BsamValueError, "0"),
    "side": ({}, lambda: stored_side(0), BsamValueError, "side"),
    "figures": ({}, lambda: stick_figures(3), BsamValueError, "3"),
    "cifar": ({"data_batch_1.bin": b""}, lambda: read_cifar(CIFAR10, FOLDER), BsamRuntimeError, "test_batch.bin"),
    "short cifar": (
        {f"{name}.bin": b"x" for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")},
        lambda: read_cifar(CIFAR10, FOLDER),
        BsamRuntimeError,
        "data_batch_1.bin must have 30,730,000 bytes",
    ),
    "short idx": ({IDX: b"x", IDX.replace("images-idx3", "labels-idx1"): b"x"}, lambda: read_fashion_mnist("."),
                  BsamRuntimeError, IDX),
    "cut gz": ({f"{IDX}.gz": gzip.compress(bytes(99))[:-9], IDX.replace("images-idx3", "labels-idx1"): b"x"},
               lambda: read_fashion_mnist("."), BsamRuntimeError, f"{IDX}.gz cannot be read"),
    "no labels": ({IDX: b"x"}, lambda: read_fashion_mnist("."), BsamRuntimeError, "train-labels-idx1-ubyte"),
    "unwritable": ({"file": b""}, lambda: fetch(Source("http://127.0.0.1:1/a.gz", "", "a.gz"), Path("file")),
                   BsamRuntimeError, "file/a.gz"),
    "nowhere": ({}, lambda: read_folder("nowhere"), BsamValueError, "nowhere"),
    "empty": ({}, lambda: read_folder(FOLDER), BsamValueError, "no class folders"),
    "no classes": ({"a.jpg": b"", "b.jpg": b""}, lambda: read_folder(FOLDER), BsamValueError, "no class folders"),
    "one class": ({"cat/1": b"", "cat/2": b""}, lambda: read_folder(FOLDER), BsamValueError, "cat"),
    "one image": ({"cat/1": b"", "cat/2": b"", "dog/1": b""}, lambda: read_folder(FOLDER), BsamValueError, "dog"),
    "hidden": ({"cat/1": b"", "cat/2": b"", "dog/.1": b""}, lambda: read_folder(FOLDER), BsamValueError, "dog"),
    "nested": ({"cat/1": b"", "dog/old/1": b""}, lambda: read_folder(FOLDER), BsamValueError, "old"),
    "unequal": ({f"{name}/1": b"" for name in ("train/a", "train/b", "test/a", "test/c")}, lambda: read_folder(FOLDER),
                BsamValueError, "no class folder"),
    "no test": ({"train/a/1": b"", "train/b/1": b"", "test/x": b""}, lambda: read_folder(FOLDER), BsamValueError,
                "test"),
    "missing pet": (ONE_PET, lambda: read_oxford_pet(FOLDER), BsamRuntimeError, "pug_2.jpg"),
    "no pets": ({}, lambda: read_oxford_pet(FOLDER), BsamRuntimeError, "annotations"),
    "no cars": ({"devkit/x": b""}, lambda: read_stanford_cars(FOLDER), BsamRuntimeError, "cars_meta.mat"),
    "bad flowers": ({"imagelabels.mat": b"MATLAB", "setid.mat": b"MATLAB"}, lambda: read_flowers102(FOLDER),
                    BsamRuntimeError, "imagelabels.mat"),
    "no joints": ({}, lambda: read_lspet(FOLDER), BsamRuntimeError, "joints.mat"),
    "bad joints": ({"joints.mat": b"MATLAB"}, lambda: read_lspet(FOLDER), BsamRuntimeError, "joints.mat"),
    "no persons": ({}, lambda: read_mpii(FOLDER), BsamRuntimeError, "mpii_human_pose"),
    "text": ({}, decoded(b"not an image"), BsamValueError, "cat.jpg"),
    "postscript": ({}, decoded(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n"), BsamValueError, "not an image"),
    "cut jpeg": ({}, decoded(encoded(SMALL, "JPEG")[:-400]), BsamValueError, "truncated"),
    "cut png": ({}, decoded(encoded(SMALL)[:-400]), BsamValueError, "truncated"),
    "floats": ({}, decoded(encoded(SMALL.astype(np.float32), "TIFF")), BsamValueError, "floating-point"),
    "bomb": ({}, decoded(encoded(GREY)), BsamValueError, "2,000 pixels"),
    "box": ({}, lambda: check_box((5, 5, 5, 9)), BsamValueError, "box"),
    "small box": ({}, lambda: check_box((2, 2, 2.5, 2.9)), BsamValueError, "box"),
    "box without end": ({}, lambda: check_box((0, 0, float("nan"), 5)), BsamValueError, "box"),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_refusals(row, tmp_path, monkeypatch):
    files, call, error, word = ROWS[row]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)
    for name, content in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)
    with pytest.raises(error) as caught:
        call()
    assert word in str(caught.value)


def test_a_matlab_file_without_the_variable(tmp_path):
    savemat(tmp_path / "joints.mat", {"labels": np.zeros(3)})
    with pytest.raises(BsamRuntimeError, match="joints"):
        read_lspet(tmp_path)


def test_digits_need_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(BsamRuntimeError, match="demo"):
        digits()
