"""Figures of the tables of runs: scores over the epochs, against cost, radius and settings; probes and classes.

Each function takes the runs and the epochs of one experiment, as ``read_runs`` and ``read_epochs`` return them, and
returns a plotly figure, or None if the runs do not have the data. ``figure.layout.meta`` has the caption.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pandas as pd

from ....common.checks import is_number
from ....common.errors import BsamValueError
from ....methods import METHODS
from ...config import BASE, RADIUS_SCHEDULE, Run
from ...recipes.plan import measured_on
from ...tasks import task_class
from ...training.run_dir import PREDICTIONS, PROBE, RunDir
from .flatness_figures import SHARPNESS, probe_figure, seeds_list, smooth, thinned, window_of
from .style import named_styles, new_axis, new_figure, panel_layout, plot_text

if TYPE_CHECKING:
    import plotly.graph_objects as go

Draw: TypeAlias = Callable[[pd.DataFrame, pd.DataFrame], "go.Figure | None"]
Trace: TypeAlias = dict[str, Any]
FEW_EPOCHS = 10  # an axis of at most this many epochs has a tick at each of them
FEW_CURVES = 4  # more curves are smoothed, and drawn without bands
SKIPPED = 0.2  # share of the epochs, from the first on, that may be outside the initial vertical range
MAX_CLASSES = 40  # in the figure of accuracies


def row_styles(runs: pd.DataFrame) -> dict[str, Trace]:
    """Return the name and the style of each row's trace, in the order of the table."""
    return named_styles(dict(zip(runs["row"], runs["method"], strict=True)))


def seeds_text(counts: Iterable[int], spread: str = "") -> str:
    """Return the number of seeds behind each point in words, with what shows their standard deviation.

    Example:
        >>> seeds_text([1, 1], "bars"), seeds_text([3, 2]), seeds_text([3, 3], "bars")
        ('one seed', 'mean of 2 to 3 seeds', 'mean of 3 seeds, bars of one standard deviation')
    """
    numbers = list(counts)
    low = min(numbers)
    high = max(numbers)
    if high == 1:
        return "one seed"
    seeds = f"{high}" if low == high else f"{low} to {high}"
    return f"mean of {seeds} seeds" + (f", {spread} of one standard deviation" if spread else "")


def points(style: Trace, x: Any, means: pd.Series, stds: pd.Series, mode: str, **options: Any) -> Trace:
    """Return a trace with whiskers of one standard deviation; that of one seed is 0."""
    whiskers = {"array": stds.fillna(0).to_numpy(), "color": style["line"]["color"], "thickness": 1.5, "width": 4}
    return {**style, "x": x, "y": means.to_numpy(), "error_y": whiskers, "mode": mode, **options}


# ---- over the epochs


def score_curves(runs: pd.DataFrame, epochs: pd.DataFrame) -> go.Figure | None:
    """Draw the score over the epochs."""
    settings: dict[str, Any] = next((settings for settings in runs["settings"] if settings), {})
    try:
        task = task_class(settings.get("task", Run.task.name))
    except BsamValueError:
        return None
    metric = task.score.metric(settings.get("eval_split", "test"))
    return curves(runs, epochs, metric, "Score during training", runs["unit"].iloc[0], task.score.factor)


