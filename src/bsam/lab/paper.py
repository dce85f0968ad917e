"""The paper: its published numbers (in ``published.json``), its radii and its claims, and what runs say about them.

Runs and their directories know nothing of it: :func:`join` adds it to the table of runs when a table or a page is made.
Numbers are test accuracy (for poses PCKh@0.5) in %, as the paper printed them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

import pandas as pd

from ..common.errors import BsamValueError
from .analysis.significance import BETTER, WORSE, compare_family
from .config import BASE, RADIUS_SCHEDULE, ClassificationSettings, Run
from .recipes.plan import measured_on
from .recipes.start import STANDS_FOR
from .recipes.variants import (
    BSAMS,
    MATCHED,
    all_arguments,
    radius_choice,
    usual_arguments,
    variant_of,
    variants,
)

PUBLISHED_EPOCHS = {"classification": 200, "fine-tuning": 30}  # of the published numbers, where the paper states them
PHOTOGRAPHS = ("mpii", "lspet")  # pose data sets; the paper's is MPII
OTHER_NETWORK = "published for EfficientNet-B0; Lite networks lack squeeze-and-excitation and use ReLU6, not swish"
CONFIRMED = "confirmed"
CONTRADICTED = "contradicted"
OPEN = "open"
OUTCOMES = {BETTER: CONFIRMED, WORSE: CONTRADICTED}  # everything else is open
PAPER_RADII = "at the paper's radii"
OUR_RADII = "at our radii"  # where the paper states none
MATCHED_RADII = "at matched radii"
TUNED_RADII = "at tuned radii"
NO_MATCH = "SAM at BSAM's total radius"  # no such run exists
MATCHED_CHOICE = "BSAM's total radius"  # how the radius of such a run was chosen
UNKNOWN: Mapping[str, Any] = {"chosen": "", "published": None, "claimed": None, "note": ""}


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
    source = published_tables()[table]
    name = method or variant_of(run).name
    model = STANDS_FOR.get(run.model, run.model) if table == "transfer" else run.model
    known = {"measure": measure, "model": model, "method": "bsam" if name in BSAMS else name}
    settings = {**all_arguments(run.method, run.arguments), **run.settings(), **known}
    key = tuple(settings.get(name) for name in source["keys"])  # stored settings may have lists, which have no hash
    number: dict[str, Any] | None = next((number for known, number in source["numbers"].items() if known == key), None)
    return {**number, "note": OTHER_NETWORK} if number is not None and "lite" in run.model else number


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
    ours = all_arguments(run.method, run.arguments)
    of_method = [variant for variant in variants().values() if variant.method == run.method]
    return next((variant.name for variant in of_method if usual_arguments(run, variant) == ours), None)


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
    if not isinstance(run.task, ClassificationSettings):
        return None
    if run.task.weight_bits is not None:
        return "quantization"
    if run.weights is not None:
        return "transfer" if run.epochs == PUBLISHED_EPOCHS["fine-tuning"] and not run.task.label_noise else None
    if run.epochs != PUBLISHED_EPOCHS["classification"] or run.init is not None:
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
    table = paper_table(run)
    number = _paper_number(run, "bsam")
    if number is not None:
        note = number["note"]
        return run, f"{note[0].upper()}{note[1:]}." if note else ""
    if table == "pose" and run.data in PHOTOGRAPHS:
        return replace(run, data="mpii", eval_split="test"), "The paper uses MPII and does not state its radii."
    if table == "label-noise" and run.settings().get("noise_labels") == "other":
        note = "The published tables draw labels from all classes, so that fewer are wrong."
        return run.changed(noise_labels="all"), note
    return run, ""


def check_table(name: str) -> None:
    """Raise unless this is the name of a table of published numbers, or empty."""
    if name and name not in published_tables():
        raise BsamValueError(f"published must be one of {', '.join(published_tables())}; got {name!r}")


def join(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a table of runs with what the paper says about each, from its settings and whether it was tuned.

    ``published`` is the number of the same experiment, or that of the table that the run's recipe shows; ``claimed``
    is the number that :func:`paper_claims` uses, perhaps of a similar experiment, and ``note`` says how that one
    differs. ``chosen`` says where the radius of a run that was not tuned comes from. Values of ``published`` and
    ``chosen`` that are stored with a run stay.

    Args:
        runs: a table of :func:`bsam.lab.read_runs`.
    """
    known = [_of_row(run) for run in runs[["settings", "tuned", "published_table"]].to_dict("records")]
    paper = pd.DataFrame(known, runs.index, columns=list(UNKNOWN))
    return runs.assign(
        chosen=runs["chosen"].where(runs["chosen"].notna(), paper["chosen"]),
        published=runs["published"].fillna(paper["published"].astype(float)).astype(float),
        claimed=paper["claimed"].astype(float),
        note=paper["note"],
    )


def _of_row(run: Mapping[str, Any]) -> Mapping[str, Any]:
    if not run["settings"]:  # of a CSV file
        return UNKNOWN
    return of_paper(Run.of(**run["settings"]), bool(run["tuned"]), run["published_table"])


