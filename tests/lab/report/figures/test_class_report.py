"""A classifier class by class: the numbers, the table, the pictures, and what ``bsam train`` writes."""

import io
import warnings

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from bsam.lab import cli
from bsam.lab.report.figures import class_report as module
from bsam.lab.report.figures.class_report import (
    class_report,
    classes_info,
    classes_table,
    draw_confusion,
    draw_mistakes,
)
from bsam.lab.training.config import Run
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


def test_accuracies_and_the_most_frequent_mistake():
    cat, dog, owl = classes_info(KEPT)
    assert (cat.samples, cat.accuracy, cat.mistaken_for) == (10, 0.6, ("dog $x", 3))
    assert (dog.samples, dog.accuracy, dog.mistaken_for) == (4, 1.0, None)
    assert (owl.samples, owl.accuracy, owl.mistaken_for) == (0, None, None)


def test_the_table_begins_with_the_class_that_is_recognised_worst():
    title, _, _, _, *rows = classes_table(RUN, KEPT).splitlines()
    assert title == "# SAM, DigitsNet on Digits: test accuracy 71.4%"
    assert rows == ["| cat | 10 | 60.0 | dog $x (3) |", "| dog $x | 4 | 100.0 | - |", "| owl | 0 | - | - |"]


def test_names_with_a_bar_or_bytes_that_are_not_utf8():
    names = np.array([b"caf\xe9".decode("utf-8", "surrogateescape"), "a|b", "owl"])
    *_, cafe, bar, _ = classes_table(RUN, {**KEPT, "class_names": names}).splitlines()
    assert (cafe, bar) == (r"| caf? | 10 | 60.0 | a\|b (3) |", r"| a\|b | 4 | 100.0 | - |")


def test_the_matrix_has_true_classes_in_rows():
    (ax, _) = draw_confusion(RUN, KEPT).axes
    counts = {text.get_position(): text.get_text() for text in ax.texts}
    assert (counts[1, 0], counts[2, 0], counts[0, 1]) == ("3", "1", "")
    assert (ax.get_ylabel(), ax.get_xlabel()) == ("true class", "predicted class")
    assert [label.get_text() for label in ax.get_yticklabels()] == NAMES


def test_long_names_leave_room_for_the_matrix():
    names = ["a" * 25, "b" * 26, "c" * 100]
    drawn = draw_confusion(RUN, {**KEPT, "class_names": np.array(names)})
    ax = drawn.axes[0]
    for labels in (ax.get_xticklabels(), ax.get_yticklabels()):
        assert [label.get_text() for label in labels] == ["a" * 25, "b" * 24 + "…", "c" * 24 + "…"]
    FigureCanvasAgg(drawn).draw()
    box = ax.get_tightbbox()
    assert 0 <= box.x0 < box.x1 <= drawn.bbox.x1
    assert 0 <= box.y0 < box.y1 <= drawn.bbox.y1
    assert ax.get_window_extent().width > 0.25 * drawn.bbox.width


def test_a_matrix_of_many_classes_has_no_numbers():
    many = {**KEPT, "confusion": np.eye(100, dtype=int), "class_names": np.array([f"class {n}" for n in range(100)])}
    drawn = draw_confusion(RUN, many)
    assert not drawn.axes[0].texts
    assert max(drawn.get_size_inches()) < 12


def test_each_mistake_says_what_was_found_and_what_is_true():
    axes = draw_mistakes(RUN, KEPT).axes
    assert [(ax.get_title(), ax.get_xlabel()) for ax in axes[::3]] == [
        ("dog $x, 99.0%", "true: cat"),
        ("owl, 70.0%", "true: cat"),
    ]


@pytest.mark.usefixtures("coarse")
def test_files_without_mistakes_without_matplotlib_and_of_other_tasks(monkeypatch):
    assert set(class_report(RUN, KEPT)) == {"classes.md", "confusion.png", "mistakes.png"}
    assert set(class_report(RUN, {**KEPT, "pixels": KEPT["pixels"][:0]})) == {"classes.md", "confusion.png"}
    assert class_report(RUN, {"pixels": KEPT["pixels"]}) == {}
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert set(class_report(RUN, KEPT)) == {"classes.md"}


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
    for name in ("confusion.png", "mistakes.png"):
        with Image.open(trained / name) as picture:
            assert min(picture.size) > 300


def test_tensorboard_has_the_settings_and_the_pictures_of_the_run(trained):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
    events = EventAccumulator(str(trained / "tensorboard")).Reload()
    assert events.Tags()["images"] == ["confusion", "mistakes"]
    for name in events.Tags()["images"]:
        (image,) = events.Images(name)
        assert image.step == 1
        with Image.open(io.BytesIO(image.encoded_image_string)) as shown, Image.open(trained / f"{name}.png") as file:
            assert np.array_equal(np.asarray(shown), np.asarray(file.convert("RGB")))
    start = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    values = HParamsPluginData.FromString(start).session_start_info.hparams
    shown = {name: value.number_value or value.string_value for name, value in values.items()}
    assert {"method": "sam", "rho": 0.1, "batch": 64.0, "data": "digits"}.items() <= shown.items()
    assert "test_accuracy" in events.Tags()["scalars"]
