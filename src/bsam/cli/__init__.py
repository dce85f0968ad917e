"""The command line: one file per command."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from typing import TextIO

from .. import __version__
from ..core.errors import BsamError
from ..core.extras import require_packages
from . import demo, export, flatness, listing, predict, run, train
from .signals import Terminated

COMMANDS = (listing, demo, train, run, flatness, predict, export)
_OS_ERROR_HINTS = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), " Check its permissions, or choose another path."),
    errno.EROFS: " The file system is read-only: choose another path.",
    errno.ENAMETOOLONG: " The name is too long: choose a shorter one.",
}
EXIT_OUTPUT_ERROR, EXIT_BAD_INPUT, EXIT_SIGINT, EXIT_SIGPIPE, EXIT_SIGTERM = 1, 2, 130, 141, 143


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``bsam ...`` and return the exit status."""
    arguments = argparse.Namespace()
    try:
        _run_command(argv, arguments)
    except BsamError as error:
        _print_error(str(error))
        return EXIT_BAD_INPUT
    except KeyboardInterrupt as end:
        how, status = ("terminated", EXIT_SIGTERM) if isinstance(end, Terminated) else ("interrupted", EXIT_SIGINT)
        _print_error(f"{how}.{_saved(arguments)}")
        return status
    except BrokenPipeError:
        _discard(sys.stdout)
        if saved := _saved(arguments):  # otherwise it was a list that is cut short, as by head
            _print_error(f"the output pipe was closed.{saved}")
        return EXIT_SIGPIPE
    except OSError as error:
        if error.filename is not None:  # a file or a folder that the user named, or one inside
            hint = _OS_ERROR_HINTS.get(error.errno or 0, "")
            _print_error(f"{os.fsdecode(error.filename)}: {error.strerror or error}.{hint}")
            return EXIT_BAD_INPUT
        if _is_writable(sys.stdout):
            raise  # another file
        _discard(sys.stdout)
        _print_error(f"the output could not be written ({error.strerror}).{_saved(arguments)}")
        return EXIT_OUTPUT_ERROR
    return 0


def _run_command(argv: Sequence[str] | None, arguments: argparse.Namespace) -> None:
    """Parse the arguments and run their command. Raises a BrokenPipeError if the output was closed at the other end."""
    parser = _parser()
    try:
        parser.parse_args(argv, arguments)
        if arguments.command is None:
            parser.print_help()
        else:
            require_packages(getattr(arguments, "needs", {}))  # now, not after the last epoch
            arguments.run(arguments)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # which rich turns into SystemExit
            raise end.__context__ from None
        raise
    finally:
        print(end="", flush=True)  # now: errors at the end of the process could not be caught


def _saved(arguments: argparse.Namespace) -> str:
    """Return what an interrupted command has written, in a sentence; empty if it writes nothing."""
    if "saved_items" not in arguments:
        return ""
    return f" Finished {arguments.saved_items} are saved in {arguments.out}; run the same command again to continue."


def _print_error(sentence: str) -> None:
    """Print to the error stream, if it can be written; of torchrun's processes on a machine only the first one does."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            print(f"bsam: {sentence}", file=sys.stderr, flush=True)
        except OSError:
            _discard(sys.stderr)


def _is_writable(stream: TextIO) -> bool:
    """Return whether a stream can be written, by printing a newline to it."""
    try:
        print(file=stream, flush=True)
    except OSError:
        return False
    return True


def _discard(stream: TextIO) -> None:
    """Discard what is left in a stream that cannot be written: the interpreter would complain at its end."""
    with contextlib.suppress(OSError):  # the stream may have no file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bsam", description="Train into flat minima: BSAM (Bilateral Sharpness-Aware Minimization) and its family."
    )
    parser.add_argument("--version", action="version", version=f"bsam {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for command in COMMANDS:
        command.add(commands)
    return parser
