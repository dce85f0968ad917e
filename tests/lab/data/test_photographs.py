"""Published data sets of photographs, which are read as their authors distribute them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from bsam.common.errors import BsamRuntimeError
from bsam.lab.data.folders import read_flowers102, read_oxford_pet, read_stanford_cars


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def pairs(files):
    return dict(zip(files.names, files.labels, strict=True))


@pytest.fixture
def pets(tmp_path):
    touch(tmp_path, *(f"images/{name}.jpg" for name in ("pug_1", "pug_2", "Maine_Coon_7", "Maine_Coon_12")))
    lists = {"trainval": "#Image CLASS-ID SPECIES BREED\npug_2 1 2 1\nMaine_Coon_12 2 1 1\n"}
    lists["test"] = "Maine_Coon_7 2 1 1\n\npug_1 1 2 1\n"
    for name, lines in lists.items():
        touch(tmp_path, f"annotations/{name}.txt")
        (tmp_path / f"annotations/{name}.txt").write_text(lines)
    return tmp_path


def test_oxford_pet(pets):
    files = read_oxford_pet(pets)
    assert (files.name, files.class_names) == ("oxford_pet", ("pug", "Maine_Coon"))  # in the order of the numbers
    assert pairs(files.train) == {"images/pug_2.jpg": 0, "images/Maine_Coon_12.jpg": 1}
    assert pairs(files.test) == {"images/Maine_Coon_7.jpg": 1, "images/pug_1.jpg": 0}
    assert (files.validation, files.split) == (None, "the official trainval/test split")


@pytest.fixture
def flowers(tmp_path):
    touch(tmp_path, *(f"jpg/image_0000{i}.jpg" for i in range(1, 6)))
    savemat(tmp_path / "imagelabels.mat", {"labels": np.array([[102, 5, 5, 1, 102]], np.uint8)})
    savemat(tmp_path / "setid.mat", {"trnid": [[5, 2]], "valid": [[3]], "tstid": [[4, 1]]})
    return tmp_path


def test_flowers(flowers):
    files = read_flowers102(flowers)
    assert files.class_names == tuple(str(i) for i in range(1, 103))
    assert pairs(files.train) == {"jpg/image_00005.jpg": 101, "jpg/image_00002.jpg": 4}
    assert pairs(files.validation) == {"jpg/image_00003.jpg": 4}
    assert pairs(files.test) == {"jpg/image_00004.jpg": 0, "jpg/image_00001.jpg": 101}
    assert files.split == "the official trnid/valid/tstid split"


@pytest.mark.parametrize(("read", "name"), [(read_flowers102, "flowers102"), (read_stanford_cars, "stanford_cars")])
def test_class_folders_are_read_and_not_called_official(tmp_path, read, name):
    touch(tmp_path, *(f"{part}/{i}/x.jpg" for part in ("train", "test") for i in (2, 10, 1)))
    files = read(tmp_path)
    assert (files.name, files.class_names) == (name, ("1", "2", "10"))
    assert files.split == "folders train and test, not checked against the official split"


@pytest.mark.parametrize("place", ["", "devkit/"])
def test_stanford_cars(tmp_path, place):
    touch(tmp_path, "cars_train/00001.jpg", "cars_train/00002.jpg", "cars_test/00001.jpg", "devkit/readme")
    kinds = [("bbox_x1", "O"), ("class", "O"), ("fname", "O")]
    annotations = {
        "devkit/cars_train_annos.mat": [(3, 2, "00001.jpg"), (4, 1, "00002.jpg")],
        f"{place}cars_test_annos_withlabels.mat": [(5, 2, "00001.jpg")],
    }
    with pytest.raises(BsamRuntimeError, match=r"cars_meta.mat is missing: give the folder that holds devkit/"):
        read_stanford_cars(tmp_path)
    names = np.array([["Audi TT", "BMW M3"]], object)
    savemat(tmp_path / "devkit/cars_meta.mat", {"class_names": names})
    for name, rows in annotations.items():
        savemat(tmp_path / name, {"annotations": np.array([rows], kinds)})
    files = read_stanford_cars(tmp_path)
    assert files.class_names == ("Audi TT", "BMW M3")
    assert pairs(files.train) == {"cars_train/00001.jpg": 1, "cars_train/00002.jpg": 0}
    assert pairs(files.test) == {"cars_test/00001.jpg": 1}
    assert files.split == "the official cars_train/cars_test split"
