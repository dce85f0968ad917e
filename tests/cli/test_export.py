"""``bsam export``."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from bsam import cli
from bsam.common import extras
from bsam.models import build
from bsam.quantization import convert, load_quantized, quantize, run_onnx
from bsam.tasks import TASKS
from bsam.training.run_dir import RunDir

SMALL = ("--device", "cpu", "--batch", "32", "--epochs", "1", "--method", "sgd", "--lr", "0.05")
LIMITS = ("--limit-train", "320", "--limit-test", "500")
PRINTED = re.compile(
    r"Accuracy on (\d+) test images: ([\d.]+)% by the trained network, ([\d.]+)% by the file\.\n"
    r"Equal predictions: ([\d.]+)%\.\n"
    r"Written: (\S+) \(([\d.]+) MB, ([\d.]+) of the float32 weights, ([\d.]+) MB\)\.\n"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a small quantized network on digits."""
    out = tmp_path_factory.mktemp("runs") / "w4"
    command = ["train", *SMALL, "--weight-bits", "4", *LIMITS, "--out", str(out)]
    assert cli.main(command) == 0
    return out


def export(run, *arguments):
    return cli.main(["export", str(run), *map(str, arguments), "--device", "cpu"])


def test_an_onnx_file(run, tmp_path, capsys):
    path = tmp_path / "net.onnx"
    assert export(run, "--out", path) == 0
    out, error = capsys.readouterr()
    images, network, file, equal, name, size, ratio, floats = PRINTED.fullmatch(out).groups()
    assert error.endswith(f"images: {images} of {images}\n")
    task = TASKS["classification"](RunDir(run).run(), torch.device("cpu"))
    weights = load_file(run / "model.safetensors")
    trained = quantize(build("digits_net", 10, 1))
    trained.load_state_dict(weights)
    x, y = (torch.cat(tensors) for tensors in zip(*task.eval_examples(), strict=True))
    assert int(images) == len(x)
    with torch.no_grad():
        expected, found = convert(trained)(x).argmax(1), run_onnx(path, x).argmax(1)
    assert len(expected.unique()) > 3
    for printed, share in ((network, expected == y), (file, found == y), (equal, found == expected)):
        assert printed == f"{100 * share.double().mean():.2f}"
    assert float(network) == pytest.approx(100 * RunDir(run).last_metrics()["test_accuracy"], abs=0.01)
    assert float(equal) >= 99.8  # one of 500 may differ
    assert (name, size) == (str(path), f"{path.stat().st_size / 1e6:.3f}")
    bytes_of_floats = sum(t.nbytes for t in build("digits_net", 10, 1).state_dict().values() if t.is_floating_point())
    assert (floats, ratio) == (f"{bytes_of_floats / 1e6:.3f}", f"{path.stat().st_size / bytes_of_floats:.3f}")
    assert list(tmp_path.iterdir()) == [path]


def test_a_safetensors_file_on_some_images(run, tmp_path, capsys):
    path = tmp_path / "net.safetensors"
    path.write_text("old")
    assert export(run, "--out", path, "--images", 50) == 0
    images, network, file, equal, *_ = PRINTED.fullmatch(capsys.readouterr().out).groups()
    assert (images, network, equal) == ("50", file, "100.00")
    assert load_quantized(path, build("digits_net", 10, 1))[-1].weight.dtype == torch.int8
    assert path.stat().st_mode & 0o777 == (run / "model.safetensors").stat().st_mode & 0o777
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_computes_something_else_is_seen(run, tmp_path, monkeypatch, capsys):
    class Zero(torch.nn.Module):
        def __init__(self, path):
            super().__init__()
            assert path.read_text() == "file"

        def forward(self, x):
            return torch.eye(10)[torch.zeros(len(x), dtype=torch.long)]

    monkeypatch.setattr("bsam.inference.export.export_onnx", lambda model, path, x: path.write_text("file"))
    monkeypatch.setattr("bsam.inference.export.OnnxNetwork", Zero)
    assert export(run, "--out", tmp_path / "net.onnx") == 0
    _, network, file, equal, *_ = PRINTED.fullmatch(capsys.readouterr().out).groups()
    assert float(file) == 10
    assert float(equal) < 50
    assert float(network) > 11


def test_errors_leave_nothing_behind(run, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "float").mkdir()
    settings = json.loads((run / "config.json").read_text())
    for file in run.iterdir():
        if file.is_file():
            (tmp_path / "float" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "float/config.json").write_text(json.dumps({**settings, "weight_bits": None}))
    (tmp_path / "net.onnx").write_text("old")
    (tmp_path / "folder.onnx").mkdir()
    for folder, flags, message in (
        (run, ("--out", "net.pt"), "the file must end in .onnx or .safetensors, got net.pt"),
        (run, ("--out", "nowhere/net.onnx"), "there is no folder nowhere: create it"),
        (run, ("--out", "folder.onnx"), "folder.onnx is a folder"),
        (run, ("--out", "net.onnx", "--images", 0), "images must be a whole number of at least 1, got 0"),
        (tmp_path, ("--out", "net.onnx"), "is not a run directory of bsam train"),
        ("float", ("--out", "net.onnx"), "the run in float trained no quantized network: give one of bsam train --w"),
    ):
        assert message in refused("export", folder, *flags)

    class Other(torch.nn.Module):
        def __init__(self, path):
            raise cli.BsamError("cannot be read")

    monkeypatch.setattr("bsam.inference.export.export_onnx", lambda model, path, x: path.write_text("new"))
    monkeypatch.setattr("bsam.inference.export.OnnxNetwork", Other)
    assert "cannot be read" in refused("export", run, "--out", "net.onnx")
    there = extras.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "onnxruntime" else there(name))
    assert "needs onnxruntime, which is not installed: pip install -c constraints.txt '.[onnx]'" in refused(
        "export", run, "--out", "net.onnx"
    )
    assert (tmp_path / "net.onnx").read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"float", "net.onnx", "folder.onnx"}
