"""The data sets that networks are trained on, and the registry :data:`DATASETS`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, partial
from pathlib import Path

from ...common.errors import BsamValueError
from .arrays import Dataset as Dataset
from .arrays import Examples as Examples
from .downloads import (
    CIFAR10,
    CIFAR100,
    FASHION_SOURCES,
    Cifar,
    fetch,
    has_cifar,
    has_fashion_mnist,
    read_cifar,
    read_fashion_mnist,
)
from .downloads import digits as digits
from .entries import ArrayData, DatasetEntry, DrawnPersonData, ImageData, KnownData, PersonData
from .entries import FunctionData as FunctionData
from .entries import TaskData as TaskData
from .folders import ImageFiles as ImageFiles
from .folders import LabelledFiles as LabelledFiles
from .folders import read_flowers102, read_folder, read_oxford_pet, read_stanford_cars
from .persons import PersonFiles as PersonFiles
from .persons import PoseData, read_lspet, read_mpii
from .stick_figures import stick_figures

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


def check_data(names: Iterable[str], folder: Path | None) -> None:
    """Raise if a data set needs a folder, and this one is None, does not exist or lacks files that can be downloaded.

    The files are not read.
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
        return ImageData(name, path.name, None, files=lambda folder: read_folder(folder / path), needs_folder=False)
    if name in DATASETS:
        return DATASETS[name]
    if ":" in name:
        return FunctionData(name, name, None)
    raise BsamValueError(f"data must be one of {', '.join(DATASETS)}, {FOLDER}PATH or MODULE:FUNCTION; got {name!r}")