def curves(
    runs: pd.DataFrame, epochs: pd.DataFrame, metric: str, title: str, label: str, factor: float = 1.0
) -> go.Figure | None:
    """Draw a metric over the epochs: means and bands over the finished seeds, and a dotted line per unfinished run.

    Rows without a finished run also show the runs that diverged. Many curves are smoothed and have no bands.
    """
    known = _values(runs, epochs, metric, factor)
    if known.empty:
        return None
    is_finished = known["state"] == "finished"
    finished = known[is_finished]
    unfinished = known[~is_finished]
    tables = {row: _by_epoch(group) for row, group in finished.groupby("row", sort=False)}
    many = len(tables) > FEW_CURVES
    data: list[Trace] = []
    spans = []
    for row, style in row_styles(runs).items():
        if row in tables:
            table = smooth(tables[row]).assign(std=np.nan) if many else tables[row]
            spans.append(_add_curve(data, style, table))
        others = unfinished[unfinished["row"] == row]
        for (_, state), run in others.groupby(["seed", "state"], sort=False) if len(others) else ():
            if state != "diverged" or row not in tables:
                line = {**style["line"], "dash": "dot", "width": 1.2}
                name = f"{row}, {state}"
                dotted = {**style, "name": plot_text(name, 44), "legendgroup": name, "line": line}
                spans.append(_add_curve(data, dotted, _by_epoch(run)))
    low = np.min(spans, axis=0)[0]
    high = np.max(spans, axis=0)[1]
    margin = 0.06 * (high - low) or 0.5
    shown = sorted(known["epoch"].unique().tolist())
    few = {"tickvals": shown} if len(shown) <= FEW_EPOCHS else {}
    axes = {"xaxis": new_axis("epoch", **few), "yaxis": new_axis(label, range=[low - margin, high + margin])}
    return new_figure(title, _caption(tables, known, many), data, hovermode="x unified", **axes)


def _values(runs: pd.DataFrame, epochs: pd.DataFrame, metric: str, factor: float) -> pd.DataFrame:
    """Return the finite values of a metric; not those of runs of which only the last epoch was kept."""
    if metric not in epochs:
        return pd.DataFrame()
    known = epochs[["row", "seed", "state", "epoch"]].assign(value=factor * epochs[metric].astype(float))
    known = known[np.isfinite(known["value"])].merge(runs[["row", "seed", "epochs"]], on=["row", "seed"])
    kept = known.groupby(["row", "seed"])["epoch"].transform("size")
    return known[(kept > 1) | (known["epochs"] <= 1) | (known["state"] != "finished")]


def _by_epoch(group: pd.DataFrame) -> pd.DataFrame:
    """Return mean, std and n of each epoch; only the epochs that all seeds have, if there are any."""
    table = group.groupby("epoch")["value"].agg(mean="mean", std="std", n="count")
    complete = table["n"] == group["seed"].nunique()
    return table[complete] if complete.any() else table


def _add_curve(data: list[Trace], style: Trace, table: pd.DataFrame) -> tuple[float, float]:
    """Add a line, and a band if there are several seeds; return the lowest and highest value after the first epochs."""
    ends = pd.DataFrame({sign: table["mean"] + sign * table["std"].fillna(0) for sign in (-1, 1)})
    later = ends.iloc[int(SKIPPED * len(table)) :]
    span = later[-1].min(), later[1].max()
    shown = thinned(len(table))
    table = table.iloc[shown]
    ends = ends.iloc[shown]
    x = table.index.to_numpy()
    y = table["mean"]
    if len(table) == 1:
        data.append(points(style, x, y, table["std"], "markers"))
        return span
    if table["std"].any():
        colour = ",".join(str(int(style["line"]["color"][i : i + 2], 16)) for i in (1, 3, 5))
        band = {"x": np.concatenate([x, x[::-1]]), "y": np.concatenate([ends[1], ends[-1][::-1]])}
        fill = {"fill": "toself", "fillcolor": f"rgba({colour},0.18)", "line": {"width": 0}}
        hidden = {"mode": "lines", "showlegend": False, "hoverinfo": "skip"}
        data.append({**style, **band, **fill, **hidden})
    data.append({**style, "x": x, "y": y.to_numpy(), "mode": "lines"})
    return span


def _caption(tables: Mapping[str, pd.DataFrame], known: pd.DataFrame, many: bool) -> str:
    text = ""
    length = known["epoch"].nunique()
    if tables:
        shape = "" if many else "bars" if length == 1 else "bands"
        text = seeds_text([int(table["n"].max()) for table in tables.values()], shape).capitalize()
        text += f", running mean over {window_of(length)} epochs. " if many and window_of(length) > 1 else ". "
    if (known["state"] == "unfinished").any():
        text += "Each run that has not finished is a dotted line. "
    return f"{text}Double-click to see the whole range."


# ---- after the last epoch


