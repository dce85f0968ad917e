"""The command line: one file per command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .. import __version__
from ..core.refusal import Refusal
from . import catalogue, demo, flatness

COMMANDS = (catalogue, demo, flatness)
REFUSED, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``bsam ...``; the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    try:
        arguments.run(arguments)
    except Refusal as refusal:
        print(f"bsam: {refusal}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print(f"bsam: interrupted. Finished {arguments.kept} are kept in {arguments.out}; the same command goes on from there.", file=sys.stderr)
        return INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bsam", description="Train into flat minima: BSAM (Bilateral Sharpness-Aware Minimization) and its family.")
    parser.add_argument("--version", action="version", version=f"bsam {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for command in COMMANDS:
        command.add(commands)
    return parser
