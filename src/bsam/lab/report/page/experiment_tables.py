"""The tables and verdicts of the experiments of the page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from ...analysis.runs_table import STATES
from ...analysis.sentences import evidence, numbers_text, seeds_sentence
from ...analysis.significance import BETTER, MIN_SEEDS, NONE_SHOWN, NOT_LEARNED, TOO_FEW, WORSE, compare_pairs
from ...recipes.plan import measured_on
from ...recipes.variants import variants
from ..table import Column, Row, Table

VERDICT_SIGNS = {BETTER: "✓", WORSE: "✗", NONE_SHOWN: "≈", TOO_FEW: "…", NOT_LEARNED: "⚠"}
UNDECIDED_VERDICTS = {NONE_SHOWN, TOO_FEW}
PROBLEMS = ("did not learn", *STATES[1:])  # of a run
RADIUS_HELP = "radius: the total radius, rho or rho_max + rho_min."
SECONDS_HELP = "s/epoch: seconds per epoch."
STATISTICS = ("first", "mean", "min", "max")  # of the runs of a row, behind the name of a column of the table of runs


def digits_of(table: pd.DataFrame) -> int:
    """Return the digits after the point of scores in a table."""
    largest = table["mean"].abs().max()
    return 2 if largest >= 10 else 3 if largest >= 1 else 4


def experiment_columns(unit: str, against: str, tops: Mapping[int, str], digits: int) -> list[Column]:
    """Return the columns of the table of an experiment.

    Their values are columns of ``compare_rows``, or "NAME mean", "NAME first", "NAME min" or "NAME max": what the runs
    of a row have in the column NAME of the table of runs.

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
        return Column(title, f"{name} mean", text, fields, f"{label}: {note}.")

    gap = f"difference to {against}, 95 % interval (seeds)"
    ends = ("difference", "low", "high", "seeds")
    return [
        Column("method", "row", words=True),
        Column(unit, "mean", score, _same("mean", "std", "n", *PROBLEMS), descending=True),
        Column("published", "published first", f".{digits}f"),
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
        Column("passes", "passes first", ".4g", note="passes: forward and backward passes per step."),
        Column("s/epoch", "seconds mean", ".3g", {"seconds per epoch": "seconds mean"}, SECONDS_HELP),
        Column("radius", "radius first", ".4g", {"total radius": "radius first"}, RADIUS_HELP),
    ]


def _same(*names: str) -> dict[str, str]:
    return dict(zip(names, names, strict=True))


def experiment_table(runs: pd.DataFrame, compared: pd.DataFrame) -> Table:
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
    names = [column.value.rpartition(" ")[::2] for column in columns]
    of_runs = {f"{name} {how}": (name, how) for name, how in names if how in STATISTICS and name}
    of_runs |= {f"{name} std": (name, "std") for name, how in names if how == "mean" and name}
    table = compared.rename(columns={"failed": "did not learn"}).set_index("row", drop=False).rename_axis(None)
    table = table.join(runs.groupby("row").agg(**of_runs))
    learned = table["mean"].where(table["did not learn"] == 0)
    table["seeds"] = table["shared"].where(table["shared"] > 0)
    best = learned.max() if bool(runs["higher"].iloc[0]) else learned.min()
    table["mean best"] = (learned == best) & (learned.count() > 1)
    table["mean marks"] = [problems_of(row) for row in table.to_dict("records")]
    table["difference interval"] = _intervals(table)
    return Table.of(runs["experiment"].iloc[0], table.to_dict("records"), columns, _notes(runs))


def problems_of(row: Row) -> list[str]:
    """Return how many runs of a row have which problem, in words."""
    return [f"{row[name]} {name}" for name in PROBLEMS if row[name]]


def _intervals(table: pd.DataFrame) -> list[Sequence[float]]:
    """Return zero, ends and mean of each interval on one scale, cut off at three times the largest difference."""
    difference = table["difference"]
    reach = 3 * max(difference.abs().max(), 1e-12)
    low = max(-reach, min(0.0, table["low"].min()))
    high = min(reach, max(0.0, table["high"].max()))
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


def pairs_table(runs: pd.DataFrame, baseline: str) -> Table | None:
    """Return the comparison of rows other than the baseline that have enough seeds; None with fewer than two."""
    seeds = runs[runs["state"] == "finished"].groupby("row")["seed"].nunique()
    runs = runs[runs["row"].isin(seeds.index[seeds >= MIN_SEEDS]) & (runs["row"] != baseline)]
    if runs["row"].nunique() < 2:
        return None
    pairs = compare_pairs(runs)
    pairs["verdict marks"] = [[word] for word in pairs["verdict"]]
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
    return Table.of(f"Other pairs: {runs['experiment'].iloc[0]}", pairs.to_dict("records"), columns)


def runs_table(runs: pd.DataFrame, digits: int) -> Table:
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
    data = runs.assign(remark=remarks, **{"state marks": [[state] for state in runs["state"]]})
    return Table.of(f"Runs: {runs['experiment'].iloc[0]}", data.to_dict("records"), columns)


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
    listed = tuned[["experiment", "row", "chosen"]].itertuples(index=False, name=None)
    choices = {(experiment, row): f" {row}: {chosen}." for experiment, row, chosen in listed}
    verdicts = []
    for row in compared.to_dict("records"):
        if row["row"] != row["against"] and (min(row["n"], row["their_n"]) or row["diverged"]):
            tuning = "".join(choices.get((row["experiment"], row[side]), "") for side in ("row", "against"))
            verdicts.append(
                {
                    "experiment": row["experiment"],
                    "outcome": row["verdict"],
                    "title": f"{row['row']} against {row['against']}",
                    "evidence": evidence(row) + tuning,
                    "more": seeds_sentence(row),
                }
            )
    return verdicts