def statistics_of(runs: pd.DataFrame, value: str = "score", by: str | list[str] = "row") -> pd.DataFrame:
    """Return mean, std and n of the finished runs, by row, in the order of the table."""
    finished = runs[(runs["state"] == "finished") & runs[value].notna()]
    return finished.groupby(by, sort=False)[value].agg(mean="mean", std="std", n="count")


def cost_figure(runs: pd.DataFrame, _: pd.DataFrame) -> go.Figure | None:
    """Draw the score against the gradient passes per step; runs with more epochs count as many times more."""
    epochs = runs["epochs"].where(runs["epochs"] > 0)  # those of CSV files are not known
    costs = runs.assign(passes=runs["passes"] * (epochs / epochs.min()).fillna(1)).groupby("row")["passes"].first()
    table = statistics_of(runs).join(costs).dropna(subset="passes")
    if table["passes"].nunique() < 2:
        return None
    same = table.groupby("passes", sort=False)["mean"]
    count = same.transform("size")
    shifts = (0.6 / count).clip(upper=0.07) * (same.cumcount() - (count - 1) / 2)  # separates the whiskers
    styles = row_styles(runs)
    data = []
    for row, part in table.groupby(level=0, sort=False):
        x = (part["passes"] + shifts[part.index]).to_numpy()
        hover = {"customdata": part["passes"].to_numpy(), "hovertemplate": "%{customdata:.3g} passes, %{y:.2f}"}
        data.append(points(styles[row], x, part["mean"], part["std"], "markers", **hover))
    caption = f"After the last epoch, {seeds_text(table['n'], 'whiskers')}. Points of equal cost are shifted."
    title = "gradient passes per step"
    if epochs.nunique() > 1:
        title = f"gradient passes, relative to {epochs.min():g} epochs with one pass per step"
    axis = new_axis(title, tickvals=sorted(table["passes"].unique().tolist()))
    return new_figure("Score against cost", caption, data, xaxis=axis, yaxis=new_axis(runs["unit"].iloc[0]))


def top_eigenvalue_figure(runs: pd.DataFrame, _: pd.DataFrame) -> go.Figure | None:
    """Draw the largest eigenvalue of the Hessian at the end of training: a dot per row, with whiskers.

    If networks were measured on different numbers of samples, it shows those of the most common number.
    """
    numbers = runs.loc[runs["top_eigenvalue"].notna(), "eigenvalue_samples"].mode()
    if numbers.empty:
        return None
    table = statistics_of(runs[runs["eigenvalue_samples"] == numbers.iloc[-1]], "top_eigenvalue")
    if len(table) < 2:
        return None
    styles = row_styles(runs)
    data = [
        points(styles[row], [styles[row]["name"]], part["mean"], part["std"], "markers")
        for row, part in table.groupby(level=0, sort=False)
    ]
    label = measured_on(runs["settings"].iloc[0], int(numbers.iloc[-1]))
    caption = f"λmax, {label}: {seeds_text(table['n'], 'whiskers')}."
    axes = {"xaxis": {"showticklabels": False}, "yaxis": new_axis("λmax", rangemode="tozero")}  # the legend names rows
    return new_figure("Largest eigenvalue of the Hessian", caption, data, **axes)


def _line_key(run: Mapping[str, Any]) -> str:
    """Return a text that is equal for rows that differ only in their radii; SAM with a falling radius is another."""
    if run["method"] not in METHODS:
        return without_radii(run["row"])
    defaults = {name: item.default for name, item in inspect.signature(METHODS[run["method"]]).parameters.items()}
    settings = {**defaults, **run["settings"].get("arguments", {})}
    others = sorted((name, str(value)) for name, value in settings.items() if not name.startswith("rho"))
    schedule = [run["settings"].get(name, 0.0) for name in RADIUS_SCHEDULE]
    return str((run["method"], run["variant"] == "sam-follow", others, schedule))


def without_radii(row: str) -> str:
    """Return the title of a row without its radii.

    Example:
        >>> without_radii("BSAM (2 passes), rho_max 0.1, rho_min 0.1, rho_warmup 5")
        'BSAM (2 passes), rho_warmup 5'
    """
    return re.sub(r", rho(?!_warmup|_start)\w* [^,]*", "", row)


