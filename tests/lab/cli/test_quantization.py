"""``bsam train --init`` and ``--weight-bits``."""

import json
import shutil

from bsam.lab import cli
from bsam.lab.training.run_dir import RunDir

SMALL = ("train", "--device", "cpu", "--epochs", "1", "--limit-test", "6", "--weight-bits", "4")


def test_network_data_and_settings_come_from_the_initial_run(digits_run, tmp_path, capsys):
    command = [*SMALL, "--method", "bsam", "--init", str(digits_run), "--batch", "64", "--limit-train", "64"]
    assert cli.main([*command, "--out", str(tmp_path / "w4")]) == 0
    run = RunDir(tmp_path / "w4").run()
    assert (run.model, run.data, run.task.weight_bits, run.task.activation_bits) == ("resnet8", "digits", 4, None)
    assert (run.lr, run.weight_decay, run.task.label_smoothing) == (0.01, 1e-4, 0.1)
    printed = capsys.readouterr().out
    assert str(digits_run) in printed
    assert "parameters, weights 4 bits, activations 4 bits)" in printed
    experiment = json.loads((tmp_path / "w4/run.json").read_text())["experiment"]
    assert ", 4 bits, " in experiment
    assert "activations" not in experiment
    assert json.loads((tmp_path / "w4/weights.json").read_text())["head_left_out"] == {}


def test_a_run_continues_without_its_initial_run(images_run, images, tmp_path, monkeypatch, capsys):
    """Also if the network is not the default of the data."""
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(images_run, tmp_path / "float")
    command = [*SMALL, "--method", "sgd", "--batch", "6", "--init", "~/float", "--out", str(tmp_path / "w4")]
    assert cli.main(command) == 0
    run = RunDir(tmp_path / "w4").run()
    assert (run.model, run.data, run.image_size, run.weights) == ("resnet8", f"folder:{images}", 28, None)
    shutil.rmtree(tmp_path / "float")
    capsys.readouterr()
    assert cli.main(command) == 0
    assert f"The run in {tmp_path / 'w4'} is finished." in capsys.readouterr().out


def test_a_recipe_trains_the_initial_runs_of_its_chosen_runs(tmp_path, capsys):
    command = ["run", "quantization", "--models", "mobilenet_v1_small", "--only", "bsam", "--out", str(tmp_path / "q")]
    assert cli.main([*command, "--dry-run"]) == 0
    plan = " ".join(capsys.readouterr().out.split())
    assert ": 2 runs " in plan
    assert "SGD, weight decay 0.001, 2" in plan
    assert "BSAM" in plan
