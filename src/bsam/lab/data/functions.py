"""Data sets returned by a user's function, which is given as ``MODULE:FUNCTION``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ...common.errors import BsamError, BsamRuntimeError, BsamTypeError, BsamValueError
from ..common.names import describe_error, find_function
from .entries import ArrayData, DatasetEntry, ImageData, KnownData, PersonData
from .examples import Dataset
from .images.folders import ImageFiles, LabelledFiles
from .images.published import check_files
from .pose.person_files import PersonFiles

ROLE = "data set"


@dataclass(frozen=True)
class FunctionData(DatasetEntry):
    """A data set that a user's function returns; see the guide "Your own data set"."""

    provided: str = field(default="is read by your function", kw_only=True)

    def resolve(self, folder: Path | None = None) -> KnownData:
        """Call the function, and return the entry for its result; consecutive calls share the data."""
        return _call(self.name, folder)

    def check(self, folder: Path | None = None) -> None:
        """Raise if the function cannot be imported."""
        find_function(self.name, ROLE)


@dataclass(frozen=True)
class TaskData(DatasetEntry):
    """The data of a task of the user, which reads it."""

    provided: str = field(default="is read by your task", kw_only=True)

    def resolve(self, folder: Path | None = None) -> KnownData:
        """Raise: only the task can read it."""
        raise BsamValueError(f"{self.name} is data of a task of yours: name the task, too (--task)")

    def check(self, folder: Path | None = None) -> None:
        """Do nothing: the task reads the data when a run begins."""


@lru_cache(maxsize=1)
def _call(name: str, folder: Path | None) -> KnownData:
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
    n, joints = len(persons.images), len(persons.skeleton.joints)
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
