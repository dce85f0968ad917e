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
from ..core.extras import need
from . import demo, flatness, listing, run, train
from .signals import Terminated

COMMANDS = (listing, demo, train, run, flatness)
_MENDS = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), " Allow this user to use it, or name another one."),
    errno.EROFS: " It is on a file system that cannot be written to: name another one.",
    errno.ENAMETOOLONG: " Give it a shorter name.",
}
UNWRITTEN, REFUSED, INTERRUPTED, UNHEARD, TERMINATED = 1, 2, 130, 141, 143


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``bsam ...``; the exit status."""
    arguments = argparse.Namespace()
    try:
        _obey(argv, arguments)
    except BsamError as error:
        _complain(str(error))
        return REFUSED
    except KeyboardInterrupt as end:
        how, status = ("terminated", TERMINATED) if isinstance(end, Terminated) else ("interrupted", INTERRUPTED)
        _complain(f"{how}.{_kept(arguments)}")
        return status
    except BrokenPipeError:
        _let_go(sys.stdout)
        if kept := _kept(arguments):  # of a list that is cut short nothing has to be said
            _complain(f"the output was closed.{kept}")
        return UNHEARD
    except OSError as error:
        if error.filename is not None:  # a file or a folder that the user named, or one in there
            _complain(f"{os.fsdecode(error.filename)}: {error.strerror or error}.{_MENDS.get(error.errno or 0, '')}")
            return REFUSED
        if _takes_a_line(sys.stdout):
            raise  # it is about something else
        _let_go(sys.stdout)
        _complain(f"the output could not be written ({error.strerror}).{_kept(arguments)}")
        return UNWRITTEN
    return 0


def _obey(argv: Sequence[str] | None, arguments: argparse.Namespace) -> None:
    """Fill in the arguments and run their command. A pipe that was closed at the other end is a BrokenPipeError,
    whoever wrote into it last.
    """
    parser = _parser()
    try:
        parser.parse_args(argv, arguments)
        if arguments.command is None:
            parser.print_help()
        else:
            for module, extra in getattr(arguments, "needs", {}).items():
                need(module, extra)
            arguments.run(arguments)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich's answer to it
            raise end.__context__ from None
        raise
    finally:
        print(end="", flush=True)  # now: at the end of the process nobody could catch it


def _kept(arguments: argparse.Namespace) -> str:
    """What an early end leaves behind, in a sentence; nothing of a command that keeps nothing."""
    return (
        f" Finished {arguments.kept} are kept in {arguments.out}; the same command goes on from there."
        if "kept" in arguments
        else ""
    )


def _complain(sentence: str) -> None:
    """On the error stream, if it can be written to; of the processes that torchrun started on a machine, the first one
    speaks.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            print(f"bsam: {sentence}", file=sys.stderr, flush=True)
        except OSError:
            _let_go(sys.stderr)


def _takes_a_line(stream: TextIO) -> bool:
    try:
        print(file=stream, flush=True)
    except OSError:
        return False
    return True


def _let_go(stream: TextIO) -> None:
    """What is left in a stream that takes nothing goes nowhere: the interpreter, which writes it out at its end, would
    complain.
    """
    with contextlib.suppress(OSError):  # there may be no file behind it
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
