"""ONNX files, run with onnxruntime, compared with the integer network."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from torch import nn
from torch.nn import functional as F

from bsam.lab.models import build
from bsam.lab.models.cifar import BasicBlock, PreActivationBlock, PyramidBlock
from bsam.lab.models.simcc import SimCCHead
from bsam.lab.quantization import (
    OnnxNetwork,
    QuantConv2d,
    QuantLinear,
    calibrate,
    convert,
    export_onnx,
    quantize,
    run_onnx,
)
from bsam.lab.quantization.quant_layers import IntLayer, QuantLayer

pytestmark = pytest.mark.usefixtures("operators_once")


class Mixed(nn.Module):
    """Layers with 2 to 8 bits, of both schemes and several geometries; one is used twice."""

    def __init__(self):
        super().__init__()
        self.stem = QuantConv2d(nn.Conv2d(3, 8, 3, bias=False), 8, 8)
        self.bn = nn.BatchNorm2d(8)
        self.depthwise = QuantConv2d(nn.Conv2d(8, 8, 3, groups=8, padding=1, padding_mode="reflect"), 4, 4)
        self.grouped = QuantConv2d(nn.Conv2d(8, 8, 3, groups=2, stride=2, padding=1), 3, 3)
        self.dilated = QuantConv2d(nn.Conv2d(8, 8, 3, dilation=2, padding="same"), 2, 2, "minmax")
        self.shared = QuantConv2d(nn.Conv2d(8, 8, 1), 4, 4, "minmax")
        self.same = self.shared
        self.wide = QuantLinear(nn.Linear(8, 8), 5, 6, "minmax")
        self.head = QuantLinear(nn.Linear(8, 10), 8, 3)

    def forward(self, x):
        x = F.max_pool2d(F.relu6(self.bn(self.stem(x))), 2)
        x = F.relu(self.depthwise(x))
        x = self.dilated(F.relu(self.grouped(x)))
        x = self.same(F.relu(self.shared(x)))
        return self.head(F.relu(self.wide(x.mean((2, 3)))))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """The network in training mode, its file, and inputs that often exceed the range of the codes."""
    torch.manual_seed(0)
    model, x = Mixed(), torch.randn(200, 3, 16, 16)
    calibrate(model, x)
    model.head.input_quantizer.scale.data /= 4  # most inputs of the last layer are clipped
    path = tmp_path_factory.mktemp("onnx") / "mixed.onnx"
    path.write_text("old")
    assert export_onnx(model, path, x[:1]) == path.stat().st_size
    assert [file.name for file in path.parent.iterdir()] == ["mixed.onnx"]
    return model, path, 2 * x


def share_equal(path, model, x):
    """The fraction of samples whose outputs are equal up to rounding."""
    with torch.no_grad():
        expected = model(x)
    errors = (run_onnx(path, x, batch_size=70) - expected).abs().flatten(1).amax(1)
    return (errors < 1e-5 * expected.abs().max()).float().mean()


def test_outputs_equal_those_of_the_integer_network(mixed):
    model, path, x = mixed
    assert model.training
    assert model.shared.input_quantizer.current_scale()[1] > 0
    assert share_equal(path, convert(model), x) > 0.97  # outputs differ where rounding changes a code
    network = OnnxNetwork(path)
    assert not list(network.parameters())
    torch.testing.assert_close(network(x[:1]), network(x[:9])[:1])


def test_file_holds_the_codes(mixed):
    model, path, _ = mixed
    proto = onnx.load(path)
    onnx.checker.check_model(proto, full_check=True)
    assert [(o.domain, o.version) for o in proto.opset_import] == [("", 21)]
    stored = {t.name: t for t in proto.graph.initializer}
    weights = {n.input[0]: n for n in proto.graph.node if n.op_type == "DequantizeLinear" and n.input[0] in stored}
    layers = {name: m for name, m in convert(model).named_modules(remove_duplicate=False) if isinstance(m, IntLayer)}
    del layers["same" if "shared.weight" in weights else "shared"]
    assert set(weights) == {f"{name}.weight" for name in layers}  # each once
    for name, layer in layers.items():
        codes, node = stored[f"{name}.weight"], weights[f"{name}.weight"]
        is_4_bit = layer.weight_bits <= 4
        assert codes.data_type == (TensorProto.INT4 if is_4_bit else TensorProto.INT8)
        assert len(codes.raw_data) == layer.weight.numel() / (2 if is_4_bit else 1)
        np.testing.assert_array_equal(numpy_helper.to_array(codes).astype(np.int8), layer.weight.numpy())
        assert [(a.name, a.i) for a in node.attribute] == [("axis", 0)]
        np.testing.assert_array_equal(numpy_helper.to_array(stored[node.input[1]]), layer.weight_scale.numpy())
    kinds = {TensorProto.UINT4: [], TensorProto.UINT8: []}
    for node in proto.graph.node:
        if node.op_type == "QuantizeLinear":
            kinds[stored[node.input[2]].data_type].append(float(numpy_helper.to_array(stored[node.input[1]])))
    assert [len(scales) for scales in kinds.values()] == [3, 5]  # one layer with 4 bits is used twice
    assert {scale for scales in kinds.values() for scale in scales} == {float(m.input_scale) for m in layers.values()}
    text = path.read_bytes()
    assert b".py" not in text  # neither source code nor paths
    assert not [t.name for t in stored.values() if t.data_type == TensorProto.FLOAT and np.prod(t.dims) > 10]


class Branches(nn.ModuleList):
    """Networks with a common input; their outputs are concatenated."""

    def forward(self, x):
        return torch.cat([branch(x) for branch in self], 1)


def test_pooling_and_consecutive_convolutions(tmp_path):
    torch.manual_seed(0)
    branches, x = Branches(), torch.randn(64, 3, 14, 14)
    for bits, bias in (((4, 4), True), ((8, 4), False)):
        layers = nn.Conv2d(3, 8, 3, bias=bias), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, bias=bias), nn.ReLU()
        net = nn.Sequential(*layers, nn.Conv2d(8, 8, 3, bias=bias), nn.ReLU(), nn.Flatten())
        branches.append(quantize(net, *bits, first_last_bits=None))
    calibrate(branches, x)
    export_onnx(branches, tmp_path / "net.onnx", x)
    assert share_equal(tmp_path / "net.onnx", branches.eval(), 2 * x) > 0.9


def residual_blocks():
    """The stem of ResNet-50, the blocks of the networks for small images, and SimCC's head."""
    stem = nn.Conv2d(3, 4, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    blocks = PyramidBlock(4, 6), PreActivationBlock(6, 8, stride=2), BasicBlock(8, 12)
    return nn.Sequential(*stem, *blocks, SimCCHead(12, joints=3, cells=16, bins=8))


def test_residual_networks(tmp_path):
    torch.manual_seed(0)
    net, x = residual_blocks(), torch.randn(32, 3, 32, 32)
    with torch.no_grad():
        net.train()(x)  # statistics for batch norm
    model = quantize(net)
    calibrate(model, x)
    export_onnx(model, tmp_path / "net.onnx", x)
    assert share_equal(tmp_path / "net.onnx", model.eval(), x) > 0.8


def least_size(model):
    """The bytes of the codes and floating-point numbers of a quantized network."""
    total = sum(4 * tensor.numel() for tensor in model.state_dict().values() if tensor.is_floating_point())
    for layer in (m for m in model.modules() if isinstance(m, QuantLayer)):
        total -= 4 * layer.weight.numel() - layer.weight.numel() // (2 if layer.weight_quantizer.bits <= 4 else 1)
    return total


def test_predictions_and_size_of_a_folded_mobilenet(tmp_path):
    torch.manual_seed(0)
    float_model, x = build("mobilenet_v1_small", seed=0), torch.randn(200, 3, 8, 8)
    with torch.no_grad():
        float_model.train()(x)  # statistics for batch norm
    model = quantize(float_model, fold_batch_norm=True)
    calibrate(model, x)
    model.blocks[0].pointwise.input_quantizer.zero_point.fill_(3)  # after a ReLU
    converted = convert(model)
    size = export_onnx(converted, tmp_path / "net.onnx", x)
    with torch.no_grad():
        assert (run_onnx(tmp_path / "net.onnx", x).argmax(1) == converted(x).argmax(1)).float().mean() >= 0.999
    assert share_equal(tmp_path / "net.onnx", converted, x) > 0.97
    assert least_size(model) < size < least_size(model) + 2500 * 10  # of 10 layers
    resnet = build("resnet18", seed=0)
    floats = sum(4 * tensor.numel() for tensor in resnet.parameters())
    assert least_size(quantize(resnet)) + 2500 * 21 < 0.13 * floats
