"""``bsam list``: methods, networks, data sets and recipes as plain text; it needs only torch and numpy."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from ...common.errors import BsamValueError
from ..common.printing import say, terminal_width
from ..report.table import Column, Table

DESCRIPTION = "List methods, models, data sets and recipes, or only one kind."


@dataclass(frozen=True)
class Listing:
    """A list: its header, a function that returns its rows, and a note below."""

    header: tuple[str, ...]
    rows: Callable[[], list[tuple[str, ...]]]
    note: str


def methods_info() -> list[tuple[str, ...]]:
    """Return a row per method, SGD first."""
    from ...methods import METHODS

    sgd = ("sgd", "SGD", "", "1", "0", "", "SGD alone; `base` is the optimizer of --base alone.", "")
    rows: list[tuple[str, ...]] = [
        (name, m.title, m.__name__, f"{m.passes:.3g}", m.memory_in_words(), m.needs_in_words(), m.purpose, m.reference)
        for name, m in METHODS.items()
    ]
    return [sgd, *rows]


def models_info() -> list[tuple[str, ...]]:
    """Return a row per network."""
    from ..models import MODELS

    return [
        (m.name, m.title, f"{m.parameters:,}", f"{m.channels} x {m.images} x {m.images}", m.reference)
        for m in MODELS.values()
    ]


def data_info() -> list[tuple[str, ...]]:
    """Return a row per data set."""
    from ..data import DATASETS

    rows: list[tuple[str, ...]] = []
    for d in DATASETS.values():
        classes = f"{d.classes} {d.counted}".strip()
        rows.append((d.name, d.title, classes, d.images, d.augmentation, d.model or "", d.origin))
    return rows


def recipes_info() -> list[tuple[str, ...]]:
    """Return a row per recipe, with the number of its runs per seed at the largest scale."""
    from ..recipes import RECIPES

    return [(r.name, r.title, str(len(r([*r.scales][-1], 1).plans))) for r in RECIPES.values()]


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
    names = list(LISTS) if arguments.which is None else [arguments.which]
    say("\n\n\n".join(list_table(name).to_text(terminal_width()) for name in names))


def list_table(name: str) -> Table:
    """Return a list as a table.

    Example:
        >>> str(list_table("methods")).split()[:4]
        ['name', 'title', 'class', 'passes']
        >>> print(list_table("data").to_text(60).partition("cifar100")[0])
        digits: title Digits; classes 10; images 1 x 8 x 8;
          augmentation none; model digits_net; from scikit-learn
        cifar10: title CIFAR-10; classes 10; images 3 x 32 x 32;
          augmentation crop-flip-cutout; model resnet18; from
          --data-dir FOLDER
    """
    if name not in LISTS:
        raise BsamValueError(f"there is no list of {name!r}: choose from {', '.join(LISTS)}")
    listing = LISTS[name]
    rows = [dict(zip(listing.header, row, strict=True)) for row in listing.rows()]
    return Table.of("", rows, [Column(title, title, words=True) for title in listing.header], [listing.note])
