"""Pictures of predictions, looked at pixel by pixel."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import bsam
from bsam.lab.cli.predict import picture_paths
from bsam.lab.data.images import Resize
from bsam.lab.data.persons import LSP, MPII, Skeleton
from bsam.lab.inference import FoundClasses, FoundJoints
from bsam.lab.inference.pictures import (
    GAP,
    LETTERS,
    MIDDLE,
    OUTLINE,
    SIDE,
    SIDES,
    draw_skeleton,
    drawable,
    full_size,
    installed_fonts,
    predictions_grid,
    save,
    side_colour,
    side_legend,
    text_picture,
)

SKELETON = Skeleton(("head", "right hand", "left hand", "neck"), ((1, 2),), ((0, 3), (3, 1), (3, 2)))
JOINTS = np.array([[100, 20], [20, 150], [180, 150], [100, 80]], float)
GREY = 200, 201, 202


def pixels_of(path):
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB")).astype(int)


def colour_at(picture, x, y):
    return "#{:02x}{:02x}{:02x}".format(*picture.getpixel((round(x), round(y))))


@pytest.mark.parametrize("suffix", ["png", "jpg", "PDF"])
def test_the_grid_has_every_image_in_rows_of_four(suffix, tmp_path):
    contents = np.random.default_rng(0).integers(0, 256, (5, 6, 6, 3), np.uint8)
    shown = []
    for n, content in enumerate(contents):
        Image.fromarray(content).save(tmp_path / f"{n}.png")
        shown.append(FoundClasses(tmp_path / f"{n}.png", Resize(6), ("cat", "dog", "owl"), (0.75, 0.2, 0.05)))
    path = tmp_path / f"grid.{suffix}"
    save(predictions_grid(shown), path)
    assert path.stat().st_size > 1000
    if suffix != "png":
        return
    drawn, title, below = pixels_of(path), text_picture(["a"], SIDE).height, text_picture(["a"] * 3, SIDE).height
    height = GAP + title + SIDE + below
    assert drawn.shape == (GAP + 2 * height, GAP + 4 * (SIDE + GAP), 3)
    for n, content in enumerate(contents):
        x, y = GAP + n % 4 * (SIDE + GAP), GAP + n // 4 * height + title
        middles = drawn[y : y + SIDE, x : x + SIDE][SIDE // 12 :: SIDE // 6, SIDE // 12 :: SIDE // 6]
        assert np.array_equal(middles, content)


class Whole:
    """A font that has every letter."""

    def getmask(self, text):
        return Image.new("L", (ord(text) % 97 + 1, 9))


def test_letters_that_no_font_has_are_escaped():
    """Pillow's font has no é; the first font that has all letters is used."""
    fonts = installed_fonts(LETTERS, ("missing.ttf",))
    assert len(fonts) == 1
    assert drawable("cat 75%", fonts) == ("cat 75%", fonts[0])
    assert drawable("café 猫 \udce9", fonts)[0] == r"caf\xe9 \u732b ?"
    more = [*fonts, Whole()]
    assert drawable("猫 75%", more) == ("猫 75%", more[1])
    assert drawable("cat 75%", more) == ("cat 75%", fonts[0])


def test_long_texts_are_wrapped():
    one, two = (text_picture([text], SIDE) for text in ("short", "a long name " * 6))
    assert (one.width, two.width) == (SIDE, SIDE)
    assert two.height >= 2 * one.height - 1
    edges = np.asarray(two)[:, [0, -1]]
    assert (edges == 255).all()


def test_each_side_has_a_colour_over_a_wider_dark_outline():
    drawn = draw_skeleton(Image.new("RGB", (200, 170), GREY), JOINTS, SKELETON, width=6)
    for one, other in SKELETON.edges:
        middle = JOINTS[[one, other]].mean(axis=0)
        assert colour_at(drawn, *middle) == side_colour(SKELETON, (one, other))
        across = np.array([[0, -1], [1, 0]]) @ (JOINTS[other] - JOINTS[one])
        assert colour_at(drawn, *(middle + 5 * across / np.linalg.norm(across))) == OUTLINE
    for joint, place in enumerate(JOINTS):
        assert colour_at(drawn, *place) == side_colour(SKELETON, (joint,))
    untouched = (np.asarray(drawn) == GREY).all(axis=2)
    assert 0.7 < untouched.mean() < 0.95


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_joints_that_are_not_finite_are_not_drawn(value):
    blank, lost = Image.new("RGB", (200, 170), GREY), JOINTS.copy()
    lost[1] = value, 0
    drawn = np.asarray(draw_skeleton(blank, lost, SKELETON))
    assert (drawn[90:, :90] == GREY).all()  # the right hand and its line
    assert (drawn[90:, 110:] != GREY).any()
    assert np.array_equal(draw_skeleton(blank, np.full((4, 2), value), SKELETON), blank)


