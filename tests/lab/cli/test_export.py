"""``bsam export``."""

import json
import re
import sys

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from bsam.lab import cli
from bsam.lab.inference import run_export
from bsam.lab.models import build
from bsam.lab.quantization import convert, load_quantized, quantize
from bsam.lab.tasks import TASKS
from bsam.lab.tasks.classifier_files import compare_classes
from bsam.lab.tasks.pose_outputs import decode
from bsam.lab.training.run_dir import RunDir
from pose_runs import draw_figures

PRINTED = re.compile(
    r"Accuracy on (\d+) test images: ([\d.]+)% \(trained network\), ([\d.]+)% \(exported file\)\.\n"
    r"Equal predictions: ([\d.]+)%\.\n"
    r"Written: (\S+) \(([\d.]+) MB, ([\d.]+) times the float32 weights' ([\d.]+) MB\)\.\n"
    r"Input: (.+)\.\n"
)
pytestmark = pytest.mark.usefixtures("operators_once")
DIGITS_STD, DIGITS_MEAN = 6.0078082, 4.8678222  # of the 640 training images, whose pixels are 0 to 16


UNTRACED = """
from torch import nn

class Untraced(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, classes))

    def forward(self, x):
        return self.layers(x) * (1 if float(x.sum()) else 2)

def network(classes):
    return Untraced(classes)
"""


def run_file(path, pixels):
    """Return the outputs for pixels, and the metadata, as a program without torch would get them."""
    session = onnxruntime.InferenceSession(path)
    (outputs,) = session.run(None, {"input": pixels})
    return torch.from_numpy(outputs), session.get_modelmeta().custom_metadata_map


def evaluation_digits(run):
    """Return the evaluation images of a run: inputs of its network, their pixels as scikit-learn has them, classes."""
    task = TASKS["classification"](RunDir(run).run(), torch.device("cpu"))
    x, y = (torch.cat(tensors) for tensors in zip(*task.eval_examples(), strict=True))
    return x, (16 * (x - x.min()) / (x.max() - x.min())).round().numpy(), y


def export(run, *arguments):
    return cli.main(["export", str(run), *map(str, arguments), "--device", "cpu"])


def test_an_onnx_file(quantized_run, tmp_path, capsys):
    path = tmp_path / "net.onnx"
    assert export(quantized_run, "--out", path) == 0
    out, error = capsys.readouterr()
    images, network, file, equal, name, size, ratio, floats, takes = PRINTED.fullmatch(out).groups()
    assert error.endswith(f"images: {images} of {images}\n")
    weights = load_file(quantized_run / "model.safetensors")
    trained = quantize(build("digits_net", 10, 1))
    trained.load_state_dict(weights)
    x, pixels, y = evaluation_digits(quantized_run)
    assert int(images) == len(x)
    outputs, about = run_file(path, pixels)
    with torch.no_grad():
        expected, exported = convert(trained)(x).argmax(1), outputs.argmax(1)
    assert len(expected.unique()) > 3
    for printed, share in ((network, expected == y), (file, exported == y), (equal, exported == expected)):
        assert printed == f"{100 * share.double().mean():.2f}"
    assert float(network) == pytest.approx(100 * RunDir(quantized_run).last_metrics()["test_accuracy"], abs=0.01)
    assert float(equal) >= 99.5  # one of 200 may differ
    assert (name, size) == (str(path), f"{path.stat().st_size / 1e6:.3f}")
    bytes_of_floats = sum(t.nbytes for t in build("digits_net", 10, 1).state_dict().values() if t.is_floating_point())
    assert (floats, ratio) == (f"{bytes_of_floats / 1e6:.3f}", f"{path.stat().st_size / bytes_of_floats:.3f}")
    assert list(tmp_path.iterdir()) == [path]
    assert (about["input"], about["task"]) == (takes, "classification")


def test_a_float_network_takes_raw_pixels_and_predicts_what_the_run_did(trained, tmp_path, capsys):
    run = trained("float", "--batch", 32, "--lr", 0.05, "--limit-train", 320, "--limit-test", 200)
    path = tmp_path / "net.onnx"
    capsys.readouterr()
    assert export(run, "--out", path) == 0
    _, _, _, equal, *_, takes = PRINTED.fullmatch(capsys.readouterr().out).groups()
    x, pixels, y = evaluation_digits(run)
    outputs, about = run_file(path, pixels)
    network = build("digits_net", 10, 1).eval()
    network.load_state_dict(load_file(run / "model.safetensors"))
    with torch.no_grad():
        expected = network(x)
    assert torch.allclose(outputs, expected, atol=1e-5)
    assert torch.equal(outputs.argmax(1), expected.argmax(1))
    assert int((outputs.argmax(1) == y).sum()) / len(y) == RunDir(run).last_metrics()["test_accuracy"]
    assert equal == "100.00"
    assert takes == "float32 (n, 1, 8, 8), pixels from 0 to 16; the file standardises them"
    assert json.loads(about["mean"]) == pytest.approx([DIGITS_MEAN], rel=1e-6)
    assert json.loads(about["std"]) == pytest.approx([DIGITS_STD], rel=1e-6)
    lists = {"input_range": [0, 16], "input_size": [1, 8, 8], "class_names": [str(digit) for digit in range(10)]}
    assert {name: json.loads(about[name]) for name in lists} == lists
    assert about["preprocessing"] == "in the file: (pixels - mean) / std"


