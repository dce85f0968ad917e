"""Find joints of persons in image files with the trained network of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...common.errors import BsamValueError
from ..common.files import reading
from ..common.printing import say
from ..config import PoseSettings
from ..data.images import Box, BoxError, check_box, decode, decode_bytes, read_image, rounded
from ..data.persons import Skeleton, person_crops
from ..data.pose_augment import apply, inverse
from ..tasks.pose import EVALUATION_BATCH, PoseInputs
from ..training.environment import pick_device
from ..training.run_dir import REPAIR, RunDir
from ..training.train_step import as_trained
from .class_prediction import decoded_batches, image_paths


@dataclass(frozen=True, eq=False)
class FoundJoints:
    """The joints that a network finds in an image of a person.

    Coordinates are pixels of the upright image, and the centre of its first pixel is (0, 0).

    Args:
        path: path of the file.
        joints: (J, 2), x and y of each joint; they may lie outside the image, if the crop extends beyond it.
        box: left, top, right and bottom of the person.
        skeleton: names of the joints.
    """

    path: Path
    joints: NDArray[np.float64]
    box: Box
    skeleton: Skeleton

    @property
    def pixels(self) -> NDArray[np.uint8]:
        """Bytes (height, width, 3) of the upright image, read from the file each time, since photographs are large."""
        return decode(self.path)


def find_joints(
    folder: str | Path,
    images: str | Path | Iterable[str | Path],
    box: Sequence[float] | None = None,
    flip_test: bool | None = None,
    device: str = "auto",
    on_message: Callable[[str], None] = say,
) -> list[FoundJoints]:
    """Find the joints of the person in each image with the trained network of a run; its data is not needed.

    The person is cut out as in training: a square around the centre of the box, 1.25 times as wide as its longer side.
    The network computes in the precision of its training.

    Args:
        folder: directory of a finished run of the task ``"pose"``.
        box: left, top, right and bottom of the person, for a single image; by default the whole image.
        flip_test: whether to average the probabilities of an image and its mirror image; by default as in the run's
            evaluation.
        images, device, on_message: as in :func:`~bsam.lab.inference.predict`.
    """
    paths = image_paths(images)
    person_box = None if box is None else check_box(box)
    if person_box is not None and len(paths) != 1:
        raise BsamValueError(f"a box is for one image, and there are {len(paths)}: give the images one at a time")
    run_dir = RunDir(folder)
    run, note = run_dir.finished_run(), run_dir.note("pose")
    if not note:
        raise BsamValueError(
            f"the run in {folder}, of the task {run.task.name}, finds no joints (it has no pose.json): give a run of "
            "the task pose"
        )
    with reading(run_dir.path / "pose.json", REPAIR):
        inputs = PoseInputs.from_json(note)
    torch_device = pick_device(device)
    network = run_dir.load_into(inputs.network(run)).eval().to(torch_device)
    augment, flip = inputs.augment(), run.task_settings(PoseSettings).flip_test if flip_test is None else flip_test
    poses = []
    with as_trained(run, torch_device):
        for batch in decoded_batches(
            paths, lambda path: _cut_out(path, person_box, inputs.side), EVALUATION_BATCH, on_message
        ):
            boxes, crops, maps = zip(*(cut for _, cut in batch), strict=True)
            x, to_image = torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2), inverse(torch.cat(maps))
            unknown = torch.zeros(len(batch), len(inputs.skeleton.joints), 3, device=torch_device)
            x, _, to_image = augment(x.to(torch_device), unknown, to_image.to(torch_device))
            joints = apply(to_image, inputs.joints(network, x, flip).double()).cpu().numpy()
            for (path, _), positions, cut_box in zip(batch, joints, boxes, strict=True):
                poses.append(FoundJoints(path, positions, cut_box, inputs.skeleton))
    return poses


def _cut_out(path: Path, box: Box | None, side: int) -> tuple[Box, NDArray[np.uint8], Tensor]:
    """Return the box of a person, the crop, and the map (1, 2, 3) from pixels of the image to pixels of the crop."""
    content = read_image(path)
    height, width, _ = decode_bytes(content, path).shape
    person_box = box or (-0.5, -0.5, width - 0.5, height - 0.5)
    left, top, right, bottom = person_box
    if min(right, bottom) <= -0.5 or left >= width - 0.5 or top >= height - 0.5:
        raise BsamValueError(f"the box {rounded(person_box)} lies outside of the {width} x {height} pixels of {path}")
    (crop,), to_crop = person_crops(torch.tensor([person_box], dtype=torch.float64), side)
    try:
        return person_box, decode_bytes(content, path, crop), to_crop
    except BoxError as error:
        raise BsamValueError(f"{error}: give another box (--box)") from error
