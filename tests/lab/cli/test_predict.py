"""``bsam predict``, with runs of classification and of pose."""

import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bsam.lab import cli
from bsam.lab.cli.predict import draw_grid
from bsam.lab.data.persons import LSP
from bsam.lab.inference import predict as bsam_predict
from bsam.lab.inference.pictures import SIDE, side_legend, text_picture

WHOLE = "The whole image was used as the person's box; set --box to change it."


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Three photographs, of which two have the same name; their folder is the current one."""
    monkeypatch.chdir(tmp_path)
    for n, name in enumerate(("one/a.png", "two/a.jpg", "b.png")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pixels = np.random.default_rng(n).integers(0, 256, (60 + n, 80, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / name)
    return ["one/a.png", "two/a.jpg", "b.png"]


def predict(run, *arguments):
    return cli.main(["predict", str(run), *map(str, arguments), "--device", "cpu"])


def joints_of(lines):
    """What is printed, by image."""
    joints, image = {}, ""
    for line in lines:
        if line.startswith("  "):
            name, x, y = re.fullmatch(r"  (\w+(?: \w+)?) +(-?\d+\.\d) +(-?\d+\.\d)", line).groups()
            joints[image][name] = float(x), float(y)
        elif line != WHOLE:
            image = line
            joints[image] = {}
    return joints


def test_joints_are_printed_and_drawn(pose_run, photos, capsys):
    Path("one/a.csv").write_text("no image")  # of the same name
    assert predict(pose_run, "one", *photos[1:], "--out", "new/drawn", "--grid", "grid.png") == 0
    *lines, grid, first, second, third = capsys.readouterr().out.splitlines()
    expected = bsam_predict(pose_run, photos, device="cpu")
    printed = joints_of(lines)
    assert list(printed) == photos
    for joints, pose in zip(printed.values(), expected, strict=True):
        assert tuple(joints) == LSP.joints
        np.testing.assert_allclose(list(joints.values()), pose.joints, atol=0.051)
    drawn = ["new/drawn/a.png", "new/drawn/a-2.png", "new/drawn/b.png"]
    assert [grid, first, second, third] == [f"Written: {path}" for path in ("grid.png", *drawn)]
    legend = side_legend()
    for path, photo in zip(drawn, photos, strict=True):
        with Image.open(path) as picture, Image.open(photo) as original:
            assert (picture.format, picture.size) == ("PNG", (legend.width, original.height + legend.height))
            shown = np.asarray(picture)[: original.height, : original.width]
            assert 0.02 < (shown != np.asarray(original)).any(axis=2).mean() < 0.5
    assert Path("grid.png").stat().st_size > 10_000


def test_a_box_and_the_flip_test(pose_run, photos, capsys):
    box, results = (-3, 5.5, 40, 50), []
    for flags, options in (
        ((), {}),
        (("--box", *box), {"box": box}),
        (("--box", *box, "--flip-test"), {"box": box, "flip_test": True}),
        (("--no-flip-test",), {"flip_test": False}),
    ):
        assert predict(pose_run, photos[2], *flags) == 0
        lines = capsys.readouterr().out.splitlines()
        assert (lines[-1] == WHOLE) == ("box" not in options)
        (joints,) = joints_of(lines).values()
        (expected,) = bsam_predict(pose_run, photos[2], device="cpu", **options)
        np.testing.assert_allclose(list(joints.values()), expected.joints, atol=0.051)
        results.append(joints)
    assert results[0] == results[3]
    assert results[0] != results[1] != results[2]


def test_tables_of_joints(pose_run, photos, capsys):
    for out in ("joints.csv", "joints.json"):
        assert predict(pose_run, "one", "b.png", "--out", out) == 0
        assert capsys.readouterr().out.splitlines()[-1] == f"Written: {out}"
    expected = bsam_predict(pose_run, ["one/a.png", "b.png"], device="cpu")
    header, *rows = csv.reader(Path("joints.csv").read_text().splitlines())
    assert header == ["file", "joint", "x", "y"]
    assert [row[:2] for row in rows] == [[str(pose.path), name] for pose in expected for name in LSP.joints]
    numbers = [[*map(float, row[2:])] for row in rows]
    np.testing.assert_allclose(numbers, np.concatenate([pose.joints for pose in expected]))
    first, second = json.loads(Path("joints.json").read_text())
    assert (first["file"], second["file"]) == ("one/a.png", "b.png")
    assert first["box"] == list(expected[0].box)
    np.testing.assert_allclose(list(second["joints"].values()), expected[1].joints)
    assert tuple(second["joints"]) == LSP.joints


def test_classes_of_a_folder_are_printed_and_written(images_run, images, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(images / "test", "test")
    Path("test/notes.txt").write_text("no image")
    Path("test/.cache").mkdir()
    Path("test/.cache/hidden.png").write_bytes(b"no image")
    files = sorted(map(str, Path("test").glob("[a-z]*/*.png")))
    assert len(files) == 6
    expected = bsam_predict(images_run, files, top=2, device="cpu")
    for out in ("predictions.csv", "predictions.json"):
        assert predict(images_run, "test", "--top", "2", "--out", out) == 0
        printed = capsys.readouterr()
        assert printed.err.count("\n") == 1
        assert "test/notes.txt" in printed.err
        *lines, written = printed.out.splitlines()
        assert written == f"Written: {out}"
    for line, prediction in zip(lines, expected, strict=True):
        path, *pairs = re.fullmatch(r"(\S+) +(cat|dog|owl) ([\d.]+)%, (cat|dog|owl) ([\d.]+)%", line).groups()
        assert (path, pairs[0], pairs[2]) == (str(prediction.path), *prediction.classes)
        percent = [float(pairs[1]), float(pairs[3])]
        assert percent == pytest.approx([100 * p for p in prediction.probabilities], abs=0.06)
    header, *rows = csv.reader(Path("predictions.csv").read_text().splitlines())
    assert header == ["file", "class", "probability", "class_2", "probability_2"]
    entries = json.loads(Path("predictions.json").read_text())
    for row, entry, prediction in zip(rows, entries, expected, strict=True):
        assert row[0] == entry["file"] == str(prediction.path)
        assert (row[1], row[3]) == tuple(entry["classes"]) == prediction.classes
        numbers = [float(row[2]), float(row[4])]
        assert numbers == entry["probabilities"] == pytest.approx(prediction.probabilities)


def test_a_grid_shows_the_first_images(images_run, pose_run, photos, capsys):
    for run in (images_run, pose_run):
        found = bsam_predict(run, photos, device="cpu")
        assert draw_grid(found, Path("first.png"), limit=2) == ["first.png shows the first 2 of 3 images."]
        assert draw_grid(found[:2], Path("two.png"), limit=2) == []
        assert Path("first.png").read_bytes() == Path("two.png").read_bytes()
        capsys.readouterr()
        assert predict(run, *photos[:2], "--grid", "grid.png", "--out", "table.csv") == 0
        assert capsys.readouterr().out.splitlines()[-2:] == ["Written: table.csv", "Written: grid.png"]
        assert Path("grid.png").read_bytes() == Path("two.png").read_bytes()


def test_pictures_of_classes(images_run, photos, capsys):
    """Each is as in a grid, without the name of the file."""
    assert predict(images_run, *photos, "--out", "drawn") == 0
    drawn = ["drawn/a.png", "drawn/a-2.png", "drawn/b.png"]
    assert capsys.readouterr().out.splitlines()[3:] == [f"Written: {path}" for path in drawn]
    for path, found in zip(drawn, bsam_predict(images_run, photos, device="cpu"), strict=True):
        with Image.open(path) as picture:
            above, below = text_picture(["a"], SIDE).height, text_picture(["a", "b"], SIDE).height
            assert picture.size == (SIDE, above + SIDE + below)
            shown = np.asarray(picture)[above : above + SIDE]
        enlarged = Image.fromarray(found.pixels).resize((SIDE, SIDE), Image.Resampling.NEAREST)
        assert np.array_equal(shown, np.asarray(enlarged))