def test_a_run_trained_in_bf16_is_evaluated_in_bf16_and_its_file_in_fp32(trained, tmp_path, capsys):
    flags = ("--batch", 32, "--lr", 0.05, "--limit-train", 320, "--limit-test", 200, "--precision", "bf16")
    run, path = trained("bf16", *flags), tmp_path / "net.onnx"
    network = run_export.in_precision(RunDir(run).run(), build("digits_net", 10, 1), torch.device("cpu"))
    assert network(torch.zeros(1, 1, 8, 8)).dtype == torch.bfloat16
    capsys.readouterr()
    assert export(run, "--out", path) == 0
    first = capsys.readouterr().out.splitlines()[0]
    _, pixels, y = evaluation_digits(run)
    outputs, about = run_file(path, pixels)
    in_file = f"{100 * (outputs.argmax(1) == y).double().mean():.2f}%"
    trained_network = f"{100 * RunDir(run).last_metrics()['test_accuracy']:.2f}%"
    assert first == (
        f"Accuracy on 200 test images: {trained_network} (trained network, bf16), {in_file} (exported file, fp32)."
    )
    assert about["precision"] == "float32; the run was trained and evaluated in bf16"


def test_a_safetensors_file_on_some_images(quantized_run, tmp_path, capsys):
    path = tmp_path / "net.safetensors"
    path.write_text("old")
    assert export(quantized_run, "--out", path, "--images", 50) == 0
    images, network, file, equal, *_, takes = PRINTED.fullmatch(capsys.readouterr().out).groups()
    assert takes == "float32 (n, 1, 8, 8), pixels from 0 to 16, standardised with mean 4.86782 and std 6.00781"
    with safe_open(path, "pt") as opened:
        assert (opened.metadata()["input"], opened.metadata()["input_range"]) == (takes, "[0.0, 16.0]")
    assert (images, network, equal) == ("50", file, "100.00")
    assert load_quantized(path, build("digits_net", 10, 1))[-1].weight.dtype == torch.int8
    assert path.stat().st_mode & 0o777 == (quantized_run / "model.safetensors").stat().st_mode & 0o777
    assert list(tmp_path.iterdir()) == [path]


def test_a_network_that_computes_something_else_is_seen(quantized_run):
    task = TASKS["classification"](RunDir(quantized_run).run(), torch.device("cpu"))
    network = RunDir(quantized_run).load_into(task.network()).eval()
    compared = compare_classes(task, network, lambda x: torch.eye(10)[torch.zeros(len(x), dtype=torch.long)], False)
    assert compared.scores == (pytest.approx(RunDir(quantized_run).last_metrics()["test_accuracy"]), 0.1)
    assert compared.equal < 0.5


def test_a_pose_network(pose_run, tmp_path, capsys, monkeypatch):
    """The file takes the pixels of the evaluation, and says what its outputs are."""
    draw_figures(16, monkeypatch)
    path = tmp_path / "net.onnx"
    assert export(pose_run, "--out", path) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    score = 100 * RunDir(pose_run).last_metrics()["test_pck"]
    assert first == f"PCK in % on 4 test samples: {score:.4g} (trained network), {score:.4g} (exported file)."
    assert float(re.fullmatch(r"Largest difference between two outputs: (\S+)\.", second)[1]) < 1e-3
    arrays, note = RunDir(pose_run).predictions(), RunDir(pose_run).note("pose")
    outputs, about = run_file(path, arrays["pixels"].transpose(0, 3, 1, 2).astype(np.float32))
    joints = json.loads(about["joints"])
    assert joints == note["skeleton"]["joints"]
    found = decode(outputs, json.loads(about["bins_per_pixel"]))
    assert found.shape == (4, len(joints), 2)
    np.testing.assert_allclose(found, arrays["found"], atol=0.5)  # the stored pixels are rounded
    assert json.loads(about["input_size"]) == [3, 32, 32]


@pytest.mark.usefixtures("script_path")
def test_an_export_that_fails_keeps_the_old_file(quantized_run, tmp_path, monkeypatch, error_of):
    path = tmp_path / "net.onnx"
    path.write_text("old")
    (tmp_path / "untraced.py").write_text(UNTRACED)
    monkeypatch.chdir(tmp_path)
    small = ("--epochs", "1", "--limit-train", "64", "--limit-test", "20", "--batch", "32", "--device", "cpu")
    named = ("--model", "untraced:network")
    assert cli.main(["train", "--method", "sgd", *named, *small, "--out", "run"]) == 0
    error = error_of("export", "run", *named, "--out", path)
    assert "cannot trace the forward pass" in error
    assert error.rstrip().endswith("The weights of this network are in run/model.safetensors")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert "'.[onnx]'" in error_of("export", quantized_run, "--out", path)
    assert path.read_text() == "old"
    assert not [file for file in tmp_path.iterdir() if file.suffix == ".draft"]
