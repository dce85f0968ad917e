from pathlib import Path

import numpy as np
import pytest

from bsam.report import predictions
from bsam.training.prediction import Prediction


def made(n, classes=("cat", "dog", "owl"), probabilities=(0.75, 0.2, 0.0504)):
    pixels = np.random.default_rng(n).integers(0, 256, (6, 6, 3), np.uint8)
    return Prediction(Path(f"pictures/{n}.png"), pixels, classes, probabilities)


def test_lines():
    assert predictions.prediction_lines([made(1), made(1000)]) == [
        "pictures/1.png     cat 75.0%, dog 20.0%, owl 5.0%",
        "pictures/1000.png  cat 75.0%, dog 20.0%, owl 5.0%",
    ]


@pytest.mark.parametrize(("n", "columns", "rows"), [(1, 1, 1), (4, 4, 1), (5, 4, 2)])
def test_the_grid_shows_every_image_with_its_classes(n, columns, rows, monkeypatch, tmp_path):
    saved = []
    monkeypatch.setattr(predictions, "save", lambda drawn, path: saved.append((drawn, path)))
    shown = [made(i) for i in range(n)]
    predictions.draw_grid(shown, tmp_path / "grid.png")
    ((drawn, path),) = saved
    assert path == tmp_path / "grid.png"
    assert drawn.get_size_inches().tolist() == pytest.approx([2.6 * columns, (2.6 + 0.45 + 3 * 0.18) * rows])
    assert len(drawn.axes) == n
    for ax, each in zip(drawn.axes, shown, strict=True):
        (image,) = ax.get_images()
        assert np.array_equal(image.get_array(), each.pixels)
        assert ax.get_title() == "cat 75.0%"
        assert ax.get_xlabel() == f"dog 20.0%\nowl 5.0%\n{each.path.name}"
    assert {ax.get_subplotspec().get_gridspec().get_geometry() for ax in drawn.axes} == {(rows, columns)}
