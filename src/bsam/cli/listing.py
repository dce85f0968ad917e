"""``bsam list`` and ``bsam methods``: methods, networks, data sets and recipes."""

from __future__ import annotations

import argparse
import shutil
from typing import Any

from ..report.lists import LISTS, list_table


def add(commands: Any) -> None:
    """Add the commands."""
    command = commands.add_parser("list", help=f"list {', '.join(LISTS)}", description="List everything, or one kind.")
    command.add_argument("which", nargs="?", help=f"one of {', '.join(LISTS)}; all of them if left out", metavar="KIND")
    command.set_defaults(run=_list)
    command = commands.add_parser(
        "methods", help="every method: what it costs, what it needs, what it is for", description="List the methods."
    )
    command.set_defaults(run=_list, which="methods")


def _list(arguments: argparse.Namespace) -> None:
    width = shutil.get_terminal_size((120, 24)).columns
    names = list(LISTS) if arguments.which is None else [arguments.which]
    print("\n\n\n".join(f"{list_table(name, width)}\n\n{LISTS[name].note}" for name in names))
