"""Command-line flags for the settings of a run, generated from the fields of ``Run``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, TypeAlias, get_args, get_type_hints

from ...common.errors import BsamValueError
from ..common.names import OWN_CLASS, find_name, is_own, named_values
from ..config import BASE, SHARED, TASK_SETTINGS, Run, kind_of, listed_tasks, method_class, settings_by_heading
from ..data import DATASETS
from ..data.augment import RESIZED_CROP
from ..recipes.start import complete_settings
from ..recipes.variants import variants
from ..tasks import named_task
from ..tasks.images import LARGE_IMAGE
from ..training.machine import CHECKPOINT_EVERY, Machine

_METAVARS = {str: "NAME", int: "N", float: "X"}
CACHE_HELP = "folder for decoded images (default: .bsam-cache next to the image files)"
DATA_HELP = "the data set of the run; needed only if it is a function of yours, which is called only if you name it"
MODEL_HELP = "the network of the run; needed only if it is a function of yours, which is called only if you name it"
TASK_HELP = "the task of the run; needed only if it is a class of yours, which is imported only if you name it"
DEVICE_HELP = "cpu, cuda, cuda:1, ...; auto uses a GPU if there is one (default: auto)"


# returns the group of flags with a heading, which is added to the help at its first use
FlagGroups: TypeAlias = Callable[[str], argparse._ArgumentGroup]


def add_run_flags(command: argparse.ArgumentParser, without: Collection[str] = ()) -> FlagGroups:
    """Add one flag per setting. Except for ``--set``, flags that are not given are missing from the namespace.

    The help shows the defaults, which come from ``Run`` and :func:`~bsam.lab.recipes.start.complete_settings`.

    Args:
        command: the command.
        without: settings that get no flag.

    Returns:
        the headings, for further flags.
    """
    own = _own_task(getattr(command, "words", ()))
    classes = (Run, *listed_tasks(own))
    groups: FlagGroups = cache(command.add_argument_group)
    hints = {name: hint for cls in classes for name, hint in get_type_hints(cls).items()} | {"task": str}
    of_data = "; ".join(f"{entry.model} for {entry.name}" for entry in DATASETS.values() if entry.model)
    defaults = {
        "model": f"the network of --init or of the --weights file; otherwise {of_data}",
        "weights": "`pretrained` for timm networks, otherwise `random`",
        "task": "the task of the data set",
        "augment": f"that of the data set; {RESIZED_CROP} with pretrained weights, for image files of at least "
        f"{LARGE_IMAGE} pixels",
    }
    if own is not None:
        defaults = {}
    presets = _presets_in_words(own)
    for title, field in ((title, field) for title, listed in settings_by_heading(own).items() for field in listed):
        if field.name in without:
            continue
        group = groups(title)
        if "flag" in field.metadata:
            pairs: dict[str, Any] = {"nargs": "+", "action": "extend", "metavar": "NAME=VALUE", "default": []}
            if field.name != "arguments":
                pairs |= {"default": argparse.SUPPRESS, "dest": field.name}
            group.add_argument(field.metadata["flag"], help=field.metadata["help"], **pairs)
            if field.name == "base_arguments":
                about = "the two betas of Adam and its variants, in short for --base-set betas=[B1,B2]"
                betas: dict[str, Any] = {"nargs": 2, "type": float, "metavar": ("B1", "B2")}
                group.add_argument("--betas", "--opt-betas", default=argparse.SUPPRESS, help=about, **betas)
            continue
        default = defaults.get(field.name, field.default)
        for values, when in presets:
            if field.name in values:
                default = f"{default}; {values[field.name]} {when}"
        shown = "" if default is MISSING or default is None else f" (default: {default})"
        if f"--{field.name.replace('_', '-')}" in command._option_string_actions:
            raise BsamValueError(f"{field.name} of {own} is also a flag of `{command.prog}`: choose another name")
        group.add_argument(
            f"--{field.name.replace('_', '-')}",
            *field.metadata.get("timm", ()),
            dest=field.name,
            required=field.default is MISSING,
            default=argparse.SUPPRESS,
            help=f"{field.metadata['help']}{shown}".replace("%", "%%"),
            **flag_kind(hints[field.name]),
        )
    return groups


def _own_task(words: Sequence[str]) -> str | None:
    """Return the task of the user that words of a command name, after importing it: its settings are flags, too."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--task", nargs="?")
    name = parser.parse_known_args(words)[0].task
    return named_task(name) if is_own(name) else None


