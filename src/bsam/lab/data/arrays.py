"""Labelled images in arrays, data sets of training, validation and test images, such as digits, and label noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...common.errors import BsamTypeError, BsamValueError
from ...common.extras import require_package
from ..config import NoiseLabels

Array: TypeAlias = NDArray[np.generic] | Tensor
IMAGES_AT_ONCE = 1024  # images that are converted to float64 at a time, for the mean and the variance


@dataclass(frozen=True)
class Examples:
    """Images ``x`` of shape (n, channels, height, width) and their classes ``y``.

    Example:
        >>> sorted_by_class = Examples(
        ...     torch.zeros(6, 1, 8, 8), torch.tensor([0, 0, 0, 1, 1, 1])
        ... )
        >>> len(sorted_by_class), sorted_by_class.some(4).y
        (6, tensor([0, 0, 1, 1]))
    """

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def at(self, rows: Tensor) -> Examples:
        """Return the examples at these indices, or where a mask is true."""
        return Examples(self.x[rows], self.y[rows])

    def some(self, n: int) -> Examples:
        """Return ``n`` examples, those at :meth:`balanced_indices`."""
        return self.at(self.balanced_indices(n))

    def balanced_indices(self, n: int) -> Tensor:
        """Return the sorted indices of ``n`` examples: the first of each class, the second of each, and so on."""
        if not 1 <= n <= len(self):
            raise BsamValueError(f"n must be between 1 and {len(self)}, the number of examples, got {n!r}")
        by_class = self.y.sort(stable=True)
        first = torch.searchsorted(by_class.values, by_class.values)  # first position of the same class
        rank = torch.empty_like(by_class.indices)
        rank[by_class.indices] = torch.arange(len(self), device=self.y.device) - first
        return rank.argsort(stable=True)[:n].sort().values

    def to(self, device: torch.device | str) -> Examples:
        """Return a copy on another device."""
        return Examples(self.x.to(device), self.y.to(device))

    def batches(self, size: int) -> list[tuple[Tensor, Tensor]]:
        """Return all examples in order, in batches of ``size``; the last one may be smaller."""
        return list(zip(self.x.split(size), self.y.split(size), strict=True))


@dataclass(frozen=True)
class Pixels:
    """The pixels of a data set before it standardised them with one mean and one standard deviation.

    Args:
        low, high: smallest and largest possible value of a pixel.
        mean, std: mean and standard deviation of the training pixels.
    """

    low: float
    high: float
    mean: float
    std: float

    def restore(self, x: Tensor) -> Tensor:
        """Return standardised images as pixels, up to rounding."""
        return x * self.std + self.mean


@dataclass(frozen=True)
class Dataset:
    """Training, validation and test images, as bytes or float32; ``bsam.lab.data.augment`` normalises each batch.

    :meth:`from_arrays` makes one from arrays.

    Args:
        name: name of the data set.
        classes: number of classes.
        train, validation, test: the three sets; ``validation`` is None if there is none.
        mean, std: mean and standard deviation of the training pixels per channel; of ``x / 255`` if they are bytes.
        class_names: in the order of the labels, if known.
        split: description of how the images were split into training and test sets, if there was a choice.
        digest: SHA-256 of the pixels, the labels and their order, for images from image files; training keeps those in
            host memory. Otherwise None.
        pixels: the pixels before standardisation, if the images are already standardised; ``mean`` is then 0, and
            ``std`` is 1.
        duplicates: numbers of image files with the same content in two sets or two classes.
    """

    name: str
    classes: int
    train: Examples
    validation: Examples | None
    test: Examples
    mean: tuple[float, ...]
    std: tuple[float, ...]
    class_names: tuple[str, ...] = ()
    split: str = ""
    digest: str | None = None
    pixels: Pixels | None = None
    duplicates: Mapping[str, int] = field(default_factory=dict, hash=False)

    @classmethod
    def from_arrays(
        cls,
        train: tuple[Array, Array],
        test: tuple[Array, Array],
        validation: tuple[Array, Array] | None = None,
        *,
        class_names: Sequence[str] = (),
    ) -> Dataset:
        """Make a data set from numpy arrays or tensors. Pixels are normalised with the statistics of ``train``.

        Args:
            train: images and labels to train on. Images have the shape (n, side, side), (n, side, side, channels) or
                (n, channels, side, side), and are uint8 or floating-point numbers. Labels are whole numbers starting
                at 0.
            test: images and labels to test on.
            validation: images and labels to choose settings on.
            class_names: in the order of the labels; by default their numbers.

        Example:
            >>> images, labels = np.zeros((6, 8, 8, 3), np.uint8), np.array([0, 1, 2, 0, 1, 2])
            >>> data = Dataset.from_arrays(train=(images, labels), test=(images, labels))
            >>> data.train.x.shape, data.classes
            (torch.Size([6, 3, 8, 8]), 3)
        """
        pairs = {"train": train, "test": test, **({} if validation is None else {"validation": validation})}
        sets = {name: _as_examples(name, pair) for name, pair in pairs.items()}
        classes = len(class_names) or count_classes(sets["train"].y)
        if classes < 2:
            raise BsamValueError(f"a data set must have at least 2 classes, got {classes}")
        shape = sets["train"].x.shape[1:]
        for name, part in sets.items():
            if (largest := int(part.y.max())) >= classes:
                raise BsamValueError(f"{name} labels must be between 0 and {classes - 1}, got {largest}")
            if part.x.shape[1:] != shape or part.x.dtype != sets["train"].x.dtype:
                raise BsamValueError(
                    f"{name} images are {tuple(part.x.shape[1:])} of {part.x.dtype}, and train images {tuple(shape)} "
                    f"of {sets['train'].x.dtype}: all images must have one shape and dtype"
                )
        mean, std = mean_and_std(sets["train"].x)
        names = tuple(map(str, class_names or range(classes)))
        return cls("arrays", classes, sets["train"], sets.get("validation"), sets["test"], mean, std, names)

    def checked(self) -> Dataset:
        """Return a copy in plain types, after checking what a function of the user may have got wrong."""
        parts = {"train": self.train, "test": self.test, "validation": self.validation}
        pairs = {name: (part.x, part.y) for name, part in parts.items() if part is not None}
        checked = Dataset.from_arrays(**pairs, class_names=self.class_names or tuple(map(str, range(self.classes))))
        if checked.classes != self.classes:
            raise BsamValueError(f"classes is {self.classes}, but there are {checked.classes} class_names")
        channels = checked.train.x.shape[1]
        if {len(self.mean), len(self.std)} - {1, channels}:
            raise BsamValueError(f"mean and std must be one number, or one for each of the {channels} channels")
        sets = {name: getattr(checked, name) for name in parts}
        return replace(self, class_names=checked.class_names, **sets)


DIGITS_TRAIN = 640  # ten batches of 64
DIGITS_VALIDATION = 400
DIGITS_TEST = 757  # all others, for a precise accuracy


def digits(seed: int = 0) -> Dataset:
    """Return 1797 images of 8 x 8 pixels in a stratified split: 640 training, 400 validation and 757 test images.

    Pixels are normalised with the mean and the standard deviation of the training images.

    Example:
        >>> data = digits()
        >>> len(data.train), len(data.validation), len(data.test)
        (640, 400, 757)
        >>> data.train.x.shape
        torch.Size([640, 1, 8, 8])
    """
    require_package("sklearn", "demo")
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    rest, test = train_test_split(np.arange(len(labels)), test_size=DIGITS_TEST, stratify=labels, random_state=seed)
    train, validation = train_test_split(
        rest, train_size=DIGITS_TRAIN, test_size=DIGITS_VALIDATION, stratify=labels[rest], random_state=seed
    )
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)
    y = torch.tensor(labels, dtype=torch.int64)
    mean = x[train].mean()
    std = x[train].std()
    x = (x - mean) / std
    pixels = Pixels(0.0, 16.0, float(mean), float(std))
    sets = [Examples(x[rows], y[rows]) for rows in (train, validation, test)]
    return Dataset("digits", 10, sets[0], sets[1], sets[2], mean=(0.0,), std=(1.0,), pixels=pixels)


def _as_examples(name: str, pair: tuple[Array, Array]) -> Examples:
    if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
        raise BsamTypeError(f"{name} must be a tuple (images, labels), got {type(pair).__name__}")
    x = as_images(name, pair[0])
    return Examples(x, as_labels(name, pair[1], len(x)))


def as_images(name: str, images: Array) -> Tensor:
    """Return images as a tensor (n, channels, side, side) of bytes or of float32.

    Args:
        name: for error messages.
        images: (n, side, side), (n, side, side, channels) or (n, channels, side, side).

    Example:
        >>> as_images("train", np.zeros((2, 8, 8, 3), np.uint8)).shape
        torch.Size([2, 3, 8, 8])
    """
    x = _as_tensor(name, "images", images)
    shape = tuple(images.shape)
    if not (x.dtype == torch.uint8 or x.is_floating_point()):
        raise BsamTypeError(f"{name} images must be uint8 (0 to 255) or floating-point numbers, got {x.dtype}")
    if 0 in shape:
        raise BsamValueError(f"{name} has no images, or images without pixels: got the shape {shape}")
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[2] != x.shape[3]:
        x = x.permute(0, 3, 1, 2)
    if x.ndim != 4 or x.shape[2] != x.shape[3]:
        raise BsamValueError(
            f"{name} images must be square, of the shape (n, side, side), (n, side, side, channels) or (n, channels, "
            f"side, side), got {shape}: crop, pad or resize them"
        )
    if x.is_floating_point():
        x = x.float()
        if not x.isfinite().all():
            raise BsamValueError(f"{name} images must be finite: they hold NaN or infinite pixels")
    return x.contiguous()


def as_labels(name: str, labels: Array, n: int) -> Tensor:
    """Return ``n`` labels, counted from 0, as an int64 tensor."""
    y = _as_tensor(name, "labels", labels)
    if y.shape != (n,):
        raise BsamValueError(f"{name} labels must have the shape ({n},), one for each image, got {tuple(y.shape)}")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise BsamTypeError(f"{name} labels must be whole numbers, got {y.dtype}: convert them, as with .astype(int)")
    y = y.long()
    if y.min() < 0:
        raise BsamValueError(f"{name} labels must count from 0, got {int(y.min())}")
    return y


def as_indices(name: str, values: Any, count: int) -> tuple[int, ...]:
    """Return whole numbers from 0 to ``count - 1`` as Python integers."""
    array = np.asarray(values)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise BsamTypeError(f"{name} must be a 1-D array of whole numbers, got {array.dtype} of shape {array.shape}")
    if len(array) and not (array.min() >= 0 and array.max() < count):
        raise BsamValueError(f"{name} must be between 0 and {count - 1}, got {array.min()} to {array.max()}")
    return tuple(array.tolist())


def count_classes(y: Tensor) -> int:
    """Return the number of classes in the training labels; raise unless every class occurs."""
    counts = y.bincount()
    if not counts.all():
        missing = int((counts == 0).nonzero()[0])
        raise BsamValueError(
            f"no train label is {missing}, and the largest is {len(counts) - 1}: number the classes from 0 without "
            "gaps, or pass class_names"
        )
    return len(counts)


def mean_and_std(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation of each channel, after dividing bytes by 255.

    The standard deviation of a constant channel is returned as 1.

    Example:
        >>> mean_and_std(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1))
        ((0.5,), (0.5,))
    """
    unit = 1.0 if x.is_floating_point() else 255.0
    total = sum((part.double() / unit).sum((0, 2, 3)) for part in x.split(IMAGES_AT_ONCE))
    mean = torch.as_tensor(total) / (x.numel() / x.shape[1])
    centred = (part.double() / unit - mean[:, None, None] for part in x.split(IMAGES_AT_ONCE))
    variance = torch.as_tensor(sum(part.square().sum((0, 2, 3)) for part in centred)) / (x.numel() / x.shape[1])
    return tuple(mean.tolist()), tuple(value or 1.0 for value in variance.sqrt().tolist())


