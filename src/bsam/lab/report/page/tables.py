"""The tables and verdicts of the page, as text, with the values that sort a table and the fields of a copy as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pandas as pd

from ...analysis.runs_table import STATES
from ...analysis.sentences import evidence, numbers_text, seeds_sentence
from ...analysis.significance import BETTER, MIN_SEEDS, NONE_SHOWN, NOT_LEARNED, TOO_FEW, WORSE, compare_pairs
from ...paper import CONFIRMED, CONTRADICTED, OPEN, paper_claims
from ...recipes.planning import measured_on
from ...recipes.variants import variants

SIGNS = {CONFIRMED: "✓", CONTRADICTED: "✗", OPEN: "?", BETTER: "✓", WORSE: "✗", NONE_SHOWN: "≈", TOO_FEW: "…"}
SIGNS[NOT_LEARNED] = "⚠"
UNDECIDED = {OPEN, NONE_SHOWN, TOO_FEW}
PROBLEMS = ("did not learn", *STATES[1:])  # of a run
RADIUS = "radius: the total radius, rho or rho_max + rho_min."
SECONDS = "s/epoch: seconds per epoch."
Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A column of a table: what it shows of each row of data.

    A column "NAME badges" of the data has words that are shown behind the text of NAME, "NAME interval" the interval
    drawn below it, and "NAME best" whether it is bold.

    Args:
        title: its title.
        value: the name in the data, or in the table of runs; it sorts the rows, and a row without it is empty.
        text: the format of the value, or a function from a row to its text; None shows the value as it is.
        fields: names in a copy as CSV, and in the data; None copies the value.
        of_runs: how the value is computed from the runs of a row, such as "mean"; the data then call it "VALUE mean".
            None if the comparison has it.
        note: what it means, for the lines below the table.
        words: whether it has words rather than numbers.
        descending: whether the first click sorts it from the highest to the lowest.
    """

    title: str
    value: str
    text: str | Callable[[Row], str] | None = None
    fields: Mapping[str, str] | None = None
    of_runs: str | None = None
    note: str = ""
    words: bool = False
    descending: bool = False

    @property
    def name(self) -> str:
        """The name of the value in the data."""
        return self.value if self.of_runs is None else f"{self.value} {self.of_runs}"

    @property
    def csv(self) -> str:
        """The names of the fields."""
        return csv_line(self.fields or [self.title])

    def cell(self, row: Row) -> dict[str, Any]:
        """Return what the template shows of a row."""
        value = row[self.name]
        text = "" if pd.isna(value) else str(value)
        if text and self.text is not None:
            text = number_text(format(value, self.text) if isinstance(self.text, str) else self.text(row))
        fields = [value] if self.fields is None else [row[name] for name in self.fields.values()]
        parts = {name: row.get(f"{self.value} {name}", ()) for name in ("badges", "interval", "best")}
        return {"text": text, "key": "" if pd.isna(value) else value, "csv": csv_line(fields), **parts}


def page_table(title: str, columns: Iterable[Column], data: pd.DataFrame, notes: Iterable[str] = ()) -> dict[str, Any]:
    """Return a table for the template. Columns without text are left out; what the others mean is the last note."""
    rows = data.to_dict("records")
    cells = [(column, [column.cell(row) for row in rows]) for column in columns]
    shown = [(column, these) for column, these in cells if any(cell["text"] or cell["badges"] for cell in these)]
    body = zip(*(these for _, these in shown), strict=True)
    legend = " ".join(column.note for column, _ in shown if column.note)
    notes = list(filter(None, [*notes, legend]))
    return {"title": title, "columns": [column for column, _ in shown], "rows": list(body), "notes": notes}


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
    """Return numbers with minus signs instead of hyphens, and spaces at which no line breaks, except at intervals."""
    return text.replace("-", "\u2212").replace(" ", "\u00a0").replace("\u00a0[", " [")


def digits_of(table: pd.DataFrame) -> int:
    """Return the digits after the point of scores in a table."""
    largest = table["mean"].abs().max()
    return 2 if largest >= 10 else 3 if largest >= 1 else 4


