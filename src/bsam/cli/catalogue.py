"""``bsam methods``: what there is."""

from __future__ import annotations

import argparse
import shutil
from typing import Any

from ..report.catalogue import methods_table


def add(commands: Any) -> None:
    """Add the command."""
    command = commands.add_parser("methods", help="every method: what it costs, what it needs, what it is for", description="List the methods.")
    command.set_defaults(run=_methods)


def _methods(_: argparse.Namespace) -> None:
    print(methods_table(shutil.get_terminal_size((120, 24)).columns))
    print("\nPasses: forward and backward, a step. Memory: beyond the base optimizer's own peak, in units of the parameters' size.")
