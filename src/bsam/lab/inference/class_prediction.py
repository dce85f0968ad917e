"""Classify image files with the trained network of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ...common.checks import check_count
from ...common.errors import BsamValueError
from ..common.files import reading
from ..common.printing import say
from ..data.folders import OF_WINDOWS
from ..data.images import DecodeError, Decoding, decode
from ..tasks.classification import LARGE_IMAGE_BATCH, build_network
from ..tasks.images import Inputs
from ..training.environment import pick_device
from ..training.run_dir import REPAIR, RunDir, check_named
from ..training.train_step import as_trained

T = TypeVar("T")


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of an image.

    Args:
        path: path of the file.
        decoding: how the network's input is cut out of the image.
        classes: the most probable classes, in descending order.
        probabilities: their probabilities.
    """

    path: Path
    decoding: Decoding
    classes: tuple[str, ...]
    probabilities: tuple[float, ...]

    @property
    def pixels(self) -> NDArray[np.uint8]:
        """Bytes (side, side, 3) of the network's input, read from the file each time."""
        return decode(self.path, self.decoding)


def image_paths(images: str | Path | Iterable[str | Path]) -> dict[Path, bool]:
    """Return the paths of files without duplicates, with True for those that the caller named directly.

    A folder stands for all files below it, sorted, except hidden ones. Raise if there are none.
    """
    paths: dict[Path, bool] = {}
    for path in map(Path, [images] if isinstance(images, (str, Path)) else images):
        is_named = not path.is_dir()
        files = [path] if is_named else _files_below(path)
        if not files:
            raise BsamValueError(f"the folder {path} holds no files: give another one")
        paths |= {file: is_named or paths.get(file, False) for file in files}
    if not paths:
        raise BsamValueError("there are no images: name files or folders")
    return paths


def _files_below(folder: Path) -> list[Path]:
    files, visited = [], set()
    for directory, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(directory)
        if real in visited:  # a link may lead back to a folder that contains it
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += [Path(directory, name) for name in names if not name.startswith(".") and name not in OF_WINDOWS]
    return sorted(files)


def decoded_batches(
    paths: Mapping[Path, bool], read: Callable[[Path], T], size: int, on_message: Callable[[str], None]
) -> Iterator[list[tuple[Path, T]]]:
    """Yield batches of paths and the results of ``read``; only one batch is in memory at a time.

    Files in folders that cannot be decoded are left out, with a message at the end; other files that cannot be decoded
    raise an error.

    Args:
        paths: from :func:`image_paths`.
        read: decodes a file.
        size: size of a batch.
        on_message: called with the message.
    """
    batch: list[tuple[Path, T]] = []
    left_out = []
    for path, is_named in paths.items():
        try:
            batch.append((path, read(path)))
        except DecodeError as error:
            if is_named:
                raise
            left_out.append(path)
            if len(left_out) == len(paths):
                raise BsamValueError(f"no file in these folders is an image: {error}") from error
        if len(batch) == size:
            yield batch
            batch = []
    if left_out:
        names = ", ".join([*map(str, left_out[:3]), *(["..."] if len(left_out) > 3 else [])])
        on_message(f"left out {len(left_out)} of {len(paths)} files (cannot be decoded as images): {names}")
    if batch:
        yield batch


def predict(
    folder: str | Path,
    images: str | Path | Iterable[str | Path],
    top: int = 3,
    device: str = "auto",
    on_message: Callable[[str], None] = say,
    *,
    model: str | None = None,
) -> list[Prediction]:
    """Classify image files with the trained network of a run, in the precision of its training; its data is not needed.

    Args:
        folder: directory of a finished run on image files, or on your own arrays of bytes.
        images: files, or folders with image files; other files in folders are left out.
        top: number of classes to return for each image.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"`` ...; ``"auto"`` takes a GPU if there is one.
        on_message: called with messages for the user.
        model: the network of the run; needed only if it is ``MODULE:FUNCTION``, which runs code of that module.
    """
    paths = image_paths(images)
    run_dir = RunDir(folder)
    run, note = run_dir.finished_run(), run_dir.note("inputs")
    if run_dir.note("pose"):
        raise BsamValueError(f"the run in {folder} finds joints, not classes: use find_joints, or give another run")
    with reading(run_dir.path / "inputs.json", REPAIR):
        inputs = Inputs.from_json(note) if note else None
    if inputs is None or not inputs.takes_files:
        raise BsamValueError(
            f"the network of the run in {folder} (task {run.task.name}, data {run.data}) does not take image files: "
            "give a classification run on image files, or on your own uint8 images with 1 or 3 channels"
        )
    check_named(run, run_dir.path, None, [] if model is None else [model])
    names, decoding = inputs.class_names, inputs.decoding
    top = min(check_count("top", top), len(names))
    torch_device = pick_device(device)
    network = run_dir.load_into(build_network(run, inputs, len(names))).eval().to(torch_device)
    predictions = []
    with as_trained(run, torch_device):
        for batch in decoded_batches(paths, lambda path: decode(path, decoding), LARGE_IMAGE_BATCH, on_message):
            x = torch.from_numpy(np.stack([inputs.stored(pixels) for _, pixels in batch])).permute(0, 3, 1, 2)
            likely = network(inputs(x.to(torch_device))).float().softmax(1).cpu().topk(top)
            for (path, _), values, indices in zip(batch, likely.values.tolist(), likely.indices.tolist(), strict=True):
                predictions.append(Prediction(path, decoding, tuple(names[i] for i in indices), tuple(values)))
    return predictions
