"""The tables and verdicts of the page, as text, with the values that sort a table and the fields of a copy as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from ...analysis.claims import CONFIRMED, CONTRADICTED, OPEN, paper_claims
from ...analysis.sentences import evidence, numbers_text, seeds_sentence
from ...analysis.significance import BETTER, MIN_SEEDS, NONE_SHOWN, NOT_LEARNED, TOO_FEW, WORSE, compare_pairs
from ...common.grouping import group_by
from ...recipes.planning import measured_on
from ...recipes.variants import variants

STATES = ("finished", "diverged", "unfinished", "not started")
SIGNS = {CONFIRMED: "✓", CONTRADICTED: "✗", OPEN: "?", BETTER: "✓", WORSE: "✗", NONE_SHOWN: "≈", TOO_FEW: "…"}
SIGNS[NOT_LEARNED] = "⚠"
UNDECIDED = {OPEN, NONE_SHOWN, TOO_FEW}


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        title: its title.
        texts: the text of each row.
        values: what sorts the rows; by default the texts.
        fields: the names and values of its fields in a copy as CSV; by default the title and the values.
        badges: the words behind each text.
        intervals: zero, ends and mean of the interval that is drawn in each row, from 0 to 100; empty for none.
        words: whether it has words rather than numbers.
        descending: whether the first click sorts it from the highest to the lowest.
        best: the row that is bold.
    """

    title: str
    texts: Sequence[str]
    values: Sequence[Any] | None = None
    fields: Mapping[str, Sequence[Any]] | None = None
    badges: Sequence[Sequence[str]] | None = None
    intervals: Sequence[Sequence[float]] | None = None
    words: bool = False
    descending: bool = False
    best: int | None = None

    @property
    def csv(self) -> str:
        """The names of the fields."""
        return csv_line(self.fields or [self.title])

    def cell(self, row: int) -> dict[str, Any]:
        """Return what the template shows of a row."""
        value = (self.texts if self.values is None else self.values)[row]
        fields = [value] if self.fields is None else [values[row] for values in self.fields.values()]
        parts = {"badges": self.badges[row] if self.badges else (), "interval": self.intervals and self.intervals[row]}
        key = "" if pd.isna(value) else value
        return {"text": self.texts[row], "key": key, "csv": csv_line(fields), "best": row == self.best, **parts}


@dataclass(frozen=True)
class PageTable:
    """A table, and the notes below it."""

    title: str
    columns: Sequence[Column]
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def rows(self) -> list[list[dict[str, Any]]]:
        """The cells of each row."""
        return [[column.cell(row) for column in self.columns] for row in range(len(self.columns[0].texts))]


def csv_line(values: Iterable[Any]) -> str:
    """Return the fields of a line of CSV; missing numbers are empty.

    Example:
        >>> csv_line(["SAM, rho 0.2", 0.5, float("nan")])
        '"SAM, rho 0.2",0.5,'
    """
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(["" if pd.isna(value) else value for value in values])
    return line.getvalue()


def number_text(text: str) -> str:
    """Return numbers with minus signs instead of hyphens, and spaces at which no line breaks."""
    return text.replace("-", "\u2212").replace(" ", "\u00a0")


def number_texts(values: Iterable[float], form: str) -> list[str]:
    """Return numbers as text; missing ones are empty."""
    return ["" if math.isnan(value) else number_text(format(value, form)) for value in values]


def digits_of(table: pd.DataFrame) -> int:
    """Return the digits after the point of scores in a table."""
    largest = table["mean"].abs().max()
    return 2 if largest >= 10 else 3 if largest >= 1 else 4


def text_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> PageTable:
    """Return a table that is given as text."""
    texts = zip(header, zip(*rows, strict=True), strict=True)
    return PageTable(title, [Column(name, column, words=name == header[0]) for name, column in texts])


def experiment_table(runs: pd.DataFrame, compared: pd.DataFrame) -> PageTable:
    """Return the table of an experiment; columns that no row has are left out.

    Args:
        runs: its runs.
        compared: the rows of ``compare_rows``.
    """
    first = {"published": "first", "passes": "first", "radius": "first", "seconds": "mean"}
    counts = pd.crosstab(runs["row"], runs["state"]).reindex(columns=STATES[1:], fill_value=0)
    table = compared.drop(columns=["diverged", "unfinished"]).join(runs.groupby("row").agg(first), on="row")
    table = table.join(counts, on="row").rename(columns={"failed": "did not learn", "shared": "seeds"})
    finished = runs[runs["state"] == "finished"]
    for name in ("memorised", "top_eigenvalue"):
        table = table.join(finished.groupby("row")[name].agg(**{name: "mean", f"{name} std": "std"}), on="row")
    digits, against = digits_of(compared), compared["against"].iloc[0]
    rows = table.to_dict("records")
    states = ("did not learn", *STATES[1:])
    badges = [[f"{row[state]} {state}" for state in states if row[state]] for row in rows]
    scores = [number_text(numbers_text(row["mean"], row["std"], row["n"], digits)) if row["n"] else "" for row in rows]
    learned = table["mean"].where(table["did not learn"] == 0)
    best = learned.idxmax() - table.index[0] if learned.notna().sum() > 1 else None
    table.loc[table["seeds"] == 0, "seeds"] = math.nan
    ends = {name: table[name].to_list() for name in ("difference", "low", "high", "seeds")}
    top = f"λmax, {measured_on(next((settings for settings in runs['settings'] if settings), {}))}"

    def fields(*names: str, **renamed: str) -> dict[str, Sequence[Any]]:
        return {name: table[name].to_list() for name in names} | {n: table[m].to_list() for n, m in renamed.items()}

    def number(title: str, name: str, form: str, label: str | None = None) -> Column:
        return Column(title, number_texts(table[name], form), table[name].to_list(), fields(**{label or title: name}))

    def measured(title: str, name: str, label: str) -> Column:
        spreads = [text and f"\u00a0±\u00a0{text}" for text in number_texts(table[f"{name} std"], ".1f")]
        texts = [text + spread for text, spread in zip(number_texts(table[name], ".1f"), spreads, strict=True)]
        return Column(title, texts, table[name].to_list(), fields(**{label: name, f"{label} std": f"{name} std"}))

    columns = [
        Column("method", table["row"].to_list(), words=True),
        Column(
            runs["unit"].iloc[0],
            scores,
            table["mean"].to_list(),
            fields("mean", "std", "n", *states),
            badges,
            descending=True,
            best=best,
        ),
        number("published", "published", f".{digits}f"),
        Column(
            f"difference to {against}, 95 % interval (seeds)",
            [_difference_text(row, digits) for row in rows],
            ends["difference"],
            ends,
            intervals=_intervals(rows),
            descending=True,
        ),
        measured("memorised, %", "memorised", "memorised"),
        measured("λmax", "top_eigenvalue", top),
        number("passes", "passes", ".4g"),
        number("s/epoch", "seconds", ".3g", "seconds per epoch"),
        number("radius", "radius", ".4g", "total radius"),
    ]
    shown = [column for place, column in enumerate(columns) if place < 2 or any(column.texts)]
    return PageTable(runs["experiment"].iloc[0], shown, _notes(runs, {column.title for column in shown}, top))


