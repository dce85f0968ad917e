"""What others can write into a run directory, and what the commands must not do with it."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bsam import BsamError
from bsam.lab import cli
from bsam.lab.analysis.runs_table import read_runs
from bsam.lab.cli import flatness as flatness_command
from bsam.lab.cli import train as train_command
from bsam.lab.common.files import save_tensors
from bsam.lab.inference import run_flatness
from bsam.lab.report.page import page
from bsam.lab.training.run_dir import RunDir
from helpers import search_roughly

SMALL = ("--epochs", "1", "--batch", "8", "--device", "cpu")
TRAIN = ("train", "--method", "sam", "--data", "folder:pets", "--model", "resnet8", "--image-size", "8", *SMALL)
QUANTIZED = (*TRAIN, "--probe", "1", "--weight-bits", "4")
FLATNESS = ("--k", "1", "--tol", "0.1", "--trace-samples", "6", "--density-steps", "2", "--density-probes", "1")
CHEAP = (*FLATNESS, "--points", "3", "--images", "4", "--device", "cpu")
COMMANDS = {  # everything that opens a run directory
    "resume": (*QUANTIZED, "--out", "unfinished"),
    "start": ("train", "--method", "sgd", "--init", "run", *SMALL, "--out", "new"),
    "compare": ("compare", "--methods", "sgd", "sam", "--init", "run", *SMALL, "--out", "new", "--dry-run"),
    "flatness": ("flatness", "run", "--out", "new", *CHEAP),
    "flatness again": ("flatness", "run", "--out", "run", *CHEAP),
    "export": ("export", "run", "--out", "net.safetensors", "--device", "cpu"),
    "predict": ("predict", "run", "pets/test/cat/0.png", "--device", "cpu"),
    "report": ("report", "run", "--out", "report.html"),
    "report of results": ("report", "results", "--out", "report.html"),
}


def write_images(folder: Path, names: tuple[str, ...] = ("cat", "dog")) -> None:
    pixels = np.random.default_rng(0)
    for part, count in (("train", 8), ("test", 4)):
        for name in names:
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                Image.fromarray(pixels.integers(0, 256, (8, 8, 3), np.uint8)).save(
                    folder / part / name / f"{number}.png"
                )


@pytest.fixture(scope="module")
def received_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images, a finished run with its flatness, an unfinished one, and results of a recipe."""
    folder = tmp_path_factory.mktemp("received")
    write_images(folder / "pets")
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(flatness_command, "flatness_figures", lambda entries: {})
        search_roughly(patch)
        assert cli.main([*QUANTIZED, "--out", "run"]) == 0
        assert cli.main(["flatness", "run", "--out", "run", *CHEAP]) == 0
        shutil.copytree("run", "unfinished")
        Path("unfinished/model.safetensors").unlink()
        settings, (last,) = RunDir("run").run().settings(), RunDir("run").metrics()
        entry = {"folder": "gone", "metrics": "kept.jsonl", "settings": settings, "state": "done", "reason": None}
        Path("results").mkdir()
        Path("results/results.json").write_text(json.dumps({"recipe": "demo", "runs": [{**entry, "last": last}]}))
        Path("results/kept.jsonl").write_text(json.dumps(last) + "\n")
    return folder


