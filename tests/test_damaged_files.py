"""Commands report files that cannot be read or reached in one sentence, with status 2."""

import contextlib
import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from bsam.lab import cli
from bsam.lab.cli import flatness as flatness_command
from bsam.lab.cli import listing
from bsam.lab.cli import train as train_command
from bsam.lab.inference import run_flatness
from bsam.lab.recipes import RECIPES
from bsam.lab.report.page import page
from bsam.lab.training.run_dir import RunDir, run_dir_name
from helpers import search_roughly

LONG = "x" * 300
TRAIN = ("train", "--method", "sam", "--epochs", "1", "--limit-train", "128", "--limit-test", "50", "--device", "cpu")
SMALL = (*TRAIN, "--probe", "1")
FLATNESS = ("--k", "1", "--tol", "0.1", "--trace-samples", "6", "--density-steps", "2", "--density-probes", "1")
CHEAP = (*FLATNESS, "--points", "3", "--images", "50", "--device", "cpu")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a finished run and its measurements."""
    folder = tmp_path_factory.mktemp("finished")
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(flatness_command, "flatness_figures", lambda entries: {})
        search_roughly(patch)
        assert cli.main([*SMALL, "--out", "run"]) == 0
        assert cli.main(["flatness", "run", "--out", "flatness", *CHEAP]) == 0
    return folder


@pytest.fixture
def home(finished, tmp_path, monkeypatch):
    """A copy of that folder, as the current folder."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sentence(capsys, *arguments):
    """Return the error message of a command."""
    capsys.readouterr()
    assert cli.main(list(map(str, arguments))) == 2
    error = capsys.readouterr().err
    assert error.startswith("bsam: ")
    assert error.count("\n") == 1
    return error


def test_a_network_of_another_architecture(home, capsys):
    weights = RunDir(home / "run").weights()
    name = next(name for name, t in weights.items() if t.dim() == 1)
    (home / "run/model.safetensors").write_bytes(save({**weights, name: torch.zeros(3)}))
    assert f"size mismatch for {name}" in sentence(capsys, "flatness", "run", "--out", "other", *CHEAP)


def test_measurements_are_read_also_with_nulls_notes_and_a_long_name(home, monkeypatch):
    file, name = home / "flatness/flatness.json", "r" * 255
    (home / "run").rename(name)
    content = json.loads(file.read_bytes())
    (entry,) = content["models"]
    entry["sharpness"]["cosine"] = entry["trace"]["standard_error"] = entry["landscape"]["loss"][0][0] = None
    entry["trace"]["note"] = "some products were not recorded"
    entry["file"] = name
    file.write_text(before := json.dumps(content))
    monkeypatch.setattr(run_flatness, "measure", lambda *_: pytest.fail("it measures"))
    assert cli.main(["flatness", name, "--out", "flatness", *CHEAP]) == 0
    assert file.read_text() == before
    assert (home / "flatness/flatness.html").exists()


DAMAGED = {  # files, and the commands that read them
    "flatness/flatness.json": ["flatness run --out flatness"],
    "run/config.json": ["train --out run", "flatness run --out other"],
    "run/metrics.jsonl": ["train --out run", "flatness run --out other"],
    "run/model.safetensors": ["flatness run --out other"],
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_kept(name, home, capsys):
    file = home / name
    content = file.read_bytes()[:100]
    file.write_bytes(content)
    for command in DAMAGED[name]:
        command_name, *arguments = command.split()
        options = SMALL[1:] if command_name == "train" else CHEAP
        error = sentence(capsys, command_name, *arguments, *options)
        assert re.search(rf"{name} cannot be read \(\w+\): .*remove", error)
    assert file.read_bytes() == content


OTHER_TYPES = {  # files, and the commands that read them
    "run/config.json": ["train --out run", "flatness run --out other", "report run"],
    "run/run.json": ["report run"],
    "run/identity.json": ["train --out run"],
    "run/environment.json": ["train --out run"],
    "run/metrics.jsonl": ["train --out run", "flatness run --out other", "report run"],
    "run/probe.jsonl": ["flatness run --out other"],
    "run/flatness.json": ["report run"],
    "flatness/flatness.json": ["flatness run --out flatness", "report flatness"],
    "run/checkpoint.pt": ["train --out run"],
    "run/tensorboard": ["train --out run"],
}


@pytest.mark.parametrize(
    "content", ["{}", "[{}]", '{"models": [{}], "settings": {}, "method": 3}', "3", "folder", "fifo"]
)
@pytest.mark.parametrize("name", OTHER_TYPES)
def test_a_file_of_another_type_is_no_traceback(name, content, home, capsys, monkeypatch):
    monkeypatch.setattr(run_flatness, "measure", lambda *_: pytest.fail("it measures"))
    monkeypatch.setattr(train_command, "class_report", lambda *_: {})
    monkeypatch.setattr(page, "write_page", lambda *_, **__: None)
    (home / "run/model.safetensors").rename(home / "network")
    file = home / name
    shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)
    if content in ("folder", "fifo"):
        file.mkdir() if content == "folder" else os.mkfifo(file)
    else:
        file.write_text(content)
    for command in OTHER_TYPES[name]:
        command_name, *arguments = command.split()
        if command_name != "train" and not (home / "run/model.safetensors").exists():
            (home / "network").rename(home / "run/model.safetensors")
        options = {"train": SMALL[1:], "flatness": CHEAP, "report": ("--out", "page.html", "--strict")}[command_name]
        capsys.readouterr()
        assert cli.main([command_name, *arguments, *options]) in (0, 2)


