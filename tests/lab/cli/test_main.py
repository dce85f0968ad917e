"""The exit status and the last sentence of ``bsam``, and ``bsam list``."""

import re
import sys
from unittest.mock import Mock

import pytest

import bsam
from bsam.lab import cli
from bsam.lab.cli import listing
from bsam.lab.models import MODELS
from bsam.lab.training.run_dir import RunDir
from processes import Command

SMALL = ["train", "--method", "sgd", "--limit-train", "128", "--limit-test", "50", "--device", "cpu"]


def test_version_and_help(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.strip() == f"bsam {bsam.__version__}"
    assert cli.main([]) == 0
    assert "demo" in capsys.readouterr().out


def test_lists(capsys):
    assert cli.main(["list"]) == 0
    everything = capsys.readouterr().out
    lists = {}
    for kind in ("methods", "models", "data", "recipes"):
        assert cli.main(["list", kind]) == 0
        lists[kind] = capsys.readouterr().out
        assert lists[kind].strip() in everything
    assert all(re.search(rf"^{name} ", lists["models"], re.MULTILINE) for name in MODELS)
    assert "11,173,962" in lists["models"]
    assert "fashion_mnist" in lists["data"]
    assert "label-noise" in lists["recipes"]


@pytest.mark.parametrize("module", ["safetensors"])
def test_a_missing_package_is_an_error_before_anything_runs(module, tmp_path, error_of, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    error = error_of(*SMALL, "--out", tmp_path / "out")
    assert module in error
    assert "'.[train]'" in error
    assert not (tmp_path / "out").exists()


def test_a_training_whose_output_is_closed_says_what_is_saved(tmp_path):
    """As before ``| head``."""
    with Command(*SMALL, "--epochs", "20", "--checkpoint-every", "0", "--out", tmp_path / "run") as process:
        assert any(line.startswith("epoch") for line in process.stdout)
        process.stdout.close()
        error = process.stderr.read()
    saved = f"Epochs up to the last checkpoint are saved in {tmp_path / 'run'}; run the same command again to continue."
    assert (process.returncode, error) == (141, f"bsam: the output pipe was closed. {saved}\n")
    assert 1 <= len(RunDir(tmp_path / "run").metrics()) < 20


def test_a_command_that_saves_nothing_ends_quietly_if_its_output_is_closed(tmp_path):
    report = ("run", "training-curves", "--out", str(tmp_path / "out"), "--report")
    for arguments in (("list",), report):
        with Command(*arguments) as process:
            process.stdout.close()
            assert process.stderr.read() == ""
        assert process.returncode == 141
    assert (tmp_path / "out/table.md").exists()


def test_an_error_that_names_no_file_of_the_user_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(listing, "_list", Mock(side_effect=FileNotFoundError("weights.pt")))
    with pytest.raises(FileNotFoundError):
        cli.main(["list"])
