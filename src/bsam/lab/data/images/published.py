"""Oxford-IIIT Pet, Flowers-102 and Stanford Cars, in the layouts that their authors publish."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ....common.errors import BsamRuntimeError
from ....common.extras import require_package
from .folders import ImageFiles, LabelledFiles, read_folder


def read_oxford_pet(folder: str | Path) -> ImageFiles:
    """List the images of Oxford-IIIT Pet, 37 breeds of cats and dogs.

    Args:
        folder: holds ``images/``, ``annotations/trainval.txt`` and ``annotations/test.txt``.
    """
    folder = Path(folder)
    class_names: dict[int, str] = {}
    parts = []
    for list_name in ("trainval", "test"):
        path = required(folder, f"annotations/{list_name}.txt")
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
        rows = [line for line in lines if line and not line[0].startswith("#")]
        class_names |= {int(row[1]): row[0].rpartition("_")[0] for row in rows}
        parts.append(([f"images/{row[0]}.jpg" for row in rows], [int(row[1]) for row in rows]))
    ordered = [class_names[number] for number in sorted(class_names)]
    train, test = (_label_files(folder, names, numbers) for names, numbers in parts)
    return ImageFiles("oxford_pet", folder, tuple(ordered), train, None, test, "the official trainval/test split")


def read_flowers102(folder: str | Path) -> ImageFiles:
    """List the images of Flowers-102: 102 kinds of flowers, named by their official numbers.

    Args:
        folder: holds ``jpg/``, ``imagelabels.mat`` and ``setid.mat``; or folders ``train``, ``valid`` and ``test`` with
            class folders, which may not be the official split.
    """
    folder = Path(folder)
    if not (folder / "setid.mat").exists() and (folder / "train").is_dir():
        return _unofficial(folder, "flowers102")
    labels = np.ravel(read_mat(required(folder, "imagelabels.mat"), "labels"))
    sets = []
    for key in ("trnid", "valid", "tstid"):
        ids = np.ravel(read_mat(required(folder, "setid.mat"), key)).tolist()
        names = [f"jpg/image_{number:05d}.jpg" for number in ids]
        sets.append(_label_files(folder, names, [labels[number - 1] for number in ids]))
    class_names = tuple(str(number) for number in range(1, 103))
    train, validation, test = sets
    split = "the official trnid/valid/tstid split"
    return ImageFiles("flowers102", folder, class_names, train, validation, test, split)


def read_stanford_cars(folder: str | Path) -> ImageFiles:
    """List the images of Stanford Cars, 196 models of cars.

    Args:
        folder: holds ``cars_train/``, ``cars_test/`` and ``devkit/`` with ``cars_meta.mat``, ``cars_train_annos.mat``
            and ``cars_test_annos_withlabels.mat`` (the last one may also be next to ``devkit``); or folders ``train``
            and ``test`` with class folders.
    """
    folder = Path(folder)
    if not (folder / "devkit").exists() and (folder / "train").is_dir():
        return _unofficial(folder, "stanford_cars")
    class_names = tuple(str(name) for name in read_mat(required(folder, "devkit/cars_meta.mat"), "class_names"))
    labelled_test = "cars_test_annos_withlabels.mat"
    if not (folder / labelled_test).exists():
        labelled_test = f"devkit/{labelled_test}"
    sets = []
    for images, name in (("cars_train", "devkit/cars_train_annos.mat"), ("cars_test", labelled_test)):
        rows = np.atleast_1d(read_mat(required(folder, name), "annotations"))
        names = [f"{images}/{file}" for file in rows["fname"]]
        sets.append(_label_files(folder, names, rows["class"]))
    return ImageFiles(
        "stanford_cars", folder, class_names, sets[0], None, sets[1], "the official cars_train/cars_test split"
    )


def _unofficial(folder: Path, name: str) -> ImageFiles:
    files = read_folder(folder)
    return replace(files, name=name, split=f"{files.split}, not checked against the official split")


def required(folder: Path, name: str) -> Path:
    """Return the path of a file; raise if it is missing."""
    path = folder / name
    if not path.is_file():
        raise BsamRuntimeError(f"{path} is missing: give the folder that holds {name}, or get the data set again")
    return path


def read_mat(path: Path, key: str, struct_as_record: bool = True) -> Any:
    """Return a variable of a MATLAB file; its structures are records, or objects with their fields as attributes."""
    require_package("scipy", "images")
    from scipy.io import loadmat

    try:
        return loadmat(path, squeeze_me=True, struct_as_record=struct_as_record, variable_names=[key])[key]
    except Exception as error:  # scipy raises errors of many types for damaged files
        raise BsamRuntimeError(
            f"{path} cannot be read as a MATLAB file with {key} ({error!r}): get it again"
        ) from error


def check_files(folder: Path, names: Sequence[str]) -> None:
    """Raise if some of the files are missing."""
    if missing := sorted(name for name in set(names) if not (folder / name).is_file()):
        raise BsamRuntimeError(
            f"{len(missing)} of {len(names)} images are missing, such as {folder / missing[0]}: get the data set again"
        )


def _label_files(folder: Path, names: Sequence[str], numbers: Iterable[Any]) -> LabelledFiles:
    """Return the files and their labels, which are the class numbers minus 1; raise if a file is missing."""
    check_files(folder, names)
    return LabelledFiles(tuple(names), tuple(int(number) - 1 for number in numbers))
