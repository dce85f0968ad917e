"""The pictures of predictions on the page: what the networks of an experiment found, a row for each method."""

from __future__ import annotations

import base64
import io
from importlib.util import find_spec
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ....common.errors import BsamValueError
from ...common.files import reading
from ...config import Run
from ...inference.pictures import side_colour
from ...tasks import task_class
from ...tasks.found import Picture
from ...training.run_dir import PREDICTIONS
from ..figures.score_figures import first_predictions

NO_PICTURES_HINT = "remove it to leave out the pictures"
MAX_SIDE = 128  # pixels; larger pictures are scaled down
SMALL = 48  # pixels; smaller pictures are PNG files, others JPEG


def picture_rows(runs: pd.DataFrame, _: pd.DataFrame) -> dict[str, Any] | None:
    """Return the pictures of the first finished run of each row, as the task shows what the run stored."""
    if find_spec("PIL") is None:
        return None
    predicted, seeds = first_predictions(runs)
    settings = dict(zip(runs["row"], runs["settings"], strict=True))
    title = ""
    caption = ""
    rows: dict[str, list[dict[str, Any]]] = {}
    for row, run in predicted.items():
        try:
            task: Any = task_class((settings[row] or {}).get("task", Run.task.name))
        except BsamValueError:  # of another version
            continue
        arrays = run.predictions()
        with reading(run.path / PREDICTIONS, NO_PICTURES_HINT):
            shown = task.pictures(arrays, lambda name, parse, run=run: run.parsed(name, parse, NO_PICTURES_HINT))
        if shown is None or not shown.pictures:
            continue
        title = shown.title
        caption = shown.caption.format(seeds=seeds)
        if shown.labels:
            rows.setdefault("label", [item(picture) for picture in shown.labels])  # the same for all methods
        rows[row] = [item(picture) for picture in shown.pictures]
    return {"title": title, "caption": caption, "rows": rows} if rows else None


def item(picture: Picture) -> dict[str, Any]:
    """Return what the template shows of a picture."""
    return {
        "src": data_uri(picture.pixels),
        "text": picture.title,
        "small": ", ".join(picture.below),
        "lines": skeleton_lines(picture),
    }


def skeleton_lines(picture: Picture) -> list[tuple[Any, ...]]:
    """Return the lines of a skeleton: their colour, and their ends as fractions of the size of the picture."""
    lines: list[tuple[Any, ...]] = []
    if picture.skeleton is None or picture.joints is None:
        return lines
    parts = (picture.joints[:, :2] + 0.5) / np.array(picture.pixels.shape[1::-1])
    for edge in picture.skeleton.edges:
        ends = parts[list(edge)].reshape(-1)
        if np.isfinite(ends).all():
            lines.append((side_colour(picture.skeleton, edge), *ends.round(4).tolist()))
    return lines


def data_uri(pixels: NDArray[np.uint8]) -> str:
    """Return a picture (height, width, channels) as a data URI: PNG if it is small, otherwise JPEG."""
    from PIL import Image

    picture = Image.fromarray(pixels.squeeze())
    picture.thumbnail((MAX_SIDE, MAX_SIDE))
    kind = "png" if max(pixels.shape[:2]) <= SMALL else "jpeg"
    content = io.BytesIO()
    picture.save(content, kind, quality=70, optimize=True)
    return f"data:image/{kind};base64,{base64.b64encode(content.getvalue()).decode()}"
