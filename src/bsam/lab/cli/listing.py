"""``bsam list``: methods, networks, data sets and recipes."""

from __future__ import annotations

import argparse
import shutil
from textwrap import fill
from typing import Any

from ..report.lists import LISTS, WIDEST, list_table


def add(commands: Any) -> None:
    """Add the command."""
    everything = "methods, models, data sets and recipes"
    command = commands.add_parser(
        "list", help=f"list {everything}", description=f"List {everything}, or only one kind."
    )
    command.add_argument("which", nargs="?", help=f"one of {', '.join(LISTS)} (default: all)", metavar="KIND")
    command.set_defaults(run=_list)


def _list(arguments: argparse.Namespace) -> None:
    width = min(shutil.get_terminal_size((120, 24)).columns, WIDEST)
    names = list(LISTS) if arguments.which is None else [arguments.which]
    print("\n\n\n".join(f"{list_table(name, width)}\n\n{fill(LISTS[name].note, width)}" for name in names))
