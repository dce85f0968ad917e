"""What the tests of the command line share: commands that are refused, and commands in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import bsam
from bsam import cli
from processes import Command


@pytest.fixture(scope="module", autouse=True)
def without_pictures() -> Iterator[None]:
    """Let ``bsam train`` draw no pictures, as without matplotlib: they take most of the time of a short run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bsam.report.classes.find_spec", lambda name: None)
        yield


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that ends with status 2; the one line on the error stream."""

    def run(*arguments: object) -> str:
        capsys.readouterr()
        assert cli.main(list(map(str, arguments))) == 2
        out, error = capsys.readouterr()
        assert error.startswith("bsam: ")
        assert error.count("\n") == 1
        assert "epoch 1" not in out
        return error

    return run


@pytest.fixture
def command() -> Callable[..., Any]:
    """Starts a command in a process of its own, and in a group of its own, as a terminal does.

    It is forked, which saves the import of torch, unless there is a ``program`` to start or a stream to write to.
    """

    def start(*arguments: object, program: tuple[str, ...] = ("-m", "bsam"), **options: Any) -> Any:
        if program == ("-m", "bsam") and not options.keys() & {"stdout", "stderr"}:
            return Command(*arguments, **options)
        environment = {**os.environ, "PYTHONPATH": str(Path(bsam.__file__).parents[1]), "COLUMNS": "120"}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment, **options}
        return subprocess.Popen([sys.executable, *program, *map(str, arguments)], start_new_session=True, **options)

    return start
