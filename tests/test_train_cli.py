"""``bsam train``, ``bsam list``, and ``bsam flatness`` on the folders of runs."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import types
import urllib.error
import urllib.request
from dataclasses import fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import bsam
from bsam import cli
from bsam.cli import downloads
from bsam.cli.run_flags import add_run_flags, explanations, method_arguments, run_of
from bsam.data.digits import digits
from bsam.data.label_noise import flip_labels
from bsam.models import MODELS
from bsam.models.digits_net import DigitsNet
from bsam.report.epochs import ConsoleLogger
from bsam.training.config import Run
from bsam.training.folder import read_metrics, read_run

ROOT = Path(bsam.__file__).parents[1]
SHORT = ("train", "--method", "bsam", "--set", "rho_max=0.02", "--epochs", "3", "--batch", "64", "--device", "cpu")
CHEAP = (
    "--k",
    "2",
    "--tol",
    "0.01",
    "--trace-samples",
    "6",
    "--density-steps",
    "2",
    "--density-probes",
    "1",
    "--points",
    "3",
    "--device",
    "cpu",
)


def run_from(*flags):
    parser = argparse.ArgumentParser()
    add_run_flags(parser)
    return run_of(parser.parse_args(flags))


def refused(capsys, *arguments):
    """The sentence on the error stream, of a command that ends with status 2."""
    capsys.readouterr()
    assert cli.main(list(map(str, arguments))) == 2
    out, error = capsys.readouterr()
    assert error.startswith("bsam: ")
    assert error.count("\n") == 1
    assert "epoch" not in out
    return error


def process(*arguments, program=("-m", "bsam")):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def other(field, hint):
    """A value of the field's type that is not its default."""
    special = {"method": "sam", "data": "cifar10"}  # those that are looked up before the training
    if field.name in special:
        return special[field.name]
    if hint is bool:
        return not field.default
    if get_origin(hint) is Literal:
        return next(choice for choice in get_args(hint) if choice != field.default)
    if isinstance(hint, types.UnionType):
        hint = get_args(hint)[0]
    return {int: 3, float: 0.25, str: "something"}[hint]


@pytest.mark.parametrize(
    "field", [field for field in fields(Run) if field.name != "arguments"], ids=lambda field: field.name
)
def test_every_setting_of_a_run_is_a_flag(field):
    value = other(field, get_type_hints(Run)[field.name])
    flag = field.name.replace("_", "-")
    given = (f"--{flag}" if value else f"--no-{flag}",) if isinstance(value, bool) else (f"--{flag}", str(value))
    run = run_from(*(() if field.name == "method" else ("--method", "bsam")), *given)
    expected = {**Run("bsam").settings(), field.name: value, **({"model": "resnet18"} if field.name == "data" else {})}
    assert run.settings() == expected
    assert type(getattr(run, field.name)) is type(value)


def test_a_flag_may_be_taken_back_and_a_default_is_the_runs():
    assert run_from("--method", "sgd") == Run("sgd")
    assert not run_from("--method", "sgd", "--compile", "--no-compile").compile
    assert run_from("--method", "sgd", "--capture").capture


def test_arguments_of_the_method_are_json_or_text():
    run = run_from("--method", "bsam", "--set", "rho_max=0.1", "passes=2", "--set", "start_from_min=true")
    assert run.arguments == {"rho_max": 0.1, "passes": 2, "start_from_min": True}
    assert type(run.arguments["passes"]) is int
    assert method_arguments(["beta=[1,1,1]", "kind=two words", "k=", "e=a=b", "none=null"]) == {
        "beta": [1, 1, 1],
        "kind": "two words",
        "k": "",
        "e": "a=b",
        "none": None,
    }


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        (["rho_max"], "NAME=VALUE, as rho_max=0.1; got 'rho_max'"),
        (["=1"], "got '=1'"),
        (["rho_max=1", "rho_max=2"], "rho_max twice"),
        (["rho=1"], "bsam has no argument 'rho': it takes rho_max"),
        (["rho_max=0,1"], "rho_max must be a finite number that is not negative, got '0,1'"),
        (["rho_max=null"], "got None"),
        (["rho_max=-1"], "got -1"),
    ],
)
def test_arguments_that_cannot_be_are_refused(pairs, words, tmp_path, capsys):
    assert words in refused(
        capsys, "train", "--method", "bsam", "--set", *pairs, "--out", tmp_path / "out", "--device", "cpu"
    )


