"""Examples with frameworks that need little or no code of ours, against plain loops."""

from __future__ import annotations

import copy
import logging
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bsam
from bsam.lab.data import digits
from docs_guides import definition
from example_checks import FRAMEWORKS, first_findings
from helpers import assert_close
from integrations.conftest import ROOT, import_framework
from lightning_training import Batches, compare, network, plain, sgd

pytestmark = pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated")


def digits_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))


def train_on_digits(model, epochs, autocast=None, lr=lambda i: 0.1):
    """BSAM with pairs of micro-batches, clipped; the losses of all micro-batches."""
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    optimizer, losses = bsam.BSAM(base, model), []
    for i, (x, y) in enumerate(epochs * digits().train.batches(32)):
        optimizer.param_groups[0]["lr"] = lr(i)

        def closure():
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                return F.cross_entropy(model(x).float(), y) / 2

        losses.append(2 * optimizer.backward(closure).item())
        if i % 2 == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def assert_same_state(ours, expected, atol=1e-6):
    assert_close(ours.state_dict().values(), expected.state_dict().values(), atol=atol)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on a CPU without bfloat16
@pytest.mark.parametrize(("precision", "autocast"), [("32-true", None), ("bf16-mixed", torch.bfloat16)])
def test_fabric(lightning, example, precision, autocast, monkeypatch):
    enabled = torch.backends.mkldnn.enabled  # torch switches it off where bfloat16 fails
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", enabled)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    _, (net, accuracy), out = example("fabric_loop", epochs=2, precision=precision)
    model = digits_network()
    losses = train_on_digits(model, 2, autocast)
    assert_same_state(net, model)
    assert f"epoch 2: loss of the last batch {losses[-1]:.4f}\n20 steps, test accuracy {accuracy:.3f}" in out
    assert accuracy > 0.85


class Halving(bsam.BSAM):
    """A ``backward`` of the user's, which must run once."""

    def backward(self, closure, scaler=None):
        return super().backward(lambda: 0.5 * closure(), scaler)


def test_fabric_keeps_the_attributes_of_the_optimizer(lightning):
    """``passes`` is 3 in the class, in which the object that Fabric makes looks first."""
    net, data = network(), Batches()
    ours, calls, method = copy.deepcopy(net), [], partial(Halving, rho_max=0.2, rho_min=0.15, passes=2)
    model, optimizer = lightning.Fabric(accelerator="cpu", devices=1).setup(ours, method(sgd(ours.parameters()), ours))
    ours.register_forward_pre_hook(lambda *_: calls.append(1))
    torch.manual_seed(0)
    for x, y in data:
        optimizer.zero_grad()
        optimizer.backward(lambda: F.cross_entropy(model(x), y))
        optimizer.step()
    plain(net, data, method=method, epochs=1)
    compare(ours, net)
    assert len(calls) == 10


def test_ignite(example):
    for part in ("engine", "handlers", "metrics"):
        import_framework(f"ignite.{part}")
    _, (model, optimizer, state), _ = example("ignite_engine", epochs=2)
    expected = digits_network()
    losses = train_on_digits(expected, 2, lr=lambda i: 0.01 + 0.045 * (1 + math.cos(math.pi * i / 40)))
    assert_same_state(model, expected)
    assert state.metrics["loss"] == pytest.approx(np.mean(losses[-20:]), abs=1e-6)  # of the first pass
    assert optimizer.t == 20
    assert state.metrics["accuracy"] > 0.8


