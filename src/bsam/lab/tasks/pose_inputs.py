"""Turn crops of persons into the inputs of a SimCC network, and its outputs into the positions of joints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..config import Run
from ..data.persons import Skeleton
from ..data.pose_augment import PoseAugment
from ..models import build
from .image_task import freeze_backbone
from .simcc_loss import decode, flip_merge


@dataclass(frozen=True)
class PoseInputs:
    """The inputs and outputs of a network that finds joints.

    Args:
        side: side of the inputs, in pixels.
        k: bins per pixel, for each coordinate.
        mean, std: mean and standard deviation per channel, of bytes divided by 255.
        skeleton: joints that the network finds.
    """

    side: int
    k: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    skeleton: Skeleton

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PoseInputs:
        """Return the inputs from JSON values of ``dataclasses.asdict``; raise if one has another type."""
        lists = values["skeleton"]
        pairs, edges = (
            tuple((int(first), int(second)) for first, second in lists[name]) for name in ("pairs", "edges")
        )
        if not all(isinstance(joint, str) for joint in lists["joints"]):
            raise TypeError
        skeleton = Skeleton(tuple(lists["joints"]), pairs, edges)
        mean, std = (tuple(map(float, values[name])) for name in ("mean", "std"))
        return cls(int(values["side"]), float(values["k"]), mean, std, skeleton)

    def augment(self, **settings: Any) -> PoseAugment:
        """Return the function that cuts inputs out of stored crops, with these settings of the augmentation."""
        return PoseAugment(self.side, self.skeleton.mirrored, mean=self.mean, std=self.std, **settings)

    def network(self, run: Run) -> nn.Module:
        """Return a run's network with random weights, drawn with its seed."""
        joints = len(self.skeleton.joints)
        network = build(run.model, joints, len(self.mean), run.seed, side=self.side, k=self.k)
        if run.freeze_backbone:
            freeze_backbone(network)
        return network

    def joints(self, network: nn.Module, x: Tensor, flip_test: bool, logits: Tensor | None = None) -> Tensor:
        """Return the positions of the joints (n, J, 2), in pixels of the inputs.

        Args:
            network: the network, in eval mode.
            x: its inputs.
            flip_test: whether to average the probabilities of an image and its mirror image.
            logits: outputs of the network for ``x``, if they are known.
        """
        logits = network(x) if logits is None else logits
        if flip_test:
            logits = flip_merge(logits, network(x.flip(-1)), self.skeleton.mirrored, self.k)
        return decode(logits, self.k)
