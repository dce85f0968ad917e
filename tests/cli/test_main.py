"""The exit status and the last sentence of ``bsam``."""

import sys

import pytest

import bsam
from bsam import cli
from bsam.training.run_dir import RunDir

SMALL = ["train", "--method", "sgd", "--limit-train", "128", "--limit-test", "50", "--device", "cpu"]


def test_version_and_help(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.strip() == f"bsam {bsam.__version__}"
    assert cli.main([]) == 0
    assert "demo" in capsys.readouterr().out


@pytest.mark.parametrize("module", ["rich", "safetensors"])
def test_a_missing_package_is_named_before_anything_runs(module, tmp_path, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    error = refused(*SMALL, "--out", tmp_path / "out")
    assert f"this needs {module}, which is not installed: pip install -c constraints.txt '.[train]'" in error
    assert not (tmp_path / "out").exists()


def test_a_training_whose_output_is_closed_says_what_is_kept(tmp_path, command):
    """As before `| head`."""
    with command(*SMALL, "--epochs", "20", "--out", tmp_path / "run") as process:
        assert any(line.startswith("epoch") for line in process.stdout)
        process.stdout.close()
        error = process.stderr.read()
    kept = f"Finished epochs are saved in {tmp_path / 'run'}; run the same command again to continue."
    assert (process.returncode, error) == (141, f"bsam: the output pipe was closed. {kept}\n")
    assert 1 <= len(RunDir(tmp_path / "run").metrics()) < 20


@pytest.mark.parametrize("arguments", [["list"], ["list", "--help"]])
def test_a_list_whose_reader_is_gone_ends_quietly(arguments, command):
    with command(*arguments) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_an_error_that_names_no_file_of_the_user_keeps_its_traceback(monkeypatch):
    def fail(arguments):
        raise FileNotFoundError("weights.pt")

    monkeypatch.setattr(cli.listing, "_list", fail)
    with pytest.raises(FileNotFoundError, match=r"weights\.pt"):
        cli.main(["list"])
