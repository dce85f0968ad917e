"""The networks compared with their papers' descriptions, as plain functions of the tensors in the state dict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bsam.lab.models import MODELS
from bsam.lab.models.cifar import PyramidNet, ResNet, WideResNet


@dataclass
class Layers:
    """Layers as functions of a state dict, whose running statistics are updated as in training."""

    state: dict[str, Tensor]
    training: bool

    def conv(self, x: Tensor, name: str, stride: int = 1) -> Tensor:
        weight = self.state[f"{name}.weight"]
        groups = x.shape[1] // weight.shape[1]
        return F.conv2d(x, weight, stride=stride, padding={3: 1, 1: 0}[weight.shape[-1]], groups=groups)

    def bn(self, x: Tensor, name: str) -> Tensor:
        parts = (self.state[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
        return F.batch_norm(x, *parts, self.training, momentum=0.1, eps=1e-5)

    def relu_bn(self, x: Tensor, name: str) -> Tensor:
        return self.bn(x, name).clamp(min=0)

    def classify(self, x: Tensor) -> Tensor:
        pooled = x.flatten(2).sum(2) / (x.shape[2] * x.shape[3])
        return pooled @ self.state["linear.weight"].T + self.state["linear.bias"]


def residual(layers: Layers, x: Tensor, stages: int, blocks: int) -> Tensor:
    """He et al. 2016, figure 2 and section 4.2: ReLU after the sum, a projection with norm where the shape changes."""
    x = layers.relu_bn(layers.conv(x, "conv"), "bn")
    for stage in range(stages):
        for block in range(blocks):
            at = f"stages.{stage}.{block}"
            halves = stage > 0 and block == 0
            stride = 2 if halves else 1
            out = layers.relu_bn(layers.conv(x, f"{at}.conv1", stride), f"{at}.bn1")
            out = layers.bn(layers.conv(out, f"{at}.conv2"), f"{at}.bn2")
            if halves:
                x = layers.bn(layers.conv(x, f"{at}.shortcut.0", stride), f"{at}.shortcut.1")
            x = (out + x).clamp(min=0)
    return layers.classify(x)


def wide(layers: Layers, x: Tensor, n: int, widen: int) -> Tensor:
    """Zagoruyko & Komodakis 2016, table 1, norm and ReLU before a convolution; projections take the activated input."""
    x = layers.conv(x, "conv")
    for stage in range(3):
        for block in range(n):
            at = f"stages.{stage}.{block}"
            stride = 2 if stage > 0 and block == 0 else 1
            active = layers.relu_bn(x, f"{at}.bn1")
            out = layers.conv(active, f"{at}.conv1", stride)
            out = layers.conv(layers.relu_bn(out, f"{at}.bn2"), f"{at}.conv2")
            if block == 0 and (stage > 0 or widen > 1):
                x = layers.conv(active, f"{at}.projection", stride)
            x = x + out
    return layers.classify(layers.relu_bn(x, "bn"))


def pyramid(layers: Layers, x: Tensor, n: int) -> Tensor:
    """Han et al. 2017, figure 6d: one ReLU per block, none after the sum; the shortcut is pooled, then zero-padded."""
    x = layers.bn(layers.conv(x, "conv"), "bn")
    for stage in range(3):
        for block in range(n):
            at = f"stages.{stage}.{block}"
            stride = 2 if stage > 0 and block == 0 else 1
            out = layers.conv(layers.bn(x, f"{at}.bn1"), f"{at}.conv1", stride)
            out = layers.bn(layers.conv(layers.relu_bn(out, f"{at}.bn2"), f"{at}.conv2"), f"{at}.bn3")
            if stride == 2:
                x = (x[:, :, ::2, ::2] + x[:, :, 1::2, ::2] + x[:, :, ::2, 1::2] + x[:, :, 1::2, 1::2]) / 4
            missing = torch.zeros(len(x), out.shape[1] - x.shape[1], *x.shape[2:], dtype=x.dtype)
            x = out + torch.cat([x, missing], dim=1)
    return layers.classify(layers.relu_bn(x, "bn_last"))


def mobile(layers: Layers, x: Tensor, strides: list[int]) -> Tensor:
    """Howard et al. 2017, table 1 and figure 3: norm and ReLU after the depthwise and after the pointwise one."""
    x = layers.relu_bn(layers.conv(x, "conv"), "bn")
    for block, stride in enumerate(strides):
        at = f"blocks.{block}"
        x = layers.relu_bn(layers.conv(x, f"{at}.depthwise", stride), f"{at}.bn1")
        x = layers.relu_bn(layers.conv(x, f"{at}.pointwise"), f"{at}.bn2")
    return layers.classify(x)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Layers, Tensor], Tensor]]] = {
    "resnet18, narrow": (lambda: ResNet((8, 16, 24, 32), 2), lambda layers, x: residual(layers, x, 4, 2)),
    "wide_resnet16_4": (lambda: WideResNet(16, 4), lambda layers, x: wide(layers, x, 2, 4)),
    "wide_resnet10_1": (MODELS["wide_resnet10_1"].build, lambda layers, x: wide(layers, x, 1, 1)),
    "pyramidnet20": (lambda: PyramidNet(20, 50), lambda layers, x: pyramid(layers, x, 3)),
    "mobilenet_v1_small": (MODELS["mobilenet_v1_small"].build, lambda layers, x: mobile(layers, x, [1, 2, 1, 2])),
}


def scattered(model: nn.Module) -> nn.Module:
    """The network with random norms and biases, so that a missing one shows."""
    generator = torch.Generator().manual_seed(1)
    for tensor in (t for t in model.state_dict().values() if t.dim() == 1):
        tensor.mul_(0.2).add_(0.5 + torch.rand(tensor.shape, generator=generator))  # variances stay positive
    return model.double()


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", CASES)
def test_forward_pass_equals_the_description_in_the_paper(name, training):
    torch.manual_seed(0)
    make, described = CASES[name]
    model = scattered(make()).train(training)
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    layers = Layers({key: value.clone() for key, value in model.state_dict().items()}, training)
    with torch.no_grad():
        torch.testing.assert_close(model(x), described(layers, x), rtol=1e-9, atol=1e-9)
    for key in (key for key in layers.state if "running" in key):
        torch.testing.assert_close(model.state_dict()[key], layers.state[key], rtol=1e-9, atol=1e-9)
