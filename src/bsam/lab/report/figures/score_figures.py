"""Figures of the tables of runs: scores over the epochs, against cost, radius and settings; probes and classes.

Each function takes the runs and the epochs of one experiment, as ``read_runs`` and ``read_epochs`` return them, and
returns a plotly figure, or None if the runs do not have the data. ``figure.layout.meta`` has the caption.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from html import escape
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from ....methods import METHODS
from ...recipes.planning import measured_on
from ...tasks import TASKS
from ...training.config import BASE
from ...training.run_dir import PREDICTIONS, PROBE, RunDir
from .flatness_figures import SHARPNESS, probe_figure
from .style import Style, style_of

Draw: TypeAlias = Callable[[pd.DataFrame, pd.DataFrame], go.Figure | None]
MAX_POINTS = 200  # of a curve
FEW_EPOCHS = 10  # an axis of at most this many epochs has a tick at each of them
FEW_CURVES = 4  # more curves are smoothed, and drawn without bands
SMOOTHED = 40  # approximate number of independent points of a smoothed curve
SKIPPED = 0.2  # share of the epochs, from the first on, that may be outside the initial vertical range
MAX_CLASSES = 40  # in the figure of accuracies


def row_styles(runs: pd.DataFrame) -> dict[str, Style]:
    """Return the style of each row, in the order of the table."""
    methods = runs.drop_duplicates("row").set_index("row")["method"]
    return {row: style_of(method, row, list(methods.index[methods == method])) for row, method in methods.items()}


def seeds_text(counts: Iterable[int]) -> str:
    """Return the number of seeds behind each point in words.

    Example:
        >>> seeds_text([1, 1]), seeds_text([3, 3]), seeds_text([3, 2])
        ('one seed', 'mean of 3 seeds', 'mean of 2 to 3 seeds')
    """
    low, *_, high = sorted([*counts] * 2)
    return "one seed" if high == 1 else f"mean of {high} seeds" if low == high else f"mean of {low} to {high} seeds"


def seed_numbers(runs: pd.DataFrame) -> str:
    """Return the seeds of runs in words."""
    seeds = sorted(runs["seed"].unique())
    return f"{'seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds))}"


def smooth(values: pd.Series | pd.DataFrame, points: int = SMOOTHED) -> Any:
    """Return a centred running mean, over fewer values at the ends."""
    return values.rolling(window_of(len(values), points), center=True, min_periods=1).mean()


def window_of(n: int, points: int = SMOOTHED) -> int:
    """Return the odd number of values that a running mean over ``n`` values averages."""
    return 2 * (n // points // 2) + 1


def new_figure(title: str, caption: str, x: str, y: str, **layout: Any) -> go.Figure:
    """Return an empty figure with labelled axes."""
    axes = {"xaxis_title_text": x, "yaxis_title_text": y}
    return go.Figure(layout={"title_text": title, "meta": {"caption": caption}, **axes, **layout})


def named(row: str, style: Style, **trace: Any) -> dict[str, Any]:
    """Return the arguments of a trace: its row, which plotly.js must not read as HTML, and its style."""
    return {"name": escape(row, quote=False), "legendgroup": row, **style.trace, **trace}


def thinned(n: int) -> NDArray[np.intp]:
    """Return at most :data:`MAX_POINTS` indices below ``n``, evenly spaced, with the first and the last."""
    return np.unique(np.linspace(0, n - 1, min(n, MAX_POINTS)).round().astype(int))


def whiskers(std: Iterable[float], style: Style) -> dict[str, Any]:
    """Return error bars of one standard deviation; that of one seed is 0."""
    return {"array": np.nan_to_num(list(std)), "color": style.trace["line"]["color"], "thickness": 1.5, "width": 4}


# ---- over the epochs


def score_curves(runs: pd.DataFrame, epochs: pd.DataFrame) -> go.Figure | None:
    """Draw the score over the epochs."""
    settings: dict[str, Any] = next((settings for settings in runs["settings"] if settings), {})
    task = TASKS.get(settings.get("task", "classification"))
    if task is None:
        return None
    metric = task.measure.metric(settings.get("eval_split", "test"))
    return curves(runs, epochs, metric, "Score during training", runs["unit"].iloc[0], task.measure.factor)


def curves(
    runs: pd.DataFrame, epochs: pd.DataFrame, metric: str, title: str, label: str, factor: float = 1.0
) -> go.Figure | None:
    """Draw a metric over the epochs: means and bands over the finished seeds, and a dotted line per unfinished run.

    Rows without a finished run also show the runs that diverged. Many curves are smoothed and have no bands.
    """
    known = _values(runs, epochs, metric, factor)
    if known.empty:
        return None
    finished = known[known["state"] == "finished"]
    tables = {row: _by_epoch(group) for row, group in finished.groupby("row", sort=False)}
    many = len(tables) > FEW_CURVES
    figure = new_figure(title, "", "epoch", label, hovermode="x unified")
    spans = []
    for row, style in row_styles(runs).items():
        if row in tables:
            table = smooth(tables[row]) if many else tables[row]
            spans.append(_add_curve(figure, row, style, table, bands=not many))
        others = known[(known["row"] == row) & (known["state"] != "finished")]
        for (_, state), run in others.groupby(["seed", "state"], sort=False):
            if state != "diverged" or row not in tables:
                table = _by_epoch(run)
                dotted = {"color": style.trace["line"]["color"], "dash": "dot", "width": 1.2}
                spans.append(_add_curve(figure, row, style, table, name=f"{row}, {state}", line=dotted))
    low, high = np.min(spans, axis=0)[0], np.max(spans, axis=0)[1]
    margin = 0.06 * (high - low) or 0.5
    figure.update_yaxes(range=[low - margin, high + margin])
    shown = sorted(known["epoch"].unique())
    if len(shown) <= FEW_EPOCHS:
        figure.update_xaxes(tickvals=shown)
    figure.layout.meta["caption"] = _caption(
        [int(table["n"].max()) for table in tables.values()], known, many, len(shown)
    )
    return figure


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


def _add_curve(
    figure: go.Figure, row: str, style: Style, table: pd.DataFrame, bands: bool = True, **options: Any
) -> tuple[float, float]:
    """Add a line, and a band if there are several seeds; return the lowest and highest value after the first epochs."""
    std = table["std"].fillna(0.0) if bands else 0.0 * table["mean"]
    later = slice(int(SKIPPED * len(table)), None)
    span = (table["mean"] - std).iloc[later].min(), (table["mean"] + std).iloc[later].max()
    points = thinned(len(table))
    x, y = table.index.to_numpy()[points], table["mean"].to_numpy()[points]
    half = std.to_numpy()[points]
    name = {"name": escape(options.pop("name", row), quote=False)}
    if len(table) == 1:
        bars = {"error_y": whiskers(half, style)} if half.any() else {}
        figure.add_scatter(x=x, y=y, **named(row, style, mode="markers", **bars) | options | name)
        return span
    if half.any():
        colour = ",".join(str(int(style.trace["line"]["color"][i : i + 2], 16)) for i in (1, 3, 5))
        band = {"x": np.concatenate([x, x[::-1]]), "y": np.concatenate([y + half, (y - half)[::-1]])}
        fill = {"fill": "toself", "fillcolor": f"rgba({colour},0.18)", "line": {"width": 0}}
        hidden = {"mode": "lines", "showlegend": False, "hoverinfo": "skip"}
        figure.add_scatter(**band, **fill, **hidden, name=name["name"], legendgroup=row)
    figure.add_scatter(x=x, y=y, **named(row, style, mode="lines") | options | name)
    return span


def _caption(counts: list[int], known: pd.DataFrame, many: bool, length: int) -> str:
    text = ""
    if counts:
        shape = "bars" if known["epoch"].nunique() == 1 else "bands"
        spread = f", {shape} of one standard deviation" if max(counts) > 1 and not many else ""
        window = window_of(length)
        averaged = f", running mean over {window} epochs" if many and window > 1 else ""
        text = f"{seeds_text(counts).capitalize()}{spread}{averaged}. "
    if (known["state"] == "unfinished").any():
        text += "Each run that has not finished is a dotted line. "
    return f"{text}Double-click to see the whole range."


# ---- after the last epoch


def statistics_of(runs: pd.DataFrame, value: str = "score", by: str | list[str] = "row") -> pd.DataFrame:
    """Return mean, std and n of the finished runs, by row, in the order of the table."""
    finished = runs[(runs["state"] == "finished") & runs[value].notna()]
    return finished.groupby(by, sort=False)[value].agg(mean="mean", std="std", n="count")


def cost_figure(runs: pd.DataFrame, _: pd.DataFrame) -> go.Figure | None:
    """Draw the score against the gradient passes per step."""
    table = statistics_of(runs).join(runs.groupby("row")["passes"].first()).dropna(subset="passes")
    if table["passes"].nunique() < 2:
        return None
    caption = f"After the last epoch, {seeds_text(table['n'])}. Points of equal cost are shifted."
    figure = new_figure("Score against cost", caption, "gradient passes per step", runs["unit"].iloc[0])
    same = table.groupby("passes", sort=False)["mean"]
    shifts = 0.07 * (same.cumcount() - (same.transform("size") - 1) / 2)  # separates the whiskers
    styles = row_styles(runs)
    for row, numbers in table.iterrows():
        x = {"x": [numbers["passes"] + shifts[row]], "y": [numbers["mean"]], "customdata": [numbers["passes"]]}
        hover = {"hovertemplate": "%{customdata} passes, %{y:.2f}", "mode": "markers"}
        figure.add_scatter(**x, **named(row, styles[row], **hover), error_y=whiskers([numbers["std"]], styles[row]))
    figure.update_xaxes(tickvals=sorted(table["passes"].unique()))
    return figure


def top_eigenvalue_figure(runs: pd.DataFrame, _: pd.DataFrame) -> go.Figure | None:
    """Draw the largest eigenvalue of the Hessian at the end of training: a dot per row, with whiskers."""
    table = statistics_of(runs, "top_eigenvalue")
    if len(table) < 2:
        return None
    label = f"λmax, {measured_on(runs['settings'].iloc[0])}"
    caption = f"{label}: {seeds_text(table['n'])}, whiskers of one standard deviation."
    figure = new_figure("Largest eigenvalue of the Hessian", caption, "", "λmax")
    for row, style in row_styles(runs).items():
        if row in table.index:
            point = {"x": [escape(row, quote=False)], "y": [table.loc[row, "mean"]], "mode": "markers"}
            figure.add_scatter(**point, **named(row, style), error_y=whiskers([table.loc[row, "std"]], style))
    figure.update_xaxes(showticklabels=False)  # the legend names the rows
    figure.update_yaxes(rangemode="tozero")
    return figure


def _line_key(run: Mapping[str, Any]) -> str:
    """Return a text that is equal for rows that differ only in their radii; SAM with a falling radius is another."""
    if run["method"] not in METHODS:
        return without_radii(run["row"])
    defaults = inspect.signature(METHODS[run["method"]]).parameters
    others = {
        name: value
        for name, value in run["settings"].get("arguments", {}).items()
        if not name.startswith("rho") and not (name in defaults and defaults[name].default == value)
    }
    return json.dumps([run["method"], run["variant"] == "sam-follow", others], sort_keys=True)


def without_radii(row: str) -> str:
    """Return the title of a row without its radii.

    Example:
        >>> without_radii("BSAM (2 passes), rho_max 0.1, rho_min 0.1, every 5")
        'BSAM (2 passes), every 5'
    """
    return re.sub(r", rho\w* [^,]*", "", row)


def radius_figure(runs: pd.DataFrame, _: pd.DataFrame) -> go.Figure | None:
    """Draw the score against the total radius: a line through rows that differ only in their radii.

    Base optimizers are horizontal lines.
    """
    table, styles = statistics_of(runs), row_styles(runs)
    rows = runs[runs["row"].isin(table.index)].drop_duplicates("row")
    rows = rows.assign(line=[_line_key(row) for row in rows.to_dict("records")]).set_index("row")
    with_radius = rows[rows["radius"] > 0].sort_values("radius", kind="stable")
    lines = [group for _, group in with_radius.groupby("line", sort=False)]
    if all(line["radius"].nunique() == 1 for line in lines):
        return None
    ticks = sorted(with_radius["radius"].unique())
    caption = f"After the last epoch, {seeds_text(table['n'])}."
    axis = {"type": "log", "tickvals": ticks, "ticktext": [f"{radius:g}" for radius in ticks]}
    label = "total radius: rho, or rho_max + rho_min"
    figure = new_figure("Score against total radius", caption, label, runs["unit"].iloc[0], xaxis=axis)
    figure.update_xaxes(title_text=label)
    for line in lines:
        numbers, row = table.loc[line.index], min(line.index, key=lambda row: (len(without_radii(row)), len(row)))
        name = row if len(line) == 1 else without_radii(row)
        hover = {"mode": "lines+markers", "hovertemplate": "total radius %{x}, %{y:.2f}"}
        points = {"x": line["radius"].to_numpy(), "y": numbers["mean"].to_numpy()}
        figure.add_scatter(**points, **named(name, styles[row], **hover), error_y=whiskers(numbers["std"], styles[row]))
    for row in rows.index[rows["method"] == BASE]:
        mean = table.loc[row, "mean"]
        figure.add_scatter(x=[ticks[0], ticks[-1]], y=[mean, mean], mode="lines", **named(row, styles[row]))
    return figure


def column_figure(runs: pd.DataFrame, _: pd.DataFrame, label: str = "") -> go.Figure | None:
    """Draw the score against the columns of a recipe's table if they are numbers, such as the label noise.

    A panel per section; published numbers are thin lines with open squares.
    """
    numbers = runs["column"].str.extract(r"^(?:(.*?)\s)?(\d+\.?\d*) ?(%?)$")
    known = runs.assign(x=numbers[1].astype(float))[numbers[1].notna()]
    known = known[known.groupby("section")["x"].transform("nunique") > 1]
    table = statistics_of(known, by=["section", "row", "x"]).join(
        known.groupby(["section", "row", "x"])["published"].first()
    )
    if table.empty:
        return None
    lines = dict(list(table.reset_index().sort_values("x").groupby(["section", "row"])))
    sections = list(dict.fromkeys(known["section"]))
    figure = make_subplots(1, len(sections), subplot_titles=[escape(section, quote=False) for section in sections])
    first = numbers.fillna("").loc[known.index[0]]
    label = label or " in ".join(filter(None, (first[0], first[2]))) or "column of the table"
    figure.update_xaxes(title_text=label).update_yaxes(title_text=runs["unit"].iloc[0])
    caption = f"After the last epoch, {seeds_text(table['n'])}, whiskers of one standard deviation."
    if table["published"].notna().any():
        caption += " Thin lines with squares: published numbers."
    figure.update_layout(title_text="Score against the columns of the table", meta={"caption": caption})
    for row, style in row_styles(known).items():
        for place, section in enumerate(sections, 1):
            if (section, row) not in lines:
                continue
            line = lines[section, row]
            options = named(row, style, mode="lines+markers", showlegend=place == 1)
            x, where = line["x"].to_numpy(), {"row": 1, "col": place}
            figure.add_scatter(x=x, y=line["mean"].to_numpy(), error_y=whiskers(line["std"], style), **options, **where)
            if line["published"].notna().any():
                thin = {
                    "line": {**style.trace["line"], "width": 0.8},
                    "showlegend": False,
                    "name": f"{options['name']}, published",
                }
                square = {"marker": {**style.trace["marker"], "symbol": "square-open"}}
                figure.add_scatter(x=x, y=line["published"].to_numpy(), **options | thin | square, **where)
    return figure


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
        readings[row] = means.reset_index().to_dict("list")
    figure = probe_figure(readings, dict(zip(runs["row"], runs["method"], strict=True)))
    assert figure is not None
    counts = probed.groupby("row").size()
    caption = f"MaxS, MinS and BilS at each method's radii, and the cosine: running mean, {seeds_text(counts)}."
    return figure.update_layout(title_text="Sharpness during training", meta={"caption": caption})


def first_predictions(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the first finished run of each row that has predictions."""
    stored = runs[[path is not None and (path / PREDICTIONS).exists() for path in runs["path"]]]
    return stored[stored["state"] == "finished"].drop_duplicates("row")


