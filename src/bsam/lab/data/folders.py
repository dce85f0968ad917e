"""Names and labels of image files, before any is decoded: class folders, and the layouts of published data sets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...common.errors import BsamRuntimeError, BsamValueError
from ...common.extras import require_package
from .arrays import as_indices

VALIDATION_NAMES = ("val", "valid", "validation")
WINDOWS_FILES = ("Thumbs.db", "desktop.ini")  # hidden files that Windows creates
LAYOUT = "a data set needs one folder of images per class, or folders train and test (or val) with such class folders"


@dataclass(frozen=True)
class LabelledFiles:
    """Image files and their classes.

    Args:
        names: paths relative to the folder of the data set, with ``/``.
        labels: one class per name, counted from 0.
    """

    names: tuple[str, ...]
    labels: tuple[int, ...]


@dataclass(frozen=True)
class ImageFiles:
    """The image files of a data set, which :func:`bsam.lab.data.images.load_images` decodes.

    Args:
        name: name of the data set.
        folder: all names are relative to it.
        class_names: in the order of the labels.
        train, validation, test: the three sets; ``validation`` is None if there is none.
        split: description of where the split comes from, for result tables.
    """

    name: str
    folder: Path
    class_names: tuple[str, ...]
    train: LabelledFiles
    validation: LabelledFiles | None
    test: LabelledFiles
    split: str

    @property
    def sets(self) -> dict[str, LabelledFiles]:
        """Training, validation (if there is one) and test set, by field name and in this order."""
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: files for name, files in parts.items() if files is not None}

    def checked(self) -> ImageFiles:
        """Return a copy in plain types, after checking what a function of the user may have got wrong."""
        sets = {}
        for name, part in self.sets.items():
            labels = as_indices(f"{name} labels", part.labels, len(self.class_names))
            if len(labels) != len(part.names) or not labels:
                raise BsamValueError(
                    f"{name} must have at least one file, and one label per file; got {len(part.names)} files and "
                    f"{len(labels)} labels"
                )
            sets[name] = LabelledFiles(tuple(map(str, part.names)), labels)
        if len(self.class_names) < 2:
            raise BsamValueError(f"class_names must have at least 2 entries, got {self.class_names!r}")
        folder = Path(self.folder)
        check_files(folder, [name for part in sets.values() for name in part.names])
        names = tuple(map(str, self.class_names))
        return replace(self, folder=folder, class_names=names, **sets)  # type: ignore[arg-type]


def read_folder(folder: str | Path, seed: int = 0, test_fraction: float = 0.2) -> ImageFiles:
    """List the images of a folder with one folder per class.

    If the folder holds ``train`` and at least one of ``test``, ``val``, ``valid`` and ``validation``, each with the
    same class folders, these are the sets; without ``test``, the validation set is the test set. Otherwise a random
    part of each class is the test set. Every file in a class folder counts as an image, except hidden ones; a folder in
    a class folder is an error.

    Args:
        folder: folder of the data set.
        seed: seed of the random split.
        test_fraction: share of each class that is in the test set of the random split; each set has at least one image
            of each class.

    Returns:
        The files, class by class, in sorted order. Classes are sorted by name, or by number if all names are numbers.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("cat/1.jpg", "cat/2.jpg", "dog/1.jpg", "dog/2.jpg"):
        ...         Path(folder, name).parent.mkdir(exist_ok=True)
        ...         Path(folder, name).touch()
        ...     files = read_folder(folder)
        >>> files.class_names, files.test.labels, files.split
        (('cat', 'dog'), (0, 1), '80/20 of each class, seed 0')
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise BsamValueError(f"{folder} is not a folder; give the one that holds the images: {LAYOUT}")
    names = _folders(folder)
    validations = [name for name in VALIDATION_NAMES if name in names]
    if "train" in names and (validations or "test" in names):
        return _given_split(folder, ["train", *validations[:1], *({"test"} & set(names))])
    return _random_split(folder, _class_files(folder, folder), seed, test_fraction)


