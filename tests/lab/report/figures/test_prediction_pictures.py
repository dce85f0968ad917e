from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import bsam
from bsam.lab.cli.predict import picture_paths
from bsam.lab.data.images.decoding import Resize
from bsam.lab.data.pose.joints import Skeleton
from bsam.lab.inference.class_prediction import Prediction
from bsam.lab.inference.pose_prediction import FoundJoints
from bsam.lab.report.figures import prediction_pictures

SKELETON = Skeleton(("head top", "right hand", "left hand"), ((1, 2),), ((0, 1), (0, 2)))


def made(n, folder="pictures"):
    return Prediction(Path(folder, f"{n}.png"), Resize(6), ("cat", "dog", "owl"), (0.75, 0.2, 0.0504))


@pytest.mark.parametrize(("n", "columns", "rows"), [(1, 1, 1), (5, 4, 2)])
def test_the_grid_shows_every_image_with_its_classes(n, columns, rows, monkeypatch, tmp_path):
    saved = []
    monkeypatch.setattr(prediction_pictures, "save", lambda drawn, path: saved.append((drawn, path)))
    shown = [made(i, tmp_path) for i in range(n)]
    pixels = np.random.default_rng(0).integers(0, 256, (n, 6, 6, 3), np.uint8)
    for each, content in zip(shown, pixels, strict=True):
        Image.fromarray(content).save(each.path)
    prediction_pictures.draw_grid(shown, tmp_path / "grid.png")
    ((drawn, path),) = saved
    assert path == tmp_path / "grid.png"
    assert drawn.get_size_inches().tolist() == pytest.approx([2.6 * columns, (2.6 + 0.45 + 3 * 0.18) * rows])
    assert len(drawn.axes) == n
    for ax, each, content in zip(drawn.axes, shown, pixels, strict=True):
        (image,) = ax.get_images()
        assert np.array_equal(image.get_array(), content)
        assert ax.get_title() == "cat 75.0%"
        assert ax.get_xlabel() == f"dog 20.0%\nowl 5.0%\n{each.path.name}"
    assert {ax.get_subplotspec().get_gridspec().get_geometry() for ax in drawn.axes} == {(rows, columns)}


@pytest.fixture
def found(tmp_path):
    """Joints in a light grey image of this size."""

    def make(name="a.png", width=201, height=149, joints=((50, 20), (10.26, 100), (90, 120.04)), box=(0, 0, 100, 140)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (width, height), (200, 201, 202)).save(path)
        return FoundJoints(path, np.array(joints, dtype=float), box, SKELETON)

    return make


def test_the_grid_shows_every_image_with_its_skeleton(found, monkeypatch, tmp_path):
    saved = []
    monkeypatch.setattr(prediction_pictures, "save", lambda drawn, path: saved.append((drawn, path)))
    shown = [found(f"{n}.png", width=40 + n) for n in range(4)]
    shown.append(found("large.png", 2500, 1700, box=(-0.5, -0.5, 2499.5, 1699.5)))
    prediction_pictures.draw_joints_grid(shown, tmp_path / "grid.png")
    ((drawn, path),) = saved
    assert path == tmp_path / "grid.png"
    assert {ax.get_subplotspec().get_gridspec().get_geometry() for ax in drawn.axes} == {(2, 4)}
    for ax, each in zip(drawn.axes, shown, strict=True):
        assert ax.get_xlabel() == each.path.name
        height, width, _ = each.pixels.shape
        assert (ax.get_xlim(), ax.get_ylim()) == ((-0.5, width - 0.5), (height - 0.5, -0.5))
        assert ax.collections[-1].get_offsets().tolist() == each.joints.tolist()
        (image,) = ax.get_images()
        assert image.get_array().shape[:2] == ((567, 834) if width == 2500 else (height, width))

    # in an image of 400 x 300, 1.25 times the longer side of the box is from -2.5 to 97.5 and from 99.5 to 199.5
    prediction_pictures.draw_joints_grid([found("b.png", 400, 300, box=(7.5, 120, 87.5, 179))], tmp_path / "grid.png")
    (ax,) = saved[1][0].axes
    assert (ax.get_xlim(), ax.get_ylim()) == ((-0.5, 97.5), (199.5, 99.5))
    assert ax.get_images()[0].get_array().shape[:2] == (100, 98)


