"""The kinds of data sets that a run can use, including what a function of the user returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from platform import node
from typing import Any, ClassVar

import numpy as np

from ...common.errors import BsamError, BsamRuntimeError, BsamTypeError, BsamValueError
from ..common.names import describe_error, find_function
from .arrays import Dataset
from .downloads import Source
from .folders import ImageFiles, LabelledFiles, check_files
from .persons import PersonFiles, PoseData


@dataclass(frozen=True)
class DatasetEntry(ABC):
    """A data set that runs refer to by its name.

    Args:
        name: its name on the command line.
        title: its name in tables.
        classes: number of classes, or of joints; None if it is not known before the data is read.
        no_download: why there is nothing to download; follows the name, as in "digits comes with scikit-learn".
        needs_folder: whether the user must say in which folder its files are.
        sources: files to download; none if the data comes with a package or the user must get it.
        is_in: returns whether the files to download are in a folder.
    """

    name: str
    title: str
    classes: int | None
    no_download: str = field(default="cannot be downloaded (put its files into --data-dir)", kw_only=True)
    needs_folder: bool = field(default=False, kw_only=True)
    sources: tuple[Source, ...] = field(default=(), kw_only=True)
    is_in: Callable[[Path], bool] = field(default=lambda folder: True, kw_only=True)

    @abstractmethod
    def resolve(self, folder: Path | None = None) -> KnownData:
        """Return an entry of a known kind. For a user's function, this calls the function."""

    def check(self, folder: Path | None = None) -> None:
        """Raise if the data set is read from files and they are not in the folder."""
        if not self.needs_folder:
            return
        directory = self._folder(folder)
        if not directory.is_dir():
            raise BsamRuntimeError(f"{self.title} is read from files, but there is no folder {directory} on {node()}")
        if self.sources and not self.is_in(directory):
            raise BsamRuntimeError(f"{directory} on {node()} does not hold the files of {self.title}: see --download")

    def _folder(self, folder: Path | None) -> Path:
        if self.needs_folder and folder is None:
            download = ", and --download to download them into it" if self.sources else ""
            raise BsamRuntimeError(f"{self.title} is read from files: give their folder with --data-dir{download}")
        return folder or Path()

    def _subfolder(self, folder: Path | None) -> Path:
        """Return the subfolder with the data set's name if it exists, otherwise the data folder itself."""
        directory = self._folder(folder)
        return directory / self.name if (directory / self.name).is_dir() else directory


@dataclass(frozen=True, kw_only=True)
class KnownData(DatasetEntry):
    """A data set of a known kind: arrays, image files, or persons.

    Args:
        augmentation: default augmentation, one of :data:`bsam.lab.data.augment.AUGMENTATIONS`, or for persons one of
            :data:`bsam.lab.data.pose_augment.POSE_AUGMENTATIONS`.
        model: default network, one of :data:`bsam.lab.models.MODELS`; None means that ``--model`` or a file of weights
            must name it.
        images: description of the images, such as their shape, for lists.
        origin: where the images come from, for lists.
    """

    augmentation: str = "none"
    model: str | None = None
    images: str = "files"
    origin: str = "--data-dir FOLDER"
    task: ClassVar[str] = "classification"  #: what is learned from it, one of :data:`bsam.lab.tasks.TASKS`
    counted: ClassVar[str] = ""  #: what ``classes`` counts, if they are no classes

    def resolve(self, folder: Path | None = None) -> KnownData:
        return self

    def has_validation(self, folder: Path | None = None) -> bool:
        """Return whether it has a validation set. Image files are listed for this, but not decoded."""
        return False


@dataclass(frozen=True, kw_only=True)
class ArrayData(KnownData):
    """Images in arrays.

    Args:
        read: returns the data set in a folder; data from a package ignores the folder.
        validation: whether it has a validation set.
    """

    read: Callable[[Path], Dataset]
    validation: bool = False
    model: str | None = "resnet18"

    def has_validation(self, folder: Path | None = None) -> bool:
        return self.validation

    def load(self, folder: Path | None = None) -> Dataset:
        return self.read(self._folder(folder))