def _given_split(folder: Path, sets: list[str]) -> ImageFiles:
    classes = {name: _class_files(folder, folder / name) for name in sets}
    class_names = tuple(classes["train"])
    for name in sets[1:]:
        for class_name in {*class_names} ^ {*classes[name]}:
            having, lacking = ("train", name) if class_name in class_names else (name, "train")
            raise BsamValueError(
                f"{folder / lacking} has no class folder {class_name}, but {folder / having} has one: all sets must "
                "have the same classes"
            )
    train, *others = (_label_files(classes[name].values()) for name in sets)
    validation = others[0] if len(others) == 2 else None
    split = f"folders {', '.join(sets[:-1])} and {sets[-1]}"
    return ImageFiles(folder.resolve().name, folder, class_names, train, validation, others[-1], split)


def _random_split(folder: Path, classes: dict[str, list[str]], seed: int, test_fraction: float) -> ImageFiles:
    train = []
    test = []
    for label, (class_name, names) in enumerate(classes.items()):
        if len(names) < 2:
            raise BsamValueError(
                f"the class {class_name} of {folder} has only one image: add one, to train on one and test on the other"
            )
        n = min(max(1, round(test_fraction * len(names))), len(names) - 1)
        chosen = {*np.random.default_rng((seed, label)).permutation(len(names))[:n].tolist()}
        train.append([name for index, name in enumerate(names) if index not in chosen])
        test.append([name for index, name in enumerate(names) if index in chosen])
    share = 100 * test_fraction
    split = f"{100 - share:g}/{share:g} of each class, seed {seed}"
    name = folder.resolve().name
    return ImageFiles(name, folder, tuple(classes), _label_files(train), None, _label_files(test), split)


def _class_files(folder: Path, directory: Path) -> dict[str, list[str]]:
    """Return the files of each class folder in ``directory``, relative to ``folder``."""
    class_names = _folders(directory)
    if len(class_names) < 2:
        content = f"only one class folder ({class_names[0]})" if class_names else "no class folders"
        raise BsamValueError(f"{directory} holds {content}: {LAYOUT}")
    classes = {class_name: _files(folder, directory / class_name) for class_name in class_names}
    empty = [class_name for class_name, names in classes.items() if not names]
    if empty:
        raise BsamValueError(f"{directory / empty[0]} holds no images: fill the class folder or remove it")
    return classes


def _folders(directory: Path) -> list[str]:
    names = sorted(path.name for path in directory.iterdir() if path.is_dir() and not path.name.startswith("."))
    return sorted(names, key=int) if all(name.isdecimal() for name in names) else names


def _files(folder: Path, directory: Path) -> list[str]:
    visible = (path for path in directory.iterdir() if not path.name.startswith("."))
    paths = sorted(path for path in visible if path.name not in WINDOWS_FILES)
    for path in paths:
        if not path.is_file():
            raise BsamValueError(f"{path} is not a file, but {directory} is read as a class folder of images: {LAYOUT}")
    return [path.relative_to(folder).as_posix() for path in paths]


def _label_files(classes: Iterable[list[str]]) -> LabelledFiles:
    pairs = [(name, label) for label, names in enumerate(classes) for name in names]
    return LabelledFiles(tuple(name for name, _ in pairs), tuple(label for _, label in pairs))


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
    train, test = (_numbered_files(folder, names, numbers) for names, numbers in parts)
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
        sets.append(_numbered_files(folder, names, [labels[number - 1] for number in ids]))
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
        sets.append(_numbered_files(folder, names, rows["class"]))
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


def _numbered_files(folder: Path, names: Sequence[str], numbers: Iterable[Any]) -> LabelledFiles:
    """Return the files and their labels, which are the class numbers minus 1; raise if a file is missing."""
    check_files(folder, names)
    return LabelledFiles(tuple(names), tuple(int(number) - 1 for number in numbers))
