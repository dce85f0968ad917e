"""Batch norm is folded into the preceding convolution."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bsam.lab.models import build
from bsam.lab.quantization.quantize import fold_norms


def used(model, *shape):
    """The network in eval mode after a few batches, with random affine parameters of batch norm."""
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.affine:
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.normal_(module.bias)
    with torch.no_grad():
        for _ in range(3):
            model.train()(3 * torch.randn(8, *shape) + 1)
    return model.eval()


def count(model, kind):
    return sum(isinstance(m, kind) for m in model.modules())


@pytest.mark.parametrize(("name", "left"), [("resnet8", 0), ("wide_resnet10_1", 4), ("pyramidnet8", 4)])
def test_outputs_in_eval_mode_are_unchanged(name, left):
    model = used(build(name, seed=0), 3, 16, 16)
    x = torch.randn(4, 3, 16, 16)
    expected = model(x).detach()
    norms = count(model, nn.BatchNorm2d)
    fold_norms(model)
    torch.testing.assert_close(model(x), expected, atol=2e-5, rtol=1e-4)
    assert count(model, nn.BatchNorm2d) == left < norms
    assert not any(m.training for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())


def test_without_affine_parameters_and_with_a_bias():
    model = used(nn.Sequential(nn.Conv2d(2, 3, 3, groups=1), nn.BatchNorm2d(3, affine=False)), 2, 5, 5)
    x = torch.randn(4, 2, 5, 5)
    expected = model(x).detach()
    fold_norms(model)
    torch.testing.assert_close(model(x), expected)


class Branches(nn.Module):
    """A convolution whose output is used twice, one that runs twice, a norm that runs twice, and a pair."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Conv2d(2, 2, 1) for _ in range(4))
        self.norm_a, self.norm_b, self.norm_c, self.norm_d = (nn.BatchNorm2d(2) for _ in range(4))

    def forward(self, x):
        y = self.a(x)
        x = self.norm_a(y) + y
        x = self.norm_b(self.b(x)) + self.b(x)
        x = self.norm_c(self.c(x)) + self.norm_c(x)
        return self.norm_d(self.d(x))


def test_only_pairs_are_folded():
    model = used(Branches(), 2, 4, 4)
    x = torch.randn(4, 2, 4, 4)
    expected = model(x).detach()
    fold_norms(model)
    torch.testing.assert_close(model(x), expected)
    kinds = [type(getattr(model, f"norm_{name}")) for name in "abcd"]
    assert kinds == [nn.BatchNorm2d] * 3 + [nn.Identity]
