"""Published numbers: test accuracy (for poses PCKh@0.5) in %, as the paper printed them, in ``published.json``."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from ...common.checks import is_number
from ..common.methods import known_method, method_class
from ..config import BASE, RADIUS_SCHEDULE, Run, arguments_of
from .variants import BSAMS, MATCHED, arguments, variant_of, variants

EPOCHS = {"classification": 200, "fine-tuning": 30}  # of the published numbers, where the paper states them
PHOTOGRAPHS = ("mpii", "lspet")  # pose data sets; the paper's is MPII
STANDS_FOR = {  # networks whose weights can be converted: the paper's networks that they replace
    "resnet50": "timm:resnet50",
    **dict.fromkeys((f"timm:tf_efficientnet_lite{i}" for i in range(3)), "timm:efficientnet_b0"),
}
OTHER_NETWORK = "published for EfficientNet-B0; Lite networks lack squeeze-and-excitation and use ReLU6, not swish"


@cache
def published_tables() -> dict[str, Any]:
    """Return the tables of ``published.json`` by name.

    ``keys`` are the settings that identify a number, ``numbers`` mean, standard deviation (None if not published) and
    footnote by the values of these settings.
    """
    tables: dict[str, Any] = json.loads((files(__package__) / "published.json").read_text())
    notes = tables.pop("notes")
    for table in tables.values():
        size = len(table["keys"])
        rows = [(tuple(row[:size]), [*row[size:], None, None]) for row in table["numbers"]]
        table["numbers"] = {
            key: {"mean": mean, "std": std, "note": notes.get(note, "")} for key, (mean, std, note, *_) in rows
        }
    return tables


def published_number(table: str, run: Run, method: str = "", measure: str = "pck") -> dict[str, Any] | None:
    """Return the number of a table for the settings of a run; None if there is none.

    The variants of BSAM share one number. The number of epochs may differ from that of the paper.

    Args:
        table: a name in ``published.json``.
        run: the run.
        method: the name of a variant; empty takes that of the run.
        measure: for poses, the name of the measure.

    Example:
        >>> published_number(
        ...     "classification", Run("bsam", {"passes": 2}, model="resnet18", data="cifar10")
        ... )
        {'mean': 96.82, 'std': 0.12, 'note': ''}
    """
    source, name = published_tables()[table], method or variant_of(run).name
    model = STANDS_FOR.get(run.model, run.model) if table == "transfer" else run.model
    known = {"measure": measure, "model": model, "method": "bsam" if name in BSAMS else name}
    settings = {**all_arguments(run.method, run.arguments), **run.settings(), **known}
    number: dict[str, Any] | None = source["numbers"].get(tuple(settings.get(key) for key in source["keys"]))
    return {**number, "note": OTHER_NETWORK} if number is not None and "lite" in run.model else number


def _defaults(method: str) -> Mapping[str, Any]:
    return {} if method == BASE or known_method(method) is None else _defaults_of_known(method)


@cache
def _defaults_of_known(method: str) -> Mapping[str, Any]:
    parameters = inspect.signature(method_class(method)).parameters
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
    base = "adam" if run.task.name == "pose" else "sgd"
    if any(value is not None for value in unset) or run.base_arguments or run.base != base:
        return None
    if any(getattr(run, name) for name in RADIUS_SCHEDULE):
        return None
    if run.task.name == "pose":
        return "pose"
    if run.task.weight_bits is not None:
        return "quantization"
    if run.weights is not None:
        return "transfer" if run.epochs == EPOCHS["fine-tuning"] and not run.task.label_noise else None
    if run.epochs != EPOCHS["classification"] or run.init is not None:
        return None
    if run.task.label_noise:
        return "label-noise" if run.model == "resnet18" else None
    return "classification"


def _paper_number(run: Run, name: str | None) -> dict[str, Any] | None:
    """Return the paper's number for the experiment of a run and a variant; None if there is none."""
    table = paper_table(run)
    return published_number(table, run, name) if table and name and run.eval_split == "test" else None


def _claimed_run(run: Run) -> tuple[Run, str]:
    """Return the run that the paper's claims are about, and a note on how it differs from this one.

    Similar experiments are poses on other photographs, and labels drawn from the other classes, so that more are wrong.
    """
    table, number = paper_table(run), _paper_number(run, "bsam")
    if number is not None:
        note = number["note"]
        return run, f"{note[0].upper()}{note[1:]}." if note else ""
    if table == "pose" and run.data in PHOTOGRAPHS:
        return replace(run, data="mpii", eval_split="test"), "The paper uses MPII and does not state its radii."
    if table == "label-noise" and run.settings().get("noise_labels") == "other":
        note = "The published tables draw labels from all classes, so that fewer are wrong."
        return run.changed(noise_labels="all"), note
    return run, ""


def describe_paper(run: Run, tuned: bool) -> dict[str, Any]:
    """Return what a run has in common with the paper: how its radius was chosen, and the numbers to compare it with.

    ``published`` is the number of the same experiment, ``claimed`` that of a similar one. A run that was not tuned has
    them only at the paper's radii.

    Example:
        >>> describe_paper(Run("sam", model="resnet18", data="cifar10"), tuned=False)
        {'chosen': "the paper's", 'published': 96.74, 'claimed': 96.74, 'note': ''}
        >>> describe_paper(
        ...     Run("sam", model="resnet18", data="cifar10", epochs=60), tuned=False
        ... )
        {'chosen': 'default', 'published': None, 'claimed': None, 'note': ''}
    """
    exact = paper_variant(run)
    name = variant_of(run).name if tuned else exact
    similar, note = _claimed_run(run)
    published, claimed = _paper_number(run, name), _paper_number(similar, name)
    if published is None and (run.model, run.method) == ("resnet18", "bsam") and paper_table(run) == "classification":
        rho_max = all_arguments("bsam", run.arguments)["rho_max"]
        if _paper_number(run, "bsam") and rho_max == paper_arguments(run)["bsam"]["rho_max"]:
            published = published_number("rho-min", run)
    radii = {key: value for key, value in all_arguments(run.method, run.arguments).items() if key.startswith("rho")}
    chosen = "default" if radii.items() <= _defaults(run.method).items() else "set by hand"
    if exact and run.task.name != "pose" and _paper_number(similar, "bsam"):  # the paper states no radii for poses
        chosen = "BSAM's total radius" if exact in MATCHED else "the paper's"
    return {
        "chosen": chosen if radii and not tuned else "",
        "published": published and published["mean"],
        "claimed": claimed and claimed["mean"],
        "note": note,
    }
