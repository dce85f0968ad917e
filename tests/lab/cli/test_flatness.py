"""``bsam flatness``, on files with a loader and on run directories."""

import json
import re
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from bsam.flatness import HessianOperator, landscape, sharpness, top_eigenvalues
from bsam.lab import cli
from bsam.lab.cli import flatness
from bsam.lab.common.files import LOCK
from bsam.lab.data import digits
from bsam.lab.data.arrays import flip_labels
from bsam.lab.models.cifar import DigitsNet
from bsam.lab.recipes.variants import variant_of
from bsam.lab.training.run_dir import RunDir, run_dir_name

CHEAP = ("--k", "1", "--tol", "0.2", "--trace-samples", "6", "--density-probes", "1", "--density-steps", "4")
CHEAP += ("--points", "3", "--rho", "0.1", "--device", "cpu")
SHORT = ("train", "--method", "bsam", "--set", "rho_max=0.02", "--epochs", "1", "--batch", "64", "--device", "cpu")


LOADER = """
import torch
from bsam.lab.data import digits
from bsam.lab.models.cifar import DigitsNet

def load(path):
    if path.name == "slow.pt" and not path.with_name("hurry").exists():
        raise KeyboardInterrupt
    model = DigitsNet()
    model.load_state_dict(torch.load(path, weights_only=True))
    x, y = digits().test.x[:20], digits().test.y[:20]
    return model, torch.nn.functional.cross_entropy, [(x[:15], y[:15]), (x[15:], y[15:])]
"""


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch):
    """Pages are empty: other tests look into them."""
    monkeypatch.setattr(flatness, "figures_html", lambda title, figures: b"")


@pytest.fixture
def saved(tmp_path, script_path):
    """A folder with two saved networks and a loader."""
    for seed, name in enumerate(("first.pt", "slow.pt")):
        torch.manual_seed(seed)
        torch.save(DigitsNet().state_dict(), tmp_path / name)
    (tmp_path / "my_nets.py").write_text(LOADER)
    return tmp_path


def test_interrupted_and_resumed_it_measures_the_saved_models(saved, capsys, monkeypatch):
    """With a loader in the current folder, interrupted at the second model."""
    arguments = ["flatness", "first.pt", "slow.pt", "--loader", "my_nets:load", "--out", "out", "--seed", "5", *CHEAP]
    monkeypatch.chdir(saved)
    assert cli.main(arguments) == 130
    assert "Finished models are saved in out; run the same command again" in capsys.readouterr().err
    assert {path.name for path in (saved / "out").iterdir()} == {LOCK, "flatness.json"}
    kept = json.loads((saved / "out" / "flatness.json").read_text())
    assert [entry["file"] for entry in kept["models"]] == ["first.pt"]

    (saved / "hurry").touch()
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    names = {"flatness.json", "flatness.html"}
    assert {path.name for path in (saved / "out").iterdir()} == {LOCK, *names}
    assert all(f"out/{name}" in out for name in names)
    written = json.loads((saved / "out" / "flatness.json").read_text())
    assert written["models"][0] == kept["models"][0]
    settings = {"k": 1, "tol": 0.2, "trace_samples": 6, "density_steps": 4, "density_probes": 1, "points": 3}
    settings |= {"rho": 0.1, "seed": 5, "mode": "eval", "span": 1.0}
    assert settings.items() <= written["settings"].items()

    data = digits().test
    for name, entry in zip(("first.pt", "slow.pt"), written["models"], strict=True):
        model = DigitsNet()
        model.load_state_dict(torch.load(saved / name, weights_only=True))
        batches = [(data.x[:20], data.y[:20])]
        near = sharpness(model, torch.nn.functional.cross_entropy, batches, 0.1, 0.1)
        assert entry["sharpness"]["bilateral"] == pytest.approx(near.bilateral, rel=1e-4)
        top = top_eigenvalues(HessianOperator(model, torch.nn.functional.cross_entropy, batches), k=1, tol=0.2)
        assert entry["eigenvalues"]["values"] == pytest.approx(top.values.tolist(), rel=0.1)
        land = landscape(model, torch.nn.functional.cross_entropy, batches, points=3, seed=5)
        assert entry["landscape"]["loss"] == pytest.approx(land.loss, rel=1e-4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with two finished runs."""
    folder = tmp_path_factory.mktemp("runs")
    for name, flags in {"noisy.0": ["--label-noise", "0.4"], "clean": ["--seed", "1"]}.items():
        assert cli.main([*SHORT, *flags, "--out", str(folder / name)]) == 0
    return folder


def test_runs_are_measured_on_their_training_samples(runs, tmp_path, monkeypatch, capsys, evenly):
    out = tmp_path / "out"
    monkeypatch.chdir(runs / "noisy.0")
    command = ["flatness", ".", "../clean", "--images", "50", "--out", str(out), *CHEAP]
    assert cli.main(command) == 0
    assert re.search(r"^noisy\.0 .*\nclean ", capsys.readouterr().out, re.MULTILINE)
    written = json.loads((out / "flatness.json").read_text())
    assert written["settings"]["images"] == 50
    assert "loader" not in written["settings"]
    data, noisy, clean = digits().train, *written["models"]
    assert (noisy["file"], clean["file"]) == (str(runs / "noisy.0"), "../clean")
    flipped, places = flip_labels(data.y, 0.4, 10, 0)
    assert json.loads((runs / "noisy.0/flipped.json").read_text()) == places.tolist()
    for entry, folder, labels in ((noisy, "noisy.0", flipped), (clean, "clean", data.y)):
        model = DigitsNet()
        model.load_state_dict(load_file(runs / folder / "model.safetensors"))
        some = evenly(labels, 50)
        with torch.no_grad():
            logits = model.eval()(data.x[some])
        assert entry["sharpness"]["loss"] == pytest.approx(float(F.cross_entropy(logits, labels[some])), rel=1e-5)
        assert entry["samples"] == 50
        assert entry["run"] == json.loads((runs / folder / "config.json").read_text())
        assert entry["metrics"] == RunDir(runs / folder).metrics()[-1]
    assert noisy["sharpness"]["loss"] > clean["sharpness"]["loss"]
    assert noisy["architecture"] == clean["architecture"]  # one scale, one pair of directions

    before = (out / "flatness.json").read_bytes()
    assert cli.main(command) == 0  # known already
    assert (out / "flatness.json").read_bytes() == before


def test_the_run_of_a_recipe_is_titled_with_method_and_seed(runs, tmp_path, measured):
    run = RunDir(runs / "clean").run()
    named = tmp_path / run_dir_name(run)
    shutil.copytree(runs / "clean", named)
    assert cli.main(["flatness", str(named), str(runs / "noisy.0")]) == 0
    assert measured.pop().titles == [f"{variant_of(run).title}, seed {run.seed}", "noisy.0"]


def test_a_folder_of_runs_may_be_given(runs, measured):
    assert cli.main(["flatness", str(runs)]) == 0
    assert measured.pop().paths == [runs / "clean", runs / "noisy.0"]