def test_timm(timm, example):
    _, (model, ema, optimizer), _ = example("timm_loop")
    torch.manual_seed(0)
    np.random.seed(0)
    sizes = {"layers": (1, 1, 1, 1), "channels": (8, 16, 16, 16), "in_chans": 1, "num_classes": 10}
    expected = timm.create_model("resnet18", drop_path_rate=0.05, **sizes)
    base = timm.optim.create_optimizer_v2(expected, "sgd", lr=0.1, weight_decay=1e-4)
    method, mixup = bsam.BSAM(base, expected, lr_max=0.1), timm.data.Mixup(mixup_alpha=0.1, num_classes=10)
    average = copy.deepcopy(expected.state_dict())
    for i, (x, y) in enumerate(2 * digits().train.batches(64)):
        for group in method.param_groups:
            group["lr"] = 0.05 + 0.025 * method.t if method.t < 2 else 0.05 * (1 + math.cos(math.pi * method.t / 10))
        x, y = mixup(x.clone(), y)
        method.backward(lambda: F.cross_entropy(expected(x), y) / 2)
        if i % 2 == 1:
            timm.utils.dispatch_clip_grad(expected.parameters(), 0.5, mode="agc")
            method.step()
            method.zero_grad()
            decay = 0.8 if method.t > 1 else 0.0  # timm's average begins with the first step
            for name, value in expected.state_dict().items():
                average[name] = decay * average[name] + (1 - decay) * value if value.is_floating_point() else value
    assert_same_state(model, expected, atol=1e-5)
    assert_close(ema.module.state_dict().values(), average.values(), atol=1e-5)
    assert optimizer.t == method.t == 10


def test_peft(hf, example):
    """SAM on the adapters, written out with autograd; the example reports whether the other weights are unchanged."""
    from peft import LoraConfig, get_peft_model

    _, (losses, frozen, perturbed), shown = example("peft_lora")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 16, "num_hidden_layers": 1}
    words = {"vocab_size": 20, "max_position_embeddings": 12, "init_std": 0.3}
    model = hf.OPTForCausalLM(hf.OPTConfig(num_attention_heads=2, dropout=0.0, **sizes, **words))
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "fc1", "fc2"]))
    adapters = [p for p in model.parameters() if p.requires_grad]
    words, base = (torch.randint(0, 20, (32, 1)) + torch.arange(12)) % 20, torch.optim.AdamW(adapters, lr=0.05)

    def loss_and_gradients():
        loss = F.cross_entropy(model(input_ids=words).logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())
        return loss.item(), torch.autograd.grad(loss, adapters)

    expected = []
    for _ in range(len(losses)):
        loss, g = loss_and_gradients()
        start, length = [p.detach().clone() for p in adapters], torch.cat([t.flatten() for t in g]).norm()
        with torch.no_grad():
            torch._foreach_add_(adapters, [0.05 * t / length for t in g])
        _, g = loss_and_gradients()
        for p, w, t in zip(adapters, start, g, strict=True):
            p.data.copy_(w)
            p.grad = t
        base.step()
        expected.append(loss)
    assert losses[:10] == pytest.approx(expected[:10], abs=1e-4)
    assert losses == pytest.approx(expected, abs=0.05)  # rounding grows with the steps
    assert losses[-1] < 0.5 * losses[0]
    assert len(frozen) == 20
    assert all(frozen)
    assert perturbed == {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(perturbed) == 8
    sizes = [sum(p.nbytes for p in params) / 1024 for params in (adapters, model.parameters())]
    assert f"adapters ({sizes[0]:.0f} KiB), not the model ({sizes[1]:.0f} KiB)" in shown
    assert "80 passes in 40 steps" in shown


@pytest.mark.parametrize("name", [name for name in FRAMEWORKS if name != "lightning_module"])
@pytest.mark.filterwarnings("ignore")
def test_check_finds_nothing(name, monkeypatch, hf, lightning):
    assert first_findings(ROOT / f"examples/{name}.py", monkeypatch) == [[], []]


def test_the_guide_to_ignite_defines_what_its_example_tests():
    paths = "docs/guides/ignite.md", "examples/ignite_engine.py"
    in_guide, in_script = (definition((ROOT / path).read_text("utf-8"), "sharpness_aware_step") for path in paths)
    assert in_guide == in_script