@dataclass(frozen=True, kw_only=True)
class ImageData(KnownData):
    """Images in files, which are resized to the input size of the network.

    Args:
        files: lists the files in a folder.
    """

    needs_folder: bool = True
    files: Callable[[Path], ImageFiles]

    def has_validation(self, folder: Path | None = None) -> bool:
        return self.image_files(folder).validation is not None

    def image_files(self, folder: Path | None = None) -> ImageFiles:
        """Return its image files in a folder; raise if the number of classes is wrong."""
        files = self.files(self._subfolder(folder))
        if self.classes is not None and len(files.class_names) != self.classes:
            raise BsamValueError(
                f"{self.title} has {self.classes} classes, but {files.folder} has {len(files.class_names)}: it holds "
                "other data, or is incomplete"
            )
        return files


@dataclass(frozen=True, kw_only=True)
class PersonData(KnownData):
    """Persons in image files, with their joints.

    Args:
        persons: lists the persons in a folder.
    """

    augmentation: str = "scale-rotate-flip"
    model: str | None = "simcc_resnet50"
    needs_folder: bool = True
    persons: Callable[[Path], PersonFiles]
    task: ClassVar[str] = "pose"
    counted: ClassVar[str] = "joints"

    def person_files(self, folder: Path | None = None) -> PersonFiles:
        return self.persons(self._subfolder(folder))


@dataclass(frozen=True, kw_only=True)
class DrawnPersonData(KnownData):
    """Drawn persons, with their joints.

    Args:
        draw: called with the side of the network's inputs, and with the number of training figures, which has a
            default; returns the persons.
    """

    draw: Callable[..., PoseData]
    images: str = "drawn"
    origin: str = "bsam"
    no_download: str = "is drawn"
    task: ClassVar[str] = "pose"
    counted: ClassVar[str] = "joints"


ROLE = "data set"


@dataclass(frozen=True)
class FunctionData(DatasetEntry):
    """A data set that a user's function returns; see the guide "Your own data set"."""

    no_download: str = field(default="is read by your function", kw_only=True)

    def resolve(self, folder: Path | None = None) -> KnownData:
        return entry_of_function(self.name, folder)

    def check(self, folder: Path | None = None) -> None:
        find_function(self.name, ROLE)


@dataclass(frozen=True)
class TaskData(DatasetEntry):
    """The data of a task of the user, which reads it."""

    no_download: str = field(default="is read by your task", kw_only=True)

    def resolve(self, folder: Path | None = None) -> KnownData:
        """Raise: only the task can read it."""
        raise BsamValueError(f"{self.name} is data of a task of yours: name the task, too (--task)")

    def check(self, folder: Path | None = None) -> None:
        """Do nothing: the task reads the data when a run begins."""


@lru_cache(maxsize=1)
def entry_of_function(name: str, folder: Path | None) -> KnownData:
    """Call a function of the user, and return the entry for its result; consecutive calls share the data."""
    function = find_function(name, ROLE)
    try:
        return _entry(name, function(folder))
    except BsamError as error:
        raise BsamValueError(f"{name}: {error}") from error
    except Exception as error:
        where = "without --data-dir" if folder is None else f"with --data-dir {folder}"
        remedy = "give --data-dir, or correct the function" if folder is None else "correct the folder or the function"
        description = describe_error(error, name.partition(":")[0])
        raise BsamRuntimeError(f"{name}, called {where}, raised {description}: {remedy}") from error


