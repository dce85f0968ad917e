"""The data sets that networks are trained on, and the registry :data:`DATASETS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..core.errors import BsamRuntimeError, BsamValueError
from . import cifar, digits, fashion_mnist
from .cifar import CIFAR10, CIFAR100, has_cifar
from .examples import Dataset
from .sources import Source, fetch


@dataclass(frozen=True)
class DatasetEntry:
    """Description of a data set, for the command line and the recipes.

    Args:
        name: its name on the command line.
        title: its name in tables.
        read: reads it from a folder, which is ignored where it comes with a package.
        classes: number of classes.
        channels: of an image.
        side: of an image, in pixels.
        augmentation: default among :data:`bsam.data.augment.AUGMENTATIONS`.
        model: default among :data:`bsam.models.MODELS`.
        is_in: returns whether its files are in a folder; True where it comes with a package.
        sources: files to download; none where it comes with a package.
    """

    name: str
    title: str
    read: Callable[[Path], Dataset]
    classes: int
    channels: int
    side: int
    augmentation: str
    model: str
    is_in: Callable[[Path], bool] = lambda folder: True
    sources: tuple[Source, ...] = ()

    @property
    def needs_folder(self) -> bool:
        """Whether it is read from files."""
        return bool(self.sources)

    def load(self, folder: Path | None = None) -> Dataset:
        """Read the data set from a folder, or from its package."""
        if self.needs_folder and folder is None:
            raise BsamRuntimeError(
                f"{self.title} is read from files: say in which folder they are (--data-dir), or where to --download "
                "them to"
            )
        return self.read(folder or Path())


_LIKE_CIFAR = (3, 32, "crop-flip-cutout", "resnet18")
_LIKE_MNIST = (1, 28, "crop-flip", "resnet18")
_HAS_CIFAR10, _HAS_CIFAR100 = partial(has_cifar, CIFAR10), partial(has_cifar, CIFAR100)
_FASHION = (fashion_mnist.has_fashion_mnist, fashion_mnist.SOURCES)

DATASETS: dict[str, DatasetEntry] = {
    entry.name: entry
    for entry in (
        DatasetEntry("digits", "Digits", lambda _: digits.digits(), 10, 1, 8, "none", "digits_net"),
        DatasetEntry("cifar10", "CIFAR-10", cifar.cifar10, 10, *_LIKE_CIFAR, _HAS_CIFAR10, (CIFAR10.source,)),
        DatasetEntry("cifar100", "CIFAR-100", cifar.cifar100, 100, *_LIKE_CIFAR, _HAS_CIFAR100, (CIFAR100.source,)),
        DatasetEntry("fashion_mnist", "Fashion-MNIST", fashion_mnist.fashion_mnist, 10, *_LIKE_MNIST, *_FASHION),
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
        bsam.core.errors.BsamRuntimeError: CIFAR-10 is read from files: say in which folder they are (--data-dir), or
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


def dataset_entry(name: str) -> DatasetEntry:
    """Return the entry of :data:`DATASETS` with this name; an unknown one is an error that lists the known ones."""
    if name not in DATASETS:
        raise BsamValueError(f"data must be one of {', '.join(DATASETS)}; got {name!r}")
    return DATASETS[name]