@pytest.fixture
def received(received_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder, as the current folder; measurements are read, and not taken."""
    shutil.copytree(received_once, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(flatness_command, "flatness_figures", lambda entries: {})
    entry = json.loads((tmp_path / "run/flatness.json").read_text())["models"][0]
    names = ("parameters", "samples", "seconds", "sharpness", "trace", "eigenvalues", "density", "landscape")
    monkeypatch.setattr(run_flatness, "measure", lambda *_: {name: entry[name] for name in names})
    monkeypatch.setattr(train_command, "class_report", lambda *_: {})
    monkeypatch.setattr(page, "write_page", lambda *_, **__: None)
    return tmp_path


@pytest.fixture
def planted(received: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A function in the current folder; the test fails if it is called or its module is imported."""
    (received / "planted.py").write_text("open('mark', 'w').close()\ndef call(*_, **__): pass\n")
    monkeypatch.syspath_prepend(received)
    yield "planted:call"
    assert "planted" not in sys.modules
    assert not (received / "mark").exists()
    importlib.import_module("planted")  # the trap works
    del sys.modules["planted"]
    assert (received / "mark").exists()


def run_command(name: str, *more: str) -> int:
    """Run a command as it would run alone; a damaged file may be an error, but not a traceback."""
    for left in ("new", "net.safetensors", "report.html"):
        shutil.rmtree(left) if Path(left).is_dir() else Path(left).unlink(missing_ok=True)
    status = cli.main([*COMMANDS[name], *more])
    assert status in (0, 2)
    return status


def texts_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each text in JSON, and of each null, which may stand for a text."""
    if isinstance(value, dict):
        for name, entry in value.items():
            yield from texts_of(entry, (*path, name))
    elif isinstance(value, list):
        for number, entry in enumerate(value[:1]):  # the others are read in the same way
            yield from texts_of(entry, (*path, number))
    elif value is None or isinstance(value, str):
        yield path


def with_text(value: Any, path: tuple[Any, ...], text: str) -> Any:
    """Return a copy of JSON with this text at a path."""
    if not path:
        return text
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = with_text(value[path[0]], path[1:], text)
    return copy


READERS = {  # the commands that read a file
    "run/config.json": [*COMMANDS][:-1],
    "run/run.json": ["report"],
    "run/identity.json": ["resume"],
    "run/environment.json": ["resume"],
    "run/inputs.json": ["start", "predict"],
    "run/data.json": ["report"],
    "run/flatness.json": ["flatness again", "report"],
    "results/results.json": ["report of results"],
}
NAMES = ("data", "weights", "init", "method", "model", "file", "folder", "metrics")  # texts that name something


def damage(file: str, content: Any) -> None:
    """Write JSON into a file; for a file of the finished run, also into that of the unfinished one."""
    for path in (Path(file), Path(file.replace("run/", "unfinished/"))):
        path.write_text(json.dumps(content))


@pytest.mark.parametrize("file", READERS)
def test_no_text_in_a_file_is_imported(file: str, received: Path, planted: str) -> None:
    content = json.loads(Path(file).read_bytes())
    paths = list(texts_of(content))
    everywhere = content
    for path in paths:
        everywhere = with_text(everywhere, path, planted)
    # one at a time, too, since most commands stop at the first wrong text
    alone = [path for path in paths if file == "run/config.json" or path[-1] in NAMES]
    for each in (everywhere, *(with_text(content, path, planted) for path in alone)):
        damage(file, each)
        commands = READERS[file]
        if file == "run/config.json" and not is_a_run(Path("run")):
            commands = ["resume", "report"]  # the others read it in the same way
        for command in commands:
            run_command(command)


def is_a_run(folder: Path) -> bool:
    """Return whether the settings in a run directory are valid."""
    try:
        RunDir(folder).run()
    except BsamError:
        return False
    return True


def test_no_text_in_the_metadata_of_a_network_is_imported(received: Path, planted: str) -> None:
    weights = RunDir("run").weights()
    settings = RunDir("run").run().settings()
    for metadata in ({"bsam_model": planted}, {"run": json.dumps({**settings, "model": planted})}, {"run": planted}):
        Path("net.safetensors").write_bytes(save_tensors(weights, metadata))
        command = ("train", "--method", "sgd", "--data", "folder:pets", "--weights", "net.safetensors", *SMALL)
        assert cli.main([*command, "--out", "new"]) == 2


def test_data_that_only_a_run_directory_names_must_be_repeated(
    received: Path, planted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage("run/config.json", {**json.loads(Path("run/config.json").read_bytes()), "data": planted})
    for command in ("start", "compare", "flatness", "export"):
        assert run_command(command) == 2
        error = capsys.readouterr().err
        assert f"is the function {planted}" in error
        assert f"add --data {planted}" in error
    for command in ("flatness", "export"):
        assert run_command(command, "--data", "planted:other") == 2
        assert planted in capsys.readouterr().err
    for command in ("predict", "report"):  # they need no data
        assert run_command(command) == 0


def test_data_that_the_user_names_is_used(received: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("my_birds.py").write_text(
        "from bsam.lab.data.folders import read_folder\ndef load(data_dir):\n    return read_folder(data_dir)\n"
    )
    damage("run/config.json", {**json.loads(Path("run/config.json").read_bytes()), "data": "my_birds:load"})
    named = ("--data", "my_birds:load", "--data-dir", "pets")
    for command in ("flatness", "export"):
        assert run_command(command, *named) == 0, capsys.readouterr().err
    assert run_command("start", *named) == 2
    assert "trained a quantized network" in capsys.readouterr().err  # it got as far as that
    assert run_command("flatness", "--data", "digits", *named) == 2
    assert "the run in run has the data my_birds:load, not digits: leave out --data digits" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["/dev/zero", "fifo", "zero", "../secret.jsonl", "out/secret.jsonl", "folder"])
@pytest.mark.parametrize("key", ["metrics", "folder"])
def test_paths_in_results_stay_in_their_folder(key: str, name: str, received: Path) -> None:
    """A device would fill the memory, a FIFO would block, and other paths lead to other people's files."""
    os.mkfifo("results/fifo")
    Path("results/zero").symlink_to("/dev/zero")
    Path("results/out").symlink_to(received)
    Path("results/folder").mkdir()
    shutil.copy("results/kept.jsonl", "secret.jsonl")
    results = json.loads(Path("results/results.json").read_bytes())
    results["runs"][0][key] = name
    Path("results/results.json").write_text(json.dumps(results))
    problems: list[str] = []
    runs = read_runs("results", problems)
    if key == "folder" and name in ("fifo", "folder"):
        assert (len(runs), problems) == (1, [])  # nothing is read there
    else:
        reason = "it is not a regular file" if name in ("fifo", "folder") else f"the path '{name}' is not inside"
        assert (len(runs), len(problems)) == (0, 1)
        assert reason in problems[0]


EVIL = "\x1b]0;owned\x07\x9b2J\u202e"


def test_control_characters_do_not_reach_the_terminal(received: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Terminals obey them, for example with another title, a cleared screen, or text that is typed for the user."""
    folder, image = f"run{EVIL}", f"new{EVIL}.png"
    Path("run").rename(folder)
    shutil.copy("pets/test/cat/0.png", image)
    note = Path(folder) / "inputs.json"
    inputs = json.loads(note.read_bytes())
    note.write_text(json.dumps({**inputs, "class_names": [f"cat{EVIL}\nsecond line", "dog"]}))
    Path(folder, "run.json").write_text(json.dumps({"experiment": 3}))
    commands = [
        ("predict", folder, image, "--device", "cpu"),
        ("predict", folder, "pets", "--out", "predictions.csv", "--device", "cpu"),
        ("flatness", folder, "--out", folder, *CHEAP),
        ("report", folder, "--out", f"page{EVIL}.html"),
        ("export", folder, "--out", f"net{EVIL}.safetensors", "--device", "cpu"),
        ("train", "--method", "sgd", "--init", folder, *SMALL, "--out", "new"),
        ("export", f"nothing{EVIL}", "--out", "net.safetensors"),
    ]
    for command in commands:
        assert cli.main(command) in (0, 2)
        printed = "".join(capsys.readouterr())
        assert not set(EVIL) & set(printed) - set("]0;owned2J"), (command, printed)
        assert r"\x1b]0;owned" in printed
    assert cli.main(commands[0]) == 0
    assert capsys.readouterr().out.count("\n") == 1  # a class name does not begin a line