def colours(path):
    with Image.open(path) as picture:
        return np.asarray(picture).astype(int)


@pytest.mark.parametrize("size", [(207, 158), (640, 480), (1, 3)])
def test_a_picture_keeps_its_pixels_away_from_the_skeleton_and_a_small_one_has_its_legend_below(found, size, tmp_path):
    width, height = size
    ends = np.array([[0.5, 0.25], [0.25, 0.75], [0.75, 0.75]]) * size
    each = found("a.png", width, height, ends, (0, 0, width, height))
    prediction_pictures.draw_joints(each, tmp_path / "drawn.png")
    pixels = colours(tmp_path / "drawn.png")
    if min(size) < 400:
        assert pixels.shape == (height + 30, max(width, 120), 3)
        below = pixels[height:].reshape(-1, 3)
        for colour in ((230, 159, 0), (86, 180, 233)):
            assert np.abs(below - colour).max(axis=1).min() < 10
        assert (pixels[:height, width:] == 255).all()
        pixels = pixels[:height, :width]
    assert pixels.shape == (height, width, 3)
    assert np.array_equal(each.pixels, np.full((height, width, 3), (200, 201, 202)))
    if width == 1:
        return
    untouched = (pixels == (200, 201, 202)).all(axis=2)
    assert 0.7 < untouched.mean() < 0.99
    dark = (pixels < 60).all(axis=2)
    for end, colour in zip(ends, ((255, 255, 255), (230, 159, 0), (86, 180, 233)), strict=True):
        x, y = end.astype(int)
        assert np.abs(pixels[y - 1 : y + 2, x - 1 : x + 2] - colour).max(axis=2).min() < 40, colour
        assert dark[y - 12 : y + 13, max(0, x - 12) : x + 13].any()  # the outline
    corner = untouched[: height // 4, -width // 3 :]
    assert corner.all() == (min(size) < 400)  # the place of the legend in a large one


def test_the_place_of_a_joint_in_a_picture_is_exact(found, tmp_path):
    """It is the centre of mass of its dot; the joint that both are connected with is not finite."""
    places = (20.3, 30.8), (60.0, 50.5)
    each = found("a.png", 97, 79, ((np.nan, 0), *places), (0, 0, 500, 500))  # 97 / 150 * 150 < 97, and so for 79
    prediction_pictures.draw_joints(each, tmp_path / "drawn.png")
    ink = np.abs(colours(tmp_path / "drawn.png")[:79, :97] - (200, 201, 202)).max(axis=2)
    for begin, place in zip((0, 45), places, strict=True):
        own = ink[:, begin : begin + 45]
        centre = own.sum(axis=0) @ np.arange(45) / own.sum() + begin, own.sum(axis=1) @ np.arange(79) / own.sum()
        assert centre == pytest.approx(place, abs=0.05)


def test_pictures_have_names_of_their_own(tmp_path):
    images = [Path(name) for name in ("x/a.jpg", "y/a.png", "a-2.jpg", "z/a", "b.tar.gz")]
    names = ["a.png", "a-2.png", "a-2-2.png", "a-3.png", "b.tar.png"]
    assert picture_paths(images, tmp_path / "new") == [tmp_path / "new" / name for name in names]
    assert not (tmp_path / "new").exists()
    (tmp_path / "a-3.png").touch()
    with pytest.raises(bsam.BsamError, match=r"a-3\.png"):
        picture_paths(images, tmp_path)
    with pytest.raises(bsam.BsamError, match=r"a-3\.png"):
        picture_paths(images, tmp_path / "a-3.png")
