"""The command imports only what runs: its help needs neither torch nor NumPy, installed or broken."""

import subprocess
import sys

import pytest

from bsam.lab import cli

PROGRAM = """
import sys
sys.modules |= dict.fromkeys(["torch", "numpy", "rich", "pandas", "scipy"])  # importing them is an error
sys.argv = ["bsam", *sys.argv[1:]]
try:
    import runpy; runpy.run_module("bsam", run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code, end.code
print(*sorted(name for name in sys.modules if name.startswith("bsam.lab.cli.")))
"""


@pytest.mark.parametrize(
    ("command", "imported"),
    [("", []), ("--help", []), ("--version", []), ("list --help", ["listing"]), ("report --help", ["report"])],
)
def test_help_without_torch(command, imported):
    words = [sys.executable, "-c", PROGRAM, *command.split()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    *shown, modules = done.stdout.splitlines()
    assert modules.split() == [f"bsam.lab.cli.{name}" for name in sorted(["parsing", *imported])]
    assert shown[0].startswith("bsam " if command == "--version" else "usage: bsam ")


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_a_help(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    help_of_command = capsys.readouterr().out
    cli.main([])
    assert help_of_command.startswith(f"usage: bsam {command} [-h]")
    assert f"\n    {command} " in capsys.readouterr().out
