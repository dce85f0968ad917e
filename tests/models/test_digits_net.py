import torch
from torch import nn

from bsam.models.digits_net import DigitsNet


def test_shape_size_and_batch_norm():
    model = DigitsNet()
    assert model(torch.randn(5, 1, 8, 8)).shape == (5, 10)
    assert sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == 2
    assert sum(p.numel() for p in model.parameters()) == 9978
    assert DigitsNet(classes=3, width=4)(torch.randn(2, 1, 8, 8)).shape == (2, 3)


def test_every_parameter_learns():
    model = DigitsNet()
    nn.functional.cross_entropy(model(torch.randn(16, 1, 8, 8)), torch.arange(16) % 10).backward()
    assert all(p.grad is not None and p.grad.norm() > 0 for p in model.parameters())