def radius_figure(runs: pd.DataFrame, _: pd.DataFrame) -> go.Figure | None:
    """Draw the score against the total radius: a line through rows that differ only in their radii.

    Base optimizers are horizontal lines.
    """
    styles = row_styles(runs)
    data = []
    table = statistics_of(runs).join(
        runs.drop_duplicates("row").set_index("row")[["radius", "method", "variant", "settings"]]
    )
    table["line"] = [_line_key(row) for row in table.reset_index().to_dict("records")]
    with_radius = table[table["radius"] > 0].sort_values("radius", kind="stable")
    if with_radius.empty or with_radius.groupby("line")["radius"].nunique().max() == 1:
        return None
    ticks = sorted(with_radius["radius"].unique().tolist())
    hover = {"mode": "lines+markers", "hovertemplate": "total radius %{x:.3g}, %{y:.2f}"}
    for _, line in with_radius.groupby("line", sort=False):
        row = min(line.index, key=lambda row: (len(without_radii(row)), len(row)))
        name = row if len(line) == 1 else without_radii(row)
        style = {**styles[row], "name": plot_text(name), "legendgroup": name}
        data.append(points(style, line["radius"].to_numpy(), line["mean"], line["std"], **hover))
    for row, mean in table.loc[table["method"] == BASE, "mean"].items():
        data.append({**styles[row], "x": [ticks[0], ticks[-1]], "y": [mean, mean], "mode": "lines"})
    caption = f"After the last epoch, {seeds_text(table['n'], 'whiskers')}."
    axis = {"type": "log", "tickvals": ticks, "ticktext": [f"{radius:g}" for radius in ticks]}
    axes = {
        "xaxis": new_axis("total radius: rho, or rho_max + rho_min", **axis),
        "yaxis": new_axis(runs["unit"].iloc[0]),
    }
    return new_figure("Score against total radius", caption, data, **axes)


def column_figure(runs: pd.DataFrame, _: pd.DataFrame) -> go.Figure | None:
    """Draw the score against the columns of a recipe's table if they are numbers, such as the label noise.

    A panel per section; published numbers are thin lines with open squares.
    """
    numbers = runs["column"].str.extract(r"^(?:(.*?)\s)?(\d+\.?\d*) ?(%?)$")
    known = runs.assign(x=numbers[1].astype(float))[numbers[1].notna()]
    known = known[known.groupby("section")["x"].transform("nunique") > 1]
    keys = ["section", "row", "x"]
    table = statistics_of(known, by=keys).join(known.groupby(keys)["published"].first())
    if table.empty:
        return None
    lines = dict(list(table.reset_index().sort_values("x").groupby(keys[:2])))
    sections = list(dict.fromkeys(known["section"]))
    data = []
    for row, style in row_styles(known).items():
        for number, section in enumerate(sections, 1):
            if (section, row) not in lines:
                continue
            line = lines[section, row]
            place = {"xaxis": f"x{number}", "yaxis": f"y{number}"}
            ours = points(style, line["x"].to_numpy(), line["mean"], line["std"], "lines+markers", **place)
            data.append({**ours, "showlegend": number == 1})
            if line["published"].notna().any():
                thin = {"name": f"{style['name']}, published", "line": {**style["line"], "width": 0.8}}
                square = {"marker": {**style["marker"], "symbol": "square-open"}, "showlegend": False}
                theirs = {"y": line["published"].to_numpy(), "error_y": None}
                data.append({**ours, **theirs, **thin, **square})
    first = numbers.fillna("").loc[known.index[0]]
    words = (_setting_in_percent(known) if first[2] else "") or first[0]
    label = " in ".join(filter(None, (words, first[2]))) or "column of the table"
    caption = f"After the last epoch, {seeds_text(table['n'], 'whiskers')}."
    if table["published"].notna().any():
        caption += " Thin lines with squares: published numbers."
    axes = {"xaxis": new_axis(label), "yaxis": new_axis(runs["unit"].iloc[0])}
    layout = panel_layout([plot_text(section) for section in sections], len(sections), 384, 300, **axes)
    return new_figure("Score against the columns of the table", caption, data, **layout)


