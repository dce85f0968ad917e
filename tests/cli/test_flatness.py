import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bsam
from bsam import cli
from bsam.data.digits import digits
from bsam.flatness import HessianOperator, landscape, sharpness, top_eigenvalues
from bsam.models.digits_net import DigitsNet

LOADER = """
import time
import torch
from bsam.data.digits import digits
from bsam.models.digits_net import DigitsNet

def load(path):
    if path.name == "slow.pt" and not path.with_name("hurry").exists():
        print("asleep", flush=True)
        time.sleep(100)
    model = DigitsNet()
    model.load_state_dict(torch.load(path, weights_only=True))
    x, y = digits().test.x[:40], digits().test.y[:40]
    return model, torch.nn.functional.cross_entropy, [(x[:30], y[:30]), (x[30:], y[30:])]
"""
SCRIPT = (
    "-c",
    "import sys; sys.path = [p for p in sys.path if p]; from bsam.cli import main; sys.exit(main(sys.argv[1:]))",
)  # as the installed command
CHEAP = (
    "--k",
    "2",
    "--tol",
    "0.01",
    "--trace-samples",
    "6",
    "--density-steps",
    "4",
    "--density-probes",
    "1",
    "--points",
    "3",
    "--rho",
    "0.1",
)


@pytest.fixture
def saved(tmp_path):
    """Two networks that were saved, and a loader beside them, in what is to be the current folder."""
    for seed, name in enumerate(("first.pt", "slow.pt")):
        torch.manual_seed(seed)
        torch.save(DigitsNet().state_dict(), tmp_path / name)
    (tmp_path / "my_nets.py").write_text(LOADER)
    return tmp_path


def command(*arguments, program, cwd):
    environment = {**os.environ, "PYTHONPATH": str(Path(bsam.__file__).parents[1]), "PYTHONUNBUFFERED": ""}
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
        cwd=cwd,
    )


def test_flatness_interrupted_and_resumed_measures_what_was_saved(saved):
    """With the loader in the current folder, Ctrl-C as a terminal sends it, and the same command again."""
    arguments = ("flatness", "first.pt", "slow.pt", "--loader", "my_nets:load", "--out", "out", "--seed", "5", *CHEAP)
    first = command(*arguments, program=SCRIPT, cwd=saved)
    for line in first.stdout:
        if "asleep" in line:  # the first one is done
            break
    os.killpg(first.pid, signal.SIGINT)
    _, error = first.communicate(timeout=60)
    assert (first.returncode, error) == (
        130,
        "bsam: interrupted. Finished models are kept in out; the same command goes on from there.\n",
    )
    assert [path.name for path in (saved / "out").iterdir()] == ["flatness.json"]
    kept = json.loads((saved / "out" / "flatness.json").read_text())
    assert [entry["file"] for entry in kept["models"]] == ["first.pt"]

    (saved / "hurry").touch()
    second = command(*arguments, program=SCRIPT, cwd=saved)
    out, error = second.communicate(timeout=100)
    assert (second.returncode, error) == (0, "")
    names = {"flatness.json", "spectrum.png", "density.png", "contours.png", "surfaces.png", "surfaces.html"}
    assert {path.name for path in (saved / "out").iterdir()} == names
    assert all(f"out/{name}" in out for name in names)
    assert "2/2" in out
    found = json.loads((saved / "out" / "flatness.json").read_text())
    assert found["models"][0] == kept["models"][0]
    wanted = {
        "k": 2,
        "tol": 0.01,
        "trace_samples": 6,
        "density_steps": 4,
        "density_probes": 1,
        "points": 3,
        "rho": 0.1,
        "seed": 5,
        "mode": "eval",
        "span": 1.0,
    }
    assert wanted.items() <= found["settings"].items()

    data = digits().test
    for name, entry in zip(("first.pt", "slow.pt"), found["models"], strict=True):
        model = DigitsNet()
        model.load_state_dict(torch.load(saved / name, weights_only=True))
        batches = [(data.x[:40], data.y[:40])]
        near = sharpness(model, torch.nn.functional.cross_entropy, batches, 0.1, 0.1)
        assert entry["sharpness"]["bilateral"] == pytest.approx(near.bilateral, rel=1e-4)
        top = top_eigenvalues(HessianOperator(model, torch.nn.functional.cross_entropy, batches), k=2)
        assert entry["eigenvalues"]["values"] == pytest.approx(top.values.tolist(), rel=1e-3)
        land = landscape(model, torch.nn.functional.cross_entropy, batches, points=3, seed=5)
        assert entry["landscape"]["loss"] == pytest.approx(land.loss, rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.pt", "--loader", "my_nets:load"], "no file missing.pt"),
        (["first.pt", "--loader", "my_nets"], "module:function, got 'my_nets'"),
        (["first.pt", "--loader", "no_nets:load"], "no module 'no_nets'"),
        (["first.pt", "--loader", "math:load"], "'math' has no function 'load'"),
        (["first.pt", "--loader", "math:sqrt", "--points", "10"], "points must be odd"),
        (["first.pt", "--loader", "math:sqrt", "--which", "smallest"], "which must be one of"),
        (["first.pt", "--loader", "math:sqrt", "--device", "abacus"], "'abacus'"),
        (["first.pt", "--loader", "os:fspath"], "must return (model, loss_fn, data); for first.pt it returned str"),
    ],
)
def test_flatness_names_the_culprit(arguments, words, saved, capsys, monkeypatch):
    monkeypatch.chdir(saved)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.main(["flatness", *arguments, "--out", "out"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("bsam: ")
    assert words in error
    assert error.count("\n") == 1
    assert not any((saved / "out").glob("*"))


@pytest.mark.parametrize("module", ["rich", "matplotlib"])
def test_flatness_says_what_is_missing_before_anything_is_measured(module, saved, capsys, monkeypatch):
    monkeypatch.chdir(saved)
    monkeypatch.setitem(sys.modules, module, None)
    assert cli.main(["flatness", "first.pt", "--loader", "my_nets:load", "--out", "out"]) == 2
    assert f"{module}, which is not installed: pip install 'bsam[" in capsys.readouterr().err
    assert not (saved / "out").exists()


def test_flatness_help_says_what_a_loader_is(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["flatness", "--help"])
    assert end.value.code == 0
    help_text = " ".join(capsys.readouterr().out.split())
    assert all(
        words in help_text
        for words in (
            "returns (model, loss_fn, data)",
            "current folder",
            "runs/flatness",
            "flatness.json",
            "surfaces.html",
        )
    )
