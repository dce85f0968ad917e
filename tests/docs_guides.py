"""Run the commands of a guide on small data."""

from __future__ import annotations

import glob
import re
import shlex
from collections.abc import Mapping

import pytest

from bsam.cli import main


def in_small(text: str, changes: Mapping[str, str]) -> str:
    """Replace parts of a guide's commands or code by what takes less time; each of them must be there."""
    for of_the_guide, ours in changes.items():
        assert of_the_guide in text
        text = text.replace(of_the_guide, ours)
    return text


def first_commands(text: str) -> str:
    """Return the commands of a guide's first block, after the installation."""
    return re.search(r"```bash\npip install [^\n]*\n(.*?)```", text, flags=re.DOTALL)[1]


def run_commands(commands: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Run lines of ``bsam ...``, patterns of files as a shell expands them; returns what each command printed last."""
    printed = {}
    for line in commands.replace("\\\n", "").splitlines():
        words = [name for word in shlex.split(line)[1:] for name in (sorted(glob.glob(word)) or [word])]
        assert main(words) == 0, capsys.readouterr().err
        printed[words[0]] = capsys.readouterr().out
    return printed
