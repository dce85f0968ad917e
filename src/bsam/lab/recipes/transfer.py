"""Transfer learning: pretrained networks, fine-tuned on smaller data sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..models.weight_loading import PRETRAINED
from ..training.config import FINE_TUNING, Run
from .cifar import COMPARED
from .experiments import Recipe
from .paper import TRANSFER, TRANSFER_DATA
from .scales import Scale, scale_of
from .variants import arguments, variants

NETWORKS: Mapping[str, Mapping[str, Any]] = {  # the paper's networks, with settings that differ from FINE_TUNING
    "timm:efficientnet_b0": {"weight_decay": 1e-5},
    "timm:resnet50": {},
}
SMALL = {"timm:efficientnet_b0": "timm:test_efficientnet", "timm:resnet50": "timm:test_resnet"}
SHORT = ("flowers102", "oxford_pet")


def transfer(scale: Scale | str) -> list[Run]:
    """Return the networks of the transfer table on its data sets.

    At the scale ``short`` these are the two smallest data sets, at ``smoke`` digits, with small networks that begin
    with random weights.
    """
    scale = scale_of(scale)
    shared: dict[str, Any] = {"weights": PRETRAINED, "precision": "bf16"}  # compiling takes as long as it saves
    data: Sequence[str] = SHORT if scale.name == "short" else TRANSFER_DATA
    if scale.stand_ins:
        shared, data = {**scale.settings, "image_size": 32}, scale.data
    return [
        Run(
            variant.method,
            arguments(variant, "cifar10"),  # the paper uses the radius of CIFAR-10 on all of them
            model=SMALL[network] if scale.stand_ins else network,
            data=name,
            **{**FINE_TUNING, **settings, **shared},
        )
        for network, settings in NETWORKS.items()
        for name in data
        for variant in (variants()[name] for name in COMPARED)
    ]


TRANSFER_RECIPE = Recipe(
    "transfer", "Pretrained networks, fine-tuned", transfer, published_table=TRANSFER, tunable=True
)
