"""The paper's numbers for runs, its variants of the methods, and how the radius of a run was chosen."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from ...methods import METHODS
from ..recipes.candidates import settings_text
from ..recipes.paper import (
    CLASSIFICATION,
    LABEL_NOISE,
    POSE,
    QUANTIZATION,
    RHO_MIN_STUDY,
    TRANSFER,
    Published,
    PublishedTable,
)
from ..recipes.variants import BSAMS, MATCHED, arguments, variant_of, variants
from ..training.config import BASE, Run, arguments_of

TUNED = {"holdout": "tuned on held-out samples", "validation": "tuned on validation samples"}  # by split
PHOTOGRAPHS = ("mpii", "lspet")  # pose data sets; the paper's is MPII
PAPER_TABLES = (CLASSIFICATION, LABEL_NOISE, POSE, QUANTIZATION, RHO_MIN_STUDY, TRANSFER)
EPOCHS = {"classification": 200, "fine-tuning": 30}  # of the published numbers, where the paper states them


def all_arguments(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of a method, with defaults for those not given; a rho_floor equal to rho becomes None."""
    values = {**_defaults(method), **given}
    if values.get("rho_floor") is not None and values["rho_floor"] == values.get("rho"):
        values["rho_floor"] = None
    return values


@cache
def _defaults(method: str) -> Mapping[str, Any]:
    if method == BASE:
        return {}
    parameters = inspect.signature(METHODS[method]).parameters
    defaults = {name: parameters[name].default for name in arguments_of(method)}
    return {name: value for name, value in defaults.items() if value is not inspect.Parameter.empty}


@cache
def _at_paper(method: str, data: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the arguments of each variant of a method for a data set."""
    of_method = [variant for variant in variants().values() if variant.method == method]
    return {variant.name: all_arguments(method, arguments(variant, data)) for variant in of_method}


def total_radius(run: Run) -> float | None:
    """Return rho, or rho_max + rho_min; None if the method has neither."""
    values = all_arguments(run.method, run.arguments)
    names = ("rho_max", "rho_min") if "rho_max" in values else ("rho",)
    return float(sum(values[name] for name in names)) if set(names) <= set(values) else None


def published_table(run: Run) -> PublishedTable | None:
    """Return the paper's table for the experiment of a run; None if the run has another protocol."""
    unset = (run.limit_train, run.limit_test, run.clip_norm, run.ema)
    if any(value is not None for value in unset) or run.base_arguments:
        return None
    if run.task == "pose":
        return POSE if run.base == "adam" else None
    if run.base != "sgd":
        return None
    if run.weight_bits is not None:
        return QUANTIZATION
    if run.weights is not None:
        return TRANSFER if run.epochs == EPOCHS["fine-tuning"] and not run.label_noise else None
    if run.epochs != EPOCHS["classification"] or run.init is not None:
        return None
    if run.label_noise:
        return LABEL_NOISE if run.model == "resnet18" else None
    return CLASSIFICATION


def published_numbers(run: Run) -> dict[str, Published]:
    """Return the numbers of the paper for the experiment of a run, by method; empty if there are none.

    Example:
        >>> numbers = published_numbers(Run("sam", model="resnet18", data="cifar10"))
        >>> numbers["sgd"].mean, numbers["bsam"].mean
        (96.18, 96.82)
        >>> published_numbers(Run("sam", model="resnet18", data="cifar10", epochs=60))
        {}
        >>> published_numbers(Run("sam", model="resnet18", data="cifar10", ema=0.999))
        {}
    """
    table = published_table(run)
    if table is None or run.eval_split != "test":
        return {}
    settings = {**run.settings(), "measure": "pck"}
    method = table.keys.index("method")
    return {
        key[method]: number
        for key, number in table.numbers.items()
        if all(settings[name] == value for name, value in zip(table.keys, key, strict=True) if name != "method")
        and (run.weight_bits is not None or "weight_bits" not in table.keys)
    }


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
    data = "cifar10" if run.task == "pose" or run.weights is not None else run.data
    ours = all_arguments(run.method, run.arguments)
    return next((name for name, theirs in _at_paper(run.method, data).items() if theirs == ours), None)


def claimed_numbers(run: Run) -> tuple[dict[str, Published], str]:
    """Return the paper's numbers for a run's experiment or for a similar one, by method, and a note on the difference.

    Similar experiments are poses on other PHOTOGRAPHS, and labels drawn from the other classes, so that more are wrong.
    """
    table, numbers = published_table(run), published_numbers(run)
    if numbers:
        note = numbers["bsam"].note
        return numbers, f" {note[0].upper()}{note[1:]}." if note else ""
    if table is POSE and run.data in PHOTOGRAPHS:
        mean = {key[1]: number for key, number in POSE.numbers.items() if key[2] == "pck"}
        return mean, " The paper uses MPII and does not state its radii."
    if table is LABEL_NOISE and run.noise_labels == "other":
        numbers = published_numbers(replace(run, noise_labels="all"))
        return numbers, " The published tables draw labels from all classes, so that fewer are wrong."
    return {}, ""


def of_paper(run: Run) -> bool:
    """Return whether the paper has numbers for a run's experiment or for a similar one."""
    return bool(claimed_numbers(run)[0])


def published_for(run: Run, tuned: bool) -> float | None:
    """Return the published number for a run that has the paper's radii or tuned ones; None if there is none."""
    name = variant_of(run).name if tuned else paper_variant(run)
    numbers = published_numbers(run)
    number = numbers.get("bsam" if name in BSAMS else name or "")
    if number is None and published_table(run) is CLASSIFICATION and (run.model, run.method) == ("resnet18", "bsam"):
        values = all_arguments("bsam", run.arguments)
        if numbers and values["rho_max"] == _at_paper("bsam", run.data)["bsam"]["rho_max"]:
            number = RHO_MIN_STUDY.number({"data": run.data, "rho_min": values["rho_min"]})
    return None if number is None else number.mean


def radius_choice(run: Run, split: str | None, varied: Collection[str] = ()) -> str:
    """Return how a run's radius or tuned settings were chosen; empty if it has neither.

    Args:
        run: the run.
        split: the split that its settings were tuned on; None if they were not tuned.
        varied: the names of the tuned settings, besides the arguments of methods.
    """
    if split is not None:
        return f"{settings_text(sorted(varied))} {TUNED[split]}" if run.method == BASE else TUNED[split]
    values = all_arguments(run.method, run.arguments)
    radii = {name: value for name, value in values.items() if name.startswith("rho")}
    if not radii:
        return ""
    name = paper_variant(run)
    if name is not None and of_paper(run) and run.task != "pose":  # the paper states no radii for poses
        return "BSAM's total radius" if name in MATCHED else "the paper's"
    return "default" if radii.items() <= _defaults(run.method).items() else "set by hand"
