"""Calls that raise an error: the class of the error, and a word of its message."""

from __future__ import annotations

import sys

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from safetensors.torch import save_file
from torch import nn

from bsam.common.errors import BsamError, BsamRuntimeError, BsamValueError
from bsam.lab.models import build
from bsam.lab.quantization import (
    OnnxNetwork,
    calibrate,
    convert,
    export_onnx,
    freeze_scales,
    load_quantized,
    parameter_groups,
    quantize,
    run_onnx,
    save_quantized,
)
from bsam.lab.quantization.arithmetic import code_range


class Subclass(nn.Conv2d):
    """Like timm's convolutions."""


class NormWithActivation(nn.BatchNorm2d):
    """Like timm's."""


class Branching(nn.Sequential):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


def fold(*layers, kind=nn.Sequential):
    return quantize(kind(*layers), fold_batch_norm=True)


def calibrated(model=None):
    model = quantize(model or nn.Linear(2, 2))
    calibrate(model, torch.randn(4, 2))
    return model


def uninitialized(scheme):
    model = quantize(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), scheme=scheme)
    model[0](torch.randn(3, 2))
    return model


NET = nn.Sequential(nn.Linear(2, 2))
REFUSED = [
    *((lambda bits=bits: code_range(bits, signed=True), BsamValueError, "bits") for bits in (1, 9, 4.0, True, None)),
    (lambda: quantize(nn.Sequential(nn.Linear(2, 2), nn.Conv1d(2, 2, 2))), BsamValueError, "Conv1d"),
    (lambda: quantize(nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2))), BsamValueError, "LSTM"),
    (lambda: quantize(nn.Sequential(nn.LazyLinear(2))), BsamValueError, "LazyLinear"),
    (lambda: quantize(nn.Sequential(Subclass(2, 2, 1))), BsamValueError, "Subclass"),
    (lambda: quantize(nn.MultiheadAttention(4, 2)), BsamValueError, "out_proj"),
    (lambda: quantize(nn.Sequential(nn.ReLU())), BsamValueError, "Sequential"),
    (lambda: quantize(quantize(NET)), BsamValueError, "QuantLinear"),
    (lambda: quantize(convert(calibrated())), BsamValueError, "IntLinear"),
    (lambda: quantize(NET, 9, first_last_bits=None), BsamValueError, "bits"),
    (lambda: quantize(NET, scheme="LSQ"), BsamValueError, "scheme"),
    *(
        (lambda call=call: call(NET), BsamValueError, "quantized")
        for call in (convert, parameter_groups, freeze_scales, lambda net: calibrate(net, torch.randn(1, 2)))
    ),
    *(
        (lambda scheme=scheme: convert(uninitialized(scheme)), BsamRuntimeError, "initial")
        for scheme in ("lsq", "minmax")
    ),
    (lambda: fold(nn.Conv2d(1, 1, 1), nn.ReLU(), nn.BatchNorm2d(1)), BsamValueError, "fold_batch_norm"),
    (lambda: fold(nn.Conv2d(1, 1, 1), NormWithActivation(1)), BsamValueError, "fold_batch_norm"),
    (lambda: fold(nn.Linear(1, 1), nn.BatchNorm1d(1)), BsamValueError, "fold_batch_norm"),
    (
        lambda: fold(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1, track_running_stats=False)),
        BsamValueError,
        "fold_batch_norm",
    ),
    (lambda: fold(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), kind=Branching), BsamValueError, "Branching"),
]


@pytest.mark.parametrize(("call", "error", "word"), REFUSED)
def test_refusals(call, error, word):
    with pytest.raises(error, match=word):
        call()


@pytest.mark.parametrize("scheme", ["lsq", "minmax"])
def test_first_batches_that_are_not_finite_are_refused(scheme):
    model, x = quantize(NET, scheme=scheme), torch.rand(8, 2)
    x[3, 1] = torch.nan
    with pytest.raises(BsamRuntimeError, match="finite"):
        calibrate(model, x)
    calibrate(model, torch.rand(8, 2))  # starts again
    assert model.eval()(torch.rand(2, 2)).isfinite().all()


def test_files_that_do_not_fit_are_refused(tmp_path):
    path, net = tmp_path / "net.safetensors", nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))

    def check(word, *models):
        for model in models:
            with pytest.raises(BsamError, match=word):
                load_quantized(path, model)

    check("net.safetensors", net)
    for model in (net, quantize(net)):
        with pytest.raises(BsamValueError, match="convert"):
            save_quantized(model, path)
    converted = convert(calibrated(net))
    save_quantized(converted, path)
    check("fit", nn.Linear(2, 2), nn.Sequential(*net[:2], nn.Linear(2, 3)), nn.Sequential(*net, nn.Linear(2, 2)))
    check("fit", build("resnet8"), converted)
    path.write_bytes(path.read_bytes()[:-100])
    check("safetensors", net)
    save_file({"a": torch.zeros(1)}, path)
    check("save_quantized", net)


def test_an_onnx_file_with_several_inputs_or_outputs(tmp_path):
    for inputs, outputs in (("left", "right"), ("sum",)), (("left",), ("copy", "again")):
        values = [
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in names]
            for names in (inputs, outputs)
        ]
        nodes = [helper.make_node("Sum", inputs, [name]) for name in outputs]
        graph = helper.make_graph(nodes, "network", *values)
        opset = [helper.make_opsetid("", 21)]
        onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), tmp_path / "net.onnx")
        with pytest.raises(BsamValueError, match="one input") as error:
            OnnxNetwork(tmp_path / "net.onnx")
        assert all(name in str(error.value) for name in (*inputs, *outputs))
        assert "cannot read" not in str(error.value)


def test_exports_that_fail_keep_the_old_file(tmp_path, monkeypatch):
    def not_traced(*args, **kwargs):
        raise RuntimeError("step 1 of 3") from ValueError("a branch on data\nat line 1")

    path, x, model = tmp_path / "net.onnx", torch.rand(4, 2), calibrated()
    path.write_text("old")
    monkeypatch.setattr(torch.onnx, "export", not_traced)
    for network, error, word in (
        (NET, BsamValueError, "a branch on data"),
        (quantize(NET), BsamRuntimeError, "initialized"),
        (model, BsamValueError, "a branch on data"),
    ):
        with pytest.raises(error, match=word):
            export_onnx(network, path, x)
    assert path.read_text() == "old"
    for name in ("none", "net.onnx"):
        with pytest.raises(BsamValueError, match=name):
            OnnxNetwork(tmp_path / name)
    with pytest.raises(BsamValueError, match="nowhere"):
        export_onnx(model, tmp_path / "nowhere" / "net.onnx", x)
    for package in ("onnx", "onnxruntime"):
        monkeypatch.setitem(sys.modules, package, None)
    for call, package in ((lambda: export_onnx(model, path, x), "onnx"), (lambda: run_onnx(path, x), "onnxruntime")):
        with pytest.raises(BsamRuntimeError, match=rf"{package}, .*onnx\]"):
            call()