def of_paper(run: Run, tuned: bool = False, table: str = "") -> dict[str, Any]:
    """Return what the paper says about a run, as :func:`join` adds it. A run that was not tuned has numbers only at
    the paper's radii.

    Args:
        run: the run.
        tuned: whether its radius was tuned.
        table: the table of published numbers that its recipe shows, at any number of epochs; empty if there is none.

    Example:
        >>> of_paper(Run("sam", model="resnet18", data="cifar10"))
        {'chosen': "the paper's", 'published': 96.74, 'claimed': 96.74, 'note': ''}
        >>> of_paper(Run("sam", model="resnet18", data="cifar10", epochs=60))
        {'chosen': 'default', 'published': None, 'claimed': None, 'note': ''}
    """
    exact = paper_variant(run)
    name = variant_of(run).name if tuned else exact
    similar, note = _claimed_run(run)
    published = _paper_number(run, name)
    claimed = _paper_number(similar, name)
    if published is None and (run.model, run.method) == ("resnet18", "bsam") and paper_table(run) == "classification":
        rho_max = all_arguments("bsam", run.arguments)["rho_max"]
        if _paper_number(run, "bsam") and rho_max == usual_arguments(run, variants()["bsam"])["rho_max"]:
            published = published_number("rho-min", run)
    if table in published_tables():
        published = published_number(table, run) or published
    chosen = "" if tuned else radius_choice(run)
    if chosen and exact and run.task.name != "pose" and _paper_number(similar, "bsam"):  # none are stated for poses
        chosen = MATCHED_CHOICE if exact in MATCHED else "the paper's"
    return {
        "chosen": chosen,
        "published": published and published["mean"],
        "claimed": claimed and claimed["mean"],
        "note": note,
    }


def paper_claims(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each claim of the paper for which there are runs, with the columns of ``compare_rows``.

    The claims are the order of the base optimizer, SAM and BSAM in the paper's table, and that the largest eigenvalue
    is smaller for BSAM than for the others. At the paper's radii, BSAM is compared with SAM at the same rho; at matched
    radii, with SAM at rho_max + rho_min, fixed or falling as BSAM's total radius does; at tuned radii, each method has
    the radius that was best on held-out samples. Comparisons with one method at several radii are corrected for each
    other (Holm). ``ours`` and ``theirs`` name the methods, ``at`` the radii, ``gap`` is the published difference, and
    ``outcome`` is confirmed, contradicted or open.

    Args:
        runs: a table of runs from :func:`join`.
    """
    table = []
    for _, group in runs[runs["settings"].notna()].groupby("experiment", sort=False):
        if group["claimed"].notna().any():
            table += _claims(group)
    return pd.DataFrame(table)


def _claims(group: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the claims of an experiment."""
    base = next(iter(group.loc[group["method"] == "base", "variant"]), "")
    paper = group[group["claimed"].notna()]
    numbers = paper.drop_duplicates("variant").set_index("variant")["claimed"]
    radii = OUR_RADII if group["settings"].iloc[0]["task"] == "pose" else PAPER_RADII
    parts = {radii: ~paper["tuned"], TUNED_RADII: paper["tuned"] | (paper["variant"] == base)}
    rows = {at: paper[part].drop_duplicates("variant").set_index("variant")["row"] for at, part in parts.items()}
    matched = group.loc[group["chosen"] == MATCHED_CHOICE, "row"].unique().tolist()
    claims = []
    for ours, theirs in (("sam", base), ("bsam", "sam")):
        if {ours, theirs} <= set(numbers.index):
            gap = numbers[ours] - numbers[theirs]
            higher, lower = (ours, theirs) if gap > 0 else (theirs, ours)
            families = [
                (at, abs(gap), [(titles[higher], titles[lower])])
                for at, titles in rows.items()
                if {higher, lower} <= set(titles.index)
            ]
            if ours == "bsam" and "bsam" in rows[radii] and (matched or not group["tuned"].any()):
                pairs = [(rows[radii]["bsam"], row) for row in matched or [NO_MATCH]]
                pairs = pairs if higher == "bsam" else [(row, against) for against, row in pairs]
                families.append((MATCHED_RADII, math.nan, pairs))
            claim = f"{_name(higher)} better than {_name(lower)}"
            for at, gap, pairs in families:
                claims += [_claim(row, at, gap, claim) for row in compare_family(group, pairs)]
    for at, titles in rows.items():
        others = [titles[name] for name in ((base, "sam") if at == radii else ("sam",)) if name in titles]
        claims += _flatness(group, at, titles.get("bsam"), others)
    return claims + _flatness(group, MATCHED_RADII, rows[radii].get("bsam"), matched)


def _flatness(group: pd.DataFrame, at: str, bsam: str | None, others: list[str]) -> list[dict[str, Any]]:
    """Compare the largest eigenvalues of networks that were measured on equally many samples."""
    if bsam is None or not others:
        return []
    pairs = [(row, bsam) for row in others]
    tables = {}
    for n in group["eigenvalue_samples"].dropna().unique():
        values = group["top_eigenvalue"].where(group["eigenvalue_samples"] == n)
        tables[int(n)] = compare_family(group.assign(top_eigenvalue=values), pairs, "top_eigenvalue")
    if not tables:
        return []
    n = max(tables, key=lambda n: (sum(row["shared"] for row in tables[n]), n))
    label = measured_on(group["settings"].iloc[0], n)
    shown = [row for row in tables[n] if row["shared"]]
    return [_claim(row, at, math.nan, f"BSAM flatter than {row['row']} (λmax, {label})") for row in shown]


def _claim(row: dict[str, Any], at: str, gap: float, claim: str) -> dict[str, Any]:
    return {**row, "outcome": OUTCOMES.get(row["verdict"], OPEN), "at": at, "gap": gap, "claim": claim}


def _name(variant: str) -> str:
    """Return the name of a method in claims, where Algorithm 1 is just BSAM, as in the paper."""
    if variant == "bsam":
        return "BSAM"
    return variants()[variant].title if variant in variants() else variant.capitalize()