def _difference_text(row: Mapping[str, Any], digits: int) -> str:
    if not row["seeds"]:
        return ""
    interval = "" if math.isnan(row["low"]) else f" [{row['low']:+.{digits}f}, {row['high']:+.{digits}f}]"
    text = number_text(f"{row['difference']:+.{digits}f}{interval} ({row['seeds']})")
    return text.replace("\u00a0[", " [")  # a line may break there


def _intervals(rows: Sequence[Mapping[str, Any]]) -> list[Sequence[float]]:
    """Return zero, ends and mean of each interval on one scale, cut off at three times the largest difference."""
    differences = pd.DataFrame(rows)[["difference", "low", "high"]]
    reach = 3 * max(differences["difference"].abs().max(), 1e-12)
    low, high = max(-reach, min(0.0, differences["low"].min())), min(reach, max(0.0, differences["high"].max()))
    if not high > low:
        return [()] * len(rows)
    ends = differences.assign(zero=0.0, low=differences["low"].fillna(differences["difference"]))
    ends["high"] = ends["high"].fillna(ends["difference"])
    places = (4 + 92 * (ends[["zero", "low", "high", "difference"]].clip(low, high) - low) / (high - low)).round(1)
    return [() if math.isnan(place[-1]) else place for place in places.to_numpy().tolist()]


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


def pairs_table(runs: pd.DataFrame) -> PageTable | None:
    """Return the comparison of all pairs of rows that have enough seeds; None with fewer than three such rows."""
    seeds = runs[runs["state"] == "finished"].groupby("row")["seed"].nunique()
    runs = runs[runs["row"].isin(seeds.index[seeds >= MIN_SEEDS])]
    if runs["row"].nunique() < 3:
        return None
    pairs = compare_pairs(runs)
    form = f"+.{digits_of(pairs)}f"
    names = ("row", "against", "difference", "low", "high", "shared", "p_holm", "verdict")
    values = {name: pairs[name].to_list() for name in names}
    ends = zip(number_texts(values["low"], form), number_texts(values["high"], form), strict=True)
    p_values = ["< 0.001" if p < 0.001 else "" if math.isnan(p) else f"{p:.3g}" for p in values["p_holm"]]
    interval = {"low": values["low"], "high": values["high"]}
    verdicts = [[word] for word in values["verdict"]]
    columns = [
        Column("method", values["row"], words=True),
        Column("compared with", values["against"], words=True),
        Column("difference", number_texts(values["difference"], form), values["difference"], descending=True),
        Column("95 % interval", [", ".join(filter(None, pair)) for pair in ends], values["low"], interval),
        Column("seeds", list(map(str, values["shared"])), values["shared"]),
        Column("p", p_values, values["p_holm"]),
        Column("verdict", [""] * len(pairs), values["verdict"], badges=verdicts, words=True),
    ]
    return PageTable(f"All pairs: {runs['experiment'].iloc[0]}", columns)


def runs_table(runs: pd.DataFrame, digits: int) -> PageTable:
    """Return the list of runs; those that did not finish are first."""
    runs = runs.sort_values("state", key=lambda states: states == "finished", kind="stable")
    values = {name: runs[name].to_list() for name in ("name", "row", "seed", "state", "epochs_done", "epochs", "score")}
    done = zip(values["epochs_done"], values["epochs"], strict=True)
    epochs = [f"{n} of {planned}" if planned else str(n) if n else "" for n, planned in done]
    remarks = (runs["reason"].where(runs["reason"] != "", runs["failure"])).where(runs["state"] != "not started", "")
    columns = [
        Column("run", values["name"], words=True),
        Column("method", values["row"], words=True),
        Column("seed", list(map(str, values["seed"])), values["seed"]),
        Column("state", [""] * len(runs), values["state"], badges=[[state] for state in values["state"]], words=True),
        Column("epochs", epochs, values["epochs_done"]),
        Column("score", number_texts(values["score"], f".{digits}f"), values["score"], descending=True),
        Column("remark", remarks.to_list(), words=True),
    ]
    return PageTable(f"Runs: {runs['experiment'].iloc[0]}", columns if remarks.any() else columns[:-1])


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