def _entry(name: str, data: object) -> KnownData:
    """Check the result of a function, and return its entry."""
    if isinstance(data, Dataset):
        arrays = _check_arrays(replace(data, name=name))
        validation = arrays.validation is not None
        return ArrayData(name, name, arrays.classes, read=lambda _: arrays, validation=validation)
    if isinstance(data, ImageFiles):
        files = _check_images(data)
        return ImageData(name, name, len(files.class_names), files=lambda _: files, needs_folder=False)
    if isinstance(data, PersonFiles):
        persons = _check_persons(data)
        return PersonData(name, name, len(data.skeleton.joints), persons=lambda _: persons, needs_folder=False)
    raise BsamTypeError(
        "the function must return a Dataset (for example from Dataset.from_arrays), ImageFiles or PersonFiles from "
        f"bsam.lab.data, but returned {type(data).__name__}"
    )


def _check_arrays(data: Dataset) -> Dataset:
    parts = {"train": data.train, "test": data.test, "validation": data.validation}
    pairs = {name: (part.x, part.y) for name, part in parts.items() if part is not None}
    checked = Dataset.from_arrays(**pairs, class_names=data.class_names or tuple(map(str, range(data.classes))))
    if checked.classes != data.classes:
        raise BsamValueError(f"classes is {data.classes}, but there are {checked.classes} class_names")
    channels = checked.train.x.shape[1]
    if {len(data.mean), len(data.std)} - {1, channels}:
        raise BsamValueError(f"mean and std must be one number, or one for each of the {channels} channels")
    sets = {name: getattr(checked, name) for name in parts}
    return replace(data, class_names=checked.class_names, **sets)


def _check_images(files: ImageFiles) -> ImageFiles:
    sets = {}
    for name, part in files.sets.items():
        labels = _indices(f"{name} labels", part.labels, len(files.class_names))
        if len(labels) != len(part.names) or not labels:
            raise BsamValueError(
                f"{name} must have at least one file, and one label per file; got {len(part.names)} files and "
                f"{len(labels)} labels"
            )
        sets[name] = LabelledFiles(tuple(map(str, part.names)), labels)
    if len(files.class_names) < 2:
        raise BsamValueError(f"class_names must have at least 2 entries, got {files.class_names!r}")
    folder = Path(files.folder)
    check_files(folder, [name for part in sets.values() for name in part.names])
    names = tuple(map(str, files.class_names))
    return replace(files, folder=folder, class_names=names, **sets)  # type: ignore[arg-type]


def _check_persons(persons: PersonFiles) -> PersonFiles:
    n = len(persons.images)
    joints = len(persons.skeleton.joints)
    shapes: dict[str, tuple[int, ...]] = {"boxes": (n, 4), "joints": (n, joints, 3), "head_sizes": (n,)}
    arrays: dict[str, Any] = {}
    for name, shape in shapes.items():
        if (values := getattr(persons, name)) is not None:
            arrays[name] = np.asarray(values, np.float64)
            if arrays[name].shape != shape:
                raise BsamValueError(f"{name} must have the shape {shape}, got {arrays[name].shape}")
    labelled = arrays["joints"][..., 2] > 0
    if not (np.isfinite(arrays["boxes"]).all() and np.isfinite(arrays["joints"][labelled]).all()):
        raise BsamValueError("boxes and labelled joints must be finite numbers")
    for name in ("train", "test"):
        arrays[name] = np.array(_indices(name, getattr(persons, name), n), np.int64)
    folder = Path(persons.folder)
    check_files(folder, persons.images)
    return replace(persons, folder=folder, images=tuple(persons.images), **arrays)


def _indices(name: str, values: Any, count: int) -> tuple[int, ...]:
    """Return whole numbers from 0 to ``count - 1`` as Python integers."""
    array = np.asarray(values)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise BsamTypeError(f"{name} must be a 1-D array of whole numbers, got {array.dtype} of shape {array.shape}")
    if len(array) and not (array.min() >= 0 and array.max() < count):
        raise BsamValueError(f"{name} must be between 0 and {count - 1}, got {array.min()} to {array.max()}")
    return tuple(array.tolist())
