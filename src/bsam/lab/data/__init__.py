"""The data sets that networks are trained on: their kinds, and the registry :data:`DATASETS`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from platform import node
from typing import ClassVar

from ...common.errors import BsamError, BsamRuntimeError, BsamTypeError, BsamValueError
from ..common.names import describe_error, find_function
from .arrays import Dataset as Dataset
from .arrays import Examples as Examples
from .arrays import digits as digits
from .downloads import (
    CIFAR10,
    CIFAR100,
    FASHION_SOURCES,
    Cifar,
    Source,
    fetch,
    has_cifar,
    has_fashion_mnist,
    read_cifar,
    read_fashion_mnist,
)
from .folders import ImageFiles as ImageFiles
from .folders import LabelledFiles as LabelledFiles
from .folders import read_flowers102, read_folder, read_oxford_pet, read_stanford_cars
from .persons import PersonFiles as PersonFiles
from .persons import PoseData, read_lspet, read_mpii
from .stick_figures import stick_figures


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
        arrays = replace(data, name=name).checked()
        validation = arrays.validation is not None
        return ArrayData(name, name, arrays.classes, read=lambda _: arrays, validation=validation)
    if isinstance(data, ImageFiles):
        files = data.checked()
        return ImageData(name, name, len(files.class_names), files=lambda _: files, needs_folder=False)
    if isinstance(data, PersonFiles):
        persons = data.checked()
        return PersonData(name, name, len(data.skeleton.joints), persons=lambda _: persons, needs_folder=False)
    raise BsamTypeError(
        "the function must return a Dataset (for example from Dataset.from_arrays), ImageFiles or PersonFiles from "
        f"bsam.lab.data, but returned {type(data).__name__}"
    )


FOLDER = "folder:"  # names a folder of the user's image files: folder:PATH
NUM_FIGURES = 800  # drawn to train on; a quarter as many to test on
_draw_figures = lru_cache(maxsize=1)(stick_figures)  # consecutive runs share the figures


def _draw(side: int, n: int | None = None) -> PoseData:
    return _draw_figures(NUM_FIGURES if n is None else n, side=side)


def _cifar(layout: Cifar) -> ArrayData:
    return ArrayData(
        layout.name,
        layout.title,
        layout.classes,
        augmentation="crop-flip-cutout",
        images="3 x 32 x 32",
        read=partial(read_cifar, layout),
        is_in=partial(has_cifar, layout),
        sources=(layout.source,),
        needs_folder=True,
    )


_ENTRIES: tuple[KnownData, ...] = (
    ArrayData(
        "digits",
        "Digits",
        10,
        model="digits_net",
        images="1 x 8 x 8",
        read=lambda _: digits(),
        validation=True,
        origin="scikit-learn",
        no_download="comes with scikit-learn",
    ),
    _cifar(CIFAR10),
    _cifar(CIFAR100),
    ArrayData(
        "fashion_mnist",
        "Fashion-MNIST",
        10,
        augmentation="crop-flip",
        images="1 x 28 x 28",
        read=read_fashion_mnist,
        is_in=has_fashion_mnist,
        sources=FASHION_SOURCES,
        needs_folder=True,
    ),
    ImageData("flowers102", "Flowers-102", 102, files=read_flowers102),
    ImageData("stanford_cars", "Stanford Cars", 196, files=read_stanford_cars),
    ImageData("oxford_pet", "Oxford-IIIT Pet", 37, files=read_oxford_pet),
    PersonData("lspet", "LSP Extended", 14, persons=read_lspet),
    PersonData("mpii", "MPII Human Pose", 16, persons=read_mpii),
    DrawnPersonData(
        "stick_figures",
        "Stick figures",
        14,
        augmentation="scale-rotate",  # no flips: the colours of left and right would be exchanged
        model="simcc_resnet8",
        draw=_draw,
    ),
)
DATASETS: dict[str, KnownData] = {entry.name: entry for entry in _ENTRIES}


def download(name: str, folder: str | Path | None, progress: bool = False) -> None:
    """Download the files of a data set from its authors' site, unless they are already there.

    Raise a BsamValueError if there is nothing to download.

    Args:
        name: one of :data:`DATASETS`.
        folder: where runs then find them; existing files are kept.
        progress: whether to show a progress bar on the error stream.
    """
    entry = dataset_entry(name)
    if not entry.sources:
        raise BsamValueError(f"{name} {entry.no_download}: leave out --download")
    if folder is None:
        raise BsamValueError("a download (--download) needs a folder to write to: set data_dir (--data-dir)")
    if entry.is_in(Path(folder)):
        return
    for source in entry.sources:
        fetch(source, Path(folder), progress)


def download_all(names: Iterable[str], folder: Path | None, progress: bool = False) -> None:
    """Download data sets, each once, as :func:`download` does; skip those without a download, such as digits."""
    for name in dict.fromkeys(names):
        if dataset_entry(name).sources:
            download(name, folder, progress)


def dataset_entry(name: str) -> DatasetEntry:
    """Return the entry of :data:`DATASETS` with this name, of ``folder:PATH``, or of ``module:function``.

    Example:
        >>> dataset_entry("folder:pictures/birds").title
        'birds'
        >>> dataset_entry("birds")
        Traceback (most recent call last):
        ...
        bsam.common.errors.BsamValueError: data must be one of digits, ..., folder:PATH or MODULE:FUNCTION; got 'birds'
    """
    if name.startswith(FOLDER):
        path = Path(name.removeprefix(FOLDER))  # relative to the data folder, if there is one
        return ImageData(name, path.name, None, files=lambda folder: read_folder(folder / path), needs_folder=False)
    if name in DATASETS:
        return DATASETS[name]
    if ":" in name:
        return FunctionData(name, name, None)
    raise BsamValueError(f"data must be one of {', '.join(DATASETS)}, {FOLDER}PATH or MODULE:FUNCTION; got {name!r}")