def test_help_explains_every_flag_in_the_words_of_run(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["train", "--help"])
    assert end.value.code == 0
    shown = "".join(capsys.readouterr().out.split())
    for name, text in explanations(Run).items():
        if name != "arguments":
            assert f"--{name.replace('_', '-')}" in shown
            assert "".join(text.split()) in shown
    assert set(explanations(Run)) == {field.name for field in fields(Run)}
    assert not re.search(r"``|:\w+:`", shown)
    assert all(
        word in shown
        for word in (
            "(default:0.05)",
            "resnet18forcifar10",
            "runs/METHOD-ARGUMENTS-MODEL-DATA-sSEED",
            "`bsamlistmodels`",
        )
    )


def test_a_run_from_start_to_end(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/bsam-rho_max0.02-digits_net-digits-s5")
    command = [*SHORT, "--seed", "5", "--label-noise", "0.25", "--radius", "0.05", "--curvature"]
    assert cli.main(command) == 0
    out, error = capsys.readouterr()
    assert error == ""
    first, where, *epochs, last, top, written = out.splitlines()
    for words in (
        "BSAM (rho_max=0.02) with SGD",
        "DigitsNet (9,978 parameters)",
        "640 samples of Digits",
        "25% of the labels flipped",
        "3 epochs of 10 steps",
    ):
        assert words in first
    assert all(words in first for words in ("batch 64", "CPU", "fp32", "steps plain"))
    assert where == f"Into {folder}."
    metrics = read_metrics(folder)
    assert len(epochs) == len(metrics) == 3
    for i, (line, found) in enumerate(zip(epochs, metrics, strict=True)):
        assert line.startswith(
            f"epoch {i + 1}/3  train loss {found['train_loss']:.4f}  test loss {found['test_loss']:.4f}  "
        )
        assert f"test accuracy {found['test_accuracy']:.4f}  BilS " in line
        assert "  lr " in line
        assert "  rho_min " in line
        assert re.search(r"left \d+:\d\d$" if i < 2 else r" s$", line)
    assert last.startswith(f"After epoch 3: train loss {metrics[2]['train_loss']:.4f}  ")
    assert (
        top
        == f"Largest eigenvalue of the Hessian: {json.loads((folder / 'curvature.json').read_text())['top_eigenvalue']:.4g}"
    )
    assert all(
        name in written
        for name in (
            "config.json",
            "metrics.jsonl",
            "model.safetensors",
            "tensorboard/",
            "flipped.json",
            "environment.json",
        )
    )
    assert read_run(folder) == Run(
        "bsam", {"rho_max": 0.02}, epochs=3, batch=64, seed=5, label_noise=0.25, radius=0.05, curvature=True
    )

    before = contents(folder)
    assert cli.main(command) == 0
    again = capsys.readouterr().out.splitlines()
    assert again == [f"The run in {folder} is finished.", last, top, written]
    assert contents(folder) == before
    error = refused(capsys, *command, "--lr", "0.1", "--out", folder)
    assert f"{folder} holds results with other settings (lr 0.05 there, 0.1 here)" in error
    assert contents(folder) == before


@pytest.mark.parametrize("damage", ['{"epoch": 1\n', "[]\n", ""])
def test_damaged_metrics_of_a_finished_run_are_repaired_by_the_same_command(damage, tmp_path, capsys):
    command, metrics = [*SHORT, "--limit-train", "64", "--out", str(tmp_path)], tmp_path / "metrics.jsonl"
    assert cli.main(command) == 0
    before, (*_, last, _) = metrics.read_bytes(), capsys.readouterr().out.splitlines()
    metrics.write_text(damage)
    assert cli.main(command) == 0
    assert metrics.read_bytes() == before
    out = capsys.readouterr().out
    assert f"{tmp_path}. Going on after epoch 3." in out
    assert last in out


def test_a_terminated_run_goes_on_and_the_handler_is_as_it_was(tmp_path, capsys, monkeypatch):
    def stop(narrator, done, metrics):
        if done == 2:
            signal.raise_signal(signal.SIGTERM)

    handler = signal.getsignal(signal.SIGTERM)
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(ConsoleLogger, "epoch", stop)
        assert cli.main([*SHORT, "--out", str(out)]) == 143
    assert signal.getsignal(signal.SIGTERM) is handler
    assert (
        capsys.readouterr().err
        == f"bsam: terminated. Finished epochs are kept in {out}; the same command goes on from there.\n"
    )
    assert cli.main([*SHORT, "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"Into {out}. Going on after epoch 2."
    assert [line[:9] for line in lines if line.startswith("epoch")] == ["epoch 3/3"]


LONG = ("train", "--method", "sam", "--epochs", "30", "--batch", "64", "--device", "cpu", "--limit-test", "50")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert cli.main([*LONG, "--out", str(folder)]) == 0
    return folder


def test_in_a_thread_signals_are_left_alone(tmp_path):
    handler, ends = signal.getsignal(signal.SIGTERM), []
    thread = threading.Thread(
        target=lambda: ends.append(cli.main([*SHORT, "--epochs", "1", "--out", str(tmp_path / "out")]))
    )
    thread.start()
    thread.join()
    assert ends == [0]
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize(
    ("number", "status", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_stopped_from_outside_it_ends_like_a_run_that_was_not(number, status, word, tmp_path, whole):
    stopped = tmp_path / "stopped"
    first = process(*LONG, "--out", stopped)
    for line in first.stdout:
        if line.startswith("epoch  2/30"):
            break
    os.killpg(first.pid, number)  # as a terminal, or a batch system
    _, error = first.communicate(timeout=60)
    assert (first.returncode, error) == (
        status,
        f"bsam: {word}. Finished epochs are kept in {stopped}; the same command goes on from there.\n",
    )
    assert 2 <= len(read_metrics(stopped)) < 30
    assert cli.main([*LONG, "--out", str(stopped)]) == 0
    assert (stopped / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    ours, theirs = ([{**line, "seconds": 0} for line in read_metrics(folder)] for folder in (stopped, whole))
    assert ours == theirs


def test_of_several_processes_one_speaks(tmp_path):
    both = process(
        "--nproc-per-node=2",
        "--standalone",
        "-m",
        "bsam",
        *SHORT,
        "--out",
        tmp_path / "out",
        program=("-m", "torch.distributed.run"),
    )
    out, error = both.communicate(timeout=100)
    assert both.returncode == 0, error
    assert out.count("epoch 1/3") == out.count("Into ") == out.count("Written to") == 1
    assert "2 processes, each on CPU" in out
    assert len(read_metrics(tmp_path / "out")) == 3


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--method", "sma"], "method must be one of sgd, sam"),
        (["--model", "resnet9"], "model must be one of digits_net, resnet8"),
        (["--model", "resnet8", "--data", "mnist"], "data must be one of digits, cifar10"),
        (["--augment", "flip"], "augmentation must be one of none"),
        (["--task", "chess"], "task must be one of classification"),
        (["--device", "abacus"], "device must be cpu, cuda or cuda:N, got 'abacus'"),
        (["--batch", "641"], "batch must be at most 640"),
        (["--limit-train", "0"], "limit_train must be a whole number of at least 1"),
        (["--data", "cifar10"], "say in which folder they are (--data-dir), or where to --download them to"),
        (["--data", "cifar10", "--data-dir", "nowhere"], "nowhere"),
        (["--download"], "digits comes with scikit-learn: leave --download out"),
        (["--data", "cifar10", "--download"], "say with --data-dir in which folder"),
    ],
)
def test_what_cannot_be_is_said_in_one_line_and_stands_in_no_ones_way(flags, words, tmp_path, capsys):
    out = tmp_path / "out"
    assert words in refused(capsys, *SHORT, "--out", out, *flags)
    assert not (out / "config.json").exists()
    assert cli.main([*SHORT, "--epochs", "1", "--out", str(out)]) == 0  # the same folder, mended


def test_folders_that_are_none_of_ours(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("years of work")
    assert "holds files of something else (thesis.tex)" in refused(capsys, *SHORT, "--out", tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    assert "cannot be used as a folder for a run" in refused(capsys, *SHORT, "--out", tmp_path / "mine/thesis.tex")


def test_a_loss_that_is_no_number_ends_the_run(tmp_path, capsys):
    assert cli.main([*SHORT, "--lr", "1e30", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "a smaller lr" in error


@pytest.mark.parametrize("module", ["safetensors", "sklearn"])
def test_a_missing_package_is_named(module, tmp_path, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("bsam.training.classification._load", bsam.data.load)
    error = refused(capsys, *SHORT, "--out", tmp_path / "out")
    assert "not installed: pip install 'bsam[" in error


def test_a_download_without_internet_says_where_to_put_what(tmp_path, capsys, monkeypatch):
    def offline(*_, **__):
        raise urllib.error.URLError("Temporary failure in name resolution")

    monkeypatch.setattr(urllib.request, "urlopen", offline)
    error = refused(
        capsys, *SHORT, "--data", "cifar10", "--download", "--data-dir", tmp_path / "data", "--out", tmp_path / "out"
    )
    assert "cifar-10" in error
    assert "name resolution" in error
    assert f"unpack it in {tmp_path / 'data'}" in error


def test_a_download_goes_where_the_data_is_read_from(tmp_path, capsys, monkeypatch):
    asked = []

    def download(name, folder, progress):
        asked.append((name, folder))
        progress(10**8, 2 * 10**8)
        progress(2 * 10**8, 2 * 10**8)

    monkeypatch.setattr(downloads, "download", download)
    capsys.readouterr()
    assert (
        cli.main(
            [*SHORT, "--data", "cifar10", "--download", "--data-dir", str(tmp_path), "--out", str(tmp_path / "out")]
        )
        == 2
    )
    assert asked == [("cifar10", tmp_path)]
    assert "200/200" in capsys.readouterr().out


@pytest.mark.parametrize(
    "folder", ["cifar-10-batches-py", "."], ids=["the other layout", "the folder of the files itself"]
)
def test_a_download_is_not_asked_for_what_is_there(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: pytest.fail("asked for"))
    (tmp_path / folder).mkdir(exist_ok=True)
    for name in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        (tmp_path / folder / name).touch()
    error = refused(
        capsys, *SHORT, "--data", "cifar10", "--download", "--data-dir", tmp_path, "--out", tmp_path / "out"
    )
    assert "data_batch_1 was refused: a broken pickle" in error  # found, and read
    assert not (tmp_path / "cifar-10-batches-bin").exists()


def test_several_data_sets_are_downloaded_once_each_and_digits_not_at_all(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(downloads, "download", lambda name, folder, progress: asked.append((name, folder)))
    downloads.download_all(["digits", "cifar10", "fashion_mnist", "cifar10"], tmp_path)
    assert asked == [("cifar10", tmp_path), ("fashion_mnist", tmp_path)]
    downloads.download_all(["digits"], None)
    with pytest.raises(bsam.BsamError, match="say with --data-dir in which folder"):
        downloads.download_all(["digits", "cifar10"], None)


def test_lists(capsys):
    assert cli.main(["list"]) == 0
    everything = capsys.readouterr().out
    found = {}
    for kind in ("methods", "models", "data", "recipes"):
        assert cli.main(["list", kind]) == 0
        found[kind] = capsys.readouterr().out
        assert found[kind].strip() in everything
    assert all(re.search(rf"^{name} ", found["models"], re.MULTILINE) for name in MODELS)
    assert "11,173,962" in found["models"]
    assert "fashion_mnist" in found["data"]
    assert "label-noise" in found["recipes"]
    assert cli.main(["methods"]) == 0
    assert capsys.readouterr().out == found["methods"]
    assert "there is no list of 'papers': choose from methods, models, data, recipes" in refused(
        capsys, "list", "papers"
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with two finished runs."""
    folder = tmp_path_factory.mktemp("runs")
    for name, flags in {"noisy.0": ["--label-noise", "0.4"], "clean": ["--seed", "1"]}.items():
        assert cli.main([*SHORT, *flags, "--out", str(folder / name)]) == 0
    return folder


def test_flatness_of_runs_is_that_of_what_they_were_trained_on(runs, tmp_path, monkeypatch, capsys, evenly):
    out = tmp_path / "out"
    monkeypatch.chdir(runs / "noisy.0")
    command = ["flatness", ".", "../clean", "--images", "100", "--out", str(out), *CHEAP]
    assert cli.main(command) == 0
    assert re.search(r"^ noisy\.0 .*\n clean ", capsys.readouterr().out, re.MULTILINE)
    found = json.loads((out / "flatness.json").read_text())
    assert found["settings"]["images"] == 100
    assert "loader" not in found["settings"]
    data, noisy, clean = digits().train, *found["models"]
    assert (noisy["file"], clean["file"]) == (str(runs / "noisy.0"), "../clean")
    flipped, places = flip_labels(data.y, 0.4, 10, 0)
    assert json.loads((runs / "noisy.0/flipped.json").read_text()) == places.tolist()
    for entry, folder, labels in ((noisy, "noisy.0", flipped), (clean, "clean", data.y)):
        model = DigitsNet()
        model.load_state_dict(load_file(runs / folder / "model.safetensors"))
        some = evenly(labels, 100)
        with torch.no_grad():
            logits = model.eval()(data.x[some])
        assert entry["sharpness"]["loss"] == pytest.approx(float(F.cross_entropy(logits, labels[some])), rel=1e-5)
        assert entry["samples"] == 100
        assert entry["run"] == json.loads((runs / folder / "config.json").read_text())
        assert entry["metrics"] == read_metrics(runs / folder)[-1]
    assert noisy["sharpness"]["loss"] > clean["sharpness"]["loss"]
    assert noisy["architecture"] == clean["architecture"]  # one scale, one pair of directions

    before = (out / "flatness.json").read_bytes()
    assert cli.main(command) == 0  # known already
    assert (out / "flatness.json").read_bytes() == before


def test_flatness_takes_a_thousand_samples_or_all(runs, tmp_path):
    assert cli.main(["flatness", str(runs / "clean"), "--out", str(tmp_path / "out"), *CHEAP]) == 0
    found = json.loads((tmp_path / "out/flatness.json").read_text())
    assert (found["settings"]["images"], found["models"][0]["samples"]) == (1000, 640)


def test_flatness_refuses_what_is_no_finished_run(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "begun", "damaged", "torn", "other"):
        Path(name).mkdir()
    config = (runs / "clean/config.json").read_text()
    for name in ("begun", "damaged", "torn"):
        Path(name, "config.json").write_text(config)
    Path("begun/metrics.jsonl").write_text('{"epoch": 1, "seconds": 1, "test_accuracy": 0.5}\n')
    Path("damaged/metrics.jsonl").write_text((runs / "clean/metrics.jsonl").read_text())
    Path("damaged/model.safetensors").write_bytes((runs / "clean/model.safetensors").read_bytes()[:999])
    Path("torn/metrics.jsonl").write_text('{"epoch": 1')
    Path("torn/model.safetensors").write_bytes((runs / "clean/model.safetensors").read_bytes())
    Path("other/config.json").write_text('{"lr": 1}')
    Path("net.pt").touch()
    clean = runs / "clean"
    for arguments, words in {
        (clean, "empty"): "empty is not a run directory of bsam train: it has no config.json",
        ("other",): "other is no folder of a run",
        (clean, "begun"): "the run in begun is not finished (1 of 3 epochs are)",
        ("damaged",): "damaged/model.safetensors is damaged",
        ("torn",): "line 1 of torn/metrics.jsonl is damaged: it holds no JSON object",
        (clean, "net.pt"): f"{clean} is a folder and net.pt is not",
        (clean, "nowhere"): f"{clean} is a folder and nowhere is not",
        (clean, "--loader", "math:sqrt"): "a run needs no loader",
        ("net.pt",): "name the function that loads it with --loader MODULE:FUNCTION, or give a run directory",
        ("net.pt", "--loader", "math:sqrt", "--images", "10"): "leave --images and --data-dir out",
        (clean, "--images", "0"): "images must be a whole number of at least 1",
    }.items():
        assert words in refused(capsys, "flatness", *arguments, "--out", "out", *CHEAP)
        assert not any(Path("out").glob("*"))
