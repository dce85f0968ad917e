"""Classes of image files, by the trained network of a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.checks import check_count
from ..core.errors import BsamValueError
from ..data.image_decoding import decode
from ..tasks.classification import LARGE_IMAGE_BATCH, build_network
from ..tasks.inputs import Inputs
from .environment import pick_device
from .run_dir import RunDir

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")


@dataclass(frozen=True)
class Prediction:
    """What a network says of an image.

    Args:
        path: of the file.
        pixels: that the network saw, (side, side, 3).
        classes: the most probable ones, in falling order.
        probabilities: of these classes.
    """

    path: Path
    pixels: NDArray[np.uint8]
    classes: tuple[str, ...]
    probabilities: tuple[float, ...]


def image_paths(images: str | Path | Iterable[str | Path]) -> list[Path]:
    """Return the paths of files; of a folder those of all image files below it, sorted. Raise if there is none."""
    paths: list[Path] = []
    for path in map(Path, [images] if isinstance(images, (str, Path)) else images):
        inside = (
            sorted(each for each in path.rglob("*") if is_image(each.relative_to(path))) if path.is_dir() else [path]
        )
        if not inside:
            raise BsamValueError(f"the folder {path} holds no image files ({', '.join(SUFFIXES)}): give another one")
        paths += inside
    if not paths:
        raise BsamValueError("there are no images: name files or folders")
    return paths


def is_image(path: Path) -> bool:
    """Return whether the name of a file ends as those of images do, and no part of its path is hidden.

    Example:
        >>> [is_image(Path(name)) for name in ("cats/1.JPG", "notes.txt", ".cache/1.png")]
        [True, False, False]
    """
    return path.suffix.lower() in SUFFIXES and not any(part.startswith(".") for part in path.parts)


def predict(
    folder: str | Path, images: str | Path | Iterable[str | Path], top: int = 3, device: str = "auto"
) -> list[Prediction]:
    """Classify image files by the trained network of a run; the data that it was trained on is not needed.

    Args:
        folder: the directory of a finished run on image files.
        images: files, or folders with image files; all are decoded before the first is classified.
        top: how many classes to return for each.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"`` ...; ``"auto"`` takes a GPU if there is one.
    """
    paths = image_paths(images)
    run_dir = RunDir(folder)
    run, note = run_dir.finished_run(), run_dir.note("inputs")
    if run_dir.note("pose"):
        raise BsamValueError(f"the run in {folder} finds joints, not classes: use find_joints, or give another run")
    if not note:
        raise BsamValueError(f"the run in {folder} was not trained on image files, but on {run.data}: give another run")
    inputs = Inputs.from_json(note)
    top = min(check_count("top", top), len(inputs.class_names))
    pixels = [decode(image, inputs.decoding) for image in paths]
    where = pick_device(device)
    network = run_dir.load_into(build_network(run, inputs, len(inputs.class_names))).eval().to(where)
    found = []
    with torch.no_grad():
        for batch in torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).split(LARGE_IMAGE_BATCH):
            found.append(network(inputs(batch.to(where))).float().softmax(1).cpu())
    likely = torch.cat(found).topk(top)
    return [
        Prediction(image, own, tuple(inputs.class_names[i] for i in indices), tuple(values))
        for image, own, indices, values in zip(
            paths, pixels, likely.indices.tolist(), likely.values.tolist(), strict=True
        )
    ]
