"""The tables and verdicts of the page, as text, with the values that sort a table and the fields of a copy as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from ...analysis.claims import OPEN, paper_claims
from ...analysis.sentences import evidence, numbers_text, seeds_sentence
from ...analysis.significance import BETTER, MIN_SEEDS, NONE_SHOWN, NOT_LEARNED, TOO_FEW, WORSE, compare_pairs
from ...common.grouping import group_by
from ...recipes.columns import measured_on
from ...recipes.variants import variants

STATES = ("finished", "diverged", "unfinished", "not started")
SIGNS = {
    "confirmed": "✓",
    "contradicted": "✗",
    OPEN: "?",
    BETTER: "✓",
    WORSE: "✗",
    NONE_SHOWN: "≈",
    TOO_FEW: "…",
    NOT_LEARNED: "⚠",
}
UNDECIDED = {OPEN, NONE_SHOWN, TOO_FEW}


@dataclass(frozen=True)
class Column:
    """A column: its title, whether it has words, the direction of the first sort, and the names of its CSV fields."""

    title: str
    words: bool = False
    descending: bool = False
    fields: tuple[str, ...] = ()

    @property
    def csv(self) -> str:
        """The names of the fields."""
        return csv_line(self.fields or (self.title,))


@dataclass(frozen=True)
class Cell:
    """A cell: its text, the value that sorts it, its CSV fields, badges, and the ends of an interval that is drawn."""

    text: str
    value: float | str | None = None
    fields: tuple[Any, ...] = ()
    badges: tuple[tuple[str, str], ...] = ()
    interval: tuple[float, ...] = ()
    is_best: bool = False

    @property
    def csv(self) -> str:
        """The fields."""
        return csv_line(self.fields or (self.text if self.value is None else self.value,))

    @property
    def key(self) -> str:
        """The value that sorts the cell; empty if it is missing."""
        return "" if _is_missing(self.value) else str(self.value)


@dataclass(frozen=True)
class PageTable:
    """A table, and the notes below it."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = field(default_factory=tuple)


def csv_line(values: Sequence[Any]) -> str:
    """Return the fields of a line of CSV; missing numbers are empty.

    Example:
        >>> csv_line(["SAM, rho 0.2", 0.5, float("nan")])
        '"SAM, rho 0.2",0.5,'
    """
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(["" if _is_missing(value) else value for value in values])
    return line.getvalue()


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def number_text(text: str) -> str:
    """Return numbers with minus signs instead of hyphens, and spaces at which no line breaks."""
    return text.replace("-", "\u2212").replace(" ", "\u00a0")


def digits_of(table: pd.DataFrame) -> int:
    """Return the digits after the point of scores in a table."""
    largest = table["mean"].abs().max()
    return 2 if largest >= 10 else 3 if largest >= 1 else 4


def text_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> PageTable:
    """Return a table that is given as text."""
    cells = [[Cell(text, _sort_value(text)) for text in row] for row in rows]
    columns = [Column(name, words=number == 0) for number, name in enumerate(header)]
    return PageTable(title, columns, [[Cell(cell.text, cell.value, (cell.text,)) for cell in row] for row in cells])


def _sort_value(text: str) -> float | str:
    try:
        return float(text.split(" ")[0])
    except ValueError:
        return text


