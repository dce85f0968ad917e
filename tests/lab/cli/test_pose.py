"""``bsam train`` on persons with joints, and ``bsam run pose``."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bsam.lab import cli
from bsam.lab.data import DATASETS
from bsam.lab.models import build
from bsam.lab.recipes import RECIPES
from bsam.lab.training.run_dir import RunDir
from helpers import draw_persons
from pose_runs import draw_figures

COLUMNS = ("head", "shoulder", "elbow", "wrist", "hip", "knee", "ankle")
SMALL = ("train", "--method", "sgd", "--base", "sgd", "--device", "cpu", "--image-size", "32", "--batch", "6")


@pytest.fixture
def weights(tmp_path):
    tensors = {key: t.contiguous() for key, t in build("resnet8", classes=5, seed=1).state_dict().items()}
    save_file(tensors, tmp_path / "a.safetensors", {"bsam_model": "resnet8"})
    return tmp_path / "a.safetensors"


def test_a_folder_of_persons_from_start_to_end(weights, tmp_path, capsys, error_of):
    """With an image that cannot be decoded."""
    draw_persons(tmp_path / "lspet")
    (tmp_path / "lspet/images/im00003.jpg").write_text("no image")
    out, cache = tmp_path / "out", tmp_path / "cache"
    command = [*SMALL, "--data", "lspet", "--data-dir", str(tmp_path), "--weights", "a.safetensors", "--lr", "0.001"]
    command += ["--cache-dir", str(cache), "--out", str(out), "--epochs", "1"]
    assert "images/im00003.jpg" in error_of(*command)
    assert cli.main([*command, "--skip-corrupt"]) == 0
    printed = capsys.readouterr().out
    assert "SimCC, ResNet-8" in printed
    assert "on 17 samples of LSP Extended at 32 x 32 pixels, 1 epoch" in printed
    assert "linear.bias 5, linear.weight 5x64" in printed  # left out
    run_dir = RunDir(out)
    assert run_dir.run().task.name == "pose"
    assert run_dir.note("data")["images"] == {"train": 17, "test": 2}
    assert run_dir.note("data")["left_out"][0].startswith("images/im00003.jpg ")
    assert run_dir.note("pose")["side"] == 32
    assert 0 <= run_dir.note("baseline")["scores"]["pck"] <= 1
    assert run_dir.note("weights")["source"] == weights.name
    predictions = run_dir.predictions()
    shapes = {"pixels": (2, 32, 32, 3), "found": (2, 14, 2), "truth": (2, 14, 3)}
    assert {name: part.shape for name, part in predictions.items()} == shapes
    assert np.isfinite(predictions["found"]).all()
    (row,) = run_dir.metrics()
    assert {"test_pck", "test_pck_head", "test_pck_ankle", "test_loss"} <= row.keys()
    end, start = load_file(out / "model.safetensors"), load_file(weights)
    way = (end["backbone.stages.0.0.conv1.weight"] - start["stages.0.0.conv1.weight"]).norm()
    assert 0 < way < 0.5 * start["stages.0.0.conv1.weight"].norm()


def test_a_diverged_run_has_no_predictions(tmp_path, error_of, monkeypatch):
    draw_figures(12, monkeypatch)
    command = (*SMALL, "--data", "stick_figures", "--epochs", "2", "--lr", "1e30", "--out", tmp_path / "out")
    assert "loss is nan in epoch 1" in error_of(*command)
    assert RunDir(tmp_path / "out").predictions() == {}


def test_a_small_experiment(tmp_path, monkeypatch):
    """Really trained; the table has all measures of each run and the baseline, as they are in the run directories."""
    small = {**RECIPES["pose"].scales["smoke"], "epochs": 1, "limit_train": 24, "limit_test": 10}
    monkeypatch.setitem(RECIPES, "pose", replace(RECIPES["pose"], scales={"smoke": small}))
    draw_figures(40, monkeypatch)
    figures = DATASETS["stick_figures"].draw(24)
    before = figures.train.x.clone(), figures.train.y.clone()
    assert cli.main(["run", "pose", "--out", str(tmp_path), "--device", "cpu", "--only", "adam", "bsam-2"]) == 0
    folders = sorted(path for path in tmp_path.iterdir() if path.is_dir())
    expected = {
        title: json.loads((path / "metrics.jsonl").read_text())
        for title, path in zip(("Adam", "BSAM (2 passes)"), folders, strict=True)
    }
    baseline = json.loads((folders[0] / "baseline.json").read_text())["scores"]
    expected["mean pose, no network"] = {f"test_{name}": value for name, value in baseline.items()}
    table = (tmp_path / "table.md").read_text()
    assert f"| method | {' | '.join(name.capitalize() for name in COLUMNS)} | Mean |" in table
    for row, metrics in expected.items():
        numbers = [100 * metrics[f"test_pck_{name}"] for name in COLUMNS] + [100 * metrics["test_pck"]]
        count = "" if row.startswith("mean pose") else " (1)"
        assert f"| {row} | {' | '.join(f'{number:.2f}{count}' for number in numbers)} |" in table
    assert DATASETS["stick_figures"].draw(24) is figures  # drawn once for all runs, which leave it as it is
    assert torch.equal(figures.train.x, before[0])
    assert torch.equal(figures.train.y, before[1])
    assert "not finished" not in table  # of those selected


def test_without_weights_the_command_says_how_to_get_them(tmp_path, capsys):
    command = ["run", "pose", "--scale", "short", "--out", str(tmp_path / "out")]
    for mode in ([], ["--report"]):
        assert cli.main([*command, *mode]) == 2
        assert "tools/convert_weights.py" in capsys.readouterr().err
    assert cli.main([*command, "--dry-run"]) == 0
    assert capsys.readouterr().out.count("SimCC, ResNet-50, LSP Extended") == 7
    save_file({"a": torch.zeros(1)}, tmp_path / "resnet50.safetensors", {"bsam_model": "resnet50"})
    with_file = [*command, "--weights", "resnet50.safetensors", "--data-dir", str(tmp_path), "--report"]
    assert cli.main(with_file) == 0
    assert "7 runs are not finished." in (tmp_path / "out" / "table.md").read_text()
