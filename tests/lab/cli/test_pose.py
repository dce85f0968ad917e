"""``bsam train`` on persons with joints."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from bsam.lab import cli
from bsam.lab.models import build
from bsam.lab.training.run_dir import RunDir
from helpers import draw_persons

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
    assert run_dir.run().task == "pose"
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
    monkeypatch.setattr("bsam.lab.data.NUM_FIGURES", 12)
    command = (*SMALL, "--data", "stick_figures", "--epochs", "2", "--lr", "1e30", "--out", tmp_path / "out")
    assert "loss is nan in epoch 1" in error_of(*command)
    assert RunDir(tmp_path / "out").predictions() == {}
