"""The predictions on the page: accuracy by class, confident mistakes and skeletons."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..common.errors import BsamError
from ..data.pose.joints import Skeleton
from ..tasks.pose_inputs import PoseInputs
from ..training.run_dir import RunDir
from .classes import classes_info
from .page_figures import Experiment, Figure, rounded, seed_numbers
from .records import Record
from .skeletons import side_colour

MISTAKES = 8  # per method
PERSONS = 6
MAX_CLASSES = 40  # in the figure of accuracies
MAX_SIDE = 128  # pixels; larger pictures are scaled down
SMALL = 48  # pixels; smaller pictures are PNG files, others JPEG
QUALITY = 70  # of JPEG


def pictures_info(experiment: Experiment) -> tuple[dict[str, Figure], list[str]]:
    """Return figures of the predictions of the first finished run of each method, and what could not be read."""
    predictions: dict[str, tuple[Record, dict[str, NDArray[Any]]]] = {}
    problems = []
    for method in experiment.methods:
        run = next((run for run in experiment.finished(method) if run.predictions is not None), None)
        if run is not None:
            try:
                predictions[method] = run, RunDir(run.folder).predictions()
            except BsamError as error:
                problems.append(str(error))
    figures = {
        "classes": _classes(experiment, predictions),
        "mistakes": _mistakes(predictions),
        "skeletons": _skeletons(predictions),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}, problems


Predictions = Mapping[str, tuple[Record, dict[str, NDArray[Any]]]]


def _seeds(predictions: Predictions) -> str:
    return seed_numbers([run for run, _ in predictions.values()])


def _classes(experiment: Experiment, predictions: Predictions) -> Figure | None:
    predictions = {method: pair for method, pair in predictions.items() if "confusion" in pair[1]}
    infos = {method: classes_info(arrays) for method, (_, arrays) in predictions.items()}
    if not infos or max(map(len, infos.values())) > MAX_CLASSES:
        return None
    names = [row.name for row in next(iter(infos.values()))]
    traces = []
    for number, (method, rows) in enumerate(infos.items()):
        shift = 0.6 * (number - (len(infos) - 1) / 2) / max(len(infos), 2)  # equal accuracies stay visible
        y = rounded([None if row.accuracy is None else 100 * row.accuracy for row in rows])
        marks = {"type": "scatter", "mode": "markers", "hovertemplate": "%{text}: %{y:.1f} %", "text": names}
        traces.append(experiment.trace(method, x=[round(n + shift, 3) for n in range(len(rows))], y=y, **marks))
    x = {"tickvals": list(range(len(names))), "ticktext": names, "title": {"text": ""}}
    layout = {"xaxis": x, "yaxis": {"title": {"text": "accuracy in %"}}}
    caption = f"Networks of {_seeds(predictions)}, on the evaluation set."
    panel = {"title": "", "data": traces, "layout": layout}
    return {"title": "Accuracy by class", "caption": caption, "kind": "plotly", "panels": [panel]}


def _mistakes(predictions: Predictions) -> Figure | None:
    if find_spec("PIL") is None:
        return None
    rows = []
    for method, (_, arrays) in predictions.items():
        if "confidence" in arrays and len(arrays["pixels"]):
            names = arrays["class_names"].tolist()
            columns = (arrays[name].tolist()[:MISTAKES] for name in ("truth", "found", "confidence"))
            pairs = zip(arrays["pixels"], *columns, strict=False)
            items = [
                {"src": data_uri(pixels), "text": f"{names[found]}, {confidence:.0%}", "small": f"true: {names[truth]}"}
                for pixels, truth, found, confidence in pairs
            ]
            rows.append({"title": method, "items": items})
    caption = f"What the networks of {_seeds(predictions)} predict, with its probability, and the true class."
    title = "Most confident mistakes"
    return {"title": title, "caption": caption, "kind": "images", "rows": rows} if rows else None


def _skeletons(predictions: Predictions) -> Figure | None:
    """Return a row of persons with their labels, and a row per method with the joints that it found."""
    if find_spec("PIL") is None:
        return None
    rows: list[dict[str, Any]] = []
    sources: list[str] = []
    for method, (run, arrays) in predictions.items():
        note = RunDir(run.folder).note("pose")
        if "found" not in arrays or not note:
            continue
        skeleton = PoseInputs.from_json(note).skeleton
        pixels, truth = arrays["pixels"][:PERSONS], arrays["truth"][:PERSONS]
        if not rows:
            sources = [data_uri(picture) for picture in pixels]
            drawn = [_lines(joints[:, :2], skeleton, joints[:, 2] > 0, pixels) for joints in truth]
            rows.append({"title": "label", "items": [{"lines": lines} for lines in drawn]})
        found = [_lines(joints, skeleton, np.ones(len(joints), bool), pixels) for joints in arrays["found"][:PERSONS]]
        rows.append({"title": method, "items": [{"lines": lines} for lines in found]})
    for row in rows:
        for item, number in zip(row["items"], range(len(sources)), strict=False):
            item["picture"] = number
    caption = (
        f"Joints that the networks of {_seeds(predictions)} found. The person's right side is orange, the left "
        "side light blue."
    )
    figure = {"title": "Skeletons", "caption": caption, "kind": "images", "rows": rows, "pictures": sources}
    return figure if rows else None


def _lines(joints: NDArray[Any], skeleton: Skeleton, shown: NDArray[np.bool_], pixels: NDArray[Any]) -> list[list[Any]]:
    """Return colour and ends of the lines between joints, in parts of the picture's width and height."""
    height, width = pixels.shape[1:3]
    parts = (joints + 0.5) / np.array([width, height])
    shown = shown & np.isfinite(parts).all(axis=1)
    edges = [edge for edge in skeleton.edges if shown[list(edge)].all()]
    return [
        [side_colour(skeleton, edge), *(round(float(v), 4) for v in parts[list(edge)].reshape(-1))] for edge in edges
    ]


def data_uri(pixels: NDArray[np.uint8]) -> str:
    """Return a picture (height, width, channels) as a data URI: PNG if it is small, otherwise JPEG."""
    from PIL import Image

    picture = Image.fromarray(pixels.squeeze())
    picture.thumbnail((MAX_SIDE, MAX_SIDE))
    kind = "png" if max(pixels.shape[:2]) <= SMALL else "jpeg"
    content = io.BytesIO()
    picture.save(content, kind, **({"quality": QUALITY} if kind == "jpeg" else {"optimize": True}))
    return f"data:image/{kind};base64,{base64.b64encode(content.getvalue()).decode()}"
