"""``bsam list``: methods, networks, data sets and recipes as plain text. It needs only torch and numpy."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count, zip_longest

from ...common.errors import BsamValueError
from ...methods import METHODS
from ..common.printing import say
from ..data import DATASETS
from ..models import MODELS
from ..recipes import RECIPES

HELP = "list methods, models, data sets and recipes"
DESCRIPTION = "List methods, models, data sets and recipes, or only one kind."
WIDEST = 160


@dataclass(frozen=True)
class Listing:
    """A list: its header, a function that returns its rows, and a note below."""

    header: tuple[str, ...]
    rows: Callable[[], list[tuple[str, ...]]]
    note: str


def methods_info() -> list[tuple[str, ...]]:
    """Return a row per method, SGD first; a dash if it needs nothing."""
    sgd = ("sgd", "SGD", "-", "1", "0", "-", "SGD alone; `base` is the optimizer of --base alone.", "-")
    rows: list[tuple[str, ...]] = [
        (name, m.title, m.__name__, f"{m.passes:.3g}", m.memory, m.needs_in_words() or "-", m.purpose, m.reference)
        for name, m in METHODS.items()
    ]
    return [sgd, *rows]


def models_info() -> list[tuple[str, ...]]:
    """Return a row per network."""
    return [
        (m.name, m.title, f"{m.parameters:,}", f"{m.channels} x {m.images} x {m.images}", m.reference or "-")
        for m in MODELS.values()
    ]


def data_info() -> list[tuple[str, ...]]:
    """Return a row per data set."""
    rows: list[tuple[str, ...]] = []
    for d in DATASETS.values():
        classes = f"{d.classes} joints" if d.task == "pose" else str(d.classes)
        rows.append((d.name, d.title, classes, d.images, d.augmentation, d.model or "-", d.origin))
    return rows


def recipes_info() -> list[tuple[str, ...]]:
    """Return a row per recipe, with the number of its runs per seed at the largest scale."""
    return [(r.name, r.title, str(len(r.study(r.scales[-1], 1).plans))) for r in RECIPES.values()]


LISTS: dict[str, Listing] = {
    "methods": Listing(
        ("name", "title", "class", "passes", "memory", "needs", "for", "reference"),
        methods_info,
        "Passes: forward and backward passes per step. Memory: beyond the peak of the base optimizer, in units of the "
        "parameters' size. bsam-2 is BSAM with two passes, bsam-released follows its authors' code.",
    ),
    "models": Listing(
        ("name", "title", "parameters", "images", "reference"),
        models_info,
        "Parameters: with 10 classes or joints. SimCC networks find the joints of a person. timm:NAME is any network "
        "of timm; these, resnet50 and the transformers need the extra timm.",
    ),
    "data": Listing(
        ("name", "title", "classes", "images", "augmentation", "model", "from"),
        data_info,
        "Augmentation and model: the defaults of `bsam train`. --download gets CIFAR and Fashion-MNIST. Images in "
        "files are resized to the input size of the network. Your own data: folder:PATH, image files with a folder per "
        "class, or MODULE:FUNCTION, a function that returns the data.",
    ),
    "recipes": Listing(
        ("name", "shows", "runs"),
        recipes_info,
        "Runs: per seed, at the largest scale, without tuning. `bsam run NAME --dry-run` lists them.",
    ),
}


def add(command: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    command.add_argument("which", nargs="?", help=f"one of {', '.join(LISTS)} (default: all)", metavar="KIND")
    command.set_defaults(run=_list)


def _list(arguments: argparse.Namespace) -> None:
    width = min(shutil.get_terminal_size((120, 24)).columns, WIDEST)
    names = list(LISTS) if arguments.which is None else [arguments.which]
    say("\n\n\n".join(f"{list_table(name, width)}\n\n{textwrap.fill(LISTS[name].note, width)}" for name in names))


def list_table(name: str, width: int) -> str:
    """Return a list as a table at most ``width`` (up to 160) characters wide; long texts wrap.

    If the columns are too narrow for the longest words, each row becomes a paragraph.

    Example:
        >>> list_table("methods", 160).split()[:4]
        ['name', 'title', 'class', 'passes']
        >>> print(list_table("data", 60).partition("cifar100")[0])
        digits: title Digits; classes 10; images 1 x 8 x 8;
          augmentation none; model digits_net; from scikit-learn
        cifar10: title CIFAR-10; classes 10; images 3 x 32 x 32;
          augmentation crop-flip-cutout; model resnet18; from
          --data-dir FOLDER
    """
    if name not in LISTS:
        raise BsamValueError(f"there is no list of {name!r}: choose from {', '.join(LISTS)}")
    listing = LISTS[name]
    rows = [listing.header, *listing.rows()]
    gaps, width = 2 * (len(listing.header) - 1), min(width, WIDEST)
    if sum(map(_longest_word, zip(*rows, strict=True))) + gaps > width:
        return "\n".join(_paragraph(listing.header, row, width) for row in rows[1:])
    widths = _widths(rows, width - gaps)
    header, *body = (_lines(row, widths) for row in rows)
    return "\n".join([*header, "-" * (sum(widths) + gaps), *(line for lines in body for line in lines)])


def _longest_word(texts: Sequence[str]) -> int:
    return max(len(word) for text in texts for word in text.split())


def _paragraph(header: Sequence[str], row: Sequence[str], width: int) -> str:
    cells = "; ".join(f"{name} {text}" for name, text in zip(header[1:], row[1:], strict=True) if text != "-")
    return textwrap.fill(f"{row[0]}: {cells}", width, subsequent_indent="  ", break_on_hyphens=False)


def _widths(rows: Sequence[Sequence[str]], room: int) -> list[int]:
    """Return widths that fit, without cutting words: columns are narrowed where it costs the fewest lines."""
    columns = list(zip(*rows, strict=True))
    words = list(map(_longest_word, columns))
    widths = [max(map(len, column)) for column in columns]
    heights = cache(lambda i, width: [len(textwrap.wrap(text, width)) for text in columns[i]])
    while sum(widths) > room:
        narrower = [[*widths[:i], widths[i] - 1, *widths[i + 1 :]] for i in range(len(widths)) if widths[i] > words[i]]
        widths = min(narrower, key=lambda tried: (sum(map(max, *map(heights, count(), tried))), max(tried)))
    return widths


def _lines(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    cells = [textwrap.wrap(text, width) for text, width in zip(row, widths, strict=True)]
    return [
        "  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip()
        for parts in zip_longest(*cells, fillvalue="")
    ]
