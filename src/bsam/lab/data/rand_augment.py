"""timm's RandAugment in batches, on the device of the images, with the results of Pillow.

timm's policy draws the operations of each image on the host; here they are recorded and then carried out for many
images at a time. An operation gets images (n, channels, height, width) in bytes and a row of numbers for each image. It
rounds as Pillow does: float32 where Pillow has ``float``, float64 where it has ``double``, in the same order.
"""

from __future__ import annotations

import importlib.util
import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ...common.timm_import import import_timm

Operation: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Numbers: TypeAlias = Sequence[float] | NDArray[Any]
Step: TypeAlias = tuple[Operation, Numbers]
PIXEL_LEVELS = np.arange(256)


class RandAugment:
    """timm's RandAugment, seeded for each image, with generators that no other code uses.

    timm draws from the global generators of Python and numpy; this class has a copy of timm's module with others.

    Args:
        name: timm's name of the RandAugment.
        fill: the colour beyond the border of the image, a level per channel.

    Example:
        >>> augment = RandAugment("rand-m9-n3-p1", fill=(128, 128, 128))
        >>> len(augment.steps(seed=0, side=32))
        3
        >>> augment(torch.zeros(2, 3, 32, 32, dtype=torch.uint8), seeds=[0, 1]).shape
        torch.Size([2, 3, 32, 32])
    """

    def __init__(self, name: str, fill: tuple[int, ...]) -> None:
        import_timm()
        spec = importlib.util.find_spec("timm.data.auto_augment")
        assert spec is not None
        assert spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self._python = random.Random()
        self._numpy = np.random.RandomState()
        module.random = self._python
        module.np = SimpleNamespace(**{**vars(np), "random": self._numpy})
        operations = {name: self._recorder(module, change.__name__) for name, change in module.NAME_TO_OP.items()}
        module.NAME_TO_OP = {name: operation for name, operation in operations.items() if operation is not None}
        # the argument of timm's create_transform; translations are relative to the side
        self._policy = module.rand_augment_transform(name, {"translate_pct": 0.45})
        self._fill = fill

    def _recorder(self, module: Any, name: str) -> Callable[..., list[Step]] | None:
        """Return what records a function of timm instead of changing an image; None for those of other policies."""

        def moves(steps: list[Step], level: float, **options: Any) -> list[Step]:
            module._check_args_tf(options)  # draws the interpolation
            cubic = options["resample"] == module.Image.Resampling.BICUBIC
            steps.append((bicubic if cubic else bilinear, (*MATRICES[name](self._side, level), *self._fill)))
            return steps

        def changes(steps: list[Step], *level: float, **_: Any) -> list[Step]:
            steps.append(CHANGES[name](*level))
            return steps

        return moves if name in MATRICES else changes if name in CHANGES else None

    def steps(self, seed: int, side: int) -> list[Step]:
        """Return the operations on an image with this side, and their numbers."""
        self._side = side
        self._python.seed(seed)
        self._numpy.seed(seed)
        steps: list[Step] = self._policy([])
        return steps

    def __call__(self, x: Tensor, seeds: Sequence[int]) -> Tensor:
        """Return changed images.

        Args:
            x: (n, channels, side, side) in bytes.
            seeds: one per image.
        """
        images = x.clone(memory_format=torch.contiguous_format)  # operations are fastest on whole planes
        all_steps = [self.steps(seed, x.shape[-1]) for seed in seeds]
        for layer in range(max(map(len, all_steps), default=0)):
            rows: dict[Operation, list[int]] = defaultdict(list)
            numbers: dict[Operation, list[Numbers]] = defaultdict(list)
            for row, steps in enumerate(all_steps):
                if layer < len(steps):
                    operation, values = steps[layer]
                    rows[operation].append(row)
                    numbers[operation].append(values)
            for operation in rows:
                index = copied(torch.tensor(rows[operation]), x.device)
                arguments = copied(torch.from_numpy(np.array(numbers[operation], np.float64)), x.device)
                size = 1 if x.device.type == "cpu" else len(index)  # one image fits into the cache of a core
                for some, of_some in zip(index.split(size), arguments.split(size), strict=True):
                    images[some] = operation(images[some], of_some)
        return images