@pytest.mark.parametrize("skeleton", [LSP, MPII])
def test_the_sides_of_real_skeletons(skeleton):
    for edge in skeleton.edges:
        sides = {side for side in SIDES for joint in edge if side in skeleton.joints[joint]}
        assert side_colour(skeleton, edge) == (SIDES[sides.pop()] if len(sides) == 1 else MIDDLE)


@pytest.fixture
def pose(tmp_path):
    """Joints in a grey image of this size."""

    def make(width=201, height=149, joints=JOINTS, box=None):
        Image.new("RGB", (width, height), GREY).save(tmp_path / "a.png")
        return FoundJoints(tmp_path / "a.png", np.array(joints), box or (0, 0, width, height), SKELETON)

    return make


@pytest.mark.parametrize("size", [(207, 158), (640, 480), (1, 3)])
def test_an_image_keeps_its_size_and_place_and_has_its_legend_below(pose, size, tmp_path):
    save(full_size(pose(*size).picture()), tmp_path / "drawn.png")
    drawn, legend = pixels_of(tmp_path / "drawn.png"), side_legend()
    assert drawn.shape == (size[1] + legend.height, max(size[0], legend.width), 3)
    assert (drawn[: size[1], size[0] :] == 255).all()
    assert size[0] == 1 or (drawn[: size[1] // 9, : size[0] // 9] == GREY).all()
    for colour in ((230, 159, 0), (86, 180, 233)):
        assert (drawn[size[1] :] == colour).all(axis=2).any()


def test_the_place_of_a_joint_is_exact(pose, tmp_path):
    """It is the centre of mass of its dot; the joint that both are connected with is not finite."""
    places = (20.3, 30.8), (60.0, 50.5)
    lost = (np.nan, 0)
    found = pose(97, 79, (lost, *places, lost), (0, 0, 500, 500))
    save(full_size(found.picture()), tmp_path / "drawn.png")
    ink = np.abs(pixels_of(tmp_path / "drawn.png")[:79, :97] - GREY).max(axis=2)
    for begin, place in zip((0, 45), places, strict=True):
        dot = ink[:, begin : begin + 45]
        centre = dot.sum(axis=0) @ np.arange(45) / dot.sum() + begin, dot.sum(axis=1) @ np.arange(79) / dot.sum()
        assert centre == pytest.approx(place, abs=0.15)


def test_the_grid_of_joints_shows_the_part_that_the_network_saw(pose, tmp_path):
    """In an image of 400 x 300, 1.25 times the longer side of the box is from -2.5 to 97.5 and from 99.5 to 199.5."""
    joints = np.full((4, 2), np.nan)
    joints[1] = 50, 150
    save(predictions_grid([pose(400, 300, joints, (7.5, 120, 87.5, 179))]), tmp_path / "grid.png")
    drawn = pixels_of(tmp_path / "grid.png")
    seen = (drawn == GREY).all(axis=2)
    rows, columns = np.flatnonzero(seen.any(axis=1)), np.flatnonzero(seen.any(axis=0))
    assert (np.ptp(rows) + 1, np.ptp(columns) + 1) == (SIDE, pytest.approx(0.98 * SIDE, abs=1))
    orange = np.argwhere((drawn[rows[0] : rows[-1], :] == (230, 159, 0)).all(axis=2)).mean(axis=0)
    assert orange == pytest.approx([SIDE * 50.5 / 100, columns[0] + SIDE * 50.5 / 100], abs=1)


def test_pictures_have_different_names(tmp_path):
    images = [Path(name) for name in ("x/a.jpg", "y/a.png", "a-2.jpg", "z/a", "b.tar.gz")]
    names = ["a.png", "a-2.png", "a-2-2.png", "a-3.png", "b.tar.png"]
    assert picture_paths(images, tmp_path / "new") == [tmp_path / "new" / name for name in names]
    assert not (tmp_path / "new").exists()
    (tmp_path / "a-3.png").touch()
    for folder in (tmp_path, tmp_path / "a-3.png"):
        with pytest.raises(bsam.BsamError, match=r"a-3\.png"):
            picture_paths(images, folder)
