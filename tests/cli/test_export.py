"""``bsam export``."""

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

PRINTED = re.compile(
    r"Accuracy on (\d+) test images: ([\d.]+)% \(trained network\), ([\d.]+)% \(exported file\)\.\n"
    r"Equal predictions: ([\d.]+)%\.\n"
    r"Written: (\S+) \(([\d.]+) MB, ([\d.]+) times the float32 weights' ([\d.]+) MB\)\.\n"
)


def export(run, *arguments):
    return cli.main(["export", str(run), *map(str, arguments), "--device", "cpu"])


def test_an_onnx_file(quantized_run, tmp_path, capsys):
    path = tmp_path / "net.onnx"
    assert export(quantized_run, "--out", path) == 0
    out, error = capsys.readouterr()
    images, network, file, equal, name, size, ratio, floats = PRINTED.fullmatch(out).groups()
    assert error.endswith(f"images: {images} of {images}\n")
    task = TASKS["classification"](RunDir(quantized_run).run(), torch.device("cpu"))
    weights = load_file(quantized_run / "model.safetensors")
    trained = quantize(build("digits_net", 10, 1))
    trained.load_state_dict(weights)
    x, y = (torch.cat(tensors) for tensors in zip(*task.eval_examples(), strict=True))
    assert int(images) == len(x)
    with torch.no_grad():
        expected, exported = convert(trained)(x).argmax(1), run_onnx(path, x).argmax(1)
    assert len(expected.unique()) > 3
    for printed, share in ((network, expected == y), (file, exported == y), (equal, exported == expected)):
        assert printed == f"{100 * share.double().mean():.2f}"
    assert float(network) == pytest.approx(100 * RunDir(quantized_run).last_metrics()["test_accuracy"], abs=0.01)
    assert float(equal) >= 99.5  # one of 200 may differ
    assert (name, size) == (str(path), f"{path.stat().st_size / 1e6:.3f}")
    bytes_of_floats = sum(t.nbytes for t in build("digits_net", 10, 1).state_dict().values() if t.is_floating_point())
    assert (floats, ratio) == (f"{bytes_of_floats / 1e6:.3f}", f"{path.stat().st_size / bytes_of_floats:.3f}")
    assert list(tmp_path.iterdir()) == [path]


def test_a_safetensors_file_on_some_images(quantized_run, tmp_path, capsys):
    path = tmp_path / "net.safetensors"
    path.write_text("old")
    assert export(quantized_run, "--out", path, "--images", 50) == 0
    images, network, file, equal, *_ = PRINTED.fullmatch(capsys.readouterr().out).groups()
    assert (images, network, equal) == ("50", file, "100.00")
    assert load_quantized(path, build("digits_net", 10, 1))[-1].weight.dtype == torch.int8
    assert path.stat().st_mode & 0o777 == (quantized_run / "model.safetensors").stat().st_mode & 0o777
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_computes_something_else_is_seen(quantized_run, tmp_path, monkeypatch, capsys):
    class Zero(torch.nn.Module):
        def __init__(self, path):
            super().__init__()
            assert path.read_text() == "file"

        def forward(self, x):
            return torch.eye(10)[torch.zeros(len(x), dtype=torch.long)]

    monkeypatch.setattr("bsam.inference.export.export_onnx", lambda model, path, x: path.write_text("file"))
    monkeypatch.setattr("bsam.inference.export.OnnxNetwork", Zero)
    assert export(quantized_run, "--out", tmp_path / "net.onnx") == 0
    _, network, file, equal, *_ = PRINTED.fullmatch(capsys.readouterr().out).groups()
    assert float(file) == 10
    assert float(equal) < 50
    assert float(network) > 11


def test_an_export_that_fails_keeps_the_old_file(quantized_run, tmp_path, monkeypatch, error_of):
    class Unreadable(torch.nn.Module):
        def __init__(self, path):
            raise cli.BsamError("cannot be read")

    path = tmp_path / "net.onnx"
    path.write_text("old")
    monkeypatch.setattr("bsam.inference.export.export_onnx", lambda model, path, x: path.write_text("new"))
    monkeypatch.setattr("bsam.inference.export.OnnxNetwork", Unreadable)
    assert "cannot be read" in error_of("export", quantized_run, "--out", path)
    find_spec = extras.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "onnxruntime" else find_spec(name))
    assert "'.[onnx]'" in error_of("export", quantized_run, "--out", path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
