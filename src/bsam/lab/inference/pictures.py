"""Draw pictures of predictions, with words above and below them, and skeletons."""

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
from ..data.persons import Skeleton
from ..tasks.found import LINE, Picture, Prediction

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage
    from PIL.ImageFont import FreeTypeFont

SIDES = {"right": "#e69f00", "left": "#56b4e9"}  # distinguishable by colour-blind readers, visible on dark pictures
CLASS = "#2f8fd0"  # the letters of the most probable class
MIDDLE = "#ffffff"
OUTLINE = "#202020"  # also the colour of letters; visible on light pictures
SIDE = 360  # pixels, the longer side of a picture in a grid
PICTURES_PER_ROW = 4  # of a grid
GAP = 12  # pixels between pictures
LETTERS = 18  # pixels, the size of letters
TEXT = 0.03  # size of letters below a photograph, relative to its shorter side
SMOOTH = 4000  # pixels; skeletons are drawn up to 8 times as large, if the picture is then at most this large
# for letters that Pillow's font lacks; the first of each line is for European ones, the others for Asian ones
FONTS = (
    *("DejaVuSans.ttf", "NotoSansCJK-Regular.ttc", "NotoSansJP-Regular.otf", "ipaexg.ttf", "DroidSansFallbackFull.ttf"),
    *("Helvetica.ttc", "Hiragino Sans GB.ttc", "Arial Unicode.ttf"),  # macOS
    *("arial.ttf", "YuGothM.ttc", "meiryo.ttc", "msgothic.ttc", "msyh.ttc", "malgun.ttf"),  # Windows
)


@cache
def installed_fonts(size: int, names: tuple[str, ...] = FONTS) -> list[FreeTypeFont]:
    """Return Pillow's font and those of these fonts that are installed."""
    from PIL import ImageFont

    fonts: list[Any] = [ImageFont.load_default(size)]
    for name in names:
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


def drawable(text: str, fonts: Sequence[FreeTypeFont]) -> tuple[str, FreeTypeFont]:
    """Return a text and the first font that has all of its letters; if there is none, with the missing ones escaped."""
    text = printable(text)
    for font in fonts:
        if all(_has(font, letter) for letter in text):
            return text, font
    font = fonts[0]
    return "".join(c if _has(font, c) else c.encode("unicode_escape").decode() for c in text), font


def text_picture(lines: Sequence[str], width: int, colour: str = OUTLINE, size: int = LETTERS) -> PilImage:
    """Return centred lines of text on white; longer lines are wrapped to the width in pixels."""
    from PIL import Image, ImageDraw

    shown = []
    for line in lines:
        text, font = drawable(line, installed_fonts(size))
        letters = max(1, int(len(text) * width / max(font.getlength(text), width)))
        shown += [(part, font) for part in textwrap.wrap(text, letters, break_on_hyphens=False)]
    picture = Image.new("RGB", (width, math.ceil(1.35 * size * len(shown))), "white")
    draw = ImageDraw.Draw(picture)
    for n, (text, font) in enumerate(shown):
        draw.text((width / 2, 1.35 * size * (n + 0.5)), text, colour, font, anchor="mm")
    return picture


def arrange(pictures: Sequence[PilImage], columns: int = 1, gap: int = 0) -> PilImage:
    """Return pictures on white, row by row, centred in columns of the same width."""
    from PIL import Image

    rows = [pictures[n : n + columns] for n in range(0, len(pictures), columns)]
    width = gap + max(picture.width for picture in pictures)
    tops = [gap]
    for row in rows:
        tops.append(tops[-1] + gap + max(picture.height for picture in row))
    sheet = Image.new("RGB", (gap + width * max(map(len, rows)), tops[-1]), "white")
    for top, row in zip(tops[:-1], rows, strict=True):
        for column, picture in enumerate(row):
            sheet.paste(picture, (gap + width * column + (width - gap - picture.width) // 2, top))
    return sheet


def scaled(picture: Picture, side: int) -> PilImage:
    """Return a picture whose longer side has this many pixels, with its skeleton. Enlarged pixels stay visible."""
    from PIL import Image, ImageOps

    image = Image.fromarray(picture.pixels.squeeze()).convert("RGB")
    filter = Image.Resampling.NEAREST if max(image.size) < side else Image.Resampling.LANCZOS
    image = ImageOps.contain(image, (side, side), filter)
    if picture.skeleton is None or picture.joints is None:
        return image
    places = side / max(picture.pixels.shape[:2]) * (picture.joints + 0.5) - 0.5
    return draw_skeleton(image, places, picture.skeleton, 2 * LINE * side)


def card(picture: Picture, colour: str = CLASS, name: str = "") -> PilImage:
    """Return a picture of a grid with its title above it, in a colour, and its lines and a name below it."""
    above = [text_picture([picture.title], SIDE, colour)] if picture.title else []
    below = [*picture.below, *([name] if name else [])]
    return arrange([*above, scaled(picture, SIDE), *([text_picture(below, SIDE)] if below else [])])


def full_size(picture: Picture) -> PilImage:
    """Return a picture for a file of its own: at full size with a legend below the skeleton, or a card of a grid."""
    from PIL import Image, ImageOps

    if picture.title:
        return card(picture)
    image = Image.fromarray(picture.pixels)
    if picture.skeleton is None or picture.joints is None:
        return image
    legend = side_legend(max(LETTERS, round(TEXT * min(image.size))))
    drawn = draw_skeleton(image, picture.joints, picture.skeleton, picture.line)
    space = max(0, legend.width - image.width)  # on the right: the image keeps its coordinates
    return arrange([ImageOps.expand(drawn, (0, 0, space, 0), "white"), legend])


def predictions_grid(found: Sequence[Prediction]) -> PilImage:
    """Return the pictures of what the network saw, with the names of the files, as one."""
    cards = []
    has_skeleton = False
    for one in found:
        picture = one.seen()
        cards.append(card(picture, name=one.path.name))
        has_skeleton = has_skeleton or picture.skeleton is not None
    sheet = arrange(cards, PICTURES_PER_ROW, GAP)
    return arrange([sheet, side_legend()]) if has_skeleton else sheet


def encoded(picture: PilImage, format: str) -> bytes:
    """Return a picture as the content of a file."""
    content = io.BytesIO()
    picture.save(content, format)
    return content.getvalue()


def save(picture: PilImage, path: Path) -> None:
    """Write a picture in the format of the path's suffix."""
    suffix = path.suffix[1:].lower()
    write(path, encoded(picture, "jpeg" if suffix == "jpg" else suffix))


def draw_skeleton(
    picture: PilImage, joints: NDArray[np.floating[Any]], skeleton: Skeleton, width: float = 3.0
) -> PilImage:
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


def side_legend(size: int = LETTERS) -> PilImage:
    """Return a legend of the colours of the sides, with letters of ``size`` pixels."""
    from PIL import Image, ImageDraw

    font = installed_fonts(size)[0]
    picture = Image.new("RGB", (19 * size, 2 * size), "white")
    draw = ImageDraw.Draw(picture)
    for n, (side, colour) in enumerate(SIDES.items()):
        x = (0.5 + 9.5 * n) * size
        draw.line([(x, size), (x + 1.5 * size, size)], colour, max(2, round(0.3 * size)))
        draw.text((x + 2 * size, size), f"person's {side}", OUTLINE, font, anchor="lm")
    return picture
