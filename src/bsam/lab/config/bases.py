"""The base optimizers of a run: the classes of torch.optim, by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ...common.errors import BsamValueError
from ..common.names import find_name

_CLASSES: dict[str, type[Optimizer]] = {
    name.lower(): cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer
}
UNUSABLE = {
    "lbfgs": "it evaluates the loss several times per step",
    "muon": "it takes only matrices, but networks have other parameters, too (in your own loop, use "
    "bsam.CombinedOptimizer)",
    "rprop": "it is made for gradients of the whole training set, and ignores the learning-rate schedule",
    "sparseadam": "it takes only sparse gradients, but those of the networks are dense",
}
BASES = {name: cls for name, cls in sorted(_CLASSES.items()) if name not in UNUSABLE}
# Steps of the others were not tested in a CUDA graph, or wait for the device.
CAPTURABLE = ("sgd", "adam", "adamw")
# Arguments that are settings of the run, and those that depend on the machine or that sharpness-aware steps exclude.
_OF_RUN = ("lr", "momentum", "nesterov", "weight_decay")
_NOT_SET = ("params", "foreach", "fused", "capturable", "maximize", "differentiable")


def find_base(name: object) -> str:
    """Return the name of a base optimizer in lower case; raise if there is none or it cannot train a network.

    Example:
        >>> find_base("RMSprop")
        'rmsprop'
    """
    if (lower := str(name).lower()) in UNUSABLE:
        raise BsamValueError(f"base must not be {lower}: {UNUSABLE[lower]}. Choose another, such as sgd or adamw")
    return find_name("base", name, BASES)


def parameters_of(base: str) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the optimizer's class."""
    return inspect.signature(BASES[base]).parameters


def check_base_arguments(base: str, arguments: object) -> None:
    """Raise unless the arguments are accepted by the base optimizer and are not settings of the run."""
    if not isinstance(arguments, Mapping):
        raise BsamValueError(f"base_arguments must map names to values, such as {{'eps': 1e-6}}; got {arguments!r}")
    for name in arguments:
        known = [known for known in parameters_of(base) if known not in (*_OF_RUN, *_NOT_SET)]
        if name in _OF_RUN:
            raise BsamValueError(f"base_arguments must not contain {name}, which is a setting of the run: set {name}")
        if name not in known:
            raise BsamValueError(f"base {base} has no argument {name!r}: its base_arguments are {', '.join(known)}")
    if arguments:
        try:
            BASES[base]([torch.zeros(1)], **as_tuples(arguments))
        except (TypeError, ValueError, IndexError) as error:
            raise BsamValueError(f"base {base} does not take {dict(arguments)}: {error}") from error


def as_tuples(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with tuples in place of lists, as which JSON stores them."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in arguments.items()}
