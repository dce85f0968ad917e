"""How crops of persons become the inputs of a SimCC network, and its outputs the places of joints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from ..data.pose.augment import PoseAugment
from ..data.pose.joints import Skeleton
from ..models import build
from .pretrained import freeze_backbone
from .settings import TaskSettings
from .simcc_loss import decode, flip_merge


@dataclass(frozen=True)
class PoseInputs:
    """What a network that finds joints takes and gives.

    Args:
        side: of the network's inputs, in pixels.
        k: bins of a coordinate for each pixel.
        mean: per channel, of bytes divided by 255.
        std: standard deviation, likewise.
        skeleton: the joints that it finds.
    """

    side: int
    k: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    skeleton: Skeleton

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PoseInputs:
        """Return what :meth:`to_json` described."""
        own = values["skeleton"]
        pairs, edges = (tuple((int(one), int(other)) for one, other in own[name]) for name in ("pairs", "edges"))
        skeleton = Skeleton(tuple(own["joints"]), pairs, edges)
        return cls(values["side"], values["k"], tuple(values["mean"]), tuple(values["std"]), skeleton)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    def augment(self, **settings: Any) -> PoseAugment:
        """Return what cuts inputs out of stored crops, with these settings of the augmentation."""
        return PoseAugment(self.side, self.skeleton.mirrored, mean=self.mean, std=self.std, **settings)

    def network(self, run: TaskSettings) -> nn.Module:
        """Return a run's network with random weights, a function of its seed."""
        joints = len(self.skeleton.joints)
        network = build(run.model, joints, len(self.mean), run.seed, side=self.side, k=self.k)
        if run.freeze_backbone:
            freeze_backbone(network)
        return network

    def joints(self, network: nn.Module, x: Tensor, flip_test: bool, logits: Tensor | None = None) -> Tensor:
        """Return where the joints are, (n, J, 2) in pixels of the inputs.

        Args:
            network: in eval mode.
            x: its inputs.
            flip_test: whether to take the mean of the probabilities of an image and of its mirror image.
            logits: of the inputs, if they are known.
        """
        logits = network(x) if logits is None else logits
        if flip_test:
            logits = flip_merge(logits, network(x.flip(-1)), self.skeleton.pairs, self.k)
        return decode(logits, self.k)