def class_figure(runs: pd.DataFrame, _: pd.DataFrame) -> go.Figure | None:
    """Draw the accuracy of each class."""
    predicted = first_predictions(runs)
    arrays = {row: RunDir(path).predictions() for row, path in zip(predicted["row"], predicted["path"], strict=True)}
    arrays = {row: found for row, found in arrays.items() if "confusion" in found}
    if not arrays or max(len(found["confusion"]) for found in arrays.values()) > MAX_CLASSES:
        return None
    names = [escape(name, quote=False) for name in next(iter(arrays.values()))["class_names"].tolist()]
    caption = f"Networks of {seed_numbers(predicted)}, on the evaluation set."
    figure = new_figure("Accuracy by class", caption, "", "accuracy in %")
    styles = row_styles(runs)
    for number, (row, found) in enumerate(arrays.items()):
        shift = 0.6 * (number - (len(arrays) - 1) / 2) / max(len(arrays), 2)  # equal accuracies stay visible
        samples = found["confusion"].sum(axis=1)
        accuracy = np.where(samples > 0, 100 * found["confusion"].diagonal() / np.maximum(samples, 1), np.nan)
        marks = {"mode": "markers", "hovertemplate": "%{text}: %{y:.1f} %", "text": names}
        figure.add_scatter(x=np.arange(len(names)) + shift, y=accuracy, **named(row, styles[row], **marks))
    return figure.update_xaxes(tickvals=list(range(len(names))), ticktext=names)


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
