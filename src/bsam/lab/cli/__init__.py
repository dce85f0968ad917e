"""The command line: one file per command, which is imported when the command runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from ... import __version__
from ...common.errors import BsamError
from ...common.extras import require_packages
from ..common.own_code import own_error
from ..common.printing import say
from ..common.termination import Terminated, terminable
from .parsing import Parser

COMMANDS = {
    "list": "list methods, models, data sets and recipes",
    "demo": "compare SGD, SAM and BSAM on digits with wrong labels, in about a minute",
    "train": "train one network with any method; an interrupted run continues",
    "compare": "compare methods on your data: which is better, by how much, and is it more than chance?",
    "run": "run an experiment: train all its runs, write a table with the published numbers and a page",
    "report": "write one HTML page with the tables, figures and verdicts of any runs",
    "flatness": "measure trained networks: eigenvalues of the Hessian, sharpness, loss landscapes",
    "predict": "classify images, or find the joints of people in them, with the network of a run",
    "export": "export the network of a run to ONNX or safetensors",
}
EXIT_OWN_CODE = 1  # code of the user raised an error
EXIT_BAD_INPUT = 2
EXIT_SIGINT = 130
EXIT_SIGPIPE = 141
EXIT_SIGNAL = 128  # plus the number of the signal


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``bsam ...`` and return the exit status."""
    try:
        with terminable():
            try:
                words = sys.argv[1:] if argv is None else argv
                parser = parser_of(words)
                arguments = parser.parse_args(words)
                if arguments.command is None:
                    parser.print_help()
                else:
                    require_packages(getattr(arguments, "needs", {}))  # now rather than after the last epoch
                    arguments.run(arguments)
            finally:
                sys.stdout.flush()  # an error in the flush at exit could not be caught
    except BsamError as error:
        own = own_error(error)
        return _end(EXIT_BAD_INPUT, str(error), before="" if own is None else own.traceback)
    except Terminated as end:
        return _end(EXIT_SIGNAL + end.number, "terminated.", *_notes(end))
    except KeyboardInterrupt as end:
        return _end(EXIT_SIGINT, "interrupted.", *_notes(end))
    except BrokenPipeError as end:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's flush at exit
        notes = _notes(end)  # none for commands that save nothing, such as `bsam list | head`
        return _end(EXIT_SIGPIPE, "the output pipe was closed.", *notes) if notes else EXIT_SIGPIPE
    except Exception as error:
        if (own := own_error(error)) is not None:
            say(f"{own.traceback}bsam: {' '.join((own.sentence, *_notes(error)))}", to_stderr=True)
            return EXIT_OWN_CODE
        if not isinstance(error, OSError) or error.filename is None:
            raise
        problem = f"{os.fsdecode(error.filename)}: {error.strerror or error}"
        return _end(EXIT_BAD_INPUT, f"{problem}. Check the path and its permissions, or choose another path.")
    return 0


def parser_of(words: Sequence[str]) -> Parser:
    """Return a parser with all commands, but only the flags of the one that the words name."""
    parser = Parser(
        prog="bsam",
        description="Train networks with sharpness-aware optimizers (BSAM, SAM and relatives) and measure how flat "
        "their minima are.",
    )
    parser.add_argument("--version", action="version", version=f"bsam {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    chosen = next((word for word in words if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if name == chosen:
            module = import_module(".listing" if name == "list" else f".{name}", __name__)
            command.words = words
            command.description = module.DESCRIPTION
            module.add(command)
    return parser


def _notes(end: BaseException) -> list[str]:
    """Return what :func:`~bsam.lab.common.termination.resumable` noted on an exception.

    A closed pipe is noticed twice: when a line is printed, and in the flush at the end.
    """
    return [*getattr(end, "__notes__", []), *getattr(end.__context__, "__notes__", [])]


def _end(status: int, *sentences: str, before: str = "") -> int:
    """Print why the command ended (under torchrun, only once per machine) and return the status."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        say(f"{before}bsam: {' '.join(sentences)}", to_stderr=True)
    return status
