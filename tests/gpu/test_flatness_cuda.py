"""The instruments on the device: what they give there is what they give on the CPU."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bsam.flatness import HessianOperator, landscape, sharpness, spectral_density, top_eigenvalues, trace

pytestmark = pytest.mark.gpu


class Twice(torch.autograd.Function):
    """An operation without a forward derivative."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g


class Doubled(nn.Module):
    def forward(self, x):
        return Twice.apply(x)


def setting(device, *extra):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), *extra, nn.Flatten(), nn.Linear(4 * 25, 5)).double()
    x, y = torch.randn(40, 2, 5, 5).double(), torch.randint(5, (40,))
    model(x)  # statistics of its own
    model, x, y = copy.deepcopy(model).to(device), x.to(device), y.to(device)
    return model, [(x[:25], y[:25]), (x[25:], y[25:])]


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("extra", [(), (Doubled(),)])
def test_products_equal_those_of_the_cpu(mode, extra):
    products = []
    for device in ("cpu", "cuda"):
        model, data = setting(device, *extra)
        H = HessianOperator(model, F.cross_entropy, data, mode=mode)
        products.append(H.times(H.random(torch.Generator().manual_seed(1))).cpu())
        if device == "cuda":
            assert H._forward_mode is (not extra)
    torch.testing.assert_close(*products, rtol=1e-10, atol=1e-12)


def test_spectra_equal_those_of_the_cpu():
    found = []
    for device in ("cpu", "cuda"):
        H = HessianOperator(*(lambda model, data: (model, F.cross_entropy, data))(*setting(device)))
        top = top_eigenvalues(H, k=10, tol=1e-9)
        assert top.converged
        density = spectral_density(H, steps=20, probes=2)
        found.append(np.concatenate([top.values, [trace(H, samples=12).value], [density.weights @ density.nodes]]))
    np.testing.assert_allclose(*found, rtol=1e-8, atol=1e-10)


def test_sharpness_and_landscapes_equal_those_of_the_cpu():
    found = []
    for device in ("cpu", "cuda"):
        model, data = setting(device)
        measured = sharpness(model, F.cross_entropy, data, random_directions=3)
        land = landscape(model, F.cross_entropy, data, points=3)
        assert land.loss[1, 1] == measured.loss
        found.append(np.concatenate([land.loss.reshape(-1), [measured.bilateral, measured.cosine, measured.average_sharpness]]))
    np.testing.assert_allclose(*found, rtol=1e-9)
