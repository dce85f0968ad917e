"""The data sets that networks are trained on, and the registry :data:`DATASETS`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, partial
from pathlib import Path

from ...common.errors import BsamValueError
from . import cifar, digits, fashion_mnist
from .cifar import CIFAR10, CIFAR100, has_cifar
from .entries import ArrayData, DatasetEntry, DrawnPersonData, ImageData, KnownData, PersonData
from .examples import Dataset as Dataset
from .examples import Examples as Examples
from .functions import FunctionData
from .images.folders import ImageFiles as ImageFiles
from .images.folders import LabelledFiles as LabelledFiles
from .images.folders import read_folder
from .images.layouts import read_flowers102, read_oxford_pet, read_stanford_cars
from .pose.layouts import PersonFiles as PersonFiles
from .pose.layouts import read_lspet, read_mpii
from .pose.stick_figures import stick_figures
from .sources import fetch

FOLDER = "folder:"  # names a folder of the user's image files: folder:PATH
NUM_FIGURES = 800  # drawn to train on; a quarter as many to test on


_drawn = lru_cache(maxsize=1)(stick_figures)  # consecutive runs share the figures
_LIKE_CIFAR = ("crop-flip-cutout", "resnet18", 3, 32)
_LIKE_MNIST = ("crop-flip", "resnet18", 1, 28)
_FILES = ("none", None)
_PERSONS = ("scale-rotate-flip", "simcc_resnet50")
_CIFAR10 = (cifar.cifar10, partial(has_cifar, CIFAR10), (CIFAR10.source,))
_CIFAR100 = (cifar.cifar100, partial(has_cifar, CIFAR100), (CIFAR100.source,))
_FASHION = (fashion_mnist.fashion_mnist, fashion_mnist.has_fashion_mnist, fashion_mnist.SOURCES)

DATASETS: dict[str, KnownData] = {
    entry.name: entry
    for entry in (
        ArrayData("digits", "Digits", 10, "none", "digits_net", 1, 8, lambda _: digits.digits(), validation=True),
        ArrayData("cifar10", "CIFAR-10", 10, *_LIKE_CIFAR, *_CIFAR10),
        ArrayData("cifar100", "CIFAR-100", 100, *_LIKE_CIFAR, *_CIFAR100),
        ArrayData("fashion_mnist", "Fashion-MNIST", 10, *_LIKE_MNIST, *_FASHION),
        ImageData("flowers102", "Flowers-102", 102, *_FILES, read_flowers102),
        ImageData("stanford_cars", "Stanford Cars", 196, *_FILES, read_stanford_cars),
        ImageData("oxford_pet", "Oxford-IIIT Pet", 37, *_FILES, read_oxford_pet),
        PersonData("lspet", "LSP Extended", 14, *_PERSONS, read_lspet),
        PersonData("mpii", "MPII Human Pose", 16, *_PERSONS, read_mpii),
        DrawnPersonData(
            # no flips: the colours of left and right would be exchanged
            *("stick_figures", "Stick figures", 14, "scale-rotate", "simcc_resnet8"),
            lambda side: _drawn(NUM_FIGURES, side=side),
        ),
    )
}


def load(name: str, folder: str | Path | None = None) -> Dataset:
    """Read a data set that stores its images in arrays.

    Args:
        name: one of :data:`DATASETS`, or ``module:function``.
        folder: the folder with its files; the digits need none.

    Example:
        >>> load("digits").train.x.shape
        torch.Size([640, 1, 8, 8])
        >>> load("cifar10")
        Traceback (most recent call last):
        ...
        bsam.common.errors.BsamRuntimeError: CIFAR-10 is read from files: give their folder with --data-dir...
    """
    directory = None if folder is None else Path(folder)
    entry = dataset_entry(name).resolve(directory)
    if not isinstance(entry, ArrayData):
        raise BsamValueError(
            f"{entry.title} is not stored in arrays: use bsam.lab.data.images.cache.load_images or "
            "bsam.lab.data.pose.persons.load_persons"
        )
    return entry.load(directory)


def download(name: str, folder: str | Path, progress: bool = False) -> None:
    """Download the files of a data set from its authors' site, unless :func:`load` would already find them.

    Raise a BsamValueError if there is nothing to download.

    Args:
        name: one of :data:`DATASETS`.
        folder: where :func:`load` then finds them; existing files are kept.
        progress: whether to show a progress bar on the error stream.
    """
    entry = dataset_entry(name)
    if not entry.sources:
        raise BsamValueError(f"there is nothing to download for {name}: it {entry.provided}")
    if entry.is_in(Path(folder)):
        return
    for source in entry.sources:
        fetch(source, Path(folder), progress)


def check_data(names: Iterable[str], folder: Path | None) -> None:
    """Raise if a data set needs a folder, and this one is None, does not exist or lacks files that can be downloaded.

    The files are not read.

    Args:
        names: names of data sets.
        folder: the folder that should hold their files.
    """
    for entry in map(dataset_entry, sorted(names)):
        entry.check(folder)


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
        return ImageData(name, path.name, None, *_FILES, lambda folder: read_folder(folder / path), in_data_dir=False)
    if name in DATASETS:
        return DATASETS[name]
    if ":" in name:
        return FunctionData(name, name, None)
    raise BsamValueError(f"data must be one of {', '.join(DATASETS)}, {FOLDER}PATH or MODULE:FUNCTION; got {name!r}")
