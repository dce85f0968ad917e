"""What the networks train on, and the list of it all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..core.errors import BsamRuntimeError, BsamValueError
from .cifar import CIFAR10, CIFAR100, cifar10, cifar100, has_cifar
from .digits import digits
from .download import Progress, Source, fetch
from .examples import Dataset
from .fashion_mnist import SOURCES, fashion_mnist, has_fashion_mnist


@dataclass(frozen=True)
class DatasetEntry:
    """What the command line and the recipes need to know of a data set before it is loaded.

    Args:
        name: by which it is called on the command line.
        title: its name in a table.
        read: from a folder, or from nothing where it comes with a package.
        classes: how many.
        channels: of an image.
        side: of an image, in pixels.
        needs_folder: whether it is read from files.
        augmentation: of :data:`bsam.data.augment.AUGMENTATIONS`, the one to train with unless another is asked for.
        model: of :data:`bsam.models.MODELS`, the one to train unless another is asked for.
        is_in: whether its files are where they would be read from, given a folder; always so where it comes with a
            package.
        sources: where its files come from.
    """

    name: str
    title: str
    read: Callable[[Path], Dataset]
    classes: int
    channels: int
    side: int
    needs_folder: bool
    augmentation: str
    model: str
    is_in: Callable[[Path], bool]
    sources: tuple[Source, ...] = ()

    def load(self, folder: Path | None = None) -> Dataset:
        """The data set, from a folder where it needs one."""
        if self.needs_folder and folder is None:
            raise BsamRuntimeError(
                f"{self.title} is read from files: say in which folder they are (--data-dir), or where to --download "
                "them to"
            )
        return self.read(folder or Path())


DATASETS: dict[str, DatasetEntry] = {
    entry.name: entry
    for entry in (
        DatasetEntry("digits", "Digits", lambda _: digits(), 10, 1, 8, False, "none", "digits_net", lambda _: True),
        DatasetEntry(
            "cifar10",
            "CIFAR-10",
            cifar10,
            10,
            3,
            32,
            True,
            "crop-flip-cutout",
            "resnet18",
            partial(has_cifar, CIFAR10),
            (CIFAR10.source,),
        ),
        DatasetEntry(
            "cifar100",
            "CIFAR-100",
            cifar100,
            100,
            3,
            32,
            True,
            "crop-flip-cutout",
            "resnet18",
            partial(has_cifar, CIFAR100),
            (CIFAR100.source,),
        ),
        DatasetEntry(
            "fashion_mnist",
            "Fashion-MNIST",
            fashion_mnist,
            10,
            1,
            28,
            True,
            "crop-flip",
            "resnet18",
            has_fashion_mnist,
            SOURCES,
        ),
    )
}


def load(name: str, folder: str | Path | None = None) -> Dataset:
    """A data set by its name.

    Args:
        name: of :data:`DATASETS`.
        folder: where its files are; the digits need none.

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


def download(name: str, folder: str | Path, progress: Progress | None = None) -> None:
    """Get the files of a data set from its authors' site, unless :func:`load` finds them all already, in any layout;
    files that are there stay.

    Args:
        name: of :data:`DATASETS`.
        folder: where to; :func:`load` finds them there.
        progress: called with the bytes that have come and the bytes that will, for each file anew.
    """
    entry = dataset_entry(name)
    if entry.is_in(Path(folder)):
        return
    for source in entry.sources:
        fetch(source, Path(folder), progress)


def dataset_entry(name: str) -> DatasetEntry:
    """What :data:`DATASETS` says of a name; one that it does not have is refused."""
    if name not in DATASETS:
        raise BsamValueError(f"data must be one of {', '.join(DATASETS)}; got {name!r}")
    return DATASETS[name]
