"""LoRA of PEFT, in the Trainer, against a LoRA written out and trained by plain bsam."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bsam


class LowRank(nn.Module):
    """A layer plus a product of two small matrices, with PEFT's initial values."""

    def __init__(self, layer: nn.Linear, A: torch.Tensor, B: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.layer, self.A, self.B = layer, nn.Parameter(A.clone()), nn.Parameter(B.clone())
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.scale * x @ self.A.T @ self.B.T


@pytest.mark.parametrize("method", ["sam", "bsam"])
def test_lora_is_exact(hf, method, tmp_path):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    settings = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    model = get_peft_model(hf.network(), LoraConfig(**settings)).double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    twin = hf.network().requires_grad_(False)
    wrappers = {}
    for name, module in model.base_model.model.named_modules():
        if hasattr(module, "lora_A"):
            parent, _, last = name.rpartition(".")
            A, B = module.lora_A["default"].weight, module.lora_B["default"].weight
            wrappers[name] = LowRank(twin.get_submodule(name), A.detach(), B.detach(), scale=2.0)
            setattr(twin.get_submodule(parent), last, wrappers[name])
    assert len(wrappers) == 4

    own = {"rho": 0.2} if method == "sam" else {"rho_max": 0.2, "rho_min": 0.1}
    args = hf.arguments(tmp_path, max_grad_norm=0.3, gradient_accumulation_steps=2, label_names=["labels"])
    run = hf.trainer(model, args, method=method, method_kwargs=own)
    run.train()
    trained = [p for p in twin.parameters() if p.requires_grad]
    cls = bsam.METHODS[method]
    optimizer = cls(torch.optim.SGD(trained, lr=hf.LR), twin, **own)
    losses = hf.train_plainly(twin, optimizer, hf.batches(2), accumulate=2, max_norm=0.3)
    assert hf.logged(run) == pytest.approx(losses, abs=1e-6)
    for name, wrapper in wrappers.items():
        found = model.base_model.model.get_submodule(name)
        torch.testing.assert_close(found.lora_A["default"].weight, wrapper.A, rtol=0, atol=1e-6)
        torch.testing.assert_close(found.lora_B["default"].weight, wrapper.B, rtol=0, atol=1e-6)
    for name, p in model.named_parameters():  # the others were not even perturbed and restored with rounding
        assert p.requires_grad != torch.equal(p, before[name]), name


def test_the_example(hf, example):
    _, (losses, frozen), out = example("peft_lora")
    assert losses[-1] < 0.5 * losses[0]
    assert len(frozen) == 20
    assert all(frozen)
    assert out.endswith("the others are as they were: True\n")


def test_the_guide(hf, guide):
    names = guide("peft")
    assert names["optimizer"].t == names["trainer"].optimizer.optimizer.t == 3
