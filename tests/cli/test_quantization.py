"""``bsam train --init`` and ``--weight-bits``."""

import json
import shutil

import pytest

from bsam import cli
from bsam.training.run_dir import RunDir
from helpers import draw_images

SMALL = ("--device", "cpu", "--batch", "64", "--epochs", "1", "--limit-train", "64", "--limit-test", "20")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A finished run of ResNet-8 on digits, which is not the default network of digits."""
    out = tmp_path_factory.mktemp("runs") / "float"
    assert cli.main(["train", *SMALL, "--method", "sgd", "--model", "resnet8", "--out", str(out)]) == 0
    return out


def test_network_data_and_settings_follow_from_the_run_to_begin_with(base, tmp_path, capsys):
    command = ["train", *SMALL, "--method", "bsam", "--init", str(base), "--weight-bits", "4"]
    assert cli.main([*command, "--out", str(tmp_path / "w4")]) == 0
    run = RunDir(tmp_path / "w4").run()
    assert (run.model, run.data, run.weight_bits, run.activation_bits) == ("resnet8", "digits", 4, None)
    assert (run.lr, run.weight_decay, run.label_smoothing) == (0.01, 1e-4, 0.1)
    assert f"Training begins with the network of {base}." in capsys.readouterr().out
    assert json.loads((tmp_path / "w4/weights.json").read_text())["head_left_out"] == {}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "digits_net"], "--model resnet8"),
        (["--weight-bits", "12"], "weight_bits must be a whole number between 2 and 8, got 12"),
        (["--init", "nowhere"], "there is no folder nowhere"),
        (["--data", "cifar100"], "learned 10 classes (digits), but cifar100 has 100"),
    ],
)
def test_errors_leave_nothing_behind(base, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    command = ["train", *SMALL, "--method", "sgd", "--init", str(base), "--out", "out", *flags]
    assert cli.main(command) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_command_continues_without_the_run_that_it_began_with(base, tmp_path, monkeypatch, capsys):
    """Also where the network is not the default of the data; image size and data are those of the first run."""
    images, home = draw_images(tmp_path / "images", {"train": 4, "test": 2}), tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    float_run = [
        "--data",
        f"folder:{images}",
        "--model",
        "timm:test_resnet",
        "--weights",
        "random",
        "--image-size",
        "32",
    ]
    small = ["train", "--device", "cpu", "--batch", "6", "--epochs", "1", "--method", "sgd"]
    assert cli.main([*small, *float_run, "--out", str(home / "float")]) == 0
    command = [*small, "--init", "~/float", "--weight-bits", "4", "--out", str(tmp_path / "w4")]
    assert cli.main(command) == 0
    run = RunDir(tmp_path / "w4").run()
    assert (run.model, run.data, run.image_size, run.weights) == ("timm:test_resnet", f"folder:{images}", 32, None)
    shutil.rmtree(home / "float")
    capsys.readouterr()
    assert cli.main(command) == 0
    assert f"The run in {tmp_path / 'w4'} is finished." in capsys.readouterr().out


def test_a_recipe_trains_what_its_chosen_runs_begin_with(tmp_path, capsys):
    command = ["run", "quantization", "--models", "mobilenet_v1_small", "--only", "bsam", "--out", str(tmp_path / "q")]
    assert cli.main([*command, "--dry-run"]) == 0
    plan = " ".join(capsys.readouterr().out.split())
    assert ": 2 runs " in plan
    assert "SGD, seed 0" in plan
    assert "BSAM" in plan
