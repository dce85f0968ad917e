"""The pictures of predictions on the page: confident mistakes and skeletons."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ...common.files import WrongContent, reading
from ...data.persons import Skeleton
from ...inference.prediction_pictures import side_colour
from ...tasks.pose import PoseInputs
from ...training.run_dir import PREDICTIONS, TASK
from ..figures.score_figures import first_predictions

Arrays: TypeAlias = Mapping[str, NDArray[Any]]
Items: TypeAlias = list[dict[str, Any]]
MISTAKES = 8  # per method
PERSONS = 6
MAX_SIDE = 128  # pixels; larger pictures are scaled down
SMALL = 48  # pixels; smaller pictures are PNG files, others JPEG


def mistakes(runs: pd.DataFrame, _: pd.DataFrame) -> dict[str, Any] | None:
    """Return the most confident mistakes of the first finished run of each row."""
    predicted, seeds = first_predictions(runs)
    rows = {row: list(_mistakes(run.predictions())) for row, run in predicted.items()}
    caption = f"Predicted class with its probability, and true class; networks of {seeds}."
    return _pictures("Most confident mistakes", caption, rows)


def _mistakes(arrays: Arrays) -> Iterator[dict[str, Any]]:
    if "confidence" in arrays:
        names = arrays["class_names"].tolist()
        columns = (arrays[name][:MISTAKES] for name in ("pixels", "truth", "found", "confidence"))
        for pixels, truth, predicted, confidence in zip(*columns, strict=True):
            texts = {"text": f"{names[predicted]}, {confidence:.0%}", "small": f"true: {names[truth]}"}
            yield {"pixels": pixels, **texts}


def skeletons(runs: pd.DataFrame, _: pd.DataFrame) -> dict[str, Any] | None:
    """Return a row of persons with their labels, and a row for each method with the joints that it found."""
    predicted, seeds = first_predictions(runs)
    rows: dict[str, Items] = {}
    for row, run in predicted.items():
        arrays = run.predictions()
        with reading(run.path / "pose.json", "remove it to leave out the skeletons"):
            note = run.note("pose")
            skeleton = PoseInputs.from_json(note).skeleton if note else None
        if skeleton is not None and "found" in arrays:
            truth = np.where(arrays["truth"][..., 2:] > 0, arrays["truth"][..., :2], np.nan)  # only labelled joints
            rows.setdefault("label", _persons(skeleton, arrays["pixels"], truth))  # the same for all methods
            rows[row] = _persons(skeleton, arrays["pixels"], arrays["found"])
    sides = "The person's right side is orange, the left side light blue."
    return _pictures("Skeletons", f"Joints that the networks of {seeds} found. {sides}", rows)


def drawn(runs: pd.DataFrame, _: pd.DataFrame) -> dict[str, Any] | None:
    """Return a row of pictures for each method, which a task of the user drew."""
    predicted, seeds = first_predictions(runs)
    rows: dict[str, Items] = {}
    for row, run in predicted.items():
        if run.note(TASK) and "pictures" in (arrays := run.predictions()):
            with reading(run.path / PREDICTIONS, "remove it to leave out the pictures"):
                rows[row] = [{"pixels": _checked(pixels)} for pixels in arrays["pictures"][:PERSONS]]
    return _pictures("Pictures", f"Evaluation samples, as the task draws them; networks of {seeds}.", rows)


def _checked(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    if pixels.ndim != 3 or pixels.shape[-1] != 3 or pixels.dtype != np.uint8:
        raise WrongContent("a picture must have bytes (height, width, 3)")
    return pixels


def _persons(skeleton: Skeleton, pictures: NDArray[Any], joints: NDArray[Any]) -> Items:
    """Return each picture, and its lines: their colour, and their ends as fractions of its size."""
    items = []
    for pixels, places in zip(pictures[:PERSONS], joints[:PERSONS], strict=True):
        parts = (places[:, :2] + 0.5) / np.array(pixels.shape[1::-1])
        ends = {edge: parts[list(edge)].reshape(-1) for edge in skeleton.edges}
        lines = [
            (side_colour(skeleton, edge), *xy.round(4).tolist()) for edge, xy in ends.items() if np.isfinite(xy).all()
        ]
        items.append({"pixels": pixels, "lines": lines})
    return items


def _pictures(title: str, caption: str, rows: Mapping[str, Items]) -> dict[str, Any] | None:
    """Return what the template shows of rows of pictures."""
    if find_spec("PIL") is None or not any(rows.values()):
        return None
    shown = {row: [{**item, "src": data_uri(item["pixels"])} for item in items] for row, items in rows.items() if items}
    return {"title": title, "caption": caption, "rows": shown}


def data_uri(pixels: NDArray[np.uint8]) -> str:
    """Return a picture (height, width, channels) as a data URI: PNG if it is small, otherwise JPEG."""
    from PIL import Image

    picture = Image.fromarray(pixels.squeeze())
    picture.thumbnail((MAX_SIDE, MAX_SIDE))
    kind = "png" if max(pixels.shape[:2]) <= SMALL else "jpeg"
    content = io.BytesIO()
    picture.save(content, kind, quality=70, optimize=True)
    return f"data:image/{kind};base64,{base64.b64encode(content.getvalue()).decode()}"
