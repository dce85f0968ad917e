"""``bsam train``: what it prints, and what it leaves behind when it is stopped."""

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

from bsam.lab import cli
from bsam.lab.config import Run
from bsam.lab.data import ArrayData
from bsam.lab.recipes import describe
from bsam.lab.training.run_dir import CHECKPOINT, RunDir, run_dir_name
from processes import Command

SHORT = ("train", "--method", "bsam", "--set", "rho_max=0.02", "--epochs", "3", "--batch", "64", "--device", "cpu")
LONG = ("train", "--method", "sam", "--epochs", "30", "--batch", "64", "--device", "cpu", "--limit-test", "50")
LONG += ("--limit-train", "128")


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_from_start_to_end(tmp_path, capsys, monkeypatch, error_of):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bsam.lab.report.figures.class_report.find_spec", find_spec)  # with pictures
    settings = {
        "seed": 5,
        "label_noise": 0.25,
        "sharpness_rho": 0.05,
        "curvature": True,
        "limit_train": 64,
        "limit_test": 50,
    }
    run = Run.of("bsam", {"rho_max": 0.02}, epochs=3, batch=32, **settings)
    folder = Path("runs") / run_dir_name(run)
    command = [*SHORT, "--seed", "5", "--label-noise", "0.25", "--sharpness-rho", "0.05", "--curvature"]
    command += ["--limit-train", "64", "--limit-test", "50", "--batch", "32"]
    assert cli.main(command) == 0
    out, error = capsys.readouterr()
    assert error == ""
    first, machine, where, *epochs, last, top, written = out.splitlines()
    noise = "25 % of labels drawn from all classes: 21.9 % wrong"  # 14 of 64
    parts = (
        "BSAM (rho_max=0.02) with SGD",
        "DigitsNet (9,978 parameters)",
        "64 samples of Digits at 8 x 8 pixels",
        noise,
        "3 epochs",
    )
    assert all(part in first for part in parts)
    assert machine.startswith(f"CPU, {torch.get_num_threads()} thread")
    assert str(folder) in where
    metrics = RunDir(folder).metrics()
    assert len(epochs) == len(metrics) == 3
    for i, (line, row) in enumerate(zip(epochs, metrics, strict=True)):
        losses = f"train loss {row['train_loss']:.4f}  test loss {row['test_loss']:.4f}"
        shares = f"test accuracy {row['test_accuracy']:.4f}  memorised {row['memorised']:.4f}"
        assert line.startswith(f"epoch {i + 1}/3  {losses}  {shares}  BilS ")
        assert re.search(r"  lr \S+  rho_min \S+  .*" + (r"left \d+:\d\d$" if i < 2 else r" s$"), line)
    assert last.startswith(f"After epoch 3: train loss {metrics[2]['train_loss']:.4f}  ")
    (entry,) = json.loads((folder / "flatness.json").read_text())["models"]
    eigenvalue = entry["eigenvalues"]["maximum"]
    assert top == f"Largest eigenvalue of the Hessian (cross-entropy, 64 training samples): {eigenvalue:.4g}"
    files = ("config.json", "metrics.jsonl", "model.safetensors", "flipped.json", "environment.json", "tensorboard/")
    assert all(name in written for name in (*files, "confusion.html", "mistakes.png"))
    assert RunDir(folder).run() == run

    before = contents(folder)
    assert cli.main(command) == 0
    again = capsys.readouterr().out.splitlines()
    assert again == [f"The run in {folder} is finished.", last, top, written]
    assert contents(folder) == before
    error = error_of(*command, "--lr", "0.1", "--out", folder)
    assert all(words in error for words in (str(folder), "lr", "0.05", "0.1"))
    assert contents(folder) == before


def test_more_epochs_of_a_finished_run_start_from_its_weights(digits_run, tmp_path, capsys, error_of):
    before = contents(digits_run)
    command = ["train", "--method", "sgd", "--model", "resnet8", "--batch", 64, "--limit-train", 64, "--limit-test", 20]
    command += ["--device", "cpu"]
    error = error_of(*command, "--epochs", 3, "--out", digits_run)
    assert f"--init {digits_run} --epochs 2" in error
    assert "--init" not in error_of(*command, "--epochs", 3, "--seed", 1, "--out", digits_run)  # another run
    assert contents(digits_run) == before
    command += ["--init", digits_run, "--epochs", 2, "--out", tmp_path / "more"]
    assert cli.main(list(map(str, command))) == 0
    assert str(digits_run) in capsys.readouterr().out


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert cli.main([*LONG, "--out", str(folder)]) == 0
    return folder


