"""Files that are damaged or cannot be reached: each is named in a sentence, with status 2, or restored."""

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

from bsam import cli
from bsam.recipes import RECIPES
from bsam.recipes.states import state_of
from bsam.report import measurements
from bsam.running.runner import run_all
from bsam.training import trainer
from bsam.training.config import Run
from bsam.training.run_dir import FileDigest, RunDir, run_dir_name

LONG = "x" * 300
TRAIN = ("train", "--method", "sam", "--epochs", "2", "--limit-train", "128", "--limit-test", "50", "--device", "cpu")
SMALL = (*TRAIN, "--curvature", "--probe", "1")
FLATNESS = ("--k", "1", "--tol", "0.1", "--trace-samples", "6", "--density-steps", "2", "--density-probes", "1")
CHEAP = (*FLATNESS, "--points", "3", "--images", "50", "--device", "cpu")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, and what was measured on it."""
    folder = tmp_path_factory.mktemp("finished")
    with contextlib.chdir(folder):
        assert cli.main([*SMALL, "--out", "run"]) == 0
        assert cli.main(["flatness", "run", "--out", "flatness", *CHEAP]) == 0
    return folder


@pytest.fixture
def home(finished, tmp_path, monkeypatch):
    """A copy of it, as the current folder."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sentence(capsys, *arguments):
    """What is said by a command that is refused."""
    capsys.readouterr()
    assert cli.main(list(map(str, arguments))) == 2
    error = capsys.readouterr().err
    assert error.startswith("bsam: ")
    assert error.count("\n") == 1
    return error


