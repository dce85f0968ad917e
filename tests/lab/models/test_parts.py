"""Classifiers and depths of networks, and the preprocessing that networks expect."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from bsam.common.errors import BsamValueError
from bsam.lab.models import MODELS, build, input_config
from bsam.lab.models.parts import head, head_name, layer_ids
from bsam.lab.models.timm_networks import InputConfig

BLOCKS = ("layer", "blocks", "backbone.layer")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("digits_net", "7"),
        ("pyramidnet8", "linear"),
        ("mobilenet_v1_small", "linear"),
        ("timm:test_resnet", "fc"),
        ("timm:test_efficientnet", "classifier"),
        ("timm:test_convnext", "head.fc"),
        ("timm:test_vit", "head"),
    ],
)
def test_head(name, expected):
    network = build(name, classes=7)
    assert head_name(network) == expected
    assert head(network) is network.get_submodule(expected)
    assert head(network).out_features == 7


class WithAuxiliary(nn.Module):
    def __init__(self, classes, auxiliary):
        super().__init__()
        self.body = nn.Linear(64, 32)
        self.fc = nn.Linear(32, classes)
        self.aux = nn.Linear(64, auxiliary)


def test_the_head_is_the_only_linear_layer_with_an_output_for_each_class():
    assert head_name(WithAuxiliary(10, 3), 10) == "fc"
    several = r"2 linear layers with 10 outputs \(fc, aux\)"
    for auxiliary, classes, found in ((10, 10, several), (3, 5, "0 linear layers with 5 outputs; ")):
        with pytest.raises(BsamValueError, match=f"{found}.*give the network get_classifier"):
            head_name(WithAuxiliary(10, auxiliary), classes)
    network = WithAuxiliary(10, 10)
    network.get_classifier = lambda: network.fc
    assert head_name(network, 10) == "fc"


@pytest.mark.parametrize("name", ["timm:resnet18", "timm:test_efficientnet", "timm:test_vit", "simcc_resnet50"])
def test_depths(name):
    with torch.device("meta"):
        network = build(name)
    depth = layer_ids(network)
    names = [key for key, _ in network.named_parameters()]
    assert sorted(depth) == sorted(names)
    assert set(depth.values()) == set(range(max(depth.values()) + 1))
    inside = f"{head_name(network)}."
    assert {key for key, d in depth.items() if d == max(depth.values())} == {k for k in names if k.startswith(inside)}
    assert depth[names[0]] == 0
    blocks = [depth[key] for key in names if key.startswith(BLOCKS)]
    assert blocks == sorted(blocks)  # they are registered in order of depth
    prefixes = {re.match(r"\D+\d+(\.\d+(?=\.))?", key)[0] for key in names if key.startswith(BLOCKS)}
    assert len(set(blocks)) == len(prefixes)  # one per block, not per stage


def test_inputs():
    assert input_config("timm:tf_efficientnet_lite2") == InputConfig(260, (0.5,) * 3, (0.5,) * 3, "bicubic", 0.89)
    assert input_config("timm:resnet18.a1_in1k").mean == (0.485, 0.456, 0.406)
    assert input_config("timm:resnet18.tv_in1k").interpolation == "bilinear"  # the tag decides
    assert [255 * mean for mean in input_config("resnet50").mean] == pytest.approx([123.68, 116.779, 103.939])
    assert [name for name in MODELS if input_config(name) is not None] == ["resnet50", "simcc_resnet50"]
    assert input_config("simcc_resnet50") == replace(input_config("resnet50"), size=256)
