"""Quantized networks on a CUDA device: no host synchronisation, capture in a CUDA graph, sums of integers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bsam
from bsam.lab.quantization import calibrate, convert, parameter_groups, quantize
from bsam.lab.quantization.quant_layers import QuantConv2d
from bsam.lab.quantization.quantizers import SCHEMES

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _deterministic():
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False


def case(scheme):
    """A quantized network, its optimizer, and a closure."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten()]
    model = quantize(nn.Sequential(*layers, nn.Linear(16 * 64, 10)), scheme=scheme).cuda()
    x, y = torch.randn(32, 3, 12, 12).cuda(), torch.randint(0, 10, (32,)).cuda()
    base = torch.optim.SGD(parameter_groups(model), lr=0.02, momentum=0.9)
    return model, bsam.BSAM(base, model), x, lambda model: F.cross_entropy(model(x), y)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_host_synchronisation_after_the_first_step(scheme):
    model, optimizer, _, loss = case(scheme)
    optimizer.step(lambda: loss(model))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            optimizer.step(lambda: loss(model))
        with torch.no_grad():
            loss(model.eval())
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_captured_step_replays_to_the_weights_of_the_eager_step(scheme):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model, optimizer, _, loss = case(scheme)
        for _ in range(3):
            optimizer.step(lambda: loss(model))
        twin, twin_optimizer = copy.deepcopy((model, optimizer))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            optimizer.step(lambda: loss(model))
        for _ in range(3):
            graph.replay()
            twin_optimizer.step(lambda: loss(twin))
    torch.cuda.synchronize()
    for (name, a), (_, b) in zip(model.state_dict().items(), twin.state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)


def test_a_layer_in_integer_arithmetic_equals_the_cpu_bit_for_bit():
    torch.manual_seed(0)
    layer, x = QuantConv2d(nn.Conv2d(64, 64, 3, padding=1)), torch.randn(16, 64, 16, 16)
    calibrate(layer, x)
    layer.eval()
    with torch.no_grad():
        expected = layer(x)
        assert torch.equal(layer.cuda()(x.cuda()).cpu(), expected)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert torch.equal(layer(x.cuda()).cpu(), expected)
        assert torch.equal(convert(layer)(x.cuda()).cpu(), expected)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by torch.compile
def test_a_compiled_network_trains():
    model, optimizer, _, loss = case("lsq")
    optimizer.step(lambda: loss(model))
    compiled = torch.compile(model)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        losses = [optimizer.step(lambda: loss(compiled)).item() for _ in range(20)]
    assert losses[-1] < 0.7 * losses[0]