def cut(content):
    return content[: len(content) // 2]


def texts(content):
    return re.sub(rb"(: |\[|, )-?\d+\.[\de-]+", rb'\1"abc"', content)


def renamed(content):
    return content.replace(b"test_acc", b"tezt_acc")


DAMAGES = {
    "cut": cut,
    "empty": lambda content: b"",
    "no text": lambda content: b"\xff\xfe{",
    "list": lambda content: b"[1]",
}


def test_a_network_of_another_architecture_is_named_with_the_reason(home, capsys):
    weights = RunDir(home / "run").weights()
    name = next(name for name, t in weights.items() if t.dim() == 1)
    content = save({**weights, name: torch.zeros(3)})
    (home / "run/model.safetensors").write_bytes(content)
    (home / "run/checksums.json").write_text(json.dumps({"model.safetensors": vars(FileDigest.of(content))}))
    said = sentence(capsys, "flatness", "run", "--out", "other", *CHEAP)
    assert f"size mismatch for {name}" in said
    assert "remove it, then run the command that trained it again to restore the file from the checkpoint" in said


@pytest.mark.parametrize("damage", [*DAMAGES.values()], ids=[*DAMAGES])
def test_damaged_measurements_are_named(damage, home, capsys):
    file = home / "flatness/flatness.json"
    content = damage(file.read_bytes())
    file.write_bytes(content)
    said = sentence(capsys, "flatness", "run", "--out", "flatness", *CHEAP)
    assert "flatness/flatness.json is damaged" in said
    assert "remove" in said
    assert file.read_bytes() == content


def test_undamaged_measurements_are_accepted_and_stay_as_they_are(home, monkeypatch):
    file = home / "flatness/flatness.json"
    before = file.read_bytes()
    monkeypatch.setattr(measurements, "measure", lambda *_: pytest.fail("it measures"))
    monkeypatch.setattr(measurements, "_draw", lambda *_: [])  # the same figures as when it was measured
    assert cli.main(["flatness", "run", "--out", "flatness", *CHEAP]) == 0
    assert file.read_bytes() == before
    (entry,) = json.loads(before)["models"]
    assert [type(entry[name]["note"]) for name in ("trace", "eigenvalues", "density")] == [str] * 3


@pytest.mark.parametrize("value", [None, 1])
def test_numbers_that_are_not_finite_and_notes_are_accepted(value, home, monkeypatch):
    file = home / "flatness/flatness.json"
    content = json.loads(file.read_bytes())
    (entry,) = content["models"]
    entry["sharpness"]["cosine"] = entry["trace"]["standard_error"] = entry["landscape"]["loss"][0][0] = value
    entry["trace"]["note"] = "some products were not recorded"
    file.write_text(json.dumps(content))
    monkeypatch.setattr(measurements, "measure", lambda *_: pytest.fail("it measures"))
    assert cli.main(["flatness", "run", "--out", "flatness", *CHEAP]) == 0


@pytest.mark.parametrize("name", ["landscape", "sharpness", "eigenvalues", "architecture", "file", "samples"])
def test_measurements_without_a_part_are_named(name, home, capsys):
    file = home / "flatness/flatness.json"
    content = json.loads(file.read_bytes())
    del content["models"][0][name]
    file.write_text(json.dumps(content))
    said = sentence(capsys, "flatness", "run", "--out", "flatness", *CHEAP)
    words = "entry 1 has no file name or no SHA-256" if name == "file" else "it lacks numbers of run"
    assert f"flatness/flatness.json is damaged: {words}; remove flatness.json" in said


@pytest.mark.parametrize("damage", [*DAMAGES.values()], ids=[*DAMAGES])
def test_damaged_settings_are_named(damage, home, capsys):
    file = home / "run/config.json"
    file.write_bytes(damage(file.read_bytes()))
    for command in ([*SMALL, "--out", "run"], ["flatness", "run", "--out", "other", *CHEAP]):
        assert "run/config.json is damaged: it holds no JSON object" in sentence(capsys, *command)


RUN = Run("sgd", epochs=1, batch=64, limit_train=64, limit_test=20)


def test_a_recipe_writes_a_damaged_network_and_damaged_metrics_again(tmp_path, monkeypatch):
    run_all([RUN], tmp_path, device="cpu")
    folder = tmp_path / run_dir_name(RUN)
    monkeypatch.setattr(trainer.Trainer, "train_epoch", lambda *_: pytest.fail("it trains"))
    for name, damage in {"model.safetensors": cut, "metrics.jsonl": renamed}.items():
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(damage(before))
        assert not state_of(RUN, tmp_path).finished
        assert run_all([RUN], tmp_path, device="cpu")[0].finished
        assert (folder / name).read_bytes() == before


@pytest.fixture(scope="module")
def recipe_folder(tmp_path_factory):
    """A small recipe with a probe, run."""
    out = tmp_path_factory.mktemp("recipe")
    assert cli.main(["run", "sharpness-curves", "--only", "sam", "--device", "cpu", "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("environment.json", "[1", "environment.json is damaged: it holds no JSON array; remove the file"),
        ("environment.json", '[{"torch": "2"}]', "environment.json is damaged: device and torch and bsam and date"),
        ("probe.jsonl", '{"step"\n', "probe.jsonl is damaged: it holds no JSON object; remove model.safetensors"),
        ("probe.jsonl", '{"step": 0}\n', "probe.jsonl is damaged: it does not hold all numbers"),
        ("probe.jsonl", None, "probe.jsonl cannot be read (No such file or directory)"),
        ("metrics.jsonl", '{"epoch"', "metrics.jsonl is damaged: it holds no JSON object; run the command that"),
        ("metrics.jsonl", '{"epoch": 1, "seconds": []}', "metrics.jsonl is damaged: it does not hold the same numbers"),
        ("metrics.jsonl", '{"epoch": 1, "seconds": 1}', "metrics.jsonl is damaged: it has no test_accuracy"),
        ("metrics.jsonl", "", "metrics.jsonl does not hold the run's"),
        ("metrics.jsonl", Path, "metrics.jsonl cannot be read (Is a directory)"),
        ("model.safetensors", Path, "model.safetensors is damaged; run the command that trained it again"),
        ("model.safetensors", "{", "model.safetensors is damaged; run the command that trained it again"),
        ("diverged.json", "{", "diverged.json is damaged: it holds no JSON object; remove the file"),
        ("config.json", "{", "config.json is damaged"),
    ],
)
def test_a_report_names_what_is_damaged(name, text, words, recipe_folder, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(recipe_folder, out)
    run = next(run for run in RECIPES["sharpness-curves"].runs("smoke") if run.method == "sam")
    file = out / run_dir_name(run) / name
    if name == "diverged.json":
        (file.parent / "model.safetensors").unlink()
    file.unlink(missing_ok=True)
    if text is Path:
        file.mkdir()
    elif text is not None:
        file.write_text(text)
    said = sentence(capsys, "run", "sharpness-curves", "--out", out, "--report")
    assert words in said
    assert str(file) in said


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
def test_a_name_of_300_characters_is_refused(command, home, capsys):
    said = sentence(capsys, *(argument.format(LONG) for argument in COMMANDS[command]))
    assert LONG in said
    assert "File name too long" in said


def test_a_default_name_of_300_characters_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    beta = f"beta=[{','.join(['1.000000000001'] * 30)}]"
    said = sentence(capsys, "train", "--method", "gam", "--set", beta, "--epochs", "1", "--device", "cpu")
    assert "File name too long" in said


@pytest.fixture
def closed(home, monkeypatch):
    """A folder that this user may not look into, as far as Python can tell: for root there is none."""
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
@pytest.mark.parametrize("below", ["", "/further"])
def test_a_folder_without_permission_is_refused(command, below, closed, capsys):
    place = f"{closed}{below}"
    if command == "train below":
        (Path("runs") / closed).mkdir(parents=True)
    said = sentence(capsys, *(argument.format(place) for argument in COMMANDS[command]))
    assert closed in said
    if (command, below) not in (("flatness file", ""), ("weights out", "")):  # a folder in place of a file
        assert "Permission denied" in said


def test_an_error_of_the_operating_system_says_what_to_do(capsys, monkeypatch):
    def fail(arguments):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "some/file")

    monkeypatch.setattr(cli.listing, "_list", fail)
    mend = "Check the path and its permissions, or choose another path."
    assert sentence(capsys, "list") == f"bsam: some/file: Read-only file system. {mend}\n"


def test_a_run_with_a_long_name_has_a_shorter_title(home):
    name = "r" * 255
    (home / "run").rename(name)
    assert cli.main(["flatness", name, "--out", "out", *CHEAP]) == 0
    (figure,) = (home / "out").glob("probe_*.png")
    assert figure.name == f"probe_{'r' * 50}.png"
