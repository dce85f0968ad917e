"""Run the commands of a guide on small data, and compare its code with a script."""

from __future__ import annotations

import ast
import glob
import re
import shlex
from collections.abc import Mapping

import pytest

from bsam.lab.cli import main


def in_small(text: str, changes: Mapping[str, str]) -> str:
    """Replace parts of a guide's commands or code, all of which must be there, with smaller ones."""
    for part, smaller in changes.items():
        assert part in text
        text = text.replace(part, smaller)
    return text


def definition(text: str, name: str) -> str:
    """Return a class or function of a script or page as a syntax tree, without layout and comments."""
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)) or text
    (match,) = (node for node in ast.parse(code).body if getattr(node, "name", "") == name)
    return ast.dump(match)


def first_commands(text: str) -> str:
    """Return the commands of a guide's first block after the installation, one per line."""
    block = re.search(r"```bash\npip install [^\n]*\n(.*?)```", text, flags=re.DOTALL)[1]
    return re.sub(r"\\\n\s*", "", block)


def run_commands(commands: str, capsys: pytest.CaptureFixture[str], draw: bool = True) -> dict[str, str]:
    """Run lines of ``bsam ...``, with file patterns expanded; return the last output of each command.

    Without ``draw``, the page of ``bsam flatness`` is empty.
    """
    printed = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bsam.lab.report.figures.class_report.find_spec", lambda name: None)  # pictures take long
        if not draw:
            patch.setattr("bsam.lab.cli.flatness.figures_html", lambda title, figures: b"")
        for line in commands.replace("\\\n", "").splitlines():
            words = [name for word in shlex.split(line)[1:] for name in (sorted(glob.glob(word)) or [word])]
            assert main(words) == 0, capsys.readouterr().err
            printed[words[0]] = capsys.readouterr().out
    return printed
