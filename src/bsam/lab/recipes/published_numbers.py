"""Published numbers: test accuracy (for poses PCKh@0.5) in %, as the paper printed them, in ``published.json``."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from ...common.checks import is_number
from ...methods import METHODS
from ..training.config import BASE, Run, arguments_of
from .variants import BSAMS, MATCHED, arguments, variant_of, variants

EPOCHS = {"classification": 200, "fine-tuning": 30}  # of the published numbers, where the paper states them
PHOTOGRAPHS = ("mpii", "lspet")  # pose data sets; the paper's is MPII
STANDS_FOR = {  # networks whose weights can be converted: the paper's networks that they replace
    "resnet50": "timm:resnet50",
    **dict.fromkeys((f"timm:tf_efficientnet_lite{i}" for i in range(3)), "timm:efficientnet_b0"),
}
OTHER_NETWORK = "published for EfficientNet-B0; Lite networks lack squeeze-and-excitation and use ReLU6, not swish"


@dataclass(frozen=True)
class Published:
    """A published number in the unit of the table, its standard deviation (None if not published) and a footnote."""

    mean: float
    std: float | None = None
    note: str = ""


@dataclass(frozen=True)
class PublishedTable:
    """A table of ``published.json``: the settings that identify its numbers, and what to say below it."""

    keys: Sequence[str]
    numbers: Mapping[tuple[Any, ...], Published]
    about: str
    decimals: int


@cache
def published_tables() -> dict[str, PublishedTable]:
    """Return all tables of published numbers, by name."""
    content = json.loads((files(__package__) / "published.json").read_text())
    notes = {None: "", **content.pop("notes")}
    tables = {}
    for name, table in content.items():
        size = len(table["keys"])
        numbers = {}
        for row in table["numbers"]:
            mean, std, note = [*row[size:], None, None][:3]
            numbers[tuple(row[:size])] = Published(mean, std, notes[note])
        tables[name] = PublishedTable(table["keys"], numbers, " ".join(table["about"]), table["decimals"])
    return tables


def published_number(table: str, run: Run, measure: str = "pck") -> Published | None:
    """Return the number of a table for the method and the settings of a run; None if there is none.

    The variants of BSAM share one number. The number of epochs may differ from that of the paper.

    Args:
        table: a name in ``published.json``.
        run: the run.
        measure: for poses, the name of the measure.

    Example:
        >>> published_number(
        ...     "classification", Run("bsam", {"passes": 2}, model="resnet18", data="cifar10")
        ... )
        Published(mean=96.82, std=0.12, note='')
    """
    name = variant_of(run).name
    return _numbers(table, run, ["bsam" if name in BSAMS else name], measure)[0]


def _numbers(table: str, run: Run, methods: Iterable[str], measure: str = "pck") -> list[Published | None]:
    """Return the numbers of a table for the settings of a run and other methods."""
    source = published_tables()[table]
    model = STANDS_FOR.get(run.model, run.model) if table == "transfer" else run.model
    settings = {**all_arguments(run.method, run.arguments), **run.settings(), "measure": measure, "model": model}
    numbers = []
    for method in methods:
        settings["method"] = method
        number = source.numbers.get(tuple(settings.get(key) for key in source.keys))
        if number is not None and "lite" in run.model:
            number = replace(number, note=OTHER_NETWORK)
        numbers.append(number)
    return numbers


@cache
def _defaults(method: str) -> Mapping[str, Any]:
    if method == BASE:
        return {}
    parameters = inspect.signature(METHODS[method]).parameters
    defaults = {name: parameters[name].default for name in arguments_of(method)}
    return {name: value for name, value in defaults.items() if value is not inspect.Parameter.empty}


def all_arguments(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of a method, with defaults for those not given; a rho_floor equal to rho becomes None."""
    values = {**_defaults(method), **given}
    if values.get("rho_floor") is not None and values["rho_floor"] == values.get("rho"):
        values["rho_floor"] = None
    return values


def total_radius(run: Run) -> float | None:
    """Return rho, or rho_max + rho_min; None if the method has neither.

    To first order in the radii, SAM and BSAM correct the gradient in proportion to it.
    """
    values = all_arguments(run.method, run.arguments)
    names = ("rho_max", "rho_min") if "rho_max" in values else ("rho",)
    radii: list[Any] = [values.get(name) for name in names]
    return float(sum(radii)) if all(map(is_number, radii)) else None


def paper_arguments(run: Run) -> Mapping[str, Mapping[str, Any]]:
    """Return all arguments of each variant of a run's method at the paper's radii, by the variant's name.

    For poses and for fine-tuning, these are the radii of CIFAR-10.
    """
    return _arguments_on(run.method, "cifar10" if run.task.name == "pose" or run.weights is not None else run.data)


