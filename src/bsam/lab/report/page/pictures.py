"""The pictures of predictions on the page: confident mistakes and skeletons."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ...data.pose.joints import Skeleton
from ...tasks.pose_inputs import PoseInputs
from ...training.files import reading
from ...training.run_dir import RunDir
from ..figures.prediction_pictures import side_colour
from ..figures.score_figures import first_predictions, seed_numbers

Pictures: TypeAlias = dict[str, Any]
MISTAKES = 8  # per method
PERSONS = 6
MAX_SIDE = 128  # pixels; larger pictures are scaled down
SMALL = 48  # pixels; smaller pictures are PNG files, others JPEG
QUALITY = 70  # of JPEG


def mistakes(runs: pd.DataFrame, _: pd.DataFrame) -> Pictures | None:
    """Return the most confident mistakes of the first finished run of each row."""
    predicted, rows = first_predictions(runs), dict[str, list[dict[str, Any]]]()
    if find_spec("PIL") is None:
        return None
    for row, path in zip(predicted["row"], predicted["path"], strict=True):
        arrays = RunDir(path).predictions()
        if "confidence" not in arrays or not len(arrays["pixels"]):
            continue
        names = arrays["class_names"].tolist()
        columns = (arrays[name].tolist()[:MISTAKES] for name in ("truth", "found", "confidence"))
        rows[row] = [
            {"src": data_uri(pixels), "text": f"{names[found]}, {confidence:.0%}", "small": f"true: {names[truth]}"}
            for pixels, truth, found, confidence in zip(arrays["pixels"][:MISTAKES], *columns, strict=True)
        ]
    caption = f"Predicted class with its probability, and true class; networks of {seed_numbers(predicted)}."
    return {"kind": "pictures", "title": "Most confident mistakes", "caption": caption, "rows": rows} if rows else None


def skeletons(runs: pd.DataFrame, _: pd.DataFrame) -> Pictures | None:
    """Return a row of persons with their labels, and a row for each method with the joints that it found."""
    predicted, rows = first_predictions(runs), dict[str, list[dict[str, Any]]]()
    if find_spec("PIL") is None:
        return None
    for row, path in zip(predicted["row"], predicted["path"], strict=True):
        arrays = RunDir(path).predictions()
        with reading(path / "pose.json", "remove it to leave out the skeletons"):
            note = RunDir(path).note("pose")
            skeleton = PoseInputs.from_json(note).skeleton if note else None
        if skeleton is not None and "found" in arrays:
            rows.setdefault("label", _items(skeleton, arrays, "truth"))  # the persons are the same for all methods
            rows[row] = _items(skeleton, arrays, "found")
    caption = (
        f"Joints that the networks of {seed_numbers(predicted)} found. The person's right side is orange, the left "
        "side light blue."
    )
    return {"kind": "pictures", "title": "Skeletons", "caption": caption, "rows": rows} if rows else None


def _items(skeleton: Skeleton, arrays: Mapping[str, NDArray[Any]], name: str) -> list[dict[str, Any]]:
    """Return each picture, and its lines: their colour, and their ends as fractions of its size."""
    height, width = arrays["pixels"].shape[1:3]
    items = []
    for pixels, joints in zip(arrays["pixels"][:PERSONS], arrays[name][:PERSONS], strict=True):
        shown = joints[:, 2] > 0 if name == "truth" else np.ones(len(joints), bool)
        parts = (joints[:, :2] + 0.5) / np.array([width, height])
        shown &= np.isfinite(parts).all(axis=1)
        lines = [
            (side_colour(skeleton, edge), *parts[list(edge)].reshape(-1).round(4).tolist())
            for edge in skeleton.edges
            if shown[list(edge)].all()
        ]
        items.append({"src": data_uri(pixels), "lines": lines})
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


PICTURES: dict[str, Callable[[pd.DataFrame, pd.DataFrame], Pictures | None]] = {
    "mistakes": mistakes,
    "skeletons": skeletons,
}
