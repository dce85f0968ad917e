"""The command line: one file per command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ... import __version__
from ...common.errors import BsamError
from ...common.extras import require_packages
from ..common.printing import say
from ..training.run_dir import CHECKPOINT
from ..training.termination import Terminated, terminable
from . import compare, demo, export, flatness, listing, predict, report, run, train
from .parsing import Parser

COMMANDS = {
    "list": listing,
    "demo": demo,
    "train": train,
    "compare": compare,
    "run": run,
    "report": report,
    "flatness": flatness,
    "predict": predict,
    "export": export,
}
EXIT_BAD_INPUT = 2
EXIT_SIGINT = 130
EXIT_SIGPIPE = 141
EXIT_SIGNAL = 128  # plus the number of the signal


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``bsam ...`` and return the exit status."""
    arguments = argparse.Namespace()
    try:
        with terminable():
            _run_command(argv, arguments)
    except BsamError as error:
        return _end(EXIT_BAD_INPUT, str(error))
    except KeyboardInterrupt as end:
        if isinstance(end, Terminated):
            return _end(EXIT_SIGNAL + end.number, f"terminated.{_saved(arguments)}")
        return _end(EXIT_SIGINT, f"interrupted.{_saved(arguments)}")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's flush at exit
        saved = _saved(arguments)  # empty for commands that save nothing, such as `bsam list | head`
        return _end(EXIT_SIGPIPE, f"the output pipe was closed.{saved}") if saved else EXIT_SIGPIPE
    except OSError as error:
        if error.filename is None:
            raise
        problem = f"{os.fsdecode(error.filename)}: {error.strerror or error}"
        return _end(EXIT_BAD_INPUT, f"{problem}. Check the path and its permissions, or choose another path.")
    return 0


def _run_command(argv: Sequence[str] | None, arguments: argparse.Namespace) -> None:
    """Parse the arguments and run the command. Raise a BrokenPipeError if the output pipe was closed."""
    parser = _parser()
    try:
        parser.parse_args(argv, arguments)
        if arguments.command is None:
            parser.print_help()
        else:
            require_packages(getattr(arguments, "needs", {}))  # now rather than after the last epoch
            arguments.run(arguments)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich turns it into SystemExit
            raise end.__context__ from None
        raise
    finally:
        sys.stdout.flush()  # an error in the flush at exit could not be caught


def _saved(arguments: argparse.Namespace) -> str:
    """Return a sentence about what an interrupted command has saved; empty if it saves nothing."""
    if "saved_items" not in arguments or arguments.out is None:  # None until the command has set its default
        return ""
    saved = f"Finished {arguments.saved_items}"
    if arguments.saved_items == "epochs":
        saved = "Epochs up to the last checkpoint"
        if not any(arguments.out.rglob(CHECKPOINT)):
            return " No checkpoint was written; run the same command again to start over."
    return f" {saved} are saved in {arguments.out}; run the same command again to continue."


def _end(status: int, sentence: str) -> int:
    """Print why the command ended (under torchrun, only once per machine) and return the status."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        say(f"bsam: {sentence}", to_stderr=True)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="bsam",
        description="Train networks with sharpness-aware optimizers (BSAM, SAM and relatives) and measure how flat "
        "their minima are.",
    )
    parser.add_argument("--version", action="version", version=f"bsam {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for name, module in COMMANDS.items():
        module.add(commands.add_parser(name, help=module.HELP, description=module.DESCRIPTION))
    return parser