def _presets_in_words(own: str | None) -> list[tuple[Mapping[str, Any], str]]:
    """Return the values of all presets, and when they apply."""
    words: list[tuple[Mapping[str, Any], str]] = []
    for kind in listed_tasks(own):
        # what the default task needs no words for
        task = [] if kind is type(Run.task) else [f"for {kind.name}"]
        words += [(preset.values, " ".join([*task, preset.words]).strip()) for preset in kind.presets]
    return [*words, *((preset.values, preset.words) for preset in SHARED)]


def add_checkpoint_flag(group: argparse._ArgumentGroup) -> None:
    """Add ``--checkpoint-every``, which is no setting: it does not change the result."""
    group.add_argument(
        "--checkpoint-every",
        type=float,
        default=CHECKPOINT_EVERY,
        help="minimum time between two checkpoints of a run, in seconds. A checkpoint is written only at the end of "
        f"an epoch; 0 writes one after every epoch (default: {CHECKPOINT_EVERY:g})",
        metavar="SECONDS",
    )


def machine_of(arguments: argparse.Namespace) -> Machine:
    """Return the machine of parsed flags; those that a command does not have keep their defaults."""
    names = [field.name for field in fields(Machine) if field.name in arguments]
    return Machine(**{name: getattr(arguments, name) for name in names})


def run_of(arguments: argparse.Namespace) -> Run:
    """Return the run of parsed flags, with the settings of :func:`settings_of`. The method may be a variant, such as
    ``bsam-2``, in upper or lower case.
    """
    method = arguments.method
    of_variant: Mapping[str, Any] = {}
    if is_own(method):
        method_class(method)
    else:
        known = {variant.name: variant for variant in variants().values() if not variant.radii}
        method = find_name("method", method, (BASE, *known), OWN_CLASS)
        if method != BASE and known[method].method != BASE:  # keep the name: Run accepts sgd only with base SGD
            of_variant = known[method].arguments
            method = known[method].method
    return Run.of(method, {**of_variant, **named_values(arguments.set)}, **settings_of(arguments))


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings except the method and its arguments: parsed flags, and defaults that depend on them."""
    own = arguments.task if is_own(getattr(arguments, "task", None)) else None
    known = [field for listed in settings_by_heading(own).values() for field in listed]
    names = [field.name for field in known if field.name not in ("method", "arguments")]
    given = {name: getattr(arguments, name) for name in names if name in arguments}
    if "task" in given and own is None:
        given["task"] = find_name("task", given["task"], TASK_SETTINGS, OWN_CLASS)
    if "base_arguments" in given:
        given["base_arguments"] = named_values(given["base_arguments"], "--base-set", "eps=1e-6")
    if "betas" in arguments:
        if "betas" in (others := given.get("base_arguments", {})):
            raise BsamValueError("--betas and --base-set betas=... give the same argument: leave one of them out")
        given["base_arguments"] = {**others, "betas": arguments.betas}
    return complete_settings(given, getattr(arguments, "data_dir", None), getattr(arguments, "out", None))


def flag_kind(hint: Any) -> dict[str, Any]:
    """Return how the flag of a setting with this annotation takes its value; None means that it is not given."""
    kind = kind_of(hint)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if kind in _METAVARS:
        return {"type": kind, "metavar": _METAVARS[kind]}
    choices = get_args(kind)
    return {"choices": choices, "type": type(choices[0])}
