"""Fake quantization compared with numpy, bit for bit, and its gradients with loops over the formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from bsam.lab.quantization.arithmetic import EPS, code_range, fake_quantize, quantize_codes

BITS = [2, 4, 8]


def reference(x, s, z, qmin, qmax):
    """Compute codes and values with numpy, in float32."""
    q = np.clip(np.rint(x / s) + z, np.float32(qmin), np.float32(qmax))
    return q, s * (q - z)


def bits_of(t):
    return t.numpy().view(np.int32)


def samples(shape=(6, 5, 3, 3), spread=3.0, seed=0):
    return (np.random.default_rng(seed).standard_normal(shape) * spread).astype(np.float32)


def halves(s, qmin, qmax):
    """Values on the boundaries between codes and next to them, inside and outside the range."""
    at = (np.arange(qmin - 3, qmax + 4) + np.float32(0.5)) * s
    return np.concatenate([at, np.nextafter(at, np.float32(np.inf)), np.nextafter(at, -np.float32(np.inf))])


@pytest.mark.parametrize(("bits", "signed"), [(2, True), (4, True), (4, False), (8, False)])
@pytest.mark.parametrize("z", [None, 3, -300])
@pytest.mark.parametrize("s", [0.25, 0.0731, 40.0, EPS, 3e7])
def test_per_tensor_equals_numpy_bit_for_bit(bits, signed, z, s):
    qmin, qmax = code_range(bits, signed=signed)
    s, zero = np.float32(s), np.float32(z or 0)
    extremes = np.float32([0.0, -0.0, 1e30, -1e30, np.inf, -np.inf, 1e-40])
    x = np.concatenate([samples().ravel(), halves(s, qmin, qmax), extremes])
    q, expected = reference(x, s, zero, qmin, qmax)
    zero_point = None if z is None else torch.tensor(float(z))
    ours = fake_quantize(torch.tensor(x), torch.tensor(s), zero_point, qmin, qmax)
    if z is None:  # the reference adds 0 and so has no negative zeros
        ours, expected = ours + 0.0, expected + np.float32(0)
    assert np.array_equal(bits_of(ours), expected.view(np.int32))
    codes = quantize_codes(torch.tensor(x), torch.tensor(s), zero_point, qmin, qmax)
    assert np.array_equal(codes.numpy(), q)
    if s < 1:
        assert {qmin, qmax} <= set(codes.tolist())  # both ends saturate


@pytest.mark.parametrize("bits", BITS)
def test_per_channel_equals_numpy_bit_for_bit(bits):
    qmin, qmax = code_range(bits, signed=True)
    x = samples()
    x[2] = 0.0  # a channel without range
    x[3] = 1.7
    s = np.maximum(np.abs(x).max((1, 2, 3), keepdims=True) / np.float32(qmax), np.float32(EPS))
    _, expected = reference(x, s, np.float32(0), qmin, qmax)
    for t in (torch.tensor(x), torch.tensor(x).to(memory_format=torch.channels_last)):
        ours = fake_quantize(t, torch.tensor(s), None, qmin, qmax)
        assert np.array_equal(bits_of(ours.contiguous() + 0.0), (expected + np.float32(0)).view(np.int32))
        assert ours.stride() == t.stride()
    assert not ours[2].any()
    assert torch.allclose(ours[3], torch.tensor(1.7))


def gradients(x, s, z, qmin, qmax, g):
    """Gradients of sum(g * fake_quantize(x)) with respect to x and to a single scale s, element by element."""
    by_x, by_s = np.zeros_like(x), 0.0
    for i in np.ndindex(x.shape):
        v = x[i] / s
        code = round(v) + z  # Python rounds halves to even
        if code < qmin:
            by_s += g[i] * (qmin - z)
        elif code > qmax:
            by_s += g[i] * (qmax - z)
        else:
            by_x[i] = g[i]
            by_s += g[i] * (round(v) - v)
    return by_x, by_s


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("signed", "z", "grad_scale"), [(True, 0, 1.0), (False, 5, 0.125), (True, -6, 1.0)])
def test_gradients_equal_the_formulas(bits, signed, z, grad_scale):
    qmin, qmax = code_range(bits, signed=signed)
    s = 0.7 / qmax
    x, g = samples((4, 30)).astype(np.float64), samples((4, 30), seed=1).astype(np.float64)
    t, scale = torch.tensor(x, requires_grad=True), torch.tensor(s, dtype=torch.float64, requires_grad=True)
    zero_point = torch.tensor(float(z), dtype=torch.float64)
    (torch.tensor(g) * fake_quantize(t, scale, zero_point, qmin, qmax, grad_scale=grad_scale)).sum().backward()
    by_x, by_s = gradients(x, s, z, qmin, qmax, g)
    assert 0 < np.count_nonzero(by_x) < by_x.size
    assert np.array_equal(t.grad.numpy(), by_x)
    assert scale.grad.item() == pytest.approx(grad_scale * by_s, rel=1e-12)


def test_gradients_per_channel_equal_those_of_each_channel():
    x, s = samples((3, 2, 4, 4)).astype(np.float64), np.array([0.1, 0.4, 0.9])
    g = samples(x.shape, seed=1).astype(np.float64)
    t, scale = torch.tensor(x, requires_grad=True), torch.tensor(s.reshape(3, 1, 1, 1), requires_grad=True)
    (torch.tensor(g) * fake_quantize(t, scale, None, -8, 7)).sum().backward()
    for c in range(3):
        by_x, by_s = gradients(x[c], s[c], 0, -8, 7, g[c])
        assert np.array_equal(t.grad[c].numpy(), by_x)
        assert scale.grad[c].item() == pytest.approx(by_s, rel=1e-12)


def test_largest_value_of_a_channel_keeps_its_gradient():
    x = torch.tensor(samples((50, 9)), requires_grad=True)
    scale = x.detach().abs().amax(1, keepdim=True) / 7
    fake_quantize(x, scale, None, -8, 7).sum().backward()
    assert x.grad.eq(1).all()


def test_infinite_values_have_finite_gradients():
    x = torch.tensor([math.inf, -math.inf, 1.0], requires_grad=True)
    scale = torch.tensor(0.5, requires_grad=True)
    fake_quantize(x, scale, None, -8, 7).sum().backward()
    assert x.grad.tolist() == [0, 0, 1]
    assert scale.grad.item() == 7 - 8 + 0


def test_second_derivatives():
    """The first derivative is the sum of w (round(x / s) - x / s) inside the range, and of w q outside."""
    x, weight = torch.tensor([0.21, -0.34, 5.0]).double(), torch.tensor([0.3, 1.2, -0.4]).double().requires_grad_()
    scale = torch.tensor(0.13).double().requires_grad_()
    out = (fake_quantize(x, scale, None, -8, 7) * weight).sum()
    (first,) = torch.autograd.grad(out, scale, create_graph=True)
    by_scale, by_weight = torch.autograd.grad(first, (scale, weight))
    inside = torch.tensor([1.0, 1.0, 0.0])
    torch.testing.assert_close(by_scale, (inside * weight * x / scale**2).sum().detach())
    torch.testing.assert_close(by_weight, torch.stack([2 - x[0] / scale, -3 - x[1] / scale, 7 + 0 * scale]).detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_float32(dtype):
    x = torch.tensor(samples()).to(dtype).requires_grad_()
    scale = torch.tensor(0.0731, requires_grad=True)
    zero_point = torch.tensor(5.0)
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            ours = fake_quantize(x, scale, zero_point, 0, 15)
        expected = fake_quantize(x.detach().float(), scale.detach(), zero_point, 0, 15)
        assert ours.dtype == dtype
        assert torch.equal(ours, expected.to(dtype))
    by_x, by_scale = torch.autograd.grad(ours.sum(), (x, scale))
    full = x.detach().float().requires_grad_()
    expected = torch.autograd.grad(fake_quantize(full, scale, zero_point, 0, 15).sum(), (full, scale))
    assert by_x.dtype == dtype
    assert torch.equal(by_x.float(), expected[0])
    assert torch.allclose(by_scale, expected[1])


@pytest.mark.parametrize(("bits", "codes"), [(2, (-2, 1, 3)), (3, (-4, 3, 7)), (4, (-8, 7, 15)), (8, (-128, 127, 255))])
def test_code_range(bits, codes):
    assert (*code_range(bits, signed=True), code_range(bits, signed=False)[1]) == codes
    assert code_range(bits, signed=False)[0] == 0
