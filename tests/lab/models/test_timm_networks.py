"""Networks from timm, and the original ResNet-50."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bsam.common.errors import BsamError
from bsam.common.timm_import import import_timm
from bsam.lab.config import Run
from bsam.lab.models import build, timm_networks
from bsam.lab.tasks.classification import build_float_network
from bsam.lab.tasks.images import Inputs


def test_networks_from_timm_are_seeded_and_channels_last():
    before = torch.get_rng_state()
    first, again, other = (build("timm:test_resnet", 7, 1, seed).state_dict() for seed in (3, 3, 4))
    assert torch.get_rng_state().equal(before)
    kernels = [key for key, value in first.items() if value.dim() == 4]
    assert first["conv1.0.weight"].shape[1] == 1
    assert first["fc.weight"].shape[0] == 7
    assert all(again[key].equal(value) for key, value in first.items())
    assert all(not other[key].equal(first[key]) for key in kernels)
    assert all(first[key].is_contiguous(memory_format=torch.channels_last) for key in kernels)


def test_error_without_timm_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    for name in ("resnet50", "timm:resnet50"):
        with pytest.raises(BsamError, match=r"\[timm\]"):
            build(name)


BLOCKS = (2, 1, 2, 1)  # in the four stages


def resnet50_by_hand(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """He et al. 2016, with the stride on the first 1x1 convolution of a stage, and 1e-3 in batch norm."""

    def norm(at: str, x: Tensor) -> Tensor:
        mean, var, scale, shift = (
            w[f"{at}.{k}"][:, None, None] for k in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / (var + 0.001).sqrt() * scale + shift

    x = norm("bn1", F.conv2d(x, w["conv1.weight"], stride=2, padding=3)).relu()
    x = F.max_pool2d(x, 3, 2, padding=1)
    for stage, blocks in enumerate(BLOCKS, start=1):
        for block in range(blocks):
            at, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            out = norm(f"{at}.bn1", F.conv2d(x, w[f"{at}.conv1.weight"], stride=stride)).relu()
            out = norm(f"{at}.bn2", F.conv2d(out, w[f"{at}.conv2.weight"], padding=1)).relu()
            out = norm(f"{at}.bn3", F.conv2d(out, w[f"{at}.conv3.weight"]))
            if block == 0:
                x = norm(f"{at}.downsample.1", F.conv2d(x, w[f"{at}.downsample.0.weight"], stride=stride))
            x = (out + x).relu()
    return x.mean((2, 3)) @ w["fc.weight"].T + w["fc.bias"]


def test_resnet50_equals_the_original_description(monkeypatch):
    """With fewer and narrower blocks."""
    make, narrow = import_timm().create_model, {"layers": BLOCKS, "channels": (8, 12, 16, 20), "num_classes": 5}
    monkeypatch.setattr(timm_networks, "timm_network", lambda name, *_, **settings: make(name, **narrow, **settings))
    model = build("resnet50", seed=0).double().eval()
    x = torch.randn(1, 3, 64, 64, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
        expected = resnet50_by_hand(model.state_dict(), x)
        assert (expected - model.fc.bias).abs().min() > 1e-3  # the output depends on the image
        torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "timm_name"), [("vit-tiny", "vit_tiny_patch16_224"), ("vit-small", "vit_small_patch16_224")]
)
def test_small_vision_transformers_are_those_of_timm(name, timm_name):
    """With patches of 4 x 4 pixels for images of 32 x 32."""
    with torch.device("meta"):
        theirs = import_timm().create_model(timm_name, img_size=32, patch_size=4, num_classes=7)
        ours = build(name, classes=7)
    shapes = [{key: t.shape for key, t in network.state_dict().items()} for network in (ours, theirs)]
    assert shapes[0] == shapes[1]
    assert str(ours) == str(theirs)
    assert ours.pos_embed.shape[1] == 8 * 8 + 1


@pytest.mark.parametrize("size", [8, 20])
def test_networks_of_one_image_size_are_built_for_that_of_the_data(size):
    inputs = Inputs(size, size, 1, (0.5,), (0.5,), "bilinear", 1.0, ())
    network = build_float_network(Run("sgd", model="vit-nano"), inputs, 10)
    assert network(torch.zeros(2, 1, size, size)).shape == (2, 10)
    assert network.pos_embed.shape[1] == (size // 2) ** 2 + 1
    usual = build_float_network(Run("sgd", model="vit-nano"), replace(inputs, side=16, size=16), 10)
    assert torch.equal(usual.pos_embed, build("vit-nano", seed=0).pos_embed)


def test_an_image_size_that_a_transformer_cannot_have_is_refused():
    inputs = Inputs(8, 8, 3, (0.5,) * 3, (0.5,) * 3, "bilinear", 1.0, ())
    for name in ("timm:vit_tiny_patch16_224", "timm:test_convnext2"):
        with pytest.raises(BsamError, match=f"{name} does not take images of 3x8x8"):
            build_float_network(Run("sgd", model=name), inputs, 10)
