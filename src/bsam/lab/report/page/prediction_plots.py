"""The predictions on the page: accuracy by class, confident mistakes and skeletons."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ....common.errors import BsamError
from ...analysis.run_record import Record
from ...data.pose.joints import Skeleton
from ...tasks.pose_inputs import PoseInputs
from ...training.files import reading
from ...training.run_dir import RunDir
from ..figures.class_report import classes_info
from ..figures.prediction_pictures import side_colour
from .plot_parts import Draw, Experiment, Figure, draw_all, figure_info, panel_info, rounded, seed_numbers

MISTAKES = 8  # per method
PERSONS = 6
MAX_CLASSES = 40  # in the figure of accuracies
MAX_SIDE = 128  # pixels; larger pictures are scaled down
SMALL = 48  # pixels; smaller pictures are PNG files, others JPEG
QUALITY = 70  # of JPEG


@dataclass(frozen=True)
class Predicted:
    """The predictions of a run, and the skeleton if they are poses."""

    run: Record
    arrays: Mapping[str, NDArray[Any]]
    skeleton: Skeleton | None


DrawPredictions: TypeAlias = Callable[[Experiment, Mapping[str, Predicted]], Figure | None]


def prediction_plots(experiment: Experiment) -> tuple[dict[str, Figure], list[str]]:
    """Return figures of the predictions of the first finished run of each method, and what could not be read."""
    predictions: dict[str, Predicted] = {}
    problems = []
    for method in experiment.methods:
        run = next((run for run in experiment.finished(method) if run.predictions is not None), None)
        if run is not None:
            try:
                predictions[method] = _read(run)
            except BsamError as error:
                problems.append(str(error))

    def of_runs(draw: DrawPredictions) -> Draw:
        """Draw only the predictions whose run belongs to the experiment."""
        return lambda shown: draw(shown, {m: p for m, p in predictions.items() if any(p.run is r for r in shown.runs)})

    functions = {"classes": of_runs(_classes), "mistakes": of_runs(_mistakes), "skeletons": of_runs(_skeletons)}
    figures, more = draw_all(experiment, functions)
    return figures, problems + more


def _read(run: Record) -> Predicted:
    files = RunDir(run.folder)
    arrays = files.predictions()
    with reading(run.folder / "pose.json", "remove it to leave out the skeletons"):
        note = files.note("pose")
        return Predicted(run, arrays, PoseInputs.from_json(note).skeleton if note else None)


def _seeds(predictions: Mapping[str, Predicted]) -> str:
    return seed_numbers([predicted.run for predicted in predictions.values()])


def _classes(experiment: Experiment, predictions: Mapping[str, Predicted]) -> Figure | None:
    predictions = {method: p for method, p in predictions.items() if "confusion" in p.arrays}
    infos = {method: classes_info(predicted.arrays) for method, predicted in predictions.items()}
    if not infos or max(map(len, infos.values())) > MAX_CLASSES:
        return None
    names = [row.name for row in next(iter(infos.values()))]
    traces = []
    for number, (method, rows) in enumerate(infos.items()):
        shift = 0.6 * (number - (len(infos) - 1) / 2) / max(len(infos), 2)  # equal accuracies stay visible
        marks = {"type": "scatter", "mode": "markers", "hovertemplate": "%{text}: %{y:.1f} %", "text": names}
        y = rounded([None if row.accuracy is None else 100 * row.accuracy for row in rows])
        traces.append(experiment.trace(method, x=[round(n + shift, 3) for n in range(len(rows))], y=y, **marks))
    ticks = {"tickvals": list(range(len(names))), "ticktext": names}
    caption = f"Networks of {_seeds(predictions)}, on the evaluation set."
    return figure_info("Accuracy by class", caption, [panel_info(traces, "", "accuracy in %", xaxis=ticks)])


def _mistakes(_: Experiment, predictions: Mapping[str, Predicted]) -> Figure | None:
    predictions = {m: p for m, p in predictions.items() if "confidence" in p.arrays and len(p.arrays["pixels"])}
    if not predictions or find_spec("PIL") is None:
        return None
    rows = []
    for method, predicted in predictions.items():
        arrays = predicted.arrays
        names = arrays["class_names"].tolist()
        columns = (arrays[name].tolist()[:MISTAKES] for name in ("truth", "found", "confidence"))
        items = [
            {"src": data_uri(pixels), "text": f"{names[predicted]}, {confidence:.0%}", "small": f"true: {names[truth]}"}
            for pixels, truth, predicted, confidence in zip(arrays["pixels"][:MISTAKES], *columns, strict=True)
        ]
        rows.append({"title": method, "items": items})
    caption = f"Predicted class with its probability, and true class; networks of {_seeds(predictions)}."
    return {"title": "Most confident mistakes", "caption": caption, "kind": "images", "rows": rows}


def _skeletons(_: Experiment, predictions: Mapping[str, Predicted]) -> Figure | None:
    """Return a row of persons with their labels, and a row per method with the joints that it found."""
    predictions = {m: p for m, p in predictions.items() if p.skeleton is not None and "found" in p.arrays}
    if not predictions or find_spec("PIL") is None:
        return None
    first = next(iter(predictions.values()))  # the persons are the same for all methods
    rows = [{"title": "label", "items": _skeleton_items(first, "truth")}]
    rows += [{"title": method, "items": _skeleton_items(p, "found")} for method, p in predictions.items()]
    caption = (
        f"Joints that the networks of {_seeds(predictions)} found. The person's right side is orange, the left side "
        "light blue."
    )
    pictures = [data_uri(picture) for picture in first.arrays["pixels"][:PERSONS]]
    return {"title": "Skeletons", "caption": caption, "kind": "images", "rows": rows, "pictures": pictures}


def _skeleton_items(predicted: Predicted, name: str) -> list[dict[str, Any]]:
    """Return the number of each picture, and its lines: their colour, and their ends as fractions of its size."""
    skeleton = predicted.skeleton
    assert skeleton is not None
    height, width = predicted.arrays["pixels"].shape[1:3]
    items = []
    for number, joints in enumerate(predicted.arrays[name][:PERSONS]):
        shown = joints[:, 2] > 0 if name == "truth" else np.ones(len(joints), bool)
        parts = (joints[:, :2] + 0.5) / np.array([width, height])
        shown &= np.isfinite(parts).all(axis=1)
        lines = []
        for edge in skeleton.edges:
            if shown[list(edge)].all():
                ends = parts[list(edge)].reshape(-1).tolist()
                lines.append([side_colour(skeleton, edge), *(round(end, 4) for end in ends)])
        items.append({"picture": number, "lines": lines})
    return items


def data_uri(pixels: NDArray[np.uint8]) -> str:
    """Return a picture (height, width, channels) as a data URI: PNG if it is small, otherwise JPEG."""
    from PIL import Image

    picture = Image.fromarray(pixels.squeeze())
    picture.thumbnail((MAX_SIDE, MAX_SIDE))
    kind = "png" if max(pixels.shape[:2]) <= SMALL else "jpeg"
    content = io.BytesIO()
    picture.save(content, kind, **({"quality": QUALITY} if kind == "jpeg" else {"optimize": True}))
    return f"data:image/{kind};base64,{base64.b64encode(content.getvalue()).decode()}"
