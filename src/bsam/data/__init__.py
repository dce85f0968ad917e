"""The data sets that networks are trained on, and the registry :data:`DATASETS`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from platform import node

from ..common.errors import BsamRuntimeError, BsamValueError
from . import cifar, digits, fashion_mnist
from .cifar import CIFAR10, CIFAR100, has_cifar
from .examples import Dataset
from .images.folders import ImageFiles, read_folder
from .images.layouts import read_flowers102, read_oxford_pet, read_stanford_cars
from .pose.layouts import PersonFiles, read_lspet, read_mpii
from .pose.persons import PoseData
from .pose.stick_figures import stick_figures
from .sources import Source, fetch

FOLDER = "folder:"  # a data set of the user's own is named folder:PATH
NUM_FIGURES = 800  # drawn to train on; a quarter as many to test on


@dataclass(frozen=True)
class DatasetEntry:
    """Description of a data set, for the command line and the recipes.

    Args:
        name: its name on the command line.
        title: its name in tables.
        read: reads it from a folder, which is ignored where it comes with a package; None for image files and persons.
        classes: number of classes, or of joints; None: as many as there are folders.
        channels: of an image.
        side: of an image, in pixels; None: they differ, and are resized to what the network takes.
        augmentation: default among :data:`bsam.data.augment.AUGMENTATIONS`, or of persons
            :data:`bsam.data.pose.augment.POSE_AUGMENTATIONS`.
        model: default among :data:`bsam.models.MODELS`; None: the one that the file of weights is for.
        is_in: returns whether its files are in a folder; True where it comes with a package.
        sources: files to download; none where it comes with a package, or where that is left to the user.
        files: lists its image files in a folder; None where the images are in arrays.
        persons: lists persons in image files, with their joints; None where it has none.
        draw: draws persons whose images have this side in a network's input; None where it is read.
    """

    name: str
    title: str
    read: Callable[[Path], Dataset] | None
    classes: int | None
    channels: int
    side: int | None
    augmentation: str
    model: str | None
    is_in: Callable[[Path], bool] = lambda folder: True
    sources: tuple[Source, ...] = ()
    files: Callable[[Path], ImageFiles] | None = None
    persons: Callable[[Path], PersonFiles] | None = None
    draw: Callable[[int], PoseData] | None = None

    @property
    def task(self) -> str:
        """What is learned from it: the name of one of :data:`bsam.tasks.TASKS`."""
        return "classification" if self.persons is None and self.draw is None else "pose"

    @property
    def needs_folder(self) -> bool:
        """Whether it is read from a folder that the user names."""
        in_files = self.files is not None or self.persons is not None
        return bool(self.sources) or (in_files and not self.name.startswith(FOLDER))

    def load(self, folder: Path | None = None) -> Dataset:
        """Read the data set from a folder, or from its package."""
        if self.read is None:
            raise BsamValueError(
                f"{self.title} is not in arrays: use load_images or load_persons, of bsam.data.images.cache and "
                "bsam.data.pose.persons"
            )
        return self.read(self._folder(folder))

    def image_files(self, folder: Path | None = None) -> ImageFiles:
        """Return its image files in a folder; raise if there are more or fewer classes than it has."""
        assert self.files is not None
        found = self.files(self._own_folder(folder))
        if self.classes is not None and len(found.class_names) != self.classes:
            raise BsamValueError(
                f"{self.title} has {self.classes} classes, and {found.folder} has {len(found.class_names)}: it holds "
                "other data, or is not complete"
            )
        return found

    def person_files(self, folder: Path | None = None) -> PersonFiles:
        """Return the persons in its image files in a folder."""
        assert self.persons is not None
        return self.persons(self._own_folder(folder))

    def check(self, folder: Path | None = None) -> None:
        """Raise if the data set is read from files and these are not in the folder."""
        if not self.needs_folder:
            return
        place = self._folder(folder)
        if not place.is_dir():
            raise BsamRuntimeError(f"{self.title} is read from files, and there is no folder {place} on {node()}")
        if self.sources and not self.is_in(place):
            raise BsamRuntimeError(f"{place} on {node()} does not hold the files of {self.title}: see --download")

    def _own_folder(self, folder: Path | None) -> Path:
        """Return the folder, or the one of its name in it: several data sets may share a data folder."""
        own = self._folder(folder)
        return own / self.name if (own / self.name).is_dir() else own

    def _folder(self, folder: Path | None) -> Path:
        if self.needs_folder and folder is None:
            download = ", or where to --download them to" if self.sources else ""
            raise BsamRuntimeError(
                f"{self.title} is read from files: say in which folder they are (--data-dir){download}"
            )
        return folder or Path()


_drawn = lru_cache(maxsize=1)(stick_figures)  # consecutive runs share the figures
_LIKE_CIFAR = (3, 32, "crop-flip-cutout", "resnet18")
_LIKE_MNIST = (1, 28, "crop-flip", "resnet18")
_HAS_CIFAR10, _HAS_CIFAR100 = partial(has_cifar, CIFAR10), partial(has_cifar, CIFAR100)
_FILES = (3, None, "none", None)
_PERSONS = (3, None, "scale-rotate-flip", "simcc_resnet50")
_FASHION = (fashion_mnist.has_fashion_mnist, fashion_mnist.SOURCES)

DATASETS: dict[str, DatasetEntry] = {
    entry.name: entry
    for entry in (
        DatasetEntry("digits", "Digits", lambda _: digits.digits(), 10, 1, 8, "none", "digits_net"),
        DatasetEntry("cifar10", "CIFAR-10", cifar.cifar10, 10, *_LIKE_CIFAR, _HAS_CIFAR10, (CIFAR10.source,)),
        DatasetEntry("cifar100", "CIFAR-100", cifar.cifar100, 100, *_LIKE_CIFAR, _HAS_CIFAR100, (CIFAR100.source,)),
        DatasetEntry("fashion_mnist", "Fashion-MNIST", fashion_mnist.fashion_mnist, 10, *_LIKE_MNIST, *_FASHION),
        DatasetEntry("flowers102", "Flowers-102", None, 102, *_FILES, files=read_flowers102),
        DatasetEntry("stanford_cars", "Stanford Cars", None, 196, *_FILES, files=read_stanford_cars),
        DatasetEntry("oxford_pet", "Oxford-IIIT Pet", None, 37, *_FILES, files=read_oxford_pet),
        DatasetEntry("lspet", "LSP Extended", None, 14, *_PERSONS, persons=read_lspet),
        DatasetEntry("mpii", "MPII Human Pose", None, 16, *_PERSONS, persons=read_mpii),
        DatasetEntry(
            # left and right have colours, which a mirrored image exchanges
            *("stick_figures", "Stick figures", None, 14, 3, None, "scale-rotate", "simcc_resnet8"),
            draw=lambda side: _drawn(NUM_FIGURES, side=side),
        ),
    )
}


def load(name: str, folder: str | Path | None = None) -> Dataset:
    """Read a data set.

    Args:
        name: one of :data:`DATASETS`.
        folder: the one that holds its files; the digits need none.

    Example:
        >>> load("digits").train.x.shape
        torch.Size([640, 1, 8, 8])
        >>> load("cifar10")
        Traceback (most recent call last):
        ...
        bsam.common.errors.BsamRuntimeError: CIFAR-10 is read from files: say in which folder they are (--data-dir), or
        where to --download them to
    """
    return dataset_entry(name).load(None if folder is None else Path(folder))


def download(name: str, folder: str | Path, progress: bool = False) -> None:
    """Download the files of a data set from its authors' site, unless :func:`load` finds all of them, in any layout.

    Args:
        name: one of :data:`DATASETS`.
        folder: where :func:`load` then finds them; files that are there stay.
        progress: whether to show a progress bar on the error stream.
    """
    entry = dataset_entry(name)
    if entry.is_in(Path(folder)):
        return
    for source in entry.sources:
        fetch(source, Path(folder), progress)


def check_data(names: Iterable[str], folder: Path | None) -> None:
    """Raise if data sets are read from files and these are not in the folder; it is not checked whether they are whole.

    Args:
        names: of data sets.
        folder: the one that should hold their files.
    """
    for entry in map(dataset_entry, sorted(names)):
        entry.check(folder)


def dataset_entry(name: str) -> DatasetEntry:
    """Return the entry of :data:`DATASETS` with this name, or the entry of ``folder:PATH``.

    Example:
        >>> dataset_entry("folder:pictures/birds").title
        'birds'
        >>> dataset_entry("birds")
        Traceback (most recent call last):
        ...
        bsam.common.errors.BsamValueError: data must be one of digits, ..., or folder:PATH; got 'birds'
    """
    if name.startswith(FOLDER):
        path = Path(name.removeprefix(FOLDER))  # relative to the data folder, if there is one
        return DatasetEntry(name, path.name, None, None, *_FILES, files=lambda folder: read_folder(folder / path))
    if name not in DATASETS:
        raise BsamValueError(f"data must be one of {', '.join(DATASETS)}, or {FOLDER}PATH; got {name!r}")
    return DATASETS[name]
