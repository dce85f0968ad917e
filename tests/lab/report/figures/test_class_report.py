"""A classifier class by class: the numbers, the table, the pictures, and what ``bsam train`` writes."""

import io
import re
import sys
import warnings

import numpy as np
import pytest
from PIL import Image

from bsam.lab import cli
from bsam.lab.config import Run
from bsam.lab.inference.pictures import SIDE
from bsam.lab.report.figures.class_report import (
    class_report,
    classes_table,
    confusion_page,
)
from bsam.lab.training.run_dir import RunDir

RUN = Run("sam")
NAMES = ["cat", "dog $x", "owl"]
KEPT = {
    "class_names": np.array(NAMES),
    "confusion": np.array([[6, 3, 1], [0, 4, 0], [0, 0, 0]]),
    "pixels": np.zeros((4, 8, 8, 3), np.uint8),
    "truth": np.zeros(4, np.int64),
    "found": np.array([1, 1, 1, 2]),
    "confidence": np.array([0.99, 0.9, 0.8, 0.7]),
}


def test_the_table_begins_with_the_class_that_is_recognised_worst():
    title, _, _, _, *rows = class_report(RUN, KEPT)["classes.md"].decode().splitlines()
    assert title == "# SAM, DigitsNet on Digits: test accuracy 71.4%"
    assert rows == ["| cat | 10 | 60.0 | dog $x (3) |", "| dog $x | 4 | 100.0 | - |", "| owl | 0 | - | - |"]


def test_control_characters_in_names_do_not_reach_a_terminal():
    names = np.array(["a\n| b", "c\td\x1b]0;e\x07", "owl"])
    kept = {**KEPT, "class_names": names}
    assert not {"\x1b", "\x07", "\t"} & {*classes_table("", kept), *confusion_page("", kept)}


def test_the_matrix_has_true_classes_in_rows_and_is_small():
    page = confusion_page("<b>", {**KEPT, "class_names": np.array(["cat", "<dog>", "owl"])})
    head, *rows = re.findall(r"<tr>(.*)", page)
    assert re.findall(r"<span>(.*?)</span>", head) == ["cat", "&lt;dog&gt;", "owl"]
    assert [re.findall(r"<td[^>]*>(\d*)", row) for row in rows] == [["6", "3", "1"], ["", "4", ""], ["", "", ""]]
    shares = [float(share) ** 2 for share in re.findall(r"--share:([\d.]+)", rows[0])]
    assert shares == pytest.approx([60, 30, 10], abs=1)
    assert "predicted &lt;dog&gt;: 3 (30.0 %)" in rows[0]
    assert "<b>" not in page
    many = {"confusion": np.full((100, 100), 9), "class_names": np.array([f"class {n}" for n in range(100)])}
    assert len(confusion_page("", many)) < 1_000_000


def mistakes_picture(pixels):
    return np.asarray(Image.open(io.BytesIO(class_report(RUN, {**KEPT, "pixels": pixels})["mistakes.png"])))


def test_each_mistake_is_in_the_picture():
    pixels = np.arange(4, dtype=np.uint8)[:, None, None, None] * np.full((4, 8, 8, 3), 60, np.uint8)
    drawn = mistakes_picture(pixels)
    large = [(drawn == value).all(axis=2).sum() for value in (0, 60, 120, 180)]
    assert min(large) >= SIDE**2
    assert np.array_equal(mistakes_picture(pixels[..., :1]), drawn)


def test_files_without_mistakes_without_packages_and_of_other_tasks(monkeypatch):
    assert set(class_report(RUN, KEPT)) == {"classes.md", "confusion.html", "mistakes.png"}
    assert set(class_report(RUN, {**KEPT, "pixels": KEPT["pixels"][:0]})) == {"classes.md", "confusion.html"}
    assert class_report(RUN, {"pixels": KEPT["pixels"]}) == {}
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert set(class_report(RUN, KEPT)) == {"classes.md", "confusion.html"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    flags = "--epochs 1 --batch 64 --limit-train 128 --limit-test 100 --device cpu --set rho=0.1"
    assert cli.main(["train", "--method", "sam", *flags.split(), "--out", str(folder)]) == 0
    return folder


def test_a_trained_run_has_them_and_they_agree_with_its_accuracy(trained):
    kept, accuracy = RunDir(trained).predictions(), RunDir(trained).last_metrics()["test_accuracy"]
    assert kept["confusion"].trace() == round(100 * accuracy)
    assert f"test accuracy {accuracy:.1%}" in (trained / "classes.md").read_text().splitlines()[0]
    assert (trained / "confusion.html").exists()


def test_tensorboard_has_the_settings_and_the_pictures_of_the_run(trained):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
    events = EventAccumulator(str(trained / "tensorboard")).Reload()
    assert events.Tags()["images"] == ["mistakes"]
    (image,) = events.Images("mistakes")
    assert image.step == 1
    with Image.open(io.BytesIO(image.encoded_image_string)) as shown, Image.open(trained / "mistakes.png") as file:
        assert np.array_equal(np.asarray(shown), np.asarray(file))
    start = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    values = HParamsPluginData.FromString(start).session_start_info.hparams
    shown = {name: value.number_value or value.string_value for name, value in values.items()}
    assert {"method": "sam", "rho": 0.1, "batch": 64.0, "data": "digits"}.items() <= shown.items()
    assert "test_accuracy" in events.Tags()["scalars"]
