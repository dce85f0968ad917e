"""Calls that raise an error, and a word of its message."""

import pytest
from torch import nn

from bsam.common.errors import BsamValueError
from bsam.lab.models import build, input_config
from bsam.lab.models.cifar import PyramidNet, WideResNet
from bsam.lab.models.parts import head, layer_ids
from bsam.lab.models.weights import load_weights

REFUSED = [
    (lambda: build("resnet9"), "resnet9"),
    (lambda: build("vit_tiny"), "vit_tiny.*Did you mean .vit-tiny"),
    (lambda: build("timm:resnet51"), "resnet51"),
    (lambda: build("timm:resnet18.a1_in1"), r"resnet18\.a1_in1"),
    (lambda: build("timm:hf-hub:timm/resnet18"), "hf-hub"),  # nothing is downloaded
    (lambda: build("resnet8", classes=0), "classes"),
    (lambda: build("timm:test_resnet", channels=-3), "channels"),
    (lambda: build("resnet8", seed=-1), "seed"),
    (lambda: build("simcc_resnet8", side=30), "side"),
    (lambda: build("simcc_resnet8", k=0.3), "k must"),
    (lambda: build("simcc_resnet8", k=0), "k must"),
    (lambda: WideResNet(27, 10), "depth"),
    (lambda: PyramidNet(109, 270), "depth"),
    (lambda: head(nn.Conv2d(1, 1, 1)), "Conv2d"),
    *((lambda name=name: layer_ids(build(name)), "timm") for name in ("resnet8", "simcc_resnet8")),
    *((lambda name=name: input_config(name), "resnet9") for name in ("resnet9", "timm:resnet9")),
    (lambda: load_weights(build("resnet8"), "resnet50", "pretrained"), "resnet50"),
    (lambda: load_weights(build("resnet8"), "timm:coatnet_0_224", "pretrained"), "coatnet"),
]


@pytest.mark.parametrize(("call", "word"), REFUSED)
def test_refusals(call, word):
    with pytest.raises(BsamValueError, match=word):
        call()
