"""Pictures of predictions: the classes of images, and skeletons, the joints of a person connected by lines."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..common.files import write
from ..common.printing import printable
from ..data.images import Crop
from ..data.persons import MARGIN, Skeleton
from .class_prediction import Prediction
from .pose_prediction import FoundJoints

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from PIL.ImageFont import FreeTypeFont

SIDES = {"right": "#e69f00", "left": "#56b4e9"}  # distinguishable by colour-blind readers, visible on dark pictures
CLASS = "#2f8fd0"  # the letters of the most probable class
MIDDLE, OUTLINE = "#ffffff", "#202020"  # the outline, also the colour of letters, is visible on light pictures
SIDE = 360  # pixels, the longer side of a picture in a grid
MAX_COLUMNS = 4  # of a grid
GAP = 12  # pixels between pictures
LETTERS = 18  # pixels, the size of letters
LINE = 0.008  # width of a skeleton's lines, relative to the longer side of the person's box
TEXT = 0.03  # size of letters below a photograph, relative to its shorter side
SMOOTH = 4000  # pixels; skeletons are drawn up to 8 times as large, if the picture is then at most this large
# for letters that Pillow's font lacks; the first of each line is for European ones, the others for Asian ones
FONTS = (
    *("DejaVuSans.ttf", "NotoSansCJK-Regular.ttc", "NotoSansJP-Regular.otf", "ipaexg.ttf", "DroidSansFallbackFull.ttf"),
    *("Helvetica.ttc", "Hiragino Sans GB.ttc", "Arial Unicode.ttf"),  # macOS
    *("arial.ttf", "YuGothM.ttc", "meiryo.ttc", "msgothic.ttc", "msyh.ttc", "malgun.ttf"),  # Windows
)


@cache
def _fonts(size: int) -> list[FreeTypeFont]:
    """Return Pillow's font and those of :data:`FONTS` that are installed."""
    from PIL import ImageFont

    fonts: list[Any] = [ImageFont.load_default(size)]
    for name in FONTS:
        try:
            fonts.append(ImageFont.truetype(name, size))
        except OSError:
            continue
    return fonts


@cache
def _has(font: FreeTypeFont, letter: str) -> bool:
    """Whether a font has a letter: otherwise it draws the box of a code that stands for no letter."""
    masks = [font.getmask(text) for text in (letter, "\uffff")]
    return letter.isspace() or masks[0].size != masks[1].size or bytes(masks[0]) != bytes(masks[1])


def drawable(text: str, size: int = LETTERS) -> tuple[str, FreeTypeFont]:
    """Return a text and the first font that has all of its letters; if there is none, with the missing ones escaped."""
    text = printable(text)
    for font in _fonts(size):
        if all(_has(font, letter) for letter in text):
            return text, font
    font = _fonts(size)[0]
    return "".join(c if _has(font, c) else c.encode("unicode_escape").decode() for c in text), font


def text_picture(lines: Sequence[str], width: int, colour: str = OUTLINE, size: int = LETTERS) -> Picture:
    """Return centred lines of text on white; longer lines are wrapped to the width in pixels."""
    from PIL import Image, ImageDraw

    shown = []
    for line in lines:
        text, font = drawable(line, size)
        letters = max(1, int(len(text) * width / max(font.getlength(text), width)))
        shown += [(part, font) for part in textwrap.wrap(text, letters, break_on_hyphens=False)]
    picture = Image.new("RGB", (width, math.ceil(1.35 * size * len(shown))), "white")
    draw = ImageDraw.Draw(picture)
    for n, (text, font) in enumerate(shown):
        draw.text((width / 2, 1.35 * size * (n + 0.5)), text, colour, font, anchor="mm")
    return picture