def experiment_table(runs: pd.DataFrame, compared: pd.DataFrame) -> PageTable:
    """Return the table of an experiment; columns that no row has are left out.

    Args:
        runs: its runs.
        compared: the rows of ``compare_rows``.
    """
    first = {"published": "first", "passes": "first", "radius": "first", "seconds": "mean"}
    about = runs.groupby("row", sort=False).agg(first)
    states = pd.crosstab(runs["row"], runs["state"]).reindex(columns=STATES, fill_value=0)
    digits, against = digits_of(compared), compared["against"].iloc[0]
    learned = compared[compared["failed"] == 0]["mean"]
    best = learned.max() if learned.notna().sum() > 1 else math.nan
    chart = _interval_chart(compared)

    def score(row: Mapping[str, Any]) -> Cell:
        counts = {"did not learn": row["failed"], **{state: int(states.loc[row["row"], state]) for state in STATES[1:]}}
        badges = tuple((state, f"{n} {state}") for state, n in counts.items() if n)
        text = number_text(numbers_text(row["mean"], row["std"], row["n"], digits)) if row["n"] else ""
        fields = row["mean"], row["std"], row["n"], *counts.values()
        return Cell(text, row["mean"], fields, badges, is_best=row["mean"] == best and not row["failed"])

    def difference(row: Mapping[str, Any]) -> Cell:
        fields = row["difference"], row["low"], row["high"], row["shared"]
        if row["row"] == against or not row["shared"]:
            return Cell("", None, (math.nan,) * 4)
        interval = "" if math.isnan(row["low"]) else f" [{row['low']:+.{digits}f}, {row['high']:+.{digits}f}]"
        text = number_text(f"{row['difference']:+.{digits}f}{interval} ({row['shared']})").replace("\u00a0[", " [")
        return Cell(text, row["difference"], fields, interval=chart(row))

    def number(name: str, form: str) -> Callable[[Mapping[str, Any]], Cell]:
        def cell(row: Mapping[str, Any]) -> Cell:
            value = float(about.loc[row["row"], name])
            return Cell("" if math.isnan(value) else number_text(format(value, form)), value)

        return cell

    def measured(name: str) -> Callable[[Mapping[str, Any]], Cell]:
        known = runs[runs["state"] == "finished"].groupby("row")[name].agg(["mean", "std"])

        def cell(row: Mapping[str, Any]) -> Cell:
            mean, std = known.loc[row["row"]] if row["row"] in known.index else (math.nan, math.nan)
            spread = "" if math.isnan(std) else f" ± {std:.1f}"
            return Cell("" if math.isnan(mean) else number_text(f"{mean:.1f}{spread}"), mean, (mean, std))

        return cell

    counted = ("mean", "std", "n", "did not learn", *STATES[1:])
    ends = ("difference", "low", "high", "seeds")
    top = f"λmax, {measured_on(next((s for s in runs['settings'] if s), {}))}"
    columns: list[tuple[Column, Callable[[Mapping[str, Any]], Cell]]] = [
        (Column("method", words=True), lambda row: Cell(row["row"], row["row"])),
        (Column(runs["unit"].iloc[0], descending=True, fields=counted), score),
        (Column("published"), number("published", f".{digits}f")),
        (Column(f"difference to {against}, 95 % interval (seeds)", descending=True, fields=ends), difference),
        (Column("memorised, %", fields=("memorised", "memorised std")), measured("memorised")),
        (Column("λmax", fields=(top, f"{top} std")), measured("top_eigenvalue")),
        (Column("passes"), number("passes", ".4g")),
        (Column("s/epoch", fields=("seconds per epoch",)), number("seconds", ".3g")),
        (Column("radius", fields=("total radius",)), number("radius", ".4g")),
    ]
    rows = compared.to_dict("records")
    shown = [
        (column, cells)
        for place, (column, draw) in enumerate(columns)
        for cells in [[draw(row) for row in rows]]
        if place < 2 or any(cell.text for cell in cells)
    ]
    notes = _notes(runs, {column.title for column, _ in shown}, top)
    title = runs["experiment"].iloc[0]
    return PageTable(
        title, [column for column, _ in shown], list(zip(*(cells for _, cells in shown), strict=True)), notes
    )


def _notes(runs: pd.DataFrame, columns: set[str], top: str) -> list[str]:
    """Return the lines below a table: the variants, how settings were chosen, what the columns are, and remarks."""
    known = variants()
    notes = [known[name].note for name in dict.fromkeys(runs["variant"]) if name in known and known[name].note]
    rows = runs[runs["chosen"] != ""].drop_duplicates("row")
    chosen = group_by(zip(rows["row"], rows["chosen"], strict=True), lambda pair: pair[1])
    if chosen:
        texts = [f"{'; '.join(row for row, _ in pairs)}: {how}" for how, pairs in chosen.items()]
        notes.append(f"How the radius or the settings were chosen. {'. '.join(texts)}.")
    about = {
        "memorised, %": "memorised: wrong training labels that the network predicts, in %.",
        "λmax": f"{top}: the largest eigenvalue of the Hessian at the end of training.",
        "passes": "passes: forward and backward passes per step.",
        "s/epoch": "s/epoch: seconds per epoch.",
        "radius": "radius: the total radius, rho or rho_max + rho_min.",
    }
    legend = " ".join(text for title, text in about.items() if title in columns)
    return [*notes, *([legend] if legend else []), *(note for note in dict.fromkeys(runs["note"]) if note)]


def _interval_chart(compared: pd.DataFrame) -> Callable[[Mapping[str, Any]], tuple[float, ...]]:
    """Return a function from a row to its zero, ends and mean on one scale from 4 to 96.

    The scale is cut off at three times the largest difference.
    """
    reach = 3 * max(compared["difference"].abs().max(), 1e-12)
    low, high = max(-reach, min(0.0, compared["low"].min())), min(reach, max(0.0, compared["high"].max()))
    if not high > low:
        return lambda row: ()

    def place(value: float) -> float:
        return round(4 + 92 * (min(max(value, low), high) - low) / (high - low), 1)

    def chart(row: Mapping[str, Any]) -> tuple[float, ...]:
        ends = [row["difference"]] * 2 if math.isnan(row["low"]) else [row["low"], row["high"]]
        return tuple(place(value) for value in (0.0, *ends, row["difference"]))

    return chart


