"""Which experiment and which row of a report a run belongs to, and their titles."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...common.errors import BsamValueError
from ..common.grouping import count_text, group_by
from ..data import dataset_entry
from ..models import model_entry
from ..recipes.candidates import TUNING_SEED, settings_text
from ..recipes.variants import BSAMS, MATCHED, variant_of, variants
from ..training.config import BASE, Run
from .paper_numbers import all_arguments, of_paper, paper_variant

# settings that may differ between runs that are compared; init names another run, so it differs between seeds
MEASUREMENTS = {"probe", "radius", "curvature", "surface"}
NOT_COMPARED = {"method", "arguments", "seed", "init", "compile", "capture", "skip_corrupt"} | MEASUREMENTS


def is_trial(run: Run) -> bool:
    """Return whether a run only served to choose settings."""
    return run.seed >= TUNING_SEED and run.eval_split != "test"


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
    same = ("model", "data", "label_noise", "noise_labels", "weight_bits", "seed")
    groups = group_by(trials, lambda run: (variant_of(run).name, *(getattr(run, name) for name in same)))
    settings = [[run.settings() for run in group] for group in groups.values()]
    return {
        name
        for first, *others in settings
        for name in first
        if name not in NOT_COMPARED and any(other[name] != first[name] for other in others)
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
    parts = [_entry_title(model_entry, run.model), _entry_title(dataset_entry, run.data)]
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
    return ", ".join([*parts, count_text(run.epochs, "epoch")])


def _entry_title(entry: Callable[[str], Any], name: str) -> str:
    try:
        return str(entry(name).title)
    except BsamValueError:  # a network or a data set that this version does not have
        return name


def titles_of(run: Run) -> tuple[str, str]:
    """Return the titles of network and data, or their names if a user's task defines them."""
    try:
        return model_entry(run.model).title, dataset_entry(run.data).title
    except BsamValueError:
        return run.model, run.data


def network_and_data(run: Run) -> str:
    """Return network and data set as text."""
    return " on ".join(titles_of(run))


def row_titles(runs: Sequence[Run], tuned: Sequence[bool], varied: Sequence[str] = ()) -> list[str]:
    """Return the row title of each run: its method, and the settings that set it apart from others of that method.

    In the paper's experiments, the row of a method at the paper's radii is just its name. If BSAM has such a row, SAM
    with a fixed radius equal to BSAM's total radius is titled SAM (sum), with or without ``rho_floor``.

    Args:
        runs: all runs of the experiment.
        tuned: whether the settings of each run were tuned.
        varied: the names of settings that may differ, besides the arguments of methods, in order.
    """
    names = [None if by or not of_paper(run) else paper_variant(run) for run, by in zip(runs, tuned, strict=True)]
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
        if name is not None and run.method != BASE:  # at the paper's radii
            rows.append(title)
            continue
        same = [theirs for other, theirs in zip(titles, values, strict=True) if other == title]
        different = [key for key, value in ours.items() if any(theirs.get(key) != value for theirs in same)]
        texts = {key: f"{ours[key]:g}" if isinstance(ours[key], float) else ours[key] for key in different}
        words = [f"{key.replace('weight_', 'weight ')} {text}" for key, text in texts.items()]
        rows.append(", ".join([title, *words]))
    return rows
