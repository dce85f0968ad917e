"""The methods as tables list them, with their settings for each data set."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ...methods import METHODS
from ..common.names import is_own
from ..config import BASE, Run, arguments_of, known_method, method_class, method_title

Arguments: TypeAlias = Mapping[str, Any]

# In these tables, a method without an entry gets its defaults.
# Arguments that are set to SAM's radius for the data set.
SAM_RADII: Mapping[str, tuple[str, ...]] = {
    "bsam": ("rho_max", "rho_min"),
    **dict.fromkeys(("sam", "gsam", "looksam", "esam", "ksam", "aesam", "rst"), ("rho",)),
}

# Arguments for some data sets.
DATA_ARGUMENTS: Mapping[str, Mapping[str, Arguments]] = {
    "asam": {"cifar100": {"rho": 1.0}},
    "friendly_sam": {"cifar100": {"rho": 0.2, "decay": 0.6}},
    "ksam": {"digits": {"k": 32}},  # half of a batch, as on CIFAR
    "mesa": {"digits": {"start_epoch": 0}},  # the default is for 200 epochs
    "msam": {"digits": {"rho": 0.3}},  # the default is for networks a thousand times as large
    "saf": {"digits": {"start_epoch": 0, "epochs_back": 1}},  # the default is for 200 epochs
}

# The candidates of the demo: three for each method that has an entry or an argument rho.
DEFAULT_CANDIDATES: tuple[Arguments, ...] = ({"rho": 0.1}, {"rho": 0.2}, {"rho": 0.4})
CANDIDATES: Mapping[str, tuple[Arguments, ...]] = {
    "asam": ({"rho": 0.5}, {"rho": 1.0}, {"rho": 2.0}),
    "bsam": tuple({"rho_max": rho, "rho_min": rho} for rho in (0.05, 0.1, 0.2)),
    "gam": ({"rho_norm": 0.1}, {"rho_norm": 0.2}, {"rho_norm": 0.4}),
    "ksam": tuple({"rho": rho, "k": 32} for rho in (0.1, 0.2, 0.4)),
    "mesa": tuple({"lam": lam, "start_epoch": 1, "decay": 0.95} for lam in (0.3, 0.8, 2.0)),
    "msam": ({"rho": 0.3}, {"rho": 1.0}, {"rho": 3.0}),
    "saf": tuple({"lam": lam, "start_epoch": 1, "epochs_back": 2} for lam in (0.3, 1.0, 3.0)),
}

DEFAULT_RADIUS = 0.05  # of SAM and BSAM; the paper's on CIFAR-10
RADIUS_BY_DATA = {"cifar100": 0.1}  # the paper's radii on other data sets; a data set without an entry gets the default


@dataclass(frozen=True)
class MethodVariant:
    """A method as tables list it.

    Args:
        name: its name on the command line.
        title: its name in a table.
        method: a name in ``bsam.METHODS``, or ``"base"``.
        arguments: the arguments that differ from the method's first variant.
        radii: arguments that are multiples of the data set's radius.
        note: a line below tables with this variant.
    """

    name: str
    title: str
    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    radii: Mapping[str, float] = field(default_factory=dict, hash=False)
    note: str = ""


# The variants of methods that have several; the others are their only variant.
VARIANTS: Mapping[str, tuple[MethodVariant, ...]] = {
    "sam": (
        MethodVariant("sam", "SAM", "sam"),
        MethodVariant(
            "sam-sum",
            "SAM (sum)",
            "sam",
            radii={"rho": 2, "rho_floor": 2},
            note="SAM (sum): SAM at the total radius of BSAM, rho = rho_max + rho_min, fixed.",
        ),
        MethodVariant(
            "sam-follow",
            "SAM (follow)",
            "sam",
            radii={"rho": 2, "rho_floor": 1},
            note="SAM (follow): SAM whose radius falls with the learning rate from rho_max + rho_min to rho_max, as "
            "the total radius of BSAM does.",
        ),
    ),
    "bsam": (
        MethodVariant(
            "bsam",
            "BSAM (Algorithm 1)",
            "bsam",
            note="BSAM (Algorithm 1): as the paper states it, with three passes: at w, uphill and downhill.",
        ),
        MethodVariant(
            "bsam-2",
            "BSAM (2 passes)",
            "bsam",
            {"passes": 2},
            note="BSAM (2 passes): the gradient downhill is extrapolated from those at w and uphill.",
        ),
        MethodVariant(
            "bsam-released",
            "BSAM (as released)",
            "bsam",
            {"start_from_min": True},
            note="BSAM (as released): as the authors' code, which takes its step from the point downhill.",
        ),
    ),
}
BSAMS = tuple(variant.name for variant in VARIANTS["bsam"])
MATCHED = tuple(variant.name for variant in VARIANTS["sam"] if variant.radii)  # SAM at BSAM's total radius


def variants() -> Mapping[str, MethodVariant]:
    """Return all variants by name, in the order of the tables."""
    listed = [MethodVariant("sgd", "SGD", BASE)]
    for method, cls in METHODS.items():  # users may add methods
        listed += VARIANTS.get(method, (MethodVariant(method, cls.title, method),))
    return {variant.name: variant for variant in listed}


def arguments_on(variant: MethodVariant, data: str) -> dict[str, Any]:
    """Return the arguments of a method for a data set, without those that repeat a default.

    A data set for which no paper states a radius gets the method's default.

    Example:
        >>> (
        ...     arguments_on(variants()["sam"], "cifar10"),
        ...     arguments_on(variants()["sam"], "cifar100"),
        ... )
        ({}, {'rho': 0.1})
        >>> arguments_on(variants()["bsam-2"], "cifar100")
        {'rho_max': 0.1, 'rho_min': 0.1, 'passes': 2}
        >>> arguments_on(variants()["sam-follow"], "cifar100")
        {'rho': 0.2, 'rho_floor': 0.1}
    """
    if variant.method == BASE:
        return {}
    method = variant.method
    radius = RADIUS_BY_DATA.get(data, DEFAULT_RADIUS)
    shared = {} if radius == DEFAULT_RADIUS else dict.fromkeys(SAM_RADII.get(method, ()), radius)
    radii = {name: factor * radius for name, factor in variant.radii.items()}
    return {**shared, **DATA_ARGUMENTS.get(method, {}).get(data, {}), **variant.arguments, **radii}


def variant_of(run: Run) -> MethodVariant:
    """Return the variant that a run belongs to; the size of its radii does not matter."""
    if run.method == BASE:
        return MethodVariant(run.base, method_title(run), BASE)
    if run.method == "sam" and run.arguments.get("rho_floor") is not None:
        fixed = run.arguments["rho_floor"] == run.arguments.get("rho", DEFAULT_RADIUS)
        return variants()["sam-sum" if fixed else "sam-follow"]
    if is_own(run.method):
        return MethodVariant(run.method, method_title(run), run.method)
    matches = [
        variant
        for variant in variants().values()
        if variant.method == run.method and not variant.radii and variant.arguments.items() <= run.arguments.items()
    ]
    return max(matches, key=lambda variant: len(variant.arguments))


def all_arguments(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of a method, with defaults for those not given; a rho_floor equal to rho becomes None.

    The defaults of a class of the user that was not imported are unknown, and left out.
    """
    values: dict[str, Any] = {}
    is_unknown = is_own(method) and known_method(method) is None
    if method != BASE and not is_unknown:
        parameters = inspect.signature(method_class(method)).parameters
        defaults = {name: parameters[name].default for name in arguments_of(method)}
        values = {name: value for name, value in defaults.items() if value is not inspect.Parameter.empty}
    values |= given
    if values.get("rho_floor") is not None and values["rho_floor"] == values.get("rho"):
        values["rho_floor"] = None
    return values