def _as_tensor(name: str, kind: str, values: Array) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach().cpu()
    if not isinstance(values, np.ndarray):
        raise BsamTypeError(f"{name} {kind} must be a numpy array or a tensor, got {type(values).__name__}")
    try:
        return torch.from_numpy(np.require(values, requirements=["C", "W"]))
    except (TypeError, ValueError) as error:  # strings and objects; numbers in the byte order of other machines
        raise BsamTypeError(
            f"{name} {kind} must be numbers in native byte order, got an array of {values.dtype}"
        ) from error


def wrong_share(share: float, noise_labels: NoiseLabels, classes: int) -> float:
    """Return the fraction of labels that are wrong if a fraction ``share`` of them is drawn at random.

    Args:
        noise_labels: ``"all"`` draws from all classes, so that one draw in ``classes`` returns the true class;
            ``"other"`` draws from the other classes.

    Example:
        >>> round(wrong_share(0.4, "all", 10), 3), wrong_share(0.4, "other", 10)
        (0.36, 0.4)
    """
    return share * (classes - 1) / classes if noise_labels == "all" else share


def flip_labels(
    labels: Tensor, share: float, classes: int, seed: int, noise_labels: NoiseLabels = "all"
) -> tuple[Tensor, Tensor]:
    """Draw a fraction of the labels at random, all classes (or all other classes) being equally likely.

    The number of wrong labels is not random: it is its expected value, ``wrong_share(...) * len(labels)``, rounded. So
    0.8 drawn from all of ten classes is the same, label by label, as 0.72 drawn from the other classes.

    Args:
        noise_labels: ``"all"`` draws from all classes, including the true one; ``"other"`` from the others.

    Returns:
        The noisy labels in a new tensor, and the sorted indices of the wrong ones.

    Example:
        >>> labels = torch.arange(1000) % 10
        >>> noisy, wrong = flip_labels(labels, 0.4, classes=10, seed=0)
        >>> bool((noisy != labels).nonzero().flatten().equal(wrong)), len(wrong)
        (True, 360)
    """
    generator = torch.Generator().manual_seed(seed)
    count = round(wrong_share(share, noise_labels, classes) * len(labels))
    wrong = torch.randperm(len(labels), generator=generator)[:count].sort().values
    shift = torch.randint(1, classes, (count,), generator=generator)  # never a multiple of classes
    noisy = labels.clone()
    noisy[wrong] = (labels[wrong] + shift.to(labels)) % classes
    return noisy, wrong


