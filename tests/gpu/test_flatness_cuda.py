"""Flatness on the device: results equal those on the CPU."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

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
    first = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
    model = nn.Sequential(*first, *extra, nn.Flatten(), nn.Linear(4 * 25, 5)).double()
    x, y = torch.randn(40, 2, 5, 5).double(), torch.randint(5, (40,))
    model(x)  # updates the running statistics
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
            assert H.differentiation == ("reverse" if extra else "forward")
            products.append(H.times(H.random(torch.Generator().manual_seed(1))).cpu())
            with H.linearized(1 << 30) as recording:
                products.append(H.times(H.random(torch.Generator().manual_seed(1))).cpu())
            assert recording.recorded == (0 if extra else 2), recording.note
    for product in products[2:]:
        torch.testing.assert_close(product, products[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(products[1], products[0], rtol=1e-10, atol=1e-12)


def test_spectra_equal_those_of_the_cpu():
    results = []
    for device in ("cpu", "cuda"):
        model, data = setting(device)
        H = HessianOperator(model, F.cross_entropy, data)
        top = top_eigenvalues(H, k=10, tol=1e-9)
        assert top.converged
        density = spectral_density(H, steps=20, probes=2)
        results.append(np.concatenate([top.values, [trace(H, samples=12).value], [density.weights @ density.nodes]]))
    np.testing.assert_allclose(*results, rtol=1e-8, atol=1e-10)


def test_sharpness_and_landscapes_equal_those_of_the_cpu():
    results = []
    for device in ("cpu", "cuda"):
        model, data = setting(device)
        measured = sharpness(model, F.cross_entropy, data, random_directions=3)
        land = landscape(model, F.cross_entropy, data, points=3)
        assert land.loss[1, 1] == measured.loss
        results.append(
            np.concatenate([land.loss.reshape(-1), [measured.bilateral, measured.cosine, measured.average_sharpness]])
        )
    np.testing.assert_allclose(*results, rtol=1e-9)


class Function(nn.Linear):
    """Adds a function of the weight to the output of a layer."""

    def __init__(self, function):
        super().__init__(4, 4)
        self.function = function

    def forward(self, x):
        return super().forward(x) + self.function(self.weight) * torch.arange(4, dtype=x.dtype, device=x.device)


class Last(nn.Module):
    """The last output of a recurrent network."""

    def __init__(self, kind):
        super().__init__()
        self.recurrent = kind(4, 4, batch_first=True)

    def forward(self, x):
        return self.recurrent(x[:, None].repeat(1, 3, 1))[0][:, -1]


NETS = {
    "penalty": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)),
    "slogdet": lambda: Function(lambda a: torch.linalg.slogdet(a)[1]),
    "det": lambda: Function(torch.linalg.det),
    "solve": lambda: Function(
        lambda a: torch.linalg.solve(a + 3 * torch.eye(4).to(a), torch.eye(4).to(a)).square().sum()
    ),
    "weight_norm": lambda: nn.Sequential(weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 4)),
    "lstm": lambda: Last(nn.LSTM),
    "gru": lambda: Last(nn.GRU),
    "rnn": lambda: Last(nn.RNN),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", NETS)
def test_operations_that_were_wrong_in_forward_mode_equal_the_cpu(name, dtype):
    products = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = NETS[name]()
        x, y = torch.randn(16, 4), torch.randint(0, 4, (16,))
        model, x, y = model.to(device, dtype), x.to(device, dtype), y.to(device)

        def loss_fn(out, y, model=model):
            penalty = sum(p.square().sum() for p in model.parameters()) if name == "penalty" else 0.0
            return F.cross_entropy(out, y) + 0.01 * penalty

        H = HessianOperator(model, loss_fn, [(x[:9], y[:9]), (x[9:], y[9:])])
        v = H.random(torch.Generator().manual_seed(1))
        products += [H.times(v).cpu(), H.times(v).cpu()]
        with H.linearized(1 << 30):
            products.append(H.times(v).cpu())
    tolerance = 1e-9 if dtype == torch.float64 else 2e-3
    for product in products[1:]:
        assert float((product - products[0]).norm() / products[0].norm()) < tolerance


def test_a_recurrent_network_has_a_sharpness():
    model = Last(nn.LSTM).cuda()
    data = [(torch.randn(8, 4, device="cuda"), torch.randint(0, 4, (8,), device="cuda"))]
    assert sharpness(model, F.cross_entropy, data).bilateral > 0
    assert torch.backends.cudnn.enabled


def test_a_recording_frees_the_memory_of_the_device():
    model, data = setting("cuda")
    data = [(x.repeat(200, 1, 1, 1), y.repeat(200)) for x, y in data]
    H = HessianOperator(model, F.cross_entropy, data)
    v = H.random(torch.Generator().manual_seed(1))
    H.times(v)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with H.linearized(1 << 34) as recording:
        H.times(v)
        assert torch.cuda.memory_allocated() - before >= 0.9 * recording.bytes > 0
    assert torch.cuda.memory_allocated() - before < 0.1 * recording.bytes
