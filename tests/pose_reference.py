"""Independent computations for the tests of pose data: complex numbers for points, a loop over pixels for images."""

from __future__ import annotations

import cmath
import math

import numpy as np


def moved(x: float, y: float, row: list[float], source: int, target: int) -> tuple[float, float]:
    """A point after magnification, rotation (clockwise on the screen) and flip about the centre."""
    scale, angle, mirrored = row
    z = scale * cmath.exp(1j * angle) * (complex(x, y) - complex(source - 1, source - 1) / 2)
    if mirrored:
        z = complex(-z.real, z.imag)
    return z.real + (target - 1) / 2, z.imag + (target - 1) / 2


def came_from(x: float, y: float, row: list[float], source: int, target: int) -> tuple[float, float]:
    scale, angle, mirrored = row
    z = complex(x, y) - complex(target - 1, target - 1) / 2
    if mirrored:
        z = complex(-z.real, z.imag)
    z = z / scale * cmath.exp(-1j * angle)
    return z.real + (source - 1) / 2, z.imag + (source - 1) / 2


def bilinear(image: np.ndarray, x: float, y: float) -> np.ndarray:
    """The value of an image (channels, height, width) between its pixels; zeros outside."""
    left, top = math.floor(x), math.floor(y)
    value = np.zeros(len(image))
    for i, down in ((top, 1 - (y - top)), (top + 1, y - top)):
        for j, across in ((left, 1 - (x - left)), (left + 1, x - left)):
            if 0 <= i < image.shape[1] and 0 <= j < image.shape[2]:
                value += down * across * image[:, i, j]
    return value