def radius_choice(run: Run) -> str:
    """Return where the radii of a run that was not tuned come from; empty if its method has none.

    Example:
        >>> radius_choice(Run("sam")), radius_choice(Run("sam", {"rho": 0.2}))
        ('default', 'set by hand')
    """
    # a report does not import a class of the user, so its defaults are unknown there
    values = run.arguments if is_own(run.method) else all_arguments(run.method, run.arguments)
    radii = {name: value for name, value in values.items() if name.startswith("rho")}
    is_default = radii.items() <= all_arguments(run.method, {}).items()
    return ("default" if is_default else "set by hand") if radii else ""


def usual_arguments(run: Run, variant: MethodVariant) -> dict[str, Any]:
    """Return all arguments that recipes use for a variant with the settings of a run.

    For fine-tuning, the radii are those of CIFAR-10.
    """
    data = "cifar10" if run.weights is not None else run.data
    return all_arguments(variant.method, arguments_on(variant, data))


def passes_of(run: Run) -> float:
    """Return the forward and backward passes per step, on average if steps differ.

    Example:
        >>> passes_of(Run("sam", epochs=40, rho_start=10))
        1.75
    """
    if run.method == BASE:
        return 1
    passes = method_class(run.method).passes_with(run.arguments)
    return passes if not run.rho_start else passes + (1 - passes) * run.rho_start / run.epochs


def baseline_row(rows: Iterable[str], baseline: str) -> str | None:
    """Return the row that a user calls ``baseline``; None if there is none, or if several rows could be meant.

    Example:
        >>> baseline_row(["SGD", "BSAM (Algorithm 1)"], "bsam")
        'BSAM (Algorithm 1)'
        >>> baseline_row(["SGD", "SAM, rho 0.1", "SAM, rho 0.2"], "sam")
    """
    rows = list(rows)
    names = {baseline.casefold(), variants()[baseline].title.casefold() if baseline in variants() else ""}
    exact = [row for row in rows if row.casefold() in names]
    similar = [row for row in rows if row.partition(", ")[0].casefold() in names]
    return exact[0] if exact else similar[0] if len(similar) == 1 else None
