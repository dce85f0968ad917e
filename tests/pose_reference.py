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


def simcc_loss(logits: np.ndarray, joints: np.ndarray, k: float, sigma: float) -> float:
    """SimCC's loss of one sample: logits (J, 2, bins), joints (J, 3) in pixels of the input."""
    bins, losses = np.arange(logits.shape[2]), []
    for (x, y, labelled), both in zip(joints, logits, strict=True):
        if not labelled or not all(-0.5 <= place < len(bins) / k - 0.5 for place in (x, y)):
            continue
        divergence = 0.0
        for place, values in zip((x, y), both, strict=True):
            label = np.exp(-((bins - k * place) ** 2) / (2 * sigma**2))
            label /= label.sum()
            found = np.exp(values - values.max())
            found /= found.sum()
            divergence += sum(p * math.log(p / q) for p, q in zip(label, found, strict=True) if p > 0)
        losses.append(divergence)
    return sum(losses) / len(losses) if losses else 0.0


def decoded(probabilities: np.ndarray, k: float) -> float:
    """The coordinate of a maximum, refined by the parabola through the logarithms of three bins."""
    logs = np.log(probabilities)
    best = int(np.argmax(logs))
    if not 0 < best < len(logs) - 1:
        return best / k
    a, b, _ = np.polyfit([-1.0, 0.0, 1.0], logs[best - 1 : best + 2], 2)
    return (best - b / (2 * a)) / k


def share_found(found: np.ndarray, truth: np.ndarray, sizes: list[float], threshold: float, joints: list[int]) -> float:
    """The share of the labelled joints that are within threshold * size; of persons with a size above 0."""
    hits = [
        math.dist(found[person, joint], truth[person, joint, :2]) <= threshold * size
        for person, size in enumerate(sizes)
        for joint in joints
        if size > 0 and truth[person, joint, 2] > 0
    ]
    return sum(hits) / len(hits)
