"""Complex parameters count as two real ones: measurements move both parts, or raise."""

import numpy as np
import pytest
import torch
from torch import nn

import bsam
from bsam.common.errors import BsamValueError
from bsam.flatness import HessianOperator, landscape, plane_through, sharpness

DATA = [(torch.randn(n, 3, dtype=torch.complex128, generator=torch.Generator().manual_seed(n)),) * 2 for n in (5, 8)]


class Mixed(nn.Module):
    """A complex matrix and a real bias."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128, generator=generator))
        self.bias = nn.Parameter(torch.randn(4, dtype=torch.float64, generator=generator))

    def forward(self, x):
        return x @ self.weight.T + self.bias


class InParts(nn.Module):
    """The same with a real parameter for each part."""

    def __init__(self, model):
        super().__init__()
        self.real, self.imag, self.bias = (
            nn.Parameter(t.detach().clone()) for t in (model.weight.real, model.weight.imag, model.bias)
        )

    def forward(self, x):
        return x @ torch.complex(self.real, self.imag).T + self.bias


def loss_fn(out, _):
    return (out.abs() ** 2).sin().mean() + out.imag.tanh().mean()


def plain_loss(model):
    return float(loss_fn(model(torch.cat([x for x, _ in DATA])), None).detach())


def test_sharpness_equals_that_of_real_parameters():
    model = Mixed()
    result, expected = (sharpness(net, loss_fn, DATA, 0.2, 0.1, steps=2) for net in (model, InParts(model)))
    names = ("loss", "max_sharpness", "min_sharpness", "cosine")
    assert [getattr(result, name) for name in names] == pytest.approx([getattr(expected, name) for name in names])


def test_random_directions_have_both_parts():
    model = Mixed()
    with torch.no_grad():
        model.weight.zero_()
    result = sharpness(model, lambda out, y: (model.weight.imag**2).sum(), DATA[:1], rho_max=0.5, random_directions=500)
    assert result.average_error < 0.01  # of 28 entries 12 are imaginary
    assert result.average_sharpness == pytest.approx(0.5**2 * 12 / 28, abs=4 * result.average_error)


def test_landscape_moves_both_parts():
    model, seen = Mixed(), []
    w = model.weight.detach().clone()

    def recording(out, y):
        seen.append(model.weight.detach() - w)
        return loss_fn(out, y)

    result = landscape(model, recording, DATA, span=1.0, points=3, dims=1, seed=2)
    step = seen[-1]
    torch.testing.assert_close(step.norm(dim=1), w.norm(dim=1))
    assert min(float(step.real.abs().min()), float(step.imag.abs().min())) > 1e-3
    expected = []
    for c in (-1, 0, 1):
        model.weight.data = w + c * step
        expected.append(plain_loss(model))
    assert result.loss.tolist() == pytest.approx(expected, rel=1e-12)
    assert np.ptp(result.loss) > 0.1


def test_plane_through_models_contains_them():
    models = [Mixed(seed) for seed in range(3)]
    plane = plane_through(models)
    weights = [torch.cat([p.detach().reshape(-1).to(torch.complex128) for p in net.parameters()]) for net in models]
    squares = [float((w - weights[0]).norm() ** 2) for w in weights]
    assert (plane.coordinates**2).sum(1).tolist() == pytest.approx(squares)
    assert plane.distances.max() < 1e-12
    (a, b), (u, v) = plane.coordinates[1], plane.directions
    result = landscape(models[0], loss_fn, DATA, points=3, dims=1, directions=[float(a) * u + float(b) * v])
    assert result.loss[1:].tolist() == pytest.approx([plain_loss(net) for net in models[:2]])


def test_real_directions_and_the_hessian_raise():
    model = Mixed()
    real = bsam.Vector([torch.zeros(4, 3), torch.zeros(4)])
    with pytest.raises(BsamValueError, match="directions"):
        landscape(model, loss_fn, DATA, dims=1, directions=[real])
    for measure in (
        lambda: HessianOperator(model, loss_fn, DATA),
        lambda: landscape(model, loss_fn, DATA, directions="hessian"),
    ):
        with pytest.raises(BsamValueError, match="real"):
            measure()
