"""SimCC networks: outputs, and weights of their backbones."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bsam.common.errors import BsamValueError
from bsam.lab.models import build
from bsam.lab.models.parts import head
from bsam.lab.models.simcc import SimCC
from bsam.lab.models.weights import MODEL_KEY, into_backbone, load_weights


def changed(name, **sizes):
    """Weights, batch norm included, that differ from those of any new network."""
    state = build(name, seed=1, **sizes).state_dict()
    return {
        key: (value + 0.25 if value.is_floating_point() else value + 7).contiguous() for key, value in state.items()
    }


def test_logits_equal_a_loop_over_joints():
    backbone = nn.Conv2d(3, 5, 4, stride=4)
    network = SimCC(backbone, 5, joints=3, side=12, k=1.5, stride=4).double()
    x = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    out, features, weights = network(x), backbone(x), dict(network.head.named_parameters())
    assert out.shape == (2, 3, 2, 18)
    for n in range(2):
        for joint in range(3):
            kernel, bias = weights["maps.weight"][joint, :, 0, 0], weights["maps.bias"][joint]
            cells = [kernel @ features[n, :, row, column] + bias for row in range(3) for column in range(3)]
            for axis, name in enumerate("xy"):
                expected = weights[f"{name}.weight"] @ torch.stack(cells) + weights[f"{name}.bias"]
                torch.testing.assert_close(out[n, joint, axis], expected)


def test_backbone_is_the_network_before_its_pooling():
    whole, network = build("resnet8", seed=0).eval(), build("simcc_resnet8", classes=14, seed=1, side=32).eval()
    network.backbone.load_state_dict({k: v for k, v in whole.state_dict().items() if not k.startswith("linear.")})
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        features = network.backbone(x)
        torch.testing.assert_close(whole.linear(features.mean((2, 3))), whole(x))
        assert network(x).equal(network.head(features))


def test_backbone_of_resnet50():
    with torch.device("meta"):  # 20 times faster
        whole, network = build("resnet50"), build("simcc_resnet50", classes=14)
        assert network.backbone(torch.zeros(1, 3, 256, 256)).shape == (1, 2048, 8, 8)
        assert network(torch.zeros(1, 3, 256, 256)).shape == (1, 14, 2, 512)
    assert list(network.backbone.state_dict()) == [key for key in whole.state_dict() if not key.startswith("fc.")]
    kinds = (nn.Conv2d, nn.BatchNorm2d)
    layers = [[str(module) for module in net.modules() if isinstance(module, kinds)] for net in (whole, network)]
    assert layers[1] == [*layers[0], "Conv2d(2048, 14, kernel_size=(1, 1), stride=(1, 1))"]
    assert head(network) is network.head
    left_out, rest = into_backbone(whole.state_dict(), "resnet50")
    assert list(left_out) == ["fc.weight", "fc.bias"]
    assert list(rest) == [key for key in network.state_dict() if not key.startswith("head.")]


def test_weights_of_the_backbone(tmp_path):
    state, path = changed("resnet8", classes=3), tmp_path / "a.safetensors"
    save_file(state, path, {MODEL_KEY: "resnet8"})
    network = build("simcc_resnet8", classes=14, seed=0)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    report = load_weights(network, "simcc_resnet8", path)
    after = network.state_dict()
    assert report.head_left_out == {"linear.weight": (3, 64), "linear.bias": (3,)}
    assert report.loaded == len(state) - 2 == len(after) - 6
    assert all(after[f"backbone.{key}"].equal(value) for key, value in state.items() if not key.startswith("linear."))
    assert all(after[key].equal(before[key]) for key in after if key.startswith("head."))
    assert f"Loaded {len(state) - 2} tensors" in str(report)
    assert "its classifier was left out (linear.bias 3, linear.weight 3x64)" in str(report)
    with pytest.raises(BsamValueError, match=r"head\.maps\.weight"):
        load_weights(network, "simcc_resnet8", path, keep_head=True)


def test_weights_of_the_whole_network(tmp_path):
    state, path, network = changed("simcc_resnet8", classes=3), tmp_path / "a.pt", build("simcc_resnet8", classes=14)
    torch.save(state, path)
    report = load_weights(network, "simcc_resnet8", path)
    assert list(report.head_left_out) == [f"head.{key}" for key in network.head.state_dict()]
    assert all(value.equal(state[f"backbone.{key}"]) for key, value in network.backbone.state_dict().items())
    whole = build("simcc_resnet8", classes=3)
    assert not load_weights(whole, "simcc_resnet8", path, keep_head=True).head_left_out
    assert all(value.equal(state[key]) for key, value in whole.state_dict().items())


def test_weights_that_do_not_fit_are_refused(tmp_path):
    state, path = changed("resnet8"), tmp_path / "a.safetensors"
    state["stages.9.weight"] = state.pop("stages.0.0.bn1.bias")
    for model, metadata, word in (
        ("simcc_resnet8", None, r"backbone\.stages\.9\.weight"),
        ("simcc_resnet8", {MODEL_KEY: "resnet20"}, "resnet20"),
        ("resnet8", {MODEL_KEY: "simcc_resnet8"}, "simcc_resnet8"),
    ):
        save_file(state, path, metadata)
        with pytest.raises(BsamValueError, match=word):
            load_weights(build(model), model, path)


def test_logits_have_full_precision_under_autocast():
    network, x = build("simcc_resnet8", 3, seed=0, side=8).eval(), torch.randn(2, 3, 8, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        features, logits = network.backbone(x), network(x)
    assert (features.dtype, logits.dtype) == (torch.bfloat16, torch.float32)
    with torch.no_grad():
        assert torch.equal(logits, network.head(features.float()))
