"""The command line: one file per command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .. import __version__
from ..core.refusal import Refusal
from . import catalogue, demo, flatness, run, train
from .signals import Terminated

COMMANDS = (catalogue, demo, train, run, flatness)
REFUSED, INTERRUPTED, TERMINATED = 2, 130, 143


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
        _complain(str(refusal))
        return REFUSED
    except KeyboardInterrupt as end:
        how, status = ("terminated", TERMINATED) if isinstance(end, Terminated) else ("interrupted", INTERRUPTED)
        kept = f" Finished {arguments.kept} are kept in {arguments.out}; the same command goes on from there." if "kept" in arguments else ""
        _complain(f"{how}.{kept}")
        return status
    return 0


def _complain(sentence: str) -> None:
    """On the error stream; of the processes that torchrun started on a machine, the first one speaks."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"bsam: {sentence}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bsam", description="Train into flat minima: BSAM (Bilateral Sharpness-Aware Minimization) and its family.")
    parser.add_argument("--version", action="version", version=f"bsam {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for command in COMMANDS:
        command.add(commands)
    return parser