def test_a_report_with_a_damaged_run(tmp_path, capsys):
    out = tmp_path / "out"
    planned = RECIPES["sharpness-curves"]("smoke").plans
    run = next(plan.run for plan in planned if plan.run.method == "sam")
    assert cli.main(["run", "sharpness-curves", "--only", "sam", "--device", "cpu", "--out", str(out)]) == 0
    command = ["run", "sharpness-curves", "--out", str(out), "--report"]
    for name in ("environment.json", "metrics.jsonl", "config.json", "probe.jsonl"):
        file = out / run_dir_name(run) / name
        content = file.read_bytes()
        file.write_text("{")
        if name == "probe.jsonl":  # only figures need it
            assert cli.main(command) == 0
            assert "probe.jsonl cannot be read" in (out / "report.html").read_text()
        else:
            assert f"{file} cannot be read" in sentence(capsys, *command)
        file.write_bytes(content)


COMMANDS = {
    "train": [*TRAIN, "--out", "{}"],
    "train below": [*TRAIN, "--out", "runs/{}/run"],
    "train data": [*TRAIN, "--data", "cifar10", "--model", "resnet8", "--out", "out", "--data-dir", "{}"],
    "train other data": [*TRAIN, "--data", "fashion_mnist", "--model", "resnet8", "--out", "out", "--data-dir", "{}"],
    "train download": [*TRAIN, "--data", "cifar10", "--download", "--out", "out", "--data-dir", "{}"],
    "demo": ["demo", "--out", "{}", "--epochs", "1", "--seeds", "1"],
    "run": ["run", "label-noise", "--device", "cpu", "--out", "{}"],
    "run plan": ["run", "label-noise", "--out", "{}", "--dry-run"],
    "run report": ["run", "label-noise", "--out", "{}", "--report"],
    "run data": ["run", "label-noise", "--scale", "short", "--device", "cpu", "--out", "out", "--data-dir", "{}"],
    "flatness": ["flatness", "{}", "--out", "out", *CHEAP],
    "flatness file": ["flatness", "{}", "--loader", "math:sqrt", "--out", "out"],
    "flatness out": ["flatness", "run", "--out", "{}", *CHEAP],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_name_of_300_characters(command, home, capsys):
    error = sentence(capsys, *(argument.format(LONG) for argument in COMMANDS[command]))
    assert LONG in error
    assert "File name too long" in error


def test_a_default_name_of_300_characters(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    beta = f"beta=[{','.join(['1.000000000001'] * 30)}]"
    error = sentence(capsys, "train", "--method", "gam", "--set", beta, "--epochs", "1", "--device", "cpu")
    assert "File name too long" in error


@pytest.fixture
def closed(home, monkeypatch):
    """A folder that Python functions report as forbidden, since root may read every folder."""
    (home / "closed").mkdir()

    def guarded(ordinary):
        def call(path, *more, **named):
            if isinstance(path, (str, Path)) and "closed" in Path(path).parts[:-1]:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return ordinary(path, *more, **named)

        return call

    for name in ("stat", "mkdir", "open"):
        monkeypatch.setattr(os, name, guarded(getattr(os, name)))
    monkeypatch.setattr("io.open", guarded(open))
    return "closed"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_without_permission(command, closed, capsys):
    if command == "train below":
        (Path("runs") / closed).mkdir(parents=True)
    error = sentence(capsys, *(argument.format(f"{closed}/further") for argument in COMMANDS[command]))
    assert closed in error
    assert "Permission denied" in error


def test_an_error_of_the_operating_system(capsys, monkeypatch):
    def fail(arguments):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "some/file")

    monkeypatch.setattr(listing, "_list", fail)
    assert "some/file: Read-only file system" in sentence(capsys, "list")
