"""One step of BSAM runs through the files that the head comment of core/optimizer.py names."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

import bsam

FOLDER = Path(bsam.__file__).parent
COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>")


def test_the_files_of_a_step(problem):
    base = torch.optim.SGD(problem.model.parameters(), lr=0.1, momentum=0.9)
    optimizer = bsam.BSAM(base, problem.model)
    optimizer.step(problem.loss)
    files: set[str] = set()

    def record(frame, event, arg):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(FOLDER)) and code.co_name not in COMPREHENSIONS:
            files.add(Path(code.co_filename).name)

    sys.setprofile(record)
    try:
        optimizer.step(problem.loss)
    finally:
        sys.setprofile(None)
    comment = (FOLDER / "core" / "optimizer.py").read_text(encoding="utf-8").partition("#\n")[0]
    named = {"optimizer.py", *re.findall(r"(\w+\.py)", comment)}
    assert files == named
