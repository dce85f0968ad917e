"""Functions that several test files use."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def same(a, b) -> bool:
    """Whether two lists of tensors are equal, bit for bit."""
    return len(a) == len(b) and all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def distance(a, b) -> float:
    """The largest absolute difference between two lists of tensors."""
    return max(float((s - t).abs().max()) for s, t in zip(a, b, strict=True))


def assert_close(ours, expected, atol: float = 1e-12) -> None:
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


def alike(a: Any, b: Any) -> bool:
    """Whether two states are equal, tensors bit for bit."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    return a == b


def draw_images(
    folder: Path,
    sets: Mapping[str, int],
    classes: Sequence[str] = ("cat", "dog", "owl"),
    size: tuple[int, int] = (26, 20),
) -> Path:
    """Write images of noise, with a colour per class, to ``folder/SET/CLASS``; ``sets`` maps SET to their number."""
    from PIL import Image

    random = np.random.default_rng(0)
    for part, count in sets.items():
        for label, name in enumerate(classes):
            (folder / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(0, 180, (size[1], size[0], 3), np.uint8)
                pixels[..., label % 3] += 75
                Image.fromarray(pixels).save(folder / part / name / f"{i}.png")
    return folder


def detached(parameters) -> list[Tensor]:
    """Copies of parameters."""
    return [p.detach().clone() for p in parameters]


def flat(tensors) -> Tensor:
    """All entries in one vector."""
    return torch.cat([t.detach().flatten() for t in tensors])


def train(problem, optimizer, steps: int, closure=None) -> None:
    """Take steps of any optimizer on a problem, with the mean loss or a closure."""
    for _ in range(steps):
        optimizer.step(closure or problem.loss)


def train_base(problem, base, steps: int, factor: float = 1.0) -> None:
    """Take steps of a base optimizer alone, on ``factor`` times the mean loss."""
    for _ in range(steps):
        base.zero_grad()
        (problem.losses().mean() * factor).backward()
        base.step()


def write_lspet(folder: Path, images: Sequence[np.ndarray], table: np.ndarray) -> None:
    """Write images (height, width, 3) and the table of joints (14, 3, n) in the layout of LSP Extended."""
    from PIL import Image
    from scipy.io import savemat

    (folder / "images").mkdir(parents=True)
    for number, pixels in enumerate(images, 1):
        Image.fromarray(pixels).save(folder / f"images/im{number:05d}.jpg", quality=95)
    savemat(folder / "joints.mat", {"joints": table})


def draw_persons(folder: Path, n: int = 20, size: tuple[int, int] = (60, 50)) -> np.ndarray:
    """Write n images of noise with 14 joints each, in the layout of LSP Extended; return the table of joints."""
    random = np.random.default_rng(0)
    table = random.uniform(5, 45, (14, 3, n))
    table[:, 2] = random.random((14, n)) < 0.8
    table[:10, 2] = 1  # including the torso
    write_lspet(folder, [random.integers(0, 256, (size[1], size[0], 3), np.uint8) for _ in range(n)], table)
    return table


def interrupted(loss: Callable[[], Tensor], call: int | None) -> Callable[[], Tensor]:
    """A closure that returns a loss and raises KeyboardInterrupt in its ``call``-th call, counted from 1."""
    calls = itertools.count(1)

    def closure() -> Tensor:
        if next(calls) == call:
            raise KeyboardInterrupt
        return loss()

    return closure


@contextlib.contextmanager
def trained_as(task: Any) -> Iterator[None]:
    """Train the runs of a task with another class of the same name."""
    from bsam.lab.tasks import TASKS

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, task.settings_type.name, task)
        yield


def search_roughly(patch: pytest.MonkeyPatch) -> None:
    """End the search for eigenvalues once their residuals are small, without the products that look for missed ones."""
    patch.setattr("bsam.flatness.spectrum.MIN_STEPS", 1)
    patch.setattr("bsam.flatness.spectrum.MISSED", float("inf"))