def arrange(rows: Sequence[Sequence[Picture]], gap: int = 0) -> Picture:
    """Return rows of pictures on white, centred in columns of the same width."""
    from PIL import Image

    width = gap + max(picture.width for row in rows for picture in row)
    heights = [gap + max(picture.height for picture in row) for row in rows]
    sheet = Image.new("RGB", (gap + width * max(map(len, rows)), gap + sum(heights)), "white")
    for n, row in enumerate(rows):
        for column, picture in enumerate(row):
            sheet.paste(picture, (gap + width * column + (width - gap - picture.width) // 2, gap + sum(heights[:n])))
    return sheet


def stack(*pictures: Picture) -> Picture:
    """Return pictures below each other."""
    return arrange([[picture] for picture in pictures])


def grid(pictures: Sequence[Picture]) -> Picture:
    """Return pictures in rows of at most four."""
    return arrange([pictures[n : n + MAX_COLUMNS] for n in range(0, len(pictures), MAX_COLUMNS)], GAP)


def captioned(pixels: NDArray[np.uint8], above: str, below: Sequence[str], colour: str) -> Picture:
    """Return a picture of a grid with a coloured line above it and lines below it."""
    return stack(text_picture([above], SIDE, colour), scaled(pixels, SIDE), text_picture(below, SIDE))


def scaled(pixels: NDArray[np.uint8], side: int) -> Picture:
    """Return a picture whose longer side has this many pixels. Enlarged pixels stay visible."""
    from PIL import Image, ImageOps

    picture = Image.fromarray(pixels.squeeze()).convert("RGB")
    filter = Image.Resampling.NEAREST if max(picture.size) < side else Image.Resampling.LANCZOS
    return ImageOps.contain(picture, (side, side), filter)


def encoded(picture: Picture, format: str) -> bytes:
    """Return a picture as the content of a file."""
    content = io.BytesIO()
    picture.save(content, format)
    return content.getvalue()


def save(picture: Picture, path: Path) -> None:
    """Write a picture in the format of the path's suffix."""
    suffix = path.suffix[1:].lower()
    write(path, encoded(picture, "jpeg" if suffix == "jpg" else suffix))


def class_texts(prediction: Prediction) -> list[str]:
    """Return the classes with their probabilities."""
    return [f"{name} {p:.1%}" for name, p in zip(prediction.classes, prediction.probabilities, strict=True)]


def draw_grid(predictions: Sequence[Prediction], path: Path) -> None:
    """Draw the images as the network saw them: the most probable class above, the others and the file below."""
    pictures = []
    for prediction in predictions:
        first, *rest = class_texts(prediction)
        pictures.append(captioned(prediction.pixels, first, [*rest, prediction.path.name], CLASS))
    save(grid(pictures), path)


def draw_joints_grid(poses: Sequence[FoundJoints], path: Path) -> None:
    """Draw the part of each image that the network saw, with its skeleton and file name, into one picture."""
    pictures = []
    for pose in poses:
        pixels = pose.pixels
        left, top, right, bottom = Crop(pose.box, MARGIN, 1).region
        x, y = max(0, math.floor(left + 0.5)), max(0, math.floor(top + 0.5))
        seen = pixels[y : math.ceil(bottom + 0.5), x : math.ceil(right + 0.5)]
        person = draw_person(seen, pose.joints - (x, y), pose.skeleton, SIDE)
        pictures.append(stack(person, text_picture([pose.path.name], SIDE)))
    save(stack(grid(pictures), side_legend()), path)


def draw_person(pixels: NDArray[np.uint8], joints: NDArray[Any], skeleton: Skeleton, side: int) -> Picture:
    """Return a picture of this side with a skeleton whose joints are in pixels of the array."""
    places = side / max(pixels.shape[:2]) * (joints + 0.5) - 0.5
    return draw_skeleton(scaled(pixels, side), places, skeleton, 2 * LINE * side)


def draw_joints(pose: FoundJoints, path: Path) -> None:
    """Draw the skeleton on the image at full size, and a legend below it."""
    from PIL import Image, ImageOps

    picture = Image.fromarray(pose.pixels)
    left, top, right, bottom = pose.box
    width = max(1.5, LINE * min(max(right - left, bottom - top), max(picture.size)))
    legend = side_legend(max(LETTERS, round(TEXT * min(picture.size))))
    drawn = draw_skeleton(picture, pose.joints, pose.skeleton, width)
    space = max(0, legend.width - picture.width)  # on the right: the image keeps its coordinates
    save(stack(ImageOps.expand(drawn, (0, 0, space, 0), "white"), legend), path)


def draw_skeleton(
    picture: Picture, joints: NDArray[np.floating[Any]], skeleton: Skeleton, width: float = 3.0
) -> Picture:
    """Return a picture with joints as dots and the lines between them.

    The person's right side is orange, the left side light blue and the middle white, all with a dark outline.

    Args:
        picture: a PIL image.
        joints: (J, 2), x and y in pixels; the centre of the first pixel is (0, 0). Non-finite joints are not drawn.
        skeleton: the names of the joints, and which to connect.
        width: the width of the lines, in pixels.
    """
    from PIL import Image, ImageDraw

    factor = min(8, max(1, SMOOTH // max(picture.size)))  # smooth edges: Pillow's own have steps
    large = picture.resize((factor * picture.width, factor * picture.height), Image.Resampling.NEAREST)
    draw = ImageDraw.Draw(large)
    shown = np.isfinite(joints).all(axis=1)
    places = [tuple(place) for place in (factor * (joints + 0.5) - 0.5).tolist()]
    edges = [edge for edge in skeleton.edges if shown[list(edge)].all()]
    for thickness, is_outline in ((2.2 * width, True), (width, False)):  # outlines first, so that none covers a line
        for edge in edges:
            colour = OUTLINE if is_outline else side_colour(skeleton, edge)
            draw.line([places[end] for end in edge], colour, max(1, round(factor * thickness)))
    for joint in np.flatnonzero(shown).tolist():
        colour = side_colour(skeleton, (joint,))
        draw.circle(places[joint], 1.45 * factor * width, colour, OUTLINE, max(1, round(0.5 * factor * width)))
    return large.reduce(factor)


def side_colour(skeleton: Skeleton, joints: Sequence[int]) -> str:
    """Return the colour of the side of the body that these joints belong to; middle joints belong to any side."""
    sides = {skeleton.joints[joint].partition(" ")[0] for joint in joints} & SIDES.keys()
    return SIDES[sides.pop()] if len(sides) == 1 else MIDDLE


def side_legend(size: int = LETTERS) -> Picture:
    """Return a legend of the colours of the sides, with letters of ``size`` pixels."""
    from PIL import Image, ImageDraw

    _, font = drawable("", size)
    picture = Image.new("RGB", (19 * size, 2 * size), "white")
    draw = ImageDraw.Draw(picture)
    for n, (side, colour) in enumerate(SIDES.items()):
        x = (0.5 + 9.5 * n) * size
        draw.line([(x, size), (x + 1.5 * size, size)], colour, max(2, round(0.3 * size)))
        draw.text((x + 2 * size, size), f"person's {side}", OUTLINE, font, anchor="lm")
    return picture
