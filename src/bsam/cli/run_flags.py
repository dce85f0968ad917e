"""The settings of a run as command-line flags: name, type, choices, default and help are those of ``Run``'s fields."""

from __future__ import annotations

import argparse
import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ..common.errors import BsamValueError
from ..data import DATASETS, FOLDER, dataset_entry
from ..data.entries import ImageData
from ..models import MODELS
from ..models.weight_files import model_of_file
from ..models.weight_loading import PRETRAINED
from ..recipes.variants import variants
from ..tasks.image_inputs import find_weights
from ..training.config import BASE, FINE_TUNING, POSE, QUANTIZED, Run
from ..training.names import find_name
from ..training.run_dir import CONFIG, RunDir

RANDOM = "random"  # as --weights: no pretrained ones
_METAVARS = {str: "NAME", int: "N", float: "X"}
CACHE_HELP = "folder for decoded image files (default: .bsam-cache beside them)"


def add_run_flags(command: argparse.ArgumentParser) -> None:
    """Add one flag per setting. A flag that is not given is not in the namespace, and ``Run`` has its default."""
    hints = get_type_hints(Run)
    for field in sorted(fields(Run), key=lambda field: field.kw_only is True):  # the method and its arguments first
        if field.name == "arguments":
            help = "arguments of the method, as rho_max=0.1 passes=2 beta=[1,1,1]"
            command.add_argument("--set", nargs="+", action="extend", default=[], help=help, metavar="NAME=VALUE")
            continue
        default = field.default
        if field.name == "model":
            known = "; ".join(f"{entry.model} for {entry.name}" for entry in DATASETS.values() if entry.model)
            default = f"that of --init, or of --weights, if its file says; {known}"
        if field.name == "weights":
            default = "pretrained for networks of timm; `random` for none"
        for named, when in (
            (FINE_TUNING, "with pretrained weights"),
            (QUANTIZED, "with quantization"),
            (POSE, "for pose"),
        ):
            if field.name in named:
                default = f"{default}; {named[field.name]} {when}"
        if field.name == "task":
            default = "that of the data"
        shown = "" if default is MISSING or default is None else f" (default: {default})"
        command.add_argument(
            f"--{field.name.replace('_', '-')}",
            required=field.default is MISSING,
            default=argparse.SUPPRESS,
            help=f"{field.metadata['help']}{shown}".replace("%", "%%"),
            **_kind(hints[field.name]),
        )


def run_of(arguments: argparse.Namespace) -> Run:
    """Return the run of parsed flags.

    Task and network are those of the data set, or the network is the one that the weights are of, unless others are
    named; with ``init``, network, data and image size are those of the run that it names. A network of timm has the
    weights that timm downloads, unless others are named. The settings that are not given are
    :data:`bsam.training.config.POSE` for pose, :data:`bsam.training.config.QUANTIZED` with quantization, and else
    :data:`bsam.training.config.FINE_TUNING` with pretrained weights.
    """
    given = {field.name: getattr(arguments, field.name) for field in fields(Run) if hasattr(arguments, field.name)}
    given["method"], of_method = _method(given["method"])
    if given.get("data", "").startswith(FOLDER):
        given["data"] = f"{FOLDER}{Path(given['data'].removeprefix(FOLDER)).expanduser()}"  # without a slash at its end
    if given.get("init") is not None:
        given = {**_inherited(Path(given["init"]).expanduser(), getattr(arguments, "out", None)), **given}
    data_dir = getattr(arguments, "data_dir", None)
    if "task" not in given:
        given["task"] = dataset_entry(given.get("data", Run.data)).resolve(data_dir).task
    if "model" not in given:
        given["model"] = _default_model(given, data_dir)
    if given["model"].startswith("timm:") and given.get("init") is None:
        given.setdefault("weights", PRETRAINED)
    if given.get("weights") == RANDOM:
        given["weights"] = None
    defaults: Mapping[str, Any] = FINE_TUNING if given.get("weights") is not None else {}
    if given.get("weight_bits") is not None:
        defaults = QUANTIZED
    if given["task"] == "pose":
        defaults = POSE
    return Run(**{**defaults, **given, "arguments": {**of_method, **method_arguments(arguments.set)}})


def _method(name: str) -> tuple[str, Mapping[str, Any]]:
    """Return the method of a name, in any case, and the arguments that make it a variant, as of ``bsam-2``."""
    forms = {variant.name: variant for variant in variants().values() if not variant.radii}
    found = find_name("method", name, (BASE, *forms))
    is_base = found == BASE or forms[found].method == BASE  # Run tells sgd from base
    return (found, {}) if is_base else (forms[found].method, forms[found].arguments)


def _inherited(init: Path, out: Path | None) -> dict[str, Any]:
    """Return the settings that follow from the run to begin with; of a run that continues, from its own directory."""
    if out is not None and (out / CONFIG).exists():
        other = RunDir(out).run()
    elif init.is_dir():
        other = RunDir(init).finished_run()
    else:
        return {}  # :func:`~bsam.training.initial_run.initial_network` says that it is missing
    return {name: getattr(other, name) for name in ("model", "data", "image_size")}


def _default_model(given: Mapping[str, Any], data_dir: Path | None) -> str:
    what, weights = given.get("data", Run.data), given.get("weights", RANDOM)
    entry = dataset_entry(what).resolve(data_dir)
    model = entry.model
    if weights not in (RANDOM, PRETRAINED):
        what = find_weights(weights, data_dir)
        in_file = model_of_file(Path(what))
        finders = {entry.backbone: entry.name for entry in MODELS.values() if entry.backbone}
        model = in_file if given["task"] != "pose" or in_file in finders.values() else finders.get(in_file or "", model)
    if model is None:
        if isinstance(entry, ImageData) and entry.name.startswith(FOLDER):
            entry.image_files(data_dir)  # raises if the path is wrong, the likelier mistake
        raise BsamValueError(
            f"{what} does not say which network to train: name one with --model, as timm:resnet50, or give --weights a "
            "file of tools/convert_weights.py"
        )
    return model


def method_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """Return values by name. A value is JSON, or else the text itself."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not name or not sign:
            raise BsamValueError(f"--set takes NAME=VALUE, as rho_max=0.1; got {pair!r}")
        if name in found:
            raise BsamValueError(f"--set has {name} twice: give it once")
        try:
            found[name] = json.loads(text)
        except json.JSONDecodeError:
            found[name] = text
    return found


def _kind(hint: Any) -> dict[str, Any]:
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if isinstance(hint, types.UnionType):  # with None, which stands for the flag that is not given
        (hint,) = (one for one in get_args(hint) if one is not type(None))
    return {"type": hint, "metavar": _METAVARS[hint]}
