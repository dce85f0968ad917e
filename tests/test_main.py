"""Ctrl-C while the command line is still being imported, which takes seconds."""

import os
import signal
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import bsam
from bsam.__main__ import main

ROOT = Path(bsam.__file__).parents[1]
MODULE, FUNCTION = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]["scripts"]["bsam"].split(":")
STARTS = {
    "module": ["-m", "bsam"],
    "script": ["-c", f"import sys; from {MODULE} import {FUNCTION}; sys.exit({FUNCTION}())"],  # as pip writes it
}
SLOW = "import time; print('importing', flush=True); time.sleep(100)"


@pytest.mark.parametrize("swallowing", [False, True])
@pytest.mark.parametrize("start", STARTS)
def test_one_line_and_status_130(start, swallowing, tmp_path):
    """A stand-in for torch is slow to import; another one, as some packages, catches whatever is raised meanwhile."""
    code = f"try:\n    {SLOW}\nexcept BaseException:\n    pass" if swallowing else SLOW
    (tmp_path / "torch.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, *STARTS[start], "list"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env=environment, start_new_session=True) as process:
        assert process.stdout.readline() == "importing\n"
        os.killpg(process.pid, signal.SIGINT)
        out, error = process.communicate(timeout=60)
    assert (process.returncode, out, error) == (130, "", "bsam: interrupted.\n")


def test_the_command_line_runs_in_a_thread(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bsam", "list", "methods"])
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(main).result() == 0
    assert "looksam" in capsys.readouterr().out.lower()


def test_the_package_imports_torch_with_the_first_name_that_is_used():
    code = (
        "import sys, bsam; assert bsam.__version__ and 'torch' not in sys.modules;"
        "bsam.SAM; assert 'torch' in sys.modules;"
        "from bsam import *; assert BSAM is bsam.BSAM and 'Vector' in dir(bsam)"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)


def test_a_name_that_is_not_there_is_named():
    with pytest.raises(AttributeError, match="module 'bsam' has no attribute 'BSMA'"):
        _ = bsam.BSMA