def pairs_table(runs: pd.DataFrame) -> PageTable | None:
    """Return the comparison of all pairs of rows that have enough seeds; None with fewer than three such rows."""
    seeds = runs[runs["state"] == "finished"].groupby("row")["seed"].nunique()
    runs = runs[runs["row"].isin(seeds.index[seeds >= MIN_SEEDS])]
    if runs["row"].nunique() < 3:
        return None
    pairs = compare_pairs(runs)
    digits = digits_of(pairs)
    rows = []
    for pair in pairs[pairs["shared"] > 0].to_dict("records"):
        interval = (
            "" if math.isnan(pair["low"]) else number_text(f"{pair['low']:+.{digits}f}, {pair['high']:+.{digits}f}")
        )
        p = "" if math.isnan(pair["p_holm"]) else "< 0.001" if pair["p_holm"] < 0.001 else f"{pair['p_holm']:.3g}"
        rows.append(
            [
                Cell(pair["row"], pair["row"]),
                Cell(pair["against"], pair["against"]),
                Cell(number_text(f"{pair['difference']:+.{digits}f}"), pair["difference"]),
                Cell(interval, pair["low"], (pair["low"], pair["high"])),
                Cell(str(pair["shared"]), pair["shared"]),
                Cell(p, pair["p_holm"]),
                Cell("", pair["verdict"], badges=((pair["verdict"], pair["verdict"]),)),
            ]
        )
    fields = Column("95 % interval", fields=("low", "high"))
    columns = [Column("method", words=True), Column("compared with", words=True), Column("difference", descending=True)]
    columns += [fields, Column("seeds"), Column("p"), Column("verdict", words=True)]
    return PageTable(f"All pairs: {runs['experiment'].iloc[0]}", columns, rows) if rows else None


def runs_table(runs: pd.DataFrame, digits: int) -> PageTable:
    """Return the list of runs; those that did not finish are first."""
    ordered = runs.sort_values("state", key=lambda states: states == "finished", kind="stable")
    columns = [Column("run", words=True), Column("method", words=True), Column("seed"), Column("state", words=True)]
    columns += [Column("epochs"), Column("score", descending=True), Column("remark", words=True)]
    rows = []
    for run in ordered.to_dict("records"):
        of = f" of {run['epochs']}" if run["epochs"] else ""
        epochs = f"{run['epochs_done']}{of}" if run["epochs_done"] or run["epochs"] else ""
        score = "" if math.isnan(run["score"]) else number_text(f"{run['score']:.{digits}f}")
        remark = "" if run["state"] == "not started" else run["reason"] or run["failure"]
        cells = [Cell(run["name"], run["name"]), Cell(run["row"], run["row"]), Cell(str(run["seed"]), run["seed"])]
        cells += [Cell("", run["state"], badges=((run["state"], run["state"]),)), Cell(epochs, run["epochs_done"])]
        rows.append([*cells, Cell(score, run["score"]), Cell(remark, remark or None)])
    shown = slice(None, None if any(row[-1].text for row in rows) else -1)
    return PageTable(f"Runs: {runs['experiment'].iloc[0]}", columns[shown], [row[shown] for row in rows])


def count_states(runs: pd.DataFrame) -> str:
    """Return the number of runs in each state, in words."""
    counts = runs["state"].value_counts()
    return ", ".join(f"{counts[state]} {state}" for state in STATES if state in counts)


def baseline_verdicts(compared: pd.DataFrame, runs: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a verdict on each row that can be compared with its baseline."""
    tuned = runs[runs["chosen"].str.contains("tuned")].drop_duplicates(["experiment", "row"])
    how = {(run["experiment"], run["row"]): run["chosen"] for run in tuned.to_dict("records")}
    verdicts: list[dict[str, Any]] = []
    if compared.empty:
        return verdicts
    for row in compared[compared["row"] != compared["against"]].to_dict("records"):
        if (row["n"] and row["their_n"]) or row["diverged"]:
            sides = [(side, how.get((row["experiment"], side))) for side in (row["row"], row["against"])]
            tuning = "".join(f" {side}: {text}." for side, text in sides if text)
            verdicts.append(_verdict(row, row["verdict"], f"{row['row']} against {row['against']}", tuning))
    return verdicts


def claim_verdicts(runs: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a verdict on each claim of the paper for which there are runs."""
    verdicts = []
    for row in paper_claims(runs).to_dict("records"):
        gap = "" if math.isnan(row["gap"]) else f" Published: {row['gap']:+.2f}."
        is_eigenvalue = "λmax" in row["claim"]
        about = row | {"unit": ""} if is_eigenvalue else row
        verdicts.append(
            _verdict(about, row["outcome"], row["claim"], gap, 1 if is_eigenvalue else 2) | {"at": row["at"]}
        )
    return verdicts


def _verdict(row: Mapping[str, Any], outcome: str, title: str, more: str, digits: int = 2) -> dict[str, Any]:
    text = f"{evidence(row, digits)}{more}".strip()
    seeds = seeds_sentence(row) if outcome in UNDECIDED else ""
    return {
        "experiment": row["experiment"],
        "outcome": outcome,
        "at": "",
        "title": title,
        "evidence": text,
        "more": seeds,
    }


def tally(verdicts: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of verdicts with each outcome, in words."""
    outcomes = [verdict["outcome"] for verdict in verdicts]
    return ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in SIGNS if outcome in outcomes)