def text_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return a table that is given as text."""
    columns = [Column(name, str(place), words=place == 0) for place, name in enumerate(header)]
    return page_table(title, columns, pd.DataFrame(rows, columns=[column.value for column in columns]))


def experiment_columns(unit: str, against: str, tops: Mapping[int, str], digits: int) -> list[Column]:
    """Return the columns of the table of an experiment.

    Args:
        unit: the title of the score.
        against: the baseline.
        tops: what largest eigenvalues were measured on, by the number of samples.
        digits: the digits of scores.
    """

    def score(row: Row) -> str:
        return numbers_text(row["mean"], row["std"], row["n"], digits)

    def difference(row: Row) -> str:
        interval = "" if math.isnan(row["low"]) else f" [{row['low']:+.{digits}f}, {row['high']:+.{digits}f}]"
        return f"{row['difference']:+.{digits}f}{interval} ({row['seeds']:.0f})"

    def measured(title: str, name: str, label: str, note: str) -> Column:
        def text(row: Row) -> str:
            return numbers_text(row[f"{name} mean"], row[f"{name} std"], digits=1)

        fields = {label: f"{name} mean", f"{label} std": f"{name} std"}
        return Column(title, name, text, fields, "mean", f"{label}: {note}.")

    gap, ends = f"difference to {against}, 95 % interval (seeds)", ("difference", "low", "high", "seeds")
    return [
        Column("method", "row", words=True),
        Column(unit, "mean", score, _same("mean", "std", "n", *PROBLEMS), descending=True),
        Column("published", "published", f".{digits}f", of_runs="first"),
        Column(gap, "difference", difference, _same(*ends), descending=True),
        measured("memorised, %", "memorised", "memorised", "wrong training labels that the network predicts, in %"),
        *(
            measured(
                "λmax" if len(tops) == 1 else f"λmax ({n:,} samples)",
                f"top_eigenvalue {n}",
                f"λmax, {on}",
                "the largest eigenvalue of the Hessian at the end of training",
            )
            for n, on in tops.items()
        ),
        Column("passes", "passes", ".4g", of_runs="first", note="passes: forward and backward passes per step."),
        Column("s/epoch", "seconds", ".3g", {"seconds per epoch": "seconds mean"}, "mean", SECONDS),
        Column("radius", "radius", ".4g", {"total radius": "radius first"}, "first", RADIUS),
    ]


def _same(*names: str) -> dict[str, str]:
    return dict(zip(names, names, strict=True))


def experiment_table(runs: pd.DataFrame, compared: pd.DataFrame) -> dict[str, Any]:
    """Return the table of an experiment.

    Args:
        runs: its runs.
        compared: the rows of ``compare_rows``.
    """
    settings: Mapping[str, Any] = next((settings for settings in runs["settings"] if settings), {})
    samples = sorted(runs["eigenvalue_samples"].dropna().astype(int).unique(), reverse=True)
    values = {n: runs["top_eigenvalue"].where(runs["eigenvalue_samples"] == n) for n in samples}
    runs = runs.assign(**{f"top_eigenvalue {n}": these for n, these in values.items()})
    tops = {n: measured_on(settings, n) for n in samples}
    columns = experiment_columns(runs["unit"].iloc[0], compared["against"].iloc[0], tops, digits_of(compared))
    of_runs = {column.name: (column.value, column.of_runs) for column in columns if column.of_runs}
    spreads = {f"{value} std": (value, "std") for value, how in of_runs.values() if how == "mean"}
    table = compared.rename(columns={"failed": "did not learn"}).set_index("row", drop=False).rename_axis(None)
    table = table.join(runs.groupby("row").agg(**{**spreads, **of_runs}))
    learned = table["mean"].where(table["did not learn"] == 0)
    table["seeds"] = table["shared"].where(table["shared"] > 0)
    table["mean best"] = (learned == learned.max()) & (learned.count() > 1)
    table["mean badges"] = [
        [f"{row[name]} {name}" for name in PROBLEMS if row[name]] for row in table.to_dict("records")
    ]
    table["difference interval"] = _intervals(table)
    return page_table(runs["experiment"].iloc[0], columns, table, _notes(runs))


def _intervals(table: pd.DataFrame) -> list[Sequence[float]]:
    """Return zero, ends and mean of each interval on one scale, cut off at three times the largest difference."""
    difference = table["difference"]
    reach = 3 * max(difference.abs().max(), 1e-12)
    low, high = max(-reach, min(0.0, table["low"].min())), min(reach, max(0.0, table["high"].max()))
    if not high > low:
        return [()] * len(table)
    ends = {"zero": 0.0, "low": table["low"].fillna(difference), "high": table["high"].fillna(difference)}
    places = 4 + 92 * (pd.DataFrame({**ends, "mean": difference}).clip(low, high) - low) / (high - low)
    return [() if math.isnan(place[-1]) else place for place in places.round(1).to_numpy().tolist()]


def _notes(runs: pd.DataFrame) -> list[str]:
    """Return lines below a table: the variants, remarks, and how settings were chosen."""
    known = variants()
    notes = [known[name].note for name in runs["variant"].unique() if name in known]
    chosen = runs[runs["chosen"] != ""].drop_duplicates("row").groupby("chosen", sort=False)["row"]
    texts = [f"{'; '.join(rows)}: {how}" for how, rows in chosen]
    notes += [f"How the radius or the settings were chosen. {'. '.join(texts)}."] if texts else []
    return [*notes, *runs["note"].unique()]


def pairs_table(runs: pd.DataFrame, baseline: str) -> dict[str, Any] | None:
    """Return the comparison of rows other than the baseline that have enough seeds; None with fewer than two."""
    seeds = runs[runs["state"] == "finished"].groupby("row")["seed"].nunique()
    runs = runs[runs["row"].isin(seeds.index[seeds >= MIN_SEEDS]) & (runs["row"] != baseline)]
    if runs["row"].nunique() < 2:
        return None
    pairs = compare_pairs(runs)
    pairs["verdict badges"] = [[word] for word in pairs["verdict"]]
    form = f"+.{digits_of(pairs)}f"
    interval = _same("low", "high")
    columns = [
        Column("method", "row", words=True),
        Column("compared with", "against", words=True),
        Column("difference", "difference", form, descending=True),
        Column("95 % interval", "low", lambda row: f"{row['low']:{form}}, {row['high']:{form}}", interval),
        Column("seeds", "shared"),
        Column("p", "p_holm", lambda row: "< 0.001" if row["p_holm"] < 0.001 else f"{row['p_holm']:.3g}"),
        Column("verdict", "verdict", lambda row: "", words=True),
    ]
    return page_table(f"Other pairs: {runs['experiment'].iloc[0]}", columns, pairs)


def runs_table(runs: pd.DataFrame, digits: int) -> dict[str, Any]:
    """Return the list of runs; those that did not finish are first."""
    runs = runs.sort_values("state", key=lambda states: states == "finished", kind="stable")
    remarks = runs["reason"].where(runs["reason"] != "", runs["failure"]).where(runs["state"] != "not started", "")
    columns = [
        Column("run", "name", words=True),
        Column("method", "row", words=True),
        Column("seed", "seed"),
        Column("state", "state", lambda row: "", words=True),
        Column("epochs", "epochs_done", _epochs_text),
        Column("score", "score", f".{digits}f", descending=True),
        Column("remark", "remark", words=True),
    ]
    data = runs.assign(remark=remarks, **{"state badges": [[state] for state in runs["state"]]})
    return page_table(f"Runs: {runs['experiment'].iloc[0]}", columns, data)


def _epochs_text(row: Row) -> str:
    return f"{row['epochs_done']} of {row['epochs']}" if row["epochs"] else str(row["epochs_done"] or "")


def tally(words: Iterable[str], order: Iterable[str] = STATES) -> str:
    """Return how often each word occurs.

    Example:
        >>> tally(["finished", "diverged", "finished"])
        '2 finished, 1 diverged'
    """
    counts = Counter(words)
    return ", ".join(f"{counts[word]} {word}" for word in order if counts[word])


def baseline_verdicts(compared: pd.DataFrame, runs: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a verdict on each row that can be compared; if runs are tuned, it says how settings were chosen."""
    tuned = runs[runs["experiment"].isin(runs.loc[runs["tuned"].astype(bool), "experiment"]) & (runs["chosen"] != "")]
    keys = zip(tuned["experiment"], tuned["row"], strict=True)
    choices = dict(zip(keys, " " + tuned["row"] + ": " + tuned["chosen"] + ".", strict=True))
    verdicts = []
    for row in compared.to_dict("records"):
        if row["row"] != row["against"] and (min(row["n"], row["their_n"]) or row["diverged"]):
            tuning = "".join(choices.get((row["experiment"], row[side]), "") for side in ("row", "against"))
            verdicts.append(_verdict(row, row["verdict"], f"{row['row']} against {row['against']}", tuning))
    return verdicts


def claim_verdicts(runs: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a verdict on each claim of the paper for which there are runs."""
    claims = paper_claims(runs).to_dict("records")
    gaps = ["" if math.isnan(row["gap"]) else f" Published: {row['gap']:+.2f}." for row in claims]
    return [_verdict(row, row["outcome"], row["claim"], gap, row["at"]) for row, gap in zip(claims, gaps, strict=True)]


def _verdict(row: Row, outcome: str, title: str, more: str, at: str = "") -> dict[str, Any]:
    text = evidence(row, digits=2 if row["unit"] else 1) + more  # eigenvalues have no unit
    seeds = seeds_sentence(row) if outcome in UNDECIDED else ""
    about = {"experiment": row["experiment"], "outcome": outcome, "title": title, "at": at}
    return {**about, "evidence": text, "more": seeds}
