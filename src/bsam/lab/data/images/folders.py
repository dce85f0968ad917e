"""Names and labels of image files in class folders, before any of them is decoded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ....common.errors import BsamValueError

VALIDATION_NAMES = ("val", "valid", "validation")
OF_WINDOWS = ("Thumbs.db", "desktop.ini")  # hidden files that Windows creates
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
    """The image files of a data set, which :func:`bsam.lab.data.images.cache.load_images` decodes.

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
    train, test = [], []
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
    paths = sorted(path for path in visible if path.name not in OF_WINDOWS)
    for path in paths:
        if not path.is_file():
            raise BsamValueError(f"{path} is not a file, but {directory} is read as a class folder of images: {LAYOUT}")
    return [path.relative_to(folder).as_posix() for path in paths]


def _label_files(classes: Iterable[list[str]]) -> LabelledFiles:
    pairs = [(name, label) for label, names in enumerate(classes) for name in names]
    return LabelledFiles(tuple(name for name, _ in pairs), tuple(label for _, label in pairs))
