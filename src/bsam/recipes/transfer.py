"""Transfer learning: pretrained networks, fine-tuned on smaller data sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core.errors import BsamValueError
from ..models.weight_files import model_of_file
from ..models.weights import PRETRAINED
from ..tasks.inputs import find_weights
from ..training.config import FINE_TUNING, Run
from .experiments import BASELINES
from .paper import STANDS_FOR, TRANSFER_DATA
from .scales import Scale, scale_of
from .variants import arguments, variants

NETWORKS: Mapping[str, Mapping[str, Any]] = {  # the paper's, with the settings in which they differ from FINE_TUNING
    "timm:efficientnet_b0": {"weight_decay": 1e-5},
    "timm:resnet50": {},
}
SMALL = {"timm:efficientnet_b0": "timm:test_efficientnet", "timm:resnet50": "timm:test_resnet"}
SHORT = ("flowers102", "oxford_pet")


def transfer(scale: Scale | str) -> list[Run]:
    """Return the networks of the transfer table on its data sets.

    On the scale ``short`` these are the two smallest ones, on ``smoke`` digits, with small networks that begin with
    random weights.
    """
    scale = scale_of(scale)
    own: dict[str, Any] = {"weights": PRETRAINED, "precision": "bf16"}  # compilation takes as long as it would save
    data: Sequence[str] = SHORT if scale.name == "short" else TRANSFER_DATA
    if scale.stand_ins:
        own, data = {**scale.settings, "image_size": 32}, scale.data
    return [
        Run(
            variant.method,
            arguments(variant, "cifar10"),  # the paper has SAM's radius for CIFAR-10 on all of them
            model=SMALL[network] if scale.stand_ins else network,
            data=name,
            **{**FINE_TUNING, **settings, **own},
        )
        for network, settings in NETWORKS.items()
        for name in data
        for variant in (variants()[name] for name in BASELINES)
    ]


def with_weights(runs: Sequence[Run], files: Sequence[str], data_dir: Path | None = None) -> list[Run]:
    """Return the runs with the networks of these files in place of those that timm would download weights for.

    Args:
        runs: of :func:`transfer`.
        files: of ``bsam weights convert``, which say what network they are of.
        data_dir: another folder where they may be.
    """
    if not any(run.weights for run in runs):
        raise BsamValueError("the runs begin with random weights: leave --weights out")
    found = []
    for file in files:
        model = model_of_file(Path(find_weights(file, data_dir)))
        paper = STANDS_FOR.get(model or "", model)
        own = [replace(run, model=model, weights=file) for run in runs if model and run.model == paper]
        if not own:
            raise BsamValueError(
                f"{file} holds weights of {model or 'an unnamed network'}: give files of `bsam weights convert` that "
                f"are of one of {', '.join((*NETWORKS, *STANDS_FOR))}"
            )
        found += own
    return found
