"""The methods as the tables list them, with their settings for each data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..methods import METHODS
from ..training.config import BASE, Run, method_title
from .method_settings import DATA_ARGUMENTS, SAM_RADII, VARIANTS

BSAMS = tuple(VARIANTS["bsam"])
RADIUS = {"cifar10": 0.05, "cifar100": 0.1, "digits": 0.05}  # SAM's, and both of BSAM's
# SAM at BSAM's total radius: title, and rho and rho_floor in units of RADIUS
MATCHED = {"sam-sum": ("SAM (sum)", 2, 2), "sam-follow": ("SAM (follow)", 2, 1)}
MATCHED_NOTES = {  # by title
    "SAM (sum)": "SAM (sum): SAM at the total radius of BSAM, rho = rho_max + rho_min, fixed.",
    "SAM (follow)": "SAM (follow): SAM whose radius falls with the learning rate from rho_max + rho_min to rho_max, as "
    "the total radius of BSAM does.",
}


@dataclass(frozen=True)
class MethodVariant:
    """A method of the tables.

    Args:
        name: its name on the command line.
        title: its name in a table.
        method: of :data:`bsam.methods.METHODS`, or ``"base"``.
        arguments: those in which it differs from its method's first variant.
        radii: arguments that are multiples of the data set's radius.
    """

    name: str
    title: str
    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    radii: Mapping[str, float] = field(default_factory=dict, hash=False)


def variants() -> dict[str, MethodVariant]:
    """Return all methods of the tables, by name."""
    listed = [MethodVariant("sgd", "SGD", BASE)]
    for method, cls in METHODS.items():
        forms = VARIANTS.get(method, {method: (cls.title, {})})
        listed += [MethodVariant(name, title, method, arguments) for name, (title, arguments) in forms.items()]
        if method == "sam":
            listed += [
                MethodVariant(name, title, "sam", radii={"rho": rho, "rho_floor": floor})
                for name, (title, rho, floor) in MATCHED.items()
            ]
    return {variant.name: variant for variant in listed}


def arguments(variant: MethodVariant, data: str) -> dict[str, Any]:
    """Return the settings of a method for a data set. No argument repeats the default.

    Example:
        >>> arguments(variants()["sam"], "cifar10"), arguments(variants()["sam"], "cifar100")
        ({}, {'rho': 0.1})
        >>> arguments(variants()["bsam-2"], "cifar100")
        {'rho_max': 0.1, 'rho_min': 0.1, 'passes': 2}
        >>> arguments(variants()["sam-follow"], "cifar100")
        {'rho': 0.2, 'rho_floor': 0.1}
    """
    if variant.method == BASE:
        return {}
    method = variant.method
    shared = {} if RADIUS[data] == RADIUS["cifar10"] else dict.fromkeys(SAM_RADII.get(method, ()), RADIUS[data])
    radii = {name: factor * RADIUS[data] for name, factor in variant.radii.items()}
    return {**shared, **DATA_ARGUMENTS.get(method, {}).get(data, {}), **variant.arguments, **radii}


def variant_of(run: Run) -> MethodVariant:
    """Return the variant that a run belongs to; its radii may be any."""
    if run.method == BASE:
        return MethodVariant(run.base, method_title(run), BASE)
    if run.method == "sam" and run.arguments.get("rho_floor") is not None:
        fixed = run.arguments["rho_floor"] == run.arguments.get("rho", RADIUS["cifar10"])
        return variants()["sam-sum" if fixed else "sam-follow"]
    fitting = [
        variant
        for variant in variants().values()
        if variant.method == run.method and not variant.radii and variant.arguments.items() <= run.arguments.items()
    ]
    return max(fitting, key=lambda variant: len(variant.arguments))


def passes_of(run: Run) -> float:
    """Return the forward and backward passes per step."""
    return 1 if run.method == BASE else METHODS[run.method].passes_with(run.arguments)
