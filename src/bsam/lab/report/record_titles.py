"""Which experiment and which row of a report page a run belongs to, their titles, and the published numbers."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ...common.errors import BsamValueError
from ...methods import METHODS
from ..data import dataset_entry
from ..models import model_entry
from ..recipes.candidates import TUNING_SEED, settings_text
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

# how a radius was chosen
PAPER, DEFAULT, BY_HAND = "the paper's", "default", "set by hand"
TUNED = {"holdout": "tuned on held-out samples", "validation": "tuned on validation samples"}  # by split
TOTAL = "BSAM's total radius"
# settings that may differ between runs that are compared; init names another run, so it differs between seeds
NOT_COMPARED = (
    *("method", "arguments", "seed", "init", "compile", "capture", "skip_corrupt"),
    *("probe", "radius", "curvature", "surface"),
)
PHOTOGRAPHS = ("mpii", "lspet")  # pose data sets; the paper's is MPII
PAPER_TABLES = (CLASSIFICATION, LABEL_NOISE, POSE, QUANTIZATION, RHO_MIN_STUDY, TRANSFER)
EPOCHS = {"classification": 200, "fine-tuning": 30}  # of the published numbers, where the paper states them


def is_trial(run: Run) -> bool:
    """Return whether a run only served to choose settings."""
    return run.seed >= TUNING_SEED and run.eval_split != "test"


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
    if run.limit_train is not None or run.limit_test is not None:
        return None
    if run.clip_norm is not None or run.ema is not None or run.base_arguments:
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
        return TOTAL if name in MATCHED else PAPER
    return DEFAULT if radii.items() <= _defaults(run.method).items() else BY_HAND


def experiment_key(run: Run, varied: Collection[str] = ()) -> str:
    """Return a text that is equal for runs that can be compared.

    Args:
        run: a run.
        varied: names of settings that tuning may have changed, which then need not be equal.
    """
    settings = {name: value for name, value in run.settings().items() if name not in {*NOT_COMPARED, *varied}}
    weights = None if run.weights is None else Path(run.weights).name
    return json.dumps({**settings, "init": run.init is not None, "weights": weights}, sort_keys=True)


def candidate_key(run: Run, varied: Collection[str]) -> str:
    """Return a text that is equal for a tuning run and for the final runs with the same settings."""
    settings = run.settings()
    method = {"method": run.method, "arguments": all_arguments(run.method, run.arguments)}
    values = {name: settings[name] for name in varied}
    unset = {"eval_split": None, "limit_test": None}
    return json.dumps({**json.loads(experiment_key(run, varied)), **unset, **method, **values}, sort_keys=True)


def tuned_settings(trials: Sequence[Run]) -> set[str]:
    """Return the names of the settings, besides the arguments of methods, that tuning runs vary."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in trials:
        experiment = run.model, run.data, run.label_noise, run.noise_labels, run.weight_bits, run.seed
        groups.setdefault((*experiment, variant_of(run).name), []).append(run.settings())
    return {
        name
        for group in groups.values()
        for name in group[0]
        if name not in NOT_COMPARED and any(settings[name] != group[0][name] for settings in group)
    }


def experiment_titles(keys: Mapping[str, tuple[Run, float | None]]) -> dict[str, str]:
    """Return the title of each experiment by its key; equal titles get the settings in which the experiments differ.

    Args:
        keys: a run of each experiment and its share of wrong labels if that is stored, by its key.
    """
    titles = {key: _title(*about) for key, about in keys.items()}
    for title in set(titles.values()):
        same = {key: json.loads(key) for key, other in titles.items() if other == title}
        for key, settings in same.items():
            different = [
                f"{name.replace('_', ' ')} {value}"
                for name, value in settings.items()
                if any(other.get(name) != value for other in same.values())
            ]
            titles[key] = ", ".join([title, *different])
    return titles


def _title(run: Run, wrong: float | None) -> str:
    parts = [model_title(run.model), _entry_title(dataset_entry, run.data)]
    if run.label_noise:
        parts.append(run.noise_text(wrong))
    if run.weight_bits is not None:
        parts.append(f"{run.weight_bits} bits")
    if run.weights is not None:
        parts.append("pretrained")
    if run.limit_train is not None:
        parts.append(f"{run.limit_train:,} training samples")
    if run.eval_split != "test":
        parts.append(f"scored on {run.eval_split}")
    return ", ".join([*parts, f"{run.epochs} epoch{'s' * (run.epochs > 1)}"])


def model_title(name: str) -> str:
    """Return the title of a network."""
    return _entry_title(model_entry, name)


def _entry_title(entry: Callable[[str], Any], name: str) -> str:
    try:
        return str(entry(name).title)
    except BsamValueError:  # a network or a data set that this version does not have
        return name


def row_titles(runs: Sequence[Run], tuned: Sequence[bool], varied: Sequence[str] = ()) -> list[str]:
    """Return the row title of each run: its method, and the settings that set it apart from others of that method.

    In the paper's experiments, the row of a method at the paper's radii is just its name. If BSAM has such a row, SAM
    with a fixed radius equal to BSAM's total radius is titled SAM (sum), with or without ``rho_floor``.

    Args:
        runs: all runs of the experiment.
        tuned: whether the settings of each run were tuned.
        varied: the names of settings that may differ, besides the arguments of methods, in order.
    """
    names = [
        None if was_tuned or not of_paper(run) else paper_variant(run)
        for run, was_tuned in zip(runs, tuned, strict=True)
    ]
    if not any(name in BSAMS for name in names):
        names = [None if name in MATCHED else name for name in names]
    with_both = any(tuned) and any(run.method != BASE and not by for run, by in zip(runs, tuned, strict=True))
    titles, values = [], []
    for run, was_tuned, name in zip(runs, tuned, names, strict=True):
        title = variants()[name].title if name in variants() else variant_of(run).title
        what = f" {settings_text(varied)}" if run.method == BASE else ""
        titles.append(f"{title}, tuned{what}" if was_tuned and with_both else title)
        settings = run.settings()
        values.append({**all_arguments(run.method, run.arguments), **{key: settings[key] for key in varied}})
    rows = []
    for run, name, title, ours in zip(runs, names, titles, values, strict=True):
        same = [theirs for other, theirs in zip(titles, values, strict=True) if other == title]
        different = [key for key, value in ours.items() if any(theirs.get(key) != value for theirs in same)]
        bare = name is not None and run.method != BASE
        words = [] if bare else [f"{key.replace('weight_', 'weight ')} {_text(ours[key])}" for key in different]
        rows.append(", ".join([title, *words]))
    return rows


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
