import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

import bsam
from bsam import cli
from bsam.methods import METHODS
from bsam.training.folder import read_metrics

ROOT = Path(bsam.__file__).parents[1]


def command(*arguments, program=("-m", "bsam"), cwd=None):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "PYTHONUNBUFFERED": ""}
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
        cwd=cwd,
    )


def test_version_and_help(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.strip() == f"bsam {bsam.__version__}"
    assert cli.main([]) == 0
    assert "demo" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        cli.main(["demo", "--help"])
    assert end.value.code == 0
    assert "runs/demo" in capsys.readouterr().out


def test_methods_are_listed_by_torch_and_numpy_alone():
    """In a process of its own, where nothing else can be imported."""
    code = "import sys; sys.modules.update(dict.fromkeys(('rich', 'sklearn', 'matplotlib'))); from bsam.cli import main; sys.exit(main(['methods']))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=100, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")
    lines = found.stdout.splitlines()
    assert [line.split()[0] for line in lines[2:] if line and not line.startswith((" ", "Passes"))] == list(METHODS)
    assert max(map(len, lines)) <= 120


def test_a_training_that_nobody_listens_to_says_what_is_kept(tmp_path):
    """As before `| head`; the same command goes on."""
    arguments = (
        "train",
        "--method",
        "sgd",
        "--epochs",
        "60",
        "--limit-train",
        "128",
        "--limit-test",
        "50",
        "--out",
        str(tmp_path / "run"),
        "--device",
        "cpu",
    )
    with command(*arguments) as process:
        assert any(line.startswith("epoch") for line in process.stdout)
        process.stdout.close()
        error = process.stderr.read()
    assert (
        error
        == f"bsam: the output was closed. Finished epochs are kept in {tmp_path / 'run'}; the same command goes on from there.\n"
    )
    assert process.returncode == 141
    kept = len(read_metrics(tmp_path / "run"))
    assert 1 <= kept < 60
    out, error = command(*arguments).communicate(timeout=100)
    assert error == ""
    assert f"Going on after epoch {kept}." in out
    assert len(read_metrics(tmp_path / "run")) == 60


@pytest.mark.parametrize("arguments", [["list"], ["methods"], ["--help"], ["list", "--help"], []])
def test_a_list_that_nobody_reads_ends_quietly(arguments):
    with command(*arguments) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_where_nobody_hears_the_sentence_either_the_status_says_it(tmp_path):
    """As before `2>&1 | head`."""
    with command(
        "train",
        "--method",
        "sgd",
        "--epochs",
        "3",
        "--limit-train",
        "128",
        "--out",
        str(tmp_path / "run"),
        "--device",
        "cpu",
    ) as process:
        process.stdout.close()
        process.stderr.close()
    assert process.returncode == 141


@pytest.fixture(params=["buffered", "unbuffered"])
def full(request):
    """A stream that takes nothing, as on a disk without room."""
    with (
        open("/dev/full", "w")
        if request.param == "buffered"
        else io.TextIOWrapper(open("/dev/full", "wb", buffering=0), write_through=True) as file
    ):
        yield file


UNWRITTEN = "bsam: the output could not be written (No space left on device)."
SMALL = [
    "train",
    "--method",
    "sgd",
    "--epochs",
    "2",
    "--limit-train",
    "128",
    "--limit-test",
    "50",
    "--device",
    "cpu",
    "--out",
]


def test_an_output_that_cannot_be_written_is_one_sentence(full, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", full)
    assert cli.main([*SMALL, str(tmp_path / "run")]) == 1
    assert (
        capsys.readouterr().err
        == f"{UNWRITTEN} Finished epochs are kept in {tmp_path / 'run'}; the same command goes on from there.\n"
    )


def test_where_the_sentence_cannot_be_written_either_the_status_says_it(full, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", full)
    assert cli.main(["train", "--method", "nope", "--out", str(tmp_path / "run")]) == 2


@pytest.mark.parametrize(
    ("arguments", "stream", "status", "heard"),
    [(["list"], "stdout", 1, f"{UNWRITTEN}\n"), (["list", "nope"], "stderr", 2, "")],
)
def test_at_the_end_of_the_process_nothing_is_left_to_complain_about(arguments, stream, status, heard):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: full}
        found = subprocess.run([sys.executable, "-m", "bsam", *arguments], text=True, env=environment, **streams)
    assert (found.returncode, (found.stdout or "") + (found.stderr or "")) == (status, heard)


def test_an_error_of_another_file_is_not_taken_for_one_of_the_output(monkeypatch):
    def fail(arguments):
        raise FileNotFoundError("weights.pt")

    monkeypatch.setattr(cli.listing, "_list", fail)
    with pytest.raises(FileNotFoundError, match=r"weights\.pt"):
        cli.main(["list"])
