"""The kinds of data sets that a run can use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from platform import node
from typing import ClassVar

from ...common.errors import BsamRuntimeError, BsamValueError
from .examples import Dataset
from .images.folders import ImageFiles
from .pose.person_files import PersonFiles
from .pose.persons import PoseData
from .sources import Source


@dataclass(frozen=True)
class DatasetEntry(ABC):
    """A data set that runs refer to by its name.

    Args:
        name: its name on the command line.
        title: its name in tables.
        classes: number of classes, or of joints; None if it is not known before the data is read.
        provided: why there is nothing to download; follows the name, as in "digits comes with scikit-learn".
        needs_folder: whether the user must say in which folder its files are.
        sources: files to download; none if the data comes with a package or the user must get it.
        is_in: returns whether the files to download are in a folder.
    """

    name: str
    title: str
    classes: int | None
    provided: str = field(default="cannot be downloaded (put its files into --data-dir)", kw_only=True)
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
            :data:`bsam.lab.data.pose.pose_augment.POSE_AUGMENTATIONS`.
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

    def resolve(self, folder: Path | None = None) -> KnownData:
        """Return the entry itself."""
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
    provided: str = "comes with scikit-learn"

    def has_validation(self, folder: Path | None = None) -> bool:
        """Return whether it has a validation set."""
        return self.validation

    def load(self, folder: Path | None = None) -> Dataset:
        """Read the data set."""
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
        """Return whether there are validation files in a folder."""
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

    def person_files(self, folder: Path | None = None) -> PersonFiles:
        """Return the persons in its image files in a folder."""
        return self.persons(self._subfolder(folder))


@dataclass(frozen=True, kw_only=True)
class DrawnPersonData(KnownData):
    """Drawn persons, with their joints.

    Args:
        draw: called with the side of the network's inputs; returns the persons.
    """

    draw: Callable[[int], PoseData]
    images: str = "drawn"
    origin: str = "bsam"
    provided: str = "is drawn"
    task: ClassVar[str] = "pose"