@pytest.mark.parametrize(
    ("number", "status", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated"), (signal.SIGUSR1, 138, "terminated")],
)
def test_stopped_from_outside_it_ends_like_a_run_that_was_not(number, status, word, tmp_path, whole, capsys):
    """Only Ctrl-C does not wait for a checkpoint."""
    stopped, is_interrupt = tmp_path / "stopped", number == signal.SIGINT
    process = Command(*LONG, "--checkpoint-every", "0" if is_interrupt else "1000", "--out", stopped)
    assert any(line.startswith("epoch  2/30") for line in process.stdout)
    os.killpg(process.pid, number)  # as a terminal, or a batch system
    _, error = process.communicate(timeout=60)
    kept = f"Epochs up to the last checkpoint are saved in {stopped}; run the same command again to continue."
    assert (process.returncode, error) == (status, f"bsam: {word}. {kept}\n")
    epochs = len(RunDir(stopped).metrics())
    assert 2 <= epochs < 30
    state = torch.load(stopped / CHECKPOINT, weights_only=True)
    place = f"epoch {epochs}" if is_interrupt else f"step {state['begun']['steps']} of epoch {epochs + 1}"
    assert cli.main([*LONG, "--out", str(stopped)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == f"Writing to {stopped}. Continuing after {place}."
    assert sum(line.startswith("epoch") for line in lines) == 30 - epochs
    assert (stopped / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    ours, theirs = ([{**line, "seconds": 0} for line in RunDir(folder).metrics()] for folder in (stopped, whole))
    assert ours == theirs


def test_stopped_before_its_first_checkpoint_it_starts_over(tmp_path, whole, capsys):
    stopped = tmp_path / "stopped"
    process = Command(*LONG, "--out", stopped)
    assert any(line.startswith("epoch  2/30") for line in process.stdout)
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert error == "bsam: interrupted. No checkpoint.pt was written; run the same command again to start over.\n"
    assert len(RunDir(stopped).metrics()) >= 2
    assert cli.main([*LONG, "--out", str(stopped)]) == 0
    assert capsys.readouterr().out.splitlines()[2] == f"Writing to {stopped}."
    assert (stopped / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.parametrize("command", [SHORT, ("run", "label-noise", "--only", "sgd")], ids=["train", "run"])
@pytest.mark.parametrize("seconds", ["-1", "nan"])
def test_a_bad_time_between_checkpoints(command, seconds, tmp_path, error_of):
    error = error_of(*command, "--checkpoint-every", seconds, "--out", tmp_path / "out")
    assert "checkpoint_every" in error
    assert seconds in error
    assert not list(tmp_path.rglob("metrics.jsonl"))


def two_ranks(*flags):
    """Start a command in two processes, as torchrun does."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        world = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    return [Command(*flags, env={**world, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]


def test_a_signal_to_one_of_several_processes_stops_all_at_the_same_step(tmp_path):
    """And the run continues bit for bit: each process has random numbers and losses of its own."""
    flags = (*LONG[:4], "6", *LONG[5:], "--model", "resnet8", "--out")
    stopped = two_ranks(*flags, tmp_path / "stopped")
    assert any(line.startswith("epoch 2/6") for line in stopped[0].stdout)
    stopped[1].send_signal(signal.SIGUSR1)
    ends = [process.communicate(timeout=100) for process in stopped]
    assert [process.returncode for process in stopped] == [138, 138], ends
    assert ends[0][1].startswith("bsam: terminated. ")
    assert ends[0][1].count("\n") == 1
    assert ends[1] == ("", "")
    assert len(torch.load(tmp_path / "stopped" / CHECKPOINT, weights_only=True)["begun"]["shares"]) == 2
    for folder in (tmp_path / "stopped", tmp_path / "whole"):
        ends = [process.communicate(timeout=100) for process in two_ranks(*flags, folder)]
        assert not any(error for _, error in ends)
    assert (tmp_path / "stopped/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()
    folders = (RunDir(tmp_path / "stopped"), RunDir(tmp_path / "whole"))
    ours, theirs = ([{**row, "seconds": 0} for row in folder.metrics()] for folder in folders)
    assert ours == theirs


def test_one_of_several_processes_prints(tmp_path):
    two = two_ranks(*SHORT, "--limit-train", "128", "--epochs", "1", "--out", tmp_path / "out")
    (out, error), other = (process.communicate(timeout=100) for process in two)
    assert [process.returncode for process in two] == [0, 0], error
    assert other == ("", "")
    assert out.count("epoch 1/1") == out.count("Writing to ") == out.count("Written to") == 1
    assert "2 processes" in out
    assert len(RunDir(tmp_path / "out").metrics()) == 1


def test_the_base_optimizer_alone(tmp_path, capsys):
    small = ("--epochs", "1", "--limit-train", "128", "--device", "cpu", "--out")
    for flags, folder, line in (
        (("--method", "sgd"), "run", "SGD: DigitsNet"),
        (("--method", "base"), "run", "The run in "),  # the same run under another name
        (("--method", "base", "--base", "adam"), "adam", "Adam: DigitsNet"),
    ):
        assert cli.main(["train", *flags, *small, str(tmp_path / folder)]) == 0
        assert capsys.readouterr().out.startswith(line)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, error_of):
    assert "lr" in error_of(*SHORT, "--lr", "1e30", "--out", tmp_path / "out")


DIGITS = ("train", "--epochs", "4", "--device", "cpu", "--seed", "0", "--limit-test", "100")


@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        (("--method", "sgd", "--lr", "1000", "--epochs", "1"), ["chance", "--lr (now 1000)"]),
        (("--method", "sam", "--set", "rho=2"), ["--lr (now 0.05)", "radius (now --set rho=2)"]),
    ],
)
def test_a_run_that_learned_nothing_ends_with_advice(flags, advice, tmp_path, capsys):
    for _ in range(2):  # also if it is finished already
        assert cli.main([*DIGITS, *flags, "--out", str(tmp_path)]) == 0
        out = capsys.readouterr().out
        assert not re.search(r"\d{6}|\.\d{5}", out)  # losses of many digits
        last = out.splitlines()[-1]
        assert all(words in last for words in advice)


@pytest.mark.parametrize("method", ["bsam", "asam"])
def test_a_run_that_learns_has_no_advice(method, tmp_path, capsys):
    assert cli.main([*DIGITS, "--method", method, "--probe", "3", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("Written to")
    assert "too large" not in out


def test_too_large_a_radius_is_reported_once_after_the_first_epoch(tmp_path, capsys):
    command = [*DIGITS, "--method", "sam", "--set", "rho=1", "--probe", "2", "--epochs", "2", "--out", str(tmp_path)]
    assert cli.main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    (number,) = (i for i, line in enumerate(lines) if "radius is too large" in line)
    assert [line[:9] for line in (lines[number - 1], lines[number + 1])] == ["epoch 1/2", "epoch 2/2"]


def test_a_missing_package_of_the_data_is_an_error(tmp_path, error_of, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "sklearn"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("bsam.lab.tasks.images._load_arrays", ArrayData.load)  # without its cache
    assert "pip install" in error_of(*SHORT, "--out", tmp_path / "out")


def test_a_run_says_what_it_is(digits_run):
    assert RunDir(digits_run).about() == describe(RunDir(digits_run).run())
    assert (describe(RunDir(digits_run).run())["row"], describe(RunDir(digits_run).run())["section"]) == ("SGD", "")


def test_a_probe_waits_for_a_late_start(tmp_path, capsys):
    """After the first epoch there is no reading yet, and the radii are those of the last step."""
    flags = ("--limit-train", "160", "--batch", "16", "--probe", "5", "--rho-start", "1", "--rho-warmup", "2")
    assert cli.main([*SHORT, *flags, "--set", "rho_min=0.1", "--out", str(tmp_path / "run")]) == 0
    assert "  rho_max 0.00e+00  rho_min 0.00e+00  " in capsys.readouterr().out
    run = RunDir(tmp_path / "run")
    assert [reading["step"] for reading in run.probe()] == [10, 15, 20, 25]
    for epoch, share in zip(run.metrics(), (0, 0.5, 1), strict=True):
        assert epoch["rho_max"] == pytest.approx(0.02 * share)
        assert epoch["rho_min"] == pytest.approx(0.1 * share * epoch["lr"] / 0.05)
