"""``bsam train`` on persons with joints."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bsam import cli
from bsam.models import build
from bsam.training.run_dir import RunDir
from helpers import draw_persons

SMALL = ("train", "--method", "sgd", "--base", "sgd", "--device", "cpu", "--image-size", "32", "--batch", "6")


@pytest.fixture(autouse=True)
def _few_figures(monkeypatch):
    monkeypatch.setattr("bsam.data.NUM_FIGURES", 12)


def weights(path, name):
    tensors = {key: t.contiguous() for key, t in build(name, classes=5, seed=1).state_dict().items()}
    save_file(tensors, path, {"bsam_model": name})
    return path


def test_a_folder_of_persons_from_start_to_end(tmp_path, capsys):
    draw_persons(tmp_path / "lspet")
    file, out, cache = weights(tmp_path / "a.safetensors", "resnet8"), tmp_path / "out", tmp_path / "cache"
    command = [*SMALL, "--data", "lspet", "--data-dir", str(tmp_path), "--weights", "a.safetensors", "--lr", "0.001"]
    assert cli.main([*command, "--cache-dir", str(cache), "--out", str(out), "--epochs", "1"]) == 0
    said, error = capsys.readouterr()
    assert error == "Cutting out the persons of lspet: 20 of 20\n"
    assert "SimCC, ResNet-8" in said
    assert "on 18 samples of LSP Extended" in said
    assert "its classifier was left out (linear.bias 5, linear.weight 5x64)" in said
    run_dir = RunDir(out)
    assert run_dir.note("data")["images"] == {"train": 18, "test": 2}
    assert run_dir.note("pose")["side"] == 32
    assert 0 <= run_dir.note("baseline")["scores"]["pck"] <= 1
    assert run_dir.note("weights")["source"] == file.name
    assert {name: part.shape for name, part in run_dir.predictions().items()} == {
        "pixels": (2, 32, 32, 3),
        "found": (2, 14, 2),
        "truth": (2, 14, 3),
    }
    (row,) = run_dir.metrics()
    assert "  test pck " in said
    assert {"test_pck", "test_pck_head", "test_pck_ankle", "test_loss"} <= row.keys()
    end, start = load_file(out / "model.safetensors"), load_file(file)
    way = (end["backbone.stages.0.0.conv1.weight"] - start["stages.0.0.conv1.weight"]).norm()
    assert 0 < way < 0.5 * start["stages.0.0.conv1.weight"].norm()
    assert json.loads((out / "config.json").read_text())["task"] == "pose"


def test_settings_that_cannot_be_trained_with_are_refused_in_one_line(tmp_path, refused):
    files = {name: weights(tmp_path / f"{name}.safetensors", name) for name in ("resnet8", "resnet20", "simcc_resnet8")}
    torch.save(build("digits_net").state_dict(), tmp_path / "other.pt")
    figures = ("--data", "stick_figures")
    for flags, words in {
        ("--data", "lspet"): "LSP Extended is read from files: say in which folder they are (--data-dir)",
        ("--data", "lspet", "--data-dir", tmp_path): "joints.mat is missing: give the folder that holds joints.mat",
        ("--data", "lspet", "--task", "classification"): "lspet has joints and no classes: use --task pose",
        ("--data", "digits", "--task", "pose"): "digits has no joints: use --task classification, or --data with",
        (*figures, "--model", "timm:test_resnet", "--weights", "random"): "timm:test_resnet does not find joints",
        (*figures, "--simcc-sigma", "0"): "simcc_sigma must be a finite number above 0, got 0.0",
        (*figures, "--simcc-k", "100"): "simcc_k must be a finite number above 0 and at most 16, got 100.0",
        (*figures, "--label-noise", "0.1"): (
            "label_noise has no meaning for pose: leave it out (its value must be 0.0; got 0.1)"
        ),
        (*figures, "--weights", "pretrained"): "no download of pretrained weights for simcc_resnet8: give --weights",
        (*figures, "--weights", files["resnet20"]): "resnet20, not of simcc_resnet8 or resnet8: give another file",
        ("--data", "digits", "--weights", files["simcc_resnet8"]): "simcc_resnet8 finds joints and has no classes",
        (*figures, "--weights", tmp_path / "other.pt", "--model", "simcc_resnet8"): (
            "other.pt does not fit simcc_resnet8, nothing was loaded"
        ),
        (*figures, "--download", "--data-dir", tmp_path): "stick_figures is drawn: leave --download out",
        ("--data", "mpii", "--download", "--data-dir", tmp_path): "mpii is not downloaded, put its files into --data-",
        (*figures, "--limit-test", "4"): "limit_test must be at most 3, the size of the set; got 4",
    }.items():
        assert words in refused(*SMALL, "--epochs", "1", "--out", tmp_path / "out", *flags), flags
        assert [path.name for path in tmp_path.glob("out/*") if path.name != ".bsam-lock"] == []


def test_a_diverged_run_ends_with_a_sentence(tmp_path, refused):
    said = refused(*SMALL, "--data", "stick_figures", "--epochs", "2", "--lr", "1e30", "--out", tmp_path / "out")
    assert "loss is nan in epoch 1: a smaller lr" in said
    assert RunDir(tmp_path / "out").predictions() == {}


def test_corrupt_images_are_left_out_and_listed(tmp_path, capsys):
    draw_persons(tmp_path)
    (tmp_path / "images/im00003.jpg").write_text("no image")
    command = [*SMALL, "--data", "lspet", "--model", "simcc_resnet8", "--data-dir", str(tmp_path), "--epochs", "1"]
    assert cli.main([*command, "--out", str(tmp_path / "out")]) == 2
    assert "images/im00003.jpg cannot be decoded" in capsys.readouterr().err
    assert cli.main([*command, "--skip-corrupt", "--out", str(tmp_path / "out")]) == 0
    assert "Samples that are left out: 1; data.json says why." in capsys.readouterr().out
    note = RunDir(tmp_path / "out").note("data")
    assert note["images"] == {"train": 17, "test": 2}
    assert note["left_out"][0].startswith("images/im00003.jpg cannot be decoded")
    assert np.isfinite(RunDir(tmp_path / "out").predictions()["found"]).all()
