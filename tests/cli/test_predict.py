"""``bsam predict`` by a run of the task pose; test_fine_tuning.py has that by a run of classification."""

import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bsam import cli
from bsam.cli import predict as cli_predict
from bsam.data.pose.joints import LSP
from bsam.inference import find_joints
from bsam.inference import predict as bsam_predict
from helpers import draw_images
from pose_runs import train_pose


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train_pose(tmp_path_factory.mktemp("pose") / "run")


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    """A run of classification, and the images that it was trained on."""
    place = tmp_path_factory.mktemp("classes")
    folder = draw_images(place / "images", {"train": 4, "test": 2})
    settings = ["--method", "sgd", "--model", "resnet8", "--weights", "random", "--image-size", "28", "--epochs", "1"]
    train = ["train", "--data", f"folder:{folder}", "--out", str(place / "run"), "--batch", "6", *settings]
    assert cli.main([*train, "--device", "cpu"]) == 0
    return place / "run"


@pytest.fixture
def images(tmp_path, monkeypatch):
    """Three photographs, of which two have the same name; their folder is the current one."""
    monkeypatch.chdir(tmp_path)
    for n, name in enumerate(("one/a.png", "two/a.jpg", "b.png")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pixels = np.random.default_rng(n).integers(0, 256, (60 + n, 80, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / name)
    return ["one/a.png", "two/a.jpg", "b.png"]


def predict(run, *arguments):
    return cli.main(["predict", str(run), *map(str, arguments), "--device", "cpu"])


WHOLE = "The whole image was taken as the person's box; --box names another."


def joints_of(lines):
    """What is printed, by image."""
    found, image = {}, ""
    for line in lines:
        if line.startswith("  "):
            name, x, y = re.fullmatch(r"  (\w+(?: \w+)?) +(-?\d+\.\d) +(-?\d+\.\d)", line).groups()
            found[image][name] = float(x), float(y)
        elif line != WHOLE:
            image = line
            found[image] = {}
    return found


def test_combined_optimizers_are_printed_and_drawn(run, images, capsys):
    assert predict(run, *images, "--out", "new/drawn", "--grid", "grid.png") == 0
    *lines, grid, first, second, third = capsys.readouterr().out.splitlines()
    expected = find_joints(run, images, device="cpu")
    found = joints_of(lines)
    assert list(found) == images
    for joints, each in zip(found.values(), expected, strict=True):
        assert tuple(joints) == LSP.joints
        np.testing.assert_allclose(list(joints.values()), each.joints, atol=0.051)
    drawn = ["new/drawn/a.png", "new/drawn/a-2.png", "new/drawn/b.png"]
    assert [grid, first, second, third] == [f"Written: {path}" for path in ("grid.png", *drawn)]
    for path, image in zip(drawn, images, strict=True):
        with Image.open(path) as picture, Image.open(image) as original:
            assert (picture.format, picture.size) == ("PNG", (120, original.height + 30))  # with its legend
            shown = np.asarray(picture)[: original.height, : original.width]
            assert 0.02 < (shown != np.asarray(original)).any(axis=2).mean() < 0.5
    with Image.open("grid.png") as picture:
        assert picture.size == (3 * 390, 480)


def test_a_box_and_the_flip_test(run, images, capsys):
    box, found = (-3, 5.5, 40, 50), []
    for flags, options in (
        ((), {}),
        (("--box", *box), {"box": box}),
        (("--box", *box, "--flip-test"), {"box": box, "flip_test": True}),
        (("--no-flip-test",), {"flip_test": False}),
    ):
        assert predict(run, images[2], *flags) == 0
        lines = capsys.readouterr().out.splitlines()
        assert (lines[-1] == WHOLE) == ("box" not in options)
        (joints,) = joints_of(lines).values()
        (expected,) = find_joints(run, images[2], device="cpu", **options)
        np.testing.assert_allclose(list(joints.values()), expected.joints, atol=0.051)
        found.append(joints)
    assert found[0] == found[3]
    assert found[0] != found[1] != found[2]


def test_what_cannot_be_done_is_said_before_anything_is_written(run, images, refused, tmp_path):
    (tmp_path / "notes.txt").write_text("no image")
    shutil.copytree(run, "unfinished")
    (tmp_path / "unfinished/model.safetensors").unlink()
    before = sorted(tmp_path.rglob("*"))
    out = ("--out", "drawn", "--grid", "grid.png", "--device", "cpu")
    for arguments, words in {
        (run, images[2], "--top", 2): "finds joints: leave --top out, or give another run",
        (run, *images, "--box", 0, 0, 9, 9): "a box is for one image, and there are 3",
        (run, images[2], "--box", 0, 0, 0, 9): "the right of a box must exceed its left, and the bottom its top",
        (run, images[2], "--box", 100, 100, 5, 5): "the right of a box must exceed its left, and the bottom its top",
        (run, images[2], "--box", 0, 0, 1e9, 1e9): "of b.png is too large for its 80 x 62 pixels: give another box (--",
        (run, images[2], "--box", 90, 0, 99, 9): "lies outside of the 80 x 62 pixels of b.png",
        (run, images[2], "nowhere.png"): "nowhere.png cannot be read: No such file",
        (run, images[2], "notes.txt"): "notes.txt cannot be decoded: it is no image",
        ("unfinished", images[2]): "is not finished",
        (tmp_path, images[2]): "is not a run directory of bsam train",
    }.items():
        assert words in refused("predict", *arguments, *out)
    assert "b.png is there already: remove it" in refused("predict", run, images[2], "--out", ".")
    assert "b.png is not a folder" in refused("predict", run, images[2], "--out", "b.png")
    assert "b.png/drawn cannot be used as a folder" in refused("predict", run, images[2], "--out", "b.png/drawn")
    assert sorted(tmp_path.rglob("*")) == before


def test_classification_has_no_boxes(classes, images, refused):
    for flags, name in (
        (("--box", 0, 0, 9, 9), "--box"),
        (("--flip-test",), "--flip-test"),
        (("--no-flip-test",), "--flip-test"),
    ):
        words = f"the run in {classes} does not find joints: leave {name} out, or give another run"
        assert words in refused("predict", classes, images[2], *flags)
    assert "--out must end in .csv or .json for classes; got drawn" in refused(
        "predict", classes, images[2], "--out", "drawn"
    )
    assert "there is no folder new for --out" in refused("predict", classes, images[2], "--out", "new/a.csv")
    assert predict(classes, images[2]) == 0


def test_folders_in_and_tables_of_classes_out(classes, tmp_path, monkeypatch, capsys, refused):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(classes.parent / "images", Path("images"))
    (folder / "test/notes.txt").write_text("no image")
    (folder / "test/.cache").mkdir()
    (folder / "test/.cache/hidden.png").write_bytes(b"no image")
    files = sorted(str(path) for path in Path("images/test").glob("*/*.png") if ".c" not in str(path))
    assert len(files) == 6
    expected = bsam_predict(classes, files, top=2, device="cpu")
    for out in ("predictions.csv", "predictions.json"):
        capsys.readouterr()
        assert predict(classes, "images/test", "--top", "2", "--out", out) == 0
        printed = capsys.readouterr()
        assert printed.err == "bsam: left out 1 of 7 files (cannot be decoded as images): images/test/notes.txt\n"
        *lines, written = printed.out.splitlines()
        assert written == f"Written: {out}"
        assert [line.split()[0] for line in lines] == files
    header, *rows = csv.reader(Path("predictions.csv").read_text().splitlines())
    assert header == ["file", "class", "probability", "class_2", "probability_2"]
    found = json.loads(Path("predictions.json").read_text())
    for row, entry, each in zip(rows, found, expected, strict=True):
        assert row[0] == entry["file"] == str(each.path)
        assert (row[1], row[3]) == tuple(entry["classes"]) == each.classes
        numbers = [float(row[2]), float(row[4])]
        assert numbers == entry["probabilities"] == pytest.approx(each.probabilities)
    (tmp_path / "empty").mkdir()
    assert "the folder empty holds no files" in refused("predict", classes, "empty")


def test_a_grid_shows_the_first_images_and_comes_after_the_table(run, classes, images, monkeypatch, capsys):
    assert cli_predict.MAX_GRID == 100
    monkeypatch.setattr(cli_predict, "MAX_GRID", 2)
    for folder, name in ((classes, "draw_grid"), (run, "draw_joints_grid")):
        drawn = []
        monkeypatch.setattr(
            f"bsam.report.predictions.{name}",
            lambda shown, path, drawn=drawn: drawn.append(([str(each.path) for each in shown], table.is_file())),
        )
        for chosen in (images, images[:2]):
            table = Path(f"{name}-{len(chosen)}.csv")
            capsys.readouterr()
            assert predict(folder, *chosen, "--grid", "grid.png", "--out", table) == 0
            lines = capsys.readouterr().out.splitlines()
            assert lines[-2:] == [f"Written: {table}", "Written: grid.png"]
            assert ("grid.png shows the first 2 of 3 images." in lines) == (len(chosen) == 3)
        assert drawn == [(images[:2], True)] * 2


def test_pictures_have_the_names_of_their_images_beside_other_files(run, images, capsys):
    Path("one/a.csv").write_text("no image")
    assert predict(run, "one", "--out", "drawn") == 0
    assert [path.name for path in Path("drawn").iterdir()] == ["a.png"]
    assert "left out 1 of 2 files (cannot be decoded as images): one/a.csv" in capsys.readouterr().err


def test_tables_of_joints(run, images, capsys):
    for out in ("joints.csv", "joints.json"):
        assert predict(run, "one", "b.png", "--out", out) == 0
        assert capsys.readouterr().out.splitlines()[-1] == f"Written: {out}"
    expected = find_joints(run, ["one/a.png", "b.png"], device="cpu")
    header, *rows = csv.reader(Path("joints.csv").read_text().splitlines())
    assert header == ["file", "joint", "x", "y"]
    assert [row[:2] for row in rows] == [[str(each.path), name] for each in expected for name in LSP.joints]
    np.testing.assert_allclose(
        [[*map(float, row[2:])] for row in rows], np.concatenate([each.joints for each in expected])
    )
    first, second = json.loads(Path("joints.json").read_text())
    assert (first["file"], second["file"]) == ("one/a.png", "b.png")
    assert first["box"] == list(expected[0].box)
    np.testing.assert_allclose(list(second["joints"].values()), expected[1].joints)
    assert tuple(second["joints"]) == LSP.joints