def copied(values: Tensor, device: torch.device) -> Tensor:
    """Return a tensor in host memory on the device, without waiting until the device has finished its work."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def use_tables(images: Tensor, tables: Tensor) -> Tensor:
    """Replace levels; the tables are (n, 256), or (n, channels, 256) for a different one per channel."""
    if tables.dim() == 2:
        tables = tables[:, None].expand(-1, images.shape[1], -1)
    return tables.to(torch.uint8).gather(2, images.flatten(2).long()).view_as(images)


def auto_contrast(images: Tensor, _: Tensor) -> Tensor:
    """Stretch each channel to all levels."""
    low, high = (level.double()[..., None] for level in (images.amin((2, 3)), images.amax((2, 3))))
    levels = _levels(images)
    scale = torch.full_like(low, 255) / (high - low)  # 255 / tensor would multiply with a rounded reciprocal
    stretched = levels * scale + -low * scale
    return use_tables(images, torch.where(high > low, stretched, levels).clamp(0, 255))


def equalize(images: Tensor, _: Tensor) -> Tensor:
    """Make the histogram of each channel flat."""
    pixels = images.flatten(2).long()
    counts = torch.zeros(*images.shape[:2], 256, dtype=torch.int64, device=images.device)
    counts.scatter_add_(2, pixels, torch.ones((), dtype=torch.int64, device=images.device).expand_as(pixels))
    last = counts.gather(2, pixels.amax(2, keepdim=True))
    step = (pixels.shape[2] - last).div(255, rounding_mode="floor")
    below = counts.cumsum(2) - counts
    flat = (step.div(2, rounding_mode="floor") + below).div(step.clamp(min=1), rounding_mode="floor")
    return use_tables(images, torch.where(step > 0, flat, _levels(images).long()).clamp(max=255))


def contrast(images: Tensor, factors: Tensor) -> Tensor:
    """Blend with the mean level."""
    grey = _grey(images).flatten(1)
    mean = (grey.sum(1, keepdim=True).double() / grey.shape[1] + 0.5).floor()
    return use_tables(images, _blended(mean.float(), _levels(images).float(), factors))


def color(images: Tensor, factors: Tensor) -> Tensor:
    """Blend with the grey image."""
    return _blended(_grey(images).float(), images.float(), factors[:, :, None, None])


def sharpness(images: Tensor, factors: Tensor) -> Tensor:
    """Blend with the image that is smoothed except at its border."""
    smooth = images.float()
    if min(images.shape[2:]) > 2:
        beside, centre = (smooth * float(np.float32(weight) / np.float32(13)) for weight in (1, 5))
        left = beside[..., :-2]
        right = beside[..., 2:]
        outer = left + beside[..., 1:-1] + right
        inner = left + centre[..., 1:-1] + right
        smoothed = 0.5 + outer[..., 2:, :] + inner[..., 1:-1, :] + outer[..., :-2, :]
        smooth[..., 1:-1, 1:-1] = smoothed.clamp(0, 255).floor()
    return _blended(smooth, images.float(), factors[:, :, None, None])


def gaussian_blur(images: Tensor, weights: Tensor) -> Tensor:
    """Average three times along rows, then along columns.

    Args:
        weights: those of a pixel, of its neighbours and of the next ones, in units of 2**-24.
    """
    pixels = images.double()
    (centre, near, far) = weights.T[:, :, None, None, None]
    for axis, border in ((3, (2, 2, 0, 0)), (2, (0, 0, 2, 2))):
        for _ in range(3):
            padded = F.pad(pixels, border, mode="replicate")
            parts = [padded.narrow(axis, i, images.shape[axis]) for i in range(5)]
            total = parts[2] * centre + (parts[1] + parts[3]) * near + (parts[0] + parts[4]) * far  # exact
            pixels = ((total + 2**23) / 2**24).floor()
    return pixels.to(torch.uint8)


def bilinear(images: Tensor, numbers: Tensor) -> Tensor:
    """Move pixels with bilinear interpolation; the numbers are an affine map to the source, and a fill colour."""
    return _moved(images, numbers, range(2), lambda a, b, d: a + (b - a) * d)


def bicubic(images: Tensor, numbers: Tensor) -> Tensor:
    """Move pixels with bicubic interpolation; the numbers are an affine map to the source, and a fill colour."""

    def cubic(a: Tensor, b: Tensor, c: Tensor, d: Tensor, t: Tensor) -> Tensor:
        return b + t * (c - a + t * (2 * (a - b) + c - d + t * (b - a - c + d)))

    return _moved(images, numbers, range(-1, 3), cubic)


def _moved(images: Tensor, numbers: Tensor, taps: range, interpolate: Callable[..., Tensor]) -> Tensor:
    channels, height, width = images.shape[1:]
    a, b, c, d, e, f = numbers[:, :6, None, None].unbind(1)
    x = torch.arange(width, device=images.device) + 0.5
    y = torch.arange(height, device=images.device)[:, None] + 0.5
    x, y = a * x + b * y + c, d * x + e * y + f
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    x = x - 0.5
    y = y - 0.5
    left = x.floor()
    top = y.floor()
    columns = [(left.long() + tap).clamp(0, width - 1) for tap in taps]
    lines = [(top.long() + tap).clamp(0, height - 1) * width for tap in taps]
    pixels = images.flatten(2)
    dx = (x - left)[:, None]
    dy = (y - top)[:, None]

    def read(index: Tensor) -> Tensor:
        index = index.flatten(1)[:, None].expand(-1, channels, -1)
        return pixels.gather(2, index).view_as(images).short()  # differences of levels are exact

    def along(line: Tensor) -> Tensor:
        return interpolate(*(read(line + column) for column in columns), dx)

    between = (along(line) for line in lines)
    levels = interpolate(*between, dy).clamp(0, 255).to(torch.uint8)
    return torch.where(inside[:, None], levels, numbers[:, 6:, None, None].to(torch.uint8))


def _levels(images: Tensor) -> Tensor:
    return torch.arange(256, dtype=torch.float64, device=images.device)


def _grey(images: Tensor) -> Tensor:
    """Return one channel of integers."""
    if images.shape[1] == 1:
        return images.int()
    red, green, blue = images.int().split(1, dim=1)
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


def _blended(start: Tensor, end: Tensor, factors: Tensor) -> Tensor:
    """Return bytes between two images, or beyond the second one."""
    return (start + factors.float() * (end - start)).clamp(0, 255).to(torch.uint8)


def _rotation(side: int, degrees: float) -> Sequence[float]:
    angle = -math.radians(degrees % 360.0)
    cos, sin, minus_sin = (round(value, 15) for value in (math.cos(angle), math.sin(angle), -math.sin(angle)))
    centre = side / 2
    x, y = (first * -centre + second * -centre + 0.0 for first, second in ((cos, sin), (minus_sin, cos)))
    return cos, sin, x + centre, minus_sin, cos, y + centre


def _blur_weights(deviation: float) -> Sequence[float]:
    """Return the weights of :func:`gaussian_blur` for deviations up to 2, the largest that timm draws."""
    variance = np.float32(deviation) * np.float32(deviation) / np.float32(3)
    length = np.float32(math.sqrt(12.0 * float(variance) + 1.0))
    whole = np.float32(math.floor((float(length) - 1.0) / 2.0))
    one, two, three, six = np.arange(7, dtype=np.float32)[[1, 2, 3, 6]]
    part = (two * whole + one) * (whole * (whole + one) - three * variance)
    part /= six * (variance - (whole + one) * (whole + one))
    weight = int(np.float32(2**24) / ((whole + part) * two + one))
    radius = int(whole + part)
    edge = (2**24 - (2 * radius + 1) * weight) // 2
    return (weight, edge, 0) if radius == 0 else (weight, weight, edge)


def _table(levels: NDArray[Any]) -> Step:
    return use_tables, levels


# by the name of timm's function: the map from pixels of the result to those of the source
MATRICES: dict[str, Callable[[int, float], Sequence[float]]] = {
    "rotate": _rotation,
    "shear_x": lambda _, factor: (1, factor, 0, 0, 1, 0),
    "shear_y": lambda _, factor: (1, 0, 0, factor, 1, 0),
    "translate_x_rel": lambda side, share: (1, 0, share * side, 0, 1, 0),
    "translate_y_rel": lambda side, share: (1, 0, 0, 0, 1, share * side),
}
# by the name of timm's function: the operation and its numbers, for the arguments of the function
CHANGES: dict[str, Callable[..., Step]] = {
    "auto_contrast": lambda: (auto_contrast, ()),
    "equalize": lambda: (equalize, ()),
    "invert": lambda: _table(255 - PIXEL_LEVELS),
    "posterize": lambda bits: _table(PIXEL_LEVELS & -(2 ** max(0, 8 - bits))),
    "solarize": lambda threshold: _table(np.where(threshold > PIXEL_LEVELS, PIXEL_LEVELS, 255 - PIXEL_LEVELS)),
    "solarize_add": lambda add: _table(np.where(PIXEL_LEVELS < 128, np.minimum(255, PIXEL_LEVELS + add), PIXEL_LEVELS)),
    "brightness": lambda factor: _table(
        (PIXEL_LEVELS.astype(np.float32) * np.float32(factor)).clip(0, 255).astype(int)
    ),
    "contrast": lambda factor: (contrast, (factor,)),
    "color": lambda factor: (color, (factor,)),
    "desaturate": lambda factor: (color, (min(1.0, max(0.0, 1.0 - factor)),)),
    "sharpness": lambda factor: (sharpness, (factor,)),
    "gaussian_blur": lambda deviation: (gaussian_blur, _blur_weights(deviation)),
}