def _setting_in_percent(known: pd.DataFrame) -> str:
    """Return the setting that the columns of the table show, in words; empty if it is none."""
    for name, first in known["settings"].iloc[0].items():
        if is_number(first):
            values = [100 * settings.get(name, math.nan) for settings in known["settings"]]
            if np.allclose(values, known["x"]):
                return str(name).replace("_", " ")
    return ""


# ---- what run directories store


def probe_curves(runs: pd.DataFrame, _: pd.DataFrame) -> go.Figure | None:
    """Draw sharpness and the cosine of g and g_min over the steps: running means over the seeds."""
    probed = runs[[path is not None and (path / PROBE).exists() for path in runs["path"]]]
    finished = probed[probed["state"] == "finished"]
    probed = probed[(probed["state"] == "finished") | ~probed["row"].isin(finished["row"])]
    if probed.empty:
        return None
    readings = {}
    for row, group in probed.groupby("row", sort=False):
        steps = pd.concat([pd.DataFrame(RunDir(path).probe()) for path in group["path"]])
        means = steps.reindex(columns=["step", *SHARPNESS, "cosine"]).astype(float).groupby("step").mean()
        if len(means):
            readings[row] = means.reset_index().to_dict("list")
    if not readings:
        return None
    seeds = seeds_text(probed.groupby("row").size())
    caption = f"MaxS, MinS and BilS at each method's radii, and the cosine: running mean, {seeds}."
    return probe_figure(readings, dict(zip(runs["row"], runs["method"], strict=True)), caption)


def first_predictions(runs: pd.DataFrame) -> tuple[dict[str, RunDir], str]:
    """Return the first finished run of each row that has predictions, and the seeds of these runs in words."""
    stored = runs[[path is not None and (path / PREDICTIONS).exists() for path in runs["path"]]]
    first = stored[stored["state"] == "finished"].drop_duplicates("row")
    return dict(zip(first["row"], map(RunDir, first["path"]), strict=True)), seeds_list(first["seed"])


def class_figure(runs: pd.DataFrame, _: pd.DataFrame) -> go.Figure | None:
    """Draw the accuracy of each class."""
    predicted, seeds = first_predictions(runs)
    arrays = {row: run.predictions() for row, run in predicted.items()}
    arrays = {row: saved for row, saved in arrays.items() if "confusion" in saved}
    if not arrays or max(len(saved["confusion"]) for saved in arrays.values()) > MAX_CLASSES:
        return None
    names = [plot_text(name) for name in next(iter(arrays.values()))["class_names"].tolist()]
    styles = row_styles(runs)
    data = []
    for number, (row, saved) in enumerate(arrays.items()):
        shift = 0.6 * (number - (len(arrays) - 1) / 2) / max(len(arrays), 2)  # equal accuracies stay visible
        samples = saved["confusion"].sum(axis=1)
        accuracy = np.where(samples > 0, 100 * saved["confusion"].diagonal() / np.maximum(samples, 1), np.nan)
        marks = {"mode": "markers", "hovertemplate": "%{text}: %{y:.1f} %", "text": names}
        data.append({**styles[row], **marks, "x": np.arange(len(names)) + shift, "y": accuracy})
    axes = {"xaxis": {"tickvals": list(range(len(names))), "ticktext": names}, "yaxis": new_axis("accuracy in %")}
    return new_figure("Accuracy by class", f"Networks of {seeds}, on the evaluation set.", data, **axes)


SCORE_FIGURES: dict[str, Draw] = {
    "score": score_curves,
    "loss": partial(curves, metric="train_loss", title="Training loss", label="training loss"),
    "memorised": partial(
        curves, metric="memorised", title="Memorised labels", label="wrong labels memorised in %", factor=100.0
    ),
    "cost": cost_figure,
    "radius": radius_figure,
    "top_eigenvalue": top_eigenvalue_figure,
    "probe": probe_curves,
    "classes": class_figure,
}