@cache
def _arguments_on(method: str, data: str) -> Mapping[str, Mapping[str, Any]]:
    of_method = [variant for variant in variants().values() if variant.method == method]
    return {variant.name: all_arguments(method, arguments(variant, data)) for variant in of_method}


def paper_variant(run: Run) -> str | None:
    """Return the variant whose arguments at the paper's radii are exactly those of a run; None if there is none.

    Example:
        >>> (
        ...     paper_variant(Run("sam", data="cifar10")),
        ...     paper_variant(Run("sam", {"rho": 0.1}, data="cifar10")),
        ... )
        ('sam', 'sam-sum')
        >>> paper_variant(Run("sam", {"rho": 0.2}, data="cifar10"))
    """
    if run.method == BASE:
        return run.base
    ours, theirs = all_arguments(run.method, run.arguments), paper_arguments(run)
    return next((name for name, values in theirs.items() if values == ours), None)


def paper_table(run: Run) -> str | None:
    """Return the name of the paper's table for the experiment of a run; None if the run has another protocol."""
    unset = (run.limit_train, run.limit_test, run.clip_norm, run.ema)
    if any(value is not None for value in unset) or run.base_arguments:
        return None
    if run.task.name == "pose":
        return "pose" if run.base == "adam" else None
    if run.base != "sgd":
        return None
    if run.task.weight_bits is not None:
        return "quantization"
    if run.weights is not None:
        return "transfer" if run.epochs == EPOCHS["fine-tuning"] and not run.task.label_noise else None
    if run.epochs != EPOCHS["classification"] or run.init is not None:
        return None
    if run.task.label_noise:
        return "label-noise" if run.model == "resnet18" else None
    return "classification"


def published_numbers(run: Run) -> dict[str, Published]:
    """Return the numbers of the paper for the experiment of a run, by method; empty if there are none.

    Example:
        >>> numbers = published_numbers(Run("sam", model="resnet18", data="cifar10"))
        >>> numbers["sgd"].mean, numbers["bsam"].mean
        (96.18, 96.82)
        >>> published_numbers(Run("sam", model="resnet18", data="cifar10", epochs=60))
        {}
    """
    table = paper_table(run)
    if table is None or run.eval_split != "test":
        return {}
    methods = (run.base, *METHODS)
    numbers = dict(zip(methods, _numbers(table, run, methods), strict=True))
    return {method: number for method, number in numbers.items() if number is not None}


def claimed_numbers(run: Run) -> tuple[dict[str, Published], str]:
    """Return the paper's numbers for a run's experiment or for a similar one, by method, and a note on the difference.

    Similar experiments are poses on other photographs, and labels drawn from the other classes, so that more are wrong.
    """
    table, numbers = paper_table(run), published_numbers(run)
    if numbers:
        note = numbers["bsam"].note
        return numbers, f"{note[0].upper()}{note[1:]}." if note else ""
    if table == "pose" and run.data in PHOTOGRAPHS:
        similar = published_numbers(replace(run, data="mpii", eval_split="test"))
        return similar, "The paper uses MPII and does not state its radii."
    if table == "label-noise" and run.settings().get("noise_labels") == "other":
        similar = published_numbers(run.changed(noise_labels="all"))
        return similar, "The published tables draw labels from all classes, so that fewer are wrong."
    return {}, ""


def number_for(run: Run, numbers: Mapping[str, Published], tuned: bool) -> Published | None:
    """Return the number of a run's variant if it has the paper's radii or tuned ones; None otherwise."""
    name = variant_of(run).name if tuned else paper_variant(run)
    return numbers.get("bsam" if name in BSAMS else name or "")


def published_for(run: Run, tuned: bool) -> float | None:
    """Return the published number for a run that has the paper's radii or tuned ones; None if there is none."""
    numbers = published_numbers(run)
    number = number_for(run, numbers, tuned)
    is_study = paper_table(run) == "classification" and (run.model, run.method) == ("resnet18", "bsam")
    if number is None and is_study and numbers:
        rho_max = all_arguments("bsam", run.arguments)["rho_max"]
        if rho_max == paper_arguments(run)["bsam"]["rho_max"]:
            number = published_number("rho-min", run)
    return None if number is None else number.mean


def radius_choice(run: Run) -> str:
    """Return how the radius of a run that was not tuned was chosen; empty if it has none."""
    values = all_arguments(run.method, run.arguments)
    radii = {name: value for name, value in values.items() if name.startswith("rho")}
    if not radii:
        return ""
    name = paper_variant(run)
    if name is not None and claimed_numbers(run)[0] and run.task.name != "pose":  # the paper states no radii for poses
        return "BSAM's total radius" if name in MATCHED else "the paper's"
    return "default" if radii.items() <= _defaults(run.method).items() else "set by hand"
