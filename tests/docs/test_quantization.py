"""The guide "From a trained network to a 4-bit file": its commands and its code run on digits, in small."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from sklearn.datasets import load_digits

from bsam.lab.training.run_dir import RunDir
from docs_guides import first_commands, in_small, run_commands

TEXT = (Path(__file__).parents[2] / "docs/guides/quantization.md").read_text(encoding="utf-8")
USE, LOOP = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
ON_DIGITS = "--limit-train 320 --batch 32 --device cpu"
SMALL = {  # what differs from the commands of the guide
    "--data cifar10 --data-dir data --epochs 24 --precision bf16 --compile": f"--data digits --epochs 3 {ON_DIGITS}",
    "--data-dir data --epochs 12 --precision bf16 --compile": f"--epochs 2 {ON_DIGITS}",
    "export runs/w4 --data-dir data": "export runs/w4 --device cpu",
    "--data-dir data --images 256 --k 5 --points 11": "--images 12 --k 1 --points 3 --trace-samples 6 "
    "--density-steps 3 --density-probes 1 --tol 0.5 --max-bytes 0 --device cpu",
}

pytestmark = pytest.mark.usefixtures("operators_once", "rough_eigenvalues")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_first_commands_of_the_guide(capsys):
    printed = run_commands(in_small(first_commands(TEXT), SMALL), capsys, draw=False)
    assert list(printed) == ["train", "export", "flatness"]
    run, last = RunDir("runs/w4").run(), RunDir("runs/w4").last_metrics()
    assert (run.model, run.data, run.task.weight_bits) == ("digits_net", "digits", 4)
    assert last["test_accuracy"] > 0.6  # chance: 0.1
    assert f"{last['test_accuracy']:.2%}" in printed["export"]
    onnx.checker.check_model("runs/w4.onnx")
    names: dict[str, object] = {}
    exec(in_small(USE, {"digits4.onnx": "runs/w4.onnx"}), names)
    assert printed["export"].endswith(f"Input: {names['about']['input']}.\n")
    right = names["logits"].argmax(1) == load_digits().target  # also of images that it was trained on
    assert abs(right.mean() - last["test_accuracy"]) < 0.05
    models = json.loads(Path("runs/flatness/flatness.json").read_text())["models"]
    assert [model["run"]["weight_bits"] for model in models] == [None, 4]
    assert all(np.isfinite(model["trace"]["value"]) for model in models)


def test_the_numbers_of_the_commands_for_digits(capsys):
    """On any machine, within five of the 757 test images: rounding decides a few of them."""
    console = re.search(r"```console\n(\$ bsam train.*?)```", TEXT, flags=re.DOTALL)[1].replace("\\\n", "")
    said, printed = [], []
    for part in console.split("$ ")[1:]:
        command, _, output = part.partition("\n")
        said += numbers_of(output)
        printed += numbers_of(run_commands(f"{command}\n", capsys)[command.split()[1]])
    assert len(said) == 5
    assert said[1] == said[2]
    assert printed == pytest.approx(said, abs=5 / 757)


def numbers_of(output):
    """Return the accuracies, and the share of equal predictions, that a command prints."""
    last = re.findall(r"After epoch \d+: .*test accuracy (\d\.\d+)", output)
    return [*map(float, last), *(float(number) / 100 for number in re.findall(r"(\d+\.\d+)%", output))]


def test_the_code_of_the_guide():
    names: dict[str, object] = {}
    exec(LOOP, names)
    ours = names["logits"]
    assert names["size"] == Path("network.onnx").stat().st_size
    (entry,) = onnx.load("network.onnx").metadata_props
    assert {entry.key: entry.value} == names["about"]
    assert (ours.argmax(1) == names["integers"](names["x"]).argmax(1)).float().mean() > 0.95