IN_TWO_CLASSES = "classes"


def find_duplicates(sets: Mapping[str, Sequence[tuple[str, int]]]) -> dict[str, int]:
    """Count the images of a set whose content is also in another set, and the images whose content has two classes.

    Returns:
        The numbers that are not 0: of the images of the second set by both sets, such as ``train and test``, and of the
        images in two classes as ``classes``.

    Example:
        >>> find_duplicates(
        ...     {"train": [("a", 0), ("b", 1), ("b", 1)], "test": [("a", 0), ("a", 1)]}
        ... )
        {'train and test': 2, 'classes': 3}
    """
    found = {}
    for first, second in combinations(sets, 2):
        contents = {digest for digest, _ in sets[first]}
        found[f"{first} and {second}"] = sum(digest in contents for digest, _ in sets[second])
    pairs = [pair for part in sets.values() for pair in part]
    classes: dict[str, set[int]] = {}
    for digest, label in pairs:
        classes.setdefault(digest, set()).add(label)
    found[IN_TWO_CLASSES] = sum(len(classes[digest]) > 1 for digest, _ in pairs)
    return {name: number for name, number in found.items() if number}


def duplicate_warnings(duplicates: Mapping[str, int]) -> list[str]:
    """Return a sentence for each number of :func:`find_duplicates`.

    Example:
        >>> duplicate_warnings({"classes": 3})
        ['3 images are in more than one class, as files with the same content: correct their classes.']
    """
    sentences = []
    for name, number in duplicates.items():
        images, verb = ("image", "is") if number == 1 else ("images", "are")
        if name == IN_TWO_CLASSES:
            sentences.append(
                f"{number:,} {images} {verb} in more than one class, as files with the same content: correct their "
                "classes."
            )
        else:
            first, _, second = name.partition(" and ")
            sentences.append(
                f"{number:,} {images} of the {second} set {verb} also in the {first} set, as files with the same "
                "content, which raises the score: remove them from one of the sets."
            )
    return sentences
