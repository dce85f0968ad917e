"""Every setting of a run as a flag: names, types, choices, defaults and explanations are those of ``Run``."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import types
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ..core.errors import BsamValueError
from ..data import DATASETS, dataset_entry
from ..data.augment import AUGMENTATIONS
from ..training.config import Run
from ..training.loop import TASKS

_REGISTRIES = {  # what a flag's help says in place of "a name of" them
    **{
        registry: f"a name of `bsam list {which}`"
        for registry, which in (("METHODS", "methods"), ("MODELS", "models"), ("DATASETS", "data"))
    },
    **{
        registry: f"one of {', '.join(names)}"
        for registry, names in (("AUGMENTATIONS", AUGMENTATIONS), ("TASKS", TASKS))
    },
}
_MODELS = "; ".join(f"{entry.model} for {entry.name}" for entry in DATASETS.values())
_METAVARS = {str: "NAME", int: "N", float: "X"}


def add_run_flags(command: argparse.ArgumentParser) -> None:
    """One flag per setting. A flag that is not given is not in the namespace: what it then is, ``Run`` says."""
    helps, hints = explanations(Run), get_type_hints(Run)
    for field in fields(Run):
        if field.name == "arguments":
            command.add_argument(
                "--set",
                nargs="+",
                action="extend",
                default=[],
                help="arguments of the method, as rho_max=0.1 passes=2 beta=[1,1,1]",
                metavar="NAME=VALUE",
            )
            continue
        text = (helps[field.name] + _default(field)).replace("%", "%%")
        command.add_argument(
            f"--{field.name.replace('_', '-')}",
            required=field.default is MISSING,
            default=argparse.SUPPRESS,
            help=text,
            **_kind(hints[field.name]),
        )


def run_of(arguments: argparse.Namespace) -> Run:
    """The run that was asked for; the model is the data set's own, unless another was named."""
    given = {field.name: getattr(arguments, field.name) for field in fields(Run) if hasattr(arguments, field.name)}
    return Run(
        **{
            "model": dataset_entry(given.get("data", Run.data)).model,
            **given,
            "arguments": method_arguments(arguments.set),
        }
    )


def method_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """Values by name. A value is JSON, or else the text as it stands.

    Example:
        >>> method_arguments(["rho_max=0.1", "passes=2", "start_from_min=true", "beta=[1,1,1]", "mode=plain"])
        {'rho_max': 0.1, 'passes': 2, 'start_from_min': True, 'beta': [1, 1, 1], 'mode': 'plain'}
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not name or not sign:
            raise BsamValueError(f"--set takes NAME=VALUE, as rho_max=0.1; got {pair!r}")
        if name in found:
            raise BsamValueError(f"--set has {name} twice: say it once")
        try:
            found[name] = json.loads(text)
        except json.JSONDecodeError:
            found[name] = text
    return found


def explanations(cls: type) -> dict[str, str]:
    """The ``Args:`` of a docstring, by name, as plain text.

    Example:
        >>> explanations(Run)["momentum"]
        'of SGD; of Adam, its first beta'
        >>> explanations(Run)["model"]
        'a name of `bsam list models`'
    """
    section = inspect.cleandoc(cls.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    return {name: _plain(re.sub(r"\s*\n\s*", " ", text)) for name, text in found}


def _plain(text: str) -> str:
    text = re.sub(r"a name of :data:`[\w.]+\.(\w+)`", lambda found: _REGISTRIES[found[1]], text)
    text = re.sub(r":\w+:`(?:\w+\.)*(\w+)`", r"\1", text)
    return re.sub(r"``\"?([^`\"]+)\"?``", r"\1", text).rstrip(".")


def _default(field: Field[Any]) -> str:
    default = _MODELS if field.name == "model" else field.default
    return "" if default is MISSING or default is None else f" (default: {default})"


def _kind(hint: Any) -> dict[str, Any]:
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if isinstance(hint, types.UnionType):  # of something and None, which stands for the flag that is not given
        (hint,) = (one for one in get_args(hint) if one is not type(None))
    return {"type": hint, "metavar": _METAVARS[hint]}
