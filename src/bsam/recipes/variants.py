"""The methods as they stand in the tables, with their settings for each data set; and BSAM three times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..methods import METHODS
from ..training.config import Run


@dataclass(frozen=True)
class MethodVariant:
    """A method of the tables.

    Args:
        name: by which it is called on the command line.
        title: in a table.
        method: of :data:`bsam.methods.METHODS`, or ``"sgd"``.
        arguments: those in which it differs from its method's first variant.
    """

    name: str
    title: str
    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)


def variants() -> dict[str, MethodVariant]:
    """Return all methods of the tables, by name."""
    found = (
        MethodVariant("sgd", "SGD", "sgd"),
        *(MethodVariant(name, method.title, name) for name, method in METHODS.items() if name != "bsam"),
        MethodVariant("bsam", "BSAM (Algorithm 1)", "bsam"),
        MethodVariant("bsam-2", "BSAM (2 passes)", "bsam", {"passes": 2}),
        MethodVariant("bsam-released", "BSAM (as released)", "bsam", {"start_from_min": True}),
    )
    return {variant.name: variant for variant in found}


BSAMS = ("bsam", "bsam-2", "bsam-released")

RADIUS = {"cifar10": 0.05, "cifar100": 0.1, "digits": 0.05}  # SAM's, and BSAM's both
OF_SAM = ("sam", "gsam", "looksam", "esam", "ksam", "aesam", "rst")  # perturb as SAM does, and take its radius
OWN: Mapping[tuple[str, str], Mapping[str, Any]] = {  # where a data set has settings of its own
    ("asam", "cifar100"): {"rho": 1.0},
    ("friendly_sam", "cifar100"): {"rho": 0.2, "decay": 0.6},
    ("ksam", "digits"): {"k": 32},  # half of a batch there, too
    ("saf", "digits"): {"start_epoch": 1, "epochs_back": 1},  # for some epochs, not for two hundred
    ("mesa", "digits"): {"start_epoch": 1},
    ("msam", "digits"): {"rho": 0.3},  # the default is for networks a thousand times as large
}


def arguments(column: MethodVariant, data: str) -> dict[str, Any]:
    """The settings of a method for a data set. No argument repeats what is the default.

    Example:
        >>> arguments(variants()["sam"], "cifar10"), arguments(variants()["sam"], "cifar100")
        ({}, {'rho': 0.1})
        >>> arguments(variants()["bsam-2"], "cifar100")
        {'rho_max': 0.1, 'rho_min': 0.1, 'passes': 2}
    """
    radii = ("rho_max", "rho_min") if column.method == "bsam" else ("rho",) if column.method in OF_SAM else ()
    shared = {} if RADIUS[data] == RADIUS["cifar10"] else dict.fromkeys(radii, RADIUS[data])
    return {**shared, **OWN.get((column.method, data), {}), **column.arguments}


def variant_of(run: Run) -> MethodVariant:
    """The column that a run belongs to.

    Example:
        >>> variant_of(Run("bsam", {"rho_min": 0.01, "start_from_min": True})).title
        'BSAM (as released)'
    """
    own = [
        column
        for column in variants().values()
        if column.method == run.method and column.arguments.items() <= run.arguments.items()
    ]
    return max(own, key=lambda column: len(column.arguments))


def passes_of(run: Run) -> float:
    """Forward and backward passes a step.

    Example:
        >>> passes_of(Run("sgd")), passes_of(Run("bsam")), passes_of(Run("bsam", {"passes": 2}))
        (1, 3, 2)
    """
    return 1 if run.method == "sgd" else run.arguments.get("passes", METHODS[run.method].passes)
