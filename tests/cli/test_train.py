"""``bsam train``: what it prints, refuses, repairs, and leaves behind when it is stopped."""

import json
import os
import re
import signal
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import bsam
from bsam import cli
from bsam.report.epochs import ConsoleLogger
from bsam.training.config import Run
from bsam.training.files import LOCK
from bsam.training.run_dir import RunDir, run_dir_name

SHORT = ("train", "--method", "bsam", "--set", "rho_max=0.02", "--epochs", "3", "--batch", "64", "--device", "cpu")
LONG = ("train", "--method", "sam", "--epochs", "30", "--batch", "64", "--device", "cpu", "--limit-test", "50")
LONG += ("--limit-train", "192")


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_from_start_to_end(tmp_path, capsys, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bsam.report.classes.find_spec", find_spec)  # with pictures
    settings = {"seed": 5, "label_noise": 0.25, "radius": 0.05, "curvature": True, "limit_train": 128}
    run = Run("bsam", {"rho_max": 0.02}, epochs=3, batch=64, **settings)
    folder = Path("runs") / run_dir_name(run)
    command = [*SHORT, "--seed", "5", "--label-noise", "0.25", "--radius", "0.05", "--curvature"]
    command += ["--limit-train", "128"]
    assert cli.main(command) == 0
    out, error = capsys.readouterr()
    assert error == ""
    first, machine, where, *epochs, last, top, written = out.splitlines()
    network, data = "DigitsNet (9,978 parameters)", "128 samples of Digits, 25% of the labels flipped"
    assert first == f"BSAM (rho_max=0.02) with SGD: {network} on {data}, 3 epochs of 2 steps, batch 64."
    assert machine == f"CPU, {torch.get_num_threads()} thread(s), fp32, eager steps."
    assert where == f"Into {folder}."
    metrics = RunDir(folder).metrics()
    assert len(epochs) == len(metrics) == 3
    for i, (line, found) in enumerate(zip(epochs, metrics, strict=True)):
        losses = f"train loss {found['train_loss']:.4f}  test loss {found['test_loss']:.4f}"
        shares = f"test accuracy {found['test_accuracy']:.4f}  memorised {found['memorised']:.4f}"
        assert line.startswith(f"epoch {i + 1}/3  {losses}  {shares}  BilS ")
        assert re.search(r"  lr \S+  rho_min \S+  .*" + (r"left \d+:\d\d$" if i < 2 else r" s$"), line)
    assert last.startswith(f"After epoch 3: train loss {metrics[2]['train_loss']:.4f}  ")
    eigenvalue = json.loads((folder / "curvature.json").read_text())["top_eigenvalue"]
    assert top == f"Largest eigenvalue of the Hessian: {eigenvalue:.4g}"
    for name in (
        "config.json",
        "metrics.jsonl",
        "model.safetensors",
        "flipped.json",
        "environment.json",
        "tensorboard/",
        "confusion.png",
        "mistakes.png",
    ):
        assert name in written
    assert RunDir(folder).run() == run

    before = contents(folder)
    assert cli.main(command) == 0
    again = capsys.readouterr().out.splitlines()
    assert again == [f"The run in {folder} is finished.", last, top, written]
    assert contents(folder) == before
    error = refused(*command, "--lr", "0.1", "--out", folder)
    assert f"{folder} holds results with other settings (lr 0.05 there, 0.1 here)" in error
    assert contents(folder) == before


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert cli.main([*SHORT, "--limit-train", "64", "--curvature", "--out", str(folder)]) == 0
    return folder


def test_more_epochs_of_a_finished_run_go_on_from_its_weights(finished, tmp_path, capsys, refused):
    before = contents(finished)
    more = [*SHORT, "--limit-train", "64", "--curvature", "--epochs", "5"]
    words = f"give --init {finished} --epochs 2 and another --out"
    assert f"the run in {finished} is finished (epochs: 3). " in (error := refused(*more, "--out", finished))
    assert words in error
    assert "choose another folder" in refused(*more, "--seed", "1", "--out", finished)  # another run
    assert contents(finished) == before
    command = [*SHORT, "--limit-train", "64", "--init", str(finished), "--epochs", "2", "--out", str(tmp_path / "more")]
    assert cli.main(command) == 0
    assert f"Training begins with the network of {finished}." in capsys.readouterr().out


def test_a_terminated_run_goes_on_and_the_handler_is_as_it_was(tmp_path, capsys, monkeypatch):
    def stop(logger, done, metrics):
        if done == 2:
            signal.raise_signal(signal.SIGTERM)

    handler = signal.getsignal(signal.SIGTERM)
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(ConsoleLogger, "epoch", stop)
        assert cli.main([*SHORT, "--out", str(out)]) == 143
    assert signal.getsignal(signal.SIGTERM) is handler
    kept = f"Finished epochs are saved in {out}; run the same command again to continue."
    assert capsys.readouterr().err == f"bsam: terminated. {kept}\n"
    assert cli.main([*SHORT, "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == f"Into {out}. Continuing after epoch 2."
    assert [line[:9] for line in lines if line.startswith("epoch")] == ["epoch 3/3"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert cli.main([*LONG, "--out", str(folder)]) == 0
    return folder


@pytest.mark.parametrize(
    ("number", "status", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_stopped_from_outside_it_ends_like_a_run_that_was_not(number, status, word, tmp_path, whole, command):
    stopped = tmp_path / "stopped"
    process = command(*LONG, "--out", stopped)
    assert any(line.startswith("epoch  2/30") for line in process.stdout)
    os.killpg(process.pid, number)  # as a terminal, or a batch system
    _, error = process.communicate(timeout=60)
    kept = f"Finished epochs are saved in {stopped}; run the same command again to continue."
    assert (process.returncode, error) == (status, f"bsam: {word}. {kept}\n")
    assert 2 <= len(RunDir(stopped).metrics()) < 30
    assert cli.main([*LONG, "--out", str(stopped)]) == 0
    assert (stopped / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    ours, theirs = ([{**line, "seconds": 0} for line in RunDir(folder).metrics()] for folder in (stopped, whole))
    assert ours == theirs


def test_of_several_processes_one_speaks(tmp_path, command):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        world = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    flags = (*SHORT, "--limit-train", "128", "--out", tmp_path / "out")
    two = [command(*flags, env={**world, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]  # as torchrun does
    (out, error), other = (process.communicate(timeout=100) for process in two)
    assert [process.returncode for process in two] == [0, 0], error
    assert other == ("", "")
    assert out.count("epoch 1/3") == out.count("Into ") == out.count("Written to") == 1
    assert "2 processes, each on CPU" in out
    assert len(RunDir(tmp_path / "out").metrics()) == 3


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--method", "sma"], "method must be one of base, sgd, sam"),
        (["--method", "bsma-2"], "bsam, bsam-2, bsam-released; got 'bsma-2'. Did you mean 'bsam-2'?"),
        (["--method", "sam-sum"], "got 'sam-sum'"),
        (["--model", "resnet9"], "model must be one of digits_net, resnet8"),
        (["--model", "resnet8", "--data", "mnist"], "data must be one of digits, cifar10"),
        (["--data", "folder:misspelled"], "misspelled is not a folder; give the one that holds the images"),
        (["--augment", "flip"], "augmentation must be one of none"),
        (["--task", "chess"], "task must be one of classification"),
        (["--device", "abacus"], "device must be cpu, cuda or cuda:N, got 'abacus'"),
        (["--batch", "641"], "batch must be at most 640"),
        (["--limit-train", "0"], "limit_train must be a whole number of at least 1"),
        (["--data", "cifar10"], "say in which folder they are (--data-dir), or where to --download them to"),
        (["--data", "cifar10", "--data-dir", "nowhere"], "nowhere"),
        (["--download"], "digits comes with scikit-learn: leave --download out"),
        (["--data", "cifar10", "--download"], "say with --data-dir in which folder"),
        (["--set", "rho_max"], "NAME=VALUE, as rho_max=0.1; got 'rho_max'"),
        (["--set", "=1"], "got '=1'"),
        (["--set", "passes=1", "passes=2"], "passes twice"),
        (["--set", "rho=1"], "bsam has no argument 'rho': it takes rho_max"),
        (["--set", "rho_min=0,1"], "rho_min must be a finite number that is not negative, got '0,1'"),
        (["--set", "rho_min=null"], "got None"),
        (["--set", "rho_min=-1"], "got -1"),
    ],
)
def test_what_is_wrong_is_one_line_and_leaves_nothing_behind(flags, words, tmp_path, refused):
    out = tmp_path / "out"
    assert words in refused(*SHORT, "--out", out, *flags)
    assert not out.exists() or {path.name for path in out.iterdir()} <= {LOCK}


def test_the_base_optimizer_alone(tmp_path, capsys, refused):
    small = ("--epochs", "1", "--limit-train", "128", "--device", "cpu", "--out", tmp_path / "run")
    assert 'base is adam: set method to "base"' in refused("train", "--method", "sgd", "--base", "adam", *small)
    for method, line in (("sgd", "SGD: DigitsNet"), ("base", "The run in ")):  # one run under two names
        assert cli.main(["train", "--method", method, *map(str, small)]) == 0
        assert capsys.readouterr().out.startswith(line)
    assert cli.main(["train", "--method", "base", "--base", "adam", *map(str, small[:-1]), str(tmp_path / "adam")]) == 0
    assert capsys.readouterr().out.startswith("Adam: DigitsNet")


def test_folders_that_hold_something_else(tmp_path, refused):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("years of work")
    assert "thesis.tex" in refused(*SHORT, "--out", tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    assert "cannot be used as a folder for a run" in refused(*SHORT, "--out", tmp_path / "mine/thesis.tex")


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, refused):
    assert "a smaller lr" in refused(*SHORT, "--lr", "1e30", "--out", tmp_path / "out")


DIGITS = ("train", "--epochs", "4", "--device", "cpu", "--seed", "0")


@pytest.mark.parametrize(
    ("flags", "last"),
    [
        (("--method", "sgd", "--lr", "100"), r"not better than chance: .*\. Try a smaller --lr \(now 100\)\."),
        (("--method", "sam", "--set", "rho=2"), r"--lr \(now 0\.05\).* a smaller radius \(now --set rho=2\)"),
    ],
)
def test_the_last_line_of_a_run_that_learned_nothing_says_so(flags, last, tmp_path, capsys):
    command = [*DIGITS, *flags, "--out", str(tmp_path)]
    for _ in range(2):  # a finished run says it again
        assert cli.main(command) == 0
        assert re.search(last, capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("method", ["bsam", "asam"])
def test_a_run_that_learns_ends_with_its_files_and_its_radius_is_not_too_large(method, tmp_path, capsys):
    assert cli.main([*DIGITS, "--method", method, "--probe", "1", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("Written to")
    assert "too large" not in out


def test_a_radius_that_is_too_large_is_named_once_after_the_first_epoch(tmp_path, capsys):
    command = [*DIGITS, "--method", "sam", "--set", "rho=1", "--probe", "2", "--out", str(tmp_path)]
    assert cli.main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    (number,) = (i for i, line in enumerate(lines) if "The radius is too large: at step 0" in line)
    assert [line[:9] for line in lines[number - 1 : number + 2]] == ["epoch 1/4", "The radiu", "epoch 2/4"]


def test_a_missing_package_of_the_data_is_named(tmp_path, refused, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "sklearn"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("bsam.tasks.image_inputs._load_arrays", bsam.data.load)
    assert "not installed: pip install -c constraints.txt '.[" in refused(*SHORT, "--out", tmp_path / "out")
