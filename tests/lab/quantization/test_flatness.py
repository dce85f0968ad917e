"""Flatness of quantized networks, compared with computations on their quantized weights without our modules."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bsam import Vector
from bsam.common.errors import BsamRuntimeError
from bsam.flatness import HessianOperator, landscape, sharpness, top_eigenvalues
from bsam.lab.quantization import calibrate, convert, freeze_scales, quantize
from bsam.lab.quantization.quantizers import SCHEMES
from helpers import detached, flat


class Case:
    """A convolution, ReLU and a linear layer with 3 bits, in eval mode, and a batch."""

    def __init__(self, scheme, *, frozen=True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 3)).double()
        self.model = quantize(net, 3, 3, first_last_bits=None, scheme=scheme).eval()
        self.x, self.y = torch.randn(10, 1, 5, 5, dtype=torch.float64), torch.randint(0, 3, (10,))
        calibrate(self.model, self.x / 2)  # ranges that the batch exceeds
        if scheme == "lsq":
            self.model[0].weight_quantizer.scale.data *= 0.8  # so that some weights are clipped
        if frozen:
            freeze_scales(self.model)
        self.data = [(self.x, self.y)]

    def operator(self, **settings):
        return HessianOperator(self.model, F.cross_entropy, self.data, **settings)

    def dense(self):
        """The masked Hessian at the quantized weights, and the fractions of weights and inputs in range."""
        parts, shares = [], []
        for layer in (self.model[0], self.model[3]):
            w, scale = layer.weight.detach(), layer.weight_quantizer.current_scale(layer.weight).detach()
            code = torch.round(w / scale)
            inside = (code >= -4) & (code <= 3)
            parts += [(scale * code.clamp(-4, 3), inside), (layer.bias.detach(), torch.ones(3, dtype=torch.bool))]
            shares.append(inside.double().mean().item())

        def inputs(layer, x):
            """Quantize; the result changes with x where it is not clipped."""
            scale, z = (t.detach() for t in layer.input_quantizer.current_scale())
            code = torch.round(x.detach() / scale) + z
            inside = (code >= 0) & (code <= 7)
            shares.append(inside.double().mean().item())
            return scale * (code.clamp(0, 7) - z) + inside * (x - x.detach())

        sizes, shapes = [t.numel() for t, _ in parts], [t.shape for t, _ in parts]

        leaf = torch.cat([t.flatten() for t, _ in parts]).requires_grad_()
        w, b, v, c = (t.view(shape) for t, shape in zip(leaf.split(sizes), shapes, strict=True))
        out = F.conv2d(inputs(self.model[0], self.x), w, b)
        out = inputs(self.model[3], out.clamp(min=0).flatten(1)) @ v.T + c
        (g,) = torch.autograd.grad(F.cross_entropy(out, self.y), leaf, create_graph=True)
        rows = [torch.autograd.grad(entry, leaf, retain_graph=True)[0] for entry in g]
        mask = torch.cat([inside.flatten() for _, inside in parts]).double()
        return mask[:, None] * torch.stack(rows) * mask, shares


@pytest.mark.parametrize("scheme", SCHEMES)
def test_hessian_is_that_at_the_quantized_weights(scheme):
    case = Case(scheme)
    H = case.operator()
    expected, shares = case.dense()
    clipped = [share < 1 for share in shares]
    assert clipped == [scheme == "lsq", False, True, True]  # of weights, of inputs
    u, v, *_ = vectors = torch.randn(5, H.size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for vector in vectors:
        torch.testing.assert_close(H.times(vector), expected @ vector, rtol=0, atol=1e-12)
    assert float(u @ H.times(v)) == pytest.approx(float(v @ H.times(u)), abs=1e-11)
    assert expected.abs().max() > 0.01
    values = np.linalg.eigvalsh(expected.numpy())[::-1]
    np.testing.assert_allclose(top_eigenvalues(H, k=2).values, values[:2], rtol=1e-6)


def test_recorded_products_are_the_same():
    H = Case("lsq").operator()
    v = torch.randn(H.size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain = H.times(v)
    with H.linearized(max_bytes=10**7) as recording:
        recorded = H.times(v)
    assert (recording.recorded, recording.note) == (1, "")
    torch.testing.assert_close(recorded, plain, rtol=0, atol=1e-13)


def test_learned_scales_have_no_symmetric_second_derivative():
    case = Case("lsq", frozen=False)
    params = list(case.model.parameters())
    g = torch.autograd.grad(F.cross_entropy(case.model(case.x), case.y), params, create_graph=True)
    u, v = ([torch.randn_like(p) for p in params] for _ in range(2))
    Hu, Hv = (torch.autograd.grad(g, params, vector, retain_graph=True) for vector in (u, v))
    assert abs(flat(u) @ flat(Hv) - flat(v) @ flat(Hu)) > 0.1 * flat(Hv).norm()
    for differentiation in ("forward", "reverse"):
        operator = case.operator(differentiation=differentiation)
        with pytest.raises(BsamRuntimeError, match="freeze_scales"):
            operator.times(torch.ones(operator.size, dtype=torch.float64))


@pytest.mark.parametrize(("scheme", "frozen"), [("lsq", True), ("lsq", False), ("minmax", True)])
def test_sharpness_and_landscapes_are_those_of_the_integer_network(scheme, frozen):
    case = Case(scheme, frozen=frozen)
    before = copy.deepcopy(case.model.state_dict())

    def loss_at(step, direction):
        moved = copy.deepcopy(case.model)
        with torch.no_grad():
            for p, d in zip((p for p in moved.parameters() if p.requires_grad), direction, strict=True):
                p += step * d
            return F.cross_entropy(convert(moved)(case.x), case.y).item()

    params = [p for p in case.model.parameters() if p.requires_grad]
    assert len(params) == (4 if frozen or scheme == "minmax" else 8)
    g = torch.autograd.grad(F.cross_entropy(case.model(case.x), case.y), params)
    unit = [t / flat(g).norm() for t in g]
    near = sharpness(case.model, F.cross_entropy, case.data, 0.3, 0.2)
    here, up, down = (loss_at(step, unit) for step in (0.0, 0.3, -0.2))
    assert near.loss == pytest.approx(here, abs=1e-12)
    assert near.max_sharpness == pytest.approx(up - here, abs=1e-12)
    assert near.min_sharpness == pytest.approx(here - down, abs=1e-12)
    assert len({here, up, down}) == 3
    land = landscape(
        case.model, F.cross_entropy, case.data, span=0.4, points=5, dims=1, directions=[Vector(detached(unit))]
    )
    assert land.loss == pytest.approx([loss_at(step, unit) for step in (-0.4, -0.2, 0.0, 0.2, 0.4)], abs=1e-12)
    assert all(torch.equal(t, before[name]) for name, t in case.model.state_dict().items())
