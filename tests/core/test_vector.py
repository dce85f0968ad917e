"""Vector against plain arithmetic on one concatenated tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bsam import BsamError
from bsam.core.tensors import Layout
from bsam.core.vector import PerGroup, Vector, map_scalars

SHAPES = [(3, 4), (5,), (), (2, 1, 3)]


def tensors(seed: int, dtypes=(torch.float64,) * 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape, dtype in zip(SHAPES, dtypes, strict=True)
    ]


def flat(ts) -> Tensor:
    return torch.cat([t.double().flatten() for t in ts])


@pytest.fixture
def three():
    layout = Layout(tensors(0), [0, 1, 1, 0])  # two interleaved groups
    return [Vector(tensors(seed), layout) for seed in range(3)], [flat(tensors(seed)) for seed in range(3)]


def test_linear_combinations(three):
    (u, v, w), (a, b, c) = three
    s = torch.tensor(0.7, dtype=torch.float64)
    cases = [
        (u + v, a + b),
        (u - v, a - b),
        (-u, -a),
        (2 * u, 2 * a),
        (u / 4, a / 4),
        (s * u, s * a),
        (u * s - v / s, a * s - b / s),
        (u - 0.3 * (v - u) + w, a - 0.3 * (b - a) + c),
        (u + u - 2 * u + w, c),
        (3 * (s * (u + v)) - w * 0, 3 * s * (a + b)),
    ]
    for ours, plain in cases:
        torch.testing.assert_close(flat(ours.tensors()), plain, rtol=0, atol=1e-14)
        torch.testing.assert_close(ours.norm(), plain.norm(), rtol=1e-14, atol=0)
        torch.testing.assert_close(ours.dot(v), plain @ b, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(v.dot(ours), plain @ b, rtol=1e-12, atol=1e-14)


def test_reject(three):
    (u, v, w), (a, b, _) = three
    torch.testing.assert_close(flat(u.reject(v).tensors()), a - (a @ b) / (b @ b) * b)
    assert abs(float((u + w).reject(v).dot(v))) < 1e-13
    zero = Vector([torch.zeros_like(t) for t in tensors(0)], u.layout)
    torch.testing.assert_close(flat(u.reject(zero).tensors()), a)


def test_one_factor_per_group(three):
    (u, v, _), (a, b, _) = three
    factors = flat([torch.full(shape, c) for shape, c in zip(SHAPES, [2.0, -3.0, -3.0, 2.0], strict=True)])
    ours = PerGroup([2.0, torch.tensor(-3.0)]) * (u + 0.5 * v)
    torch.testing.assert_close(flat(ours.tensors()), factors * (a + 0.5 * b))
    torch.testing.assert_close(ours.norm(), (factors * (a + 0.5 * b)).norm())
    torch.testing.assert_close((-2 * u + PerGroup([1.0, 1.0]) * v).norm(), (-2 * a + b).norm())
    scaled = PerGroup([2.0, -3.0]) * u
    torch.testing.assert_close(scaled.norm(), (factors * a).norm())
    torch.testing.assert_close(flat((scaled / PerGroup([2.0, -3.0])).tensors()), a)
    assert map_scalars(lambda x, y: x + y, PerGroup([1.0, 2.0]), 3.0) == (4.0, 5.0)


def test_nothing_is_written_unless_scratch(three):
    (u, v, w), _ = three
    (2 * u - v + w).tensors()
    (u - v).norm()
    u.dot(v + w)
    assert all(torch.equal(a, b) for a, b in zip(u.tensors(), tensors(0), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(v.tensors(), tensors(1), strict=True))


def test_a_combination_is_evaluated_in_the_first_scratch_term(three):
    (u, v, _), (a, b, _) = three
    store = tensors(5)
    scratch = Vector(store, u.layout, scratch=True)
    plain = 2 * a - 0.5 * flat(tensors(5)) + b
    torch.testing.assert_close(scratch.norm(), flat(tensors(5)).norm())  # cached until the entries are overwritten
    out = u.layout.join((2 * u - 0.5 * scratch + v).materialize_())
    torch.testing.assert_close(flat(out), plain)
    assert all(o.data_ptr() == s.data_ptr() for o, s in zip(out, store, strict=True))
    torch.testing.assert_close(scratch.norm(), plain.norm())
    fresh = u.layout.join((u + v).materialize_())
    torch.testing.assert_close(flat(fresh), a + b)
    assert all(torch.equal(x, y) for x, y in zip(u.tensors(), tensors(0), strict=True))


def test_kept_memory_holds_intermediate_results_only(three):
    (u, v, _), (a, b, _) = three
    store, kept = tensors(5), tensors(6)
    scratch = Vector(store, u.layout, scratch=True)
    (term,) = scratch.terms
    for target, source in zip(kept, store, strict=True):
        target.copy_(source)
    term.buckets, term.reused = u.layout.split(kept), True  # as Gradients does on the CPU
    total = scratch + u
    total.store_(term)
    torch.testing.assert_close(flat(kept), flat(tensors(5)) + a)
    out = u.layout.join((2 * total + v).materialize_())
    torch.testing.assert_close(flat(out), 2 * (flat(tensors(5)) + a) + b)
    torch.testing.assert_close(flat(kept), flat(tensors(5)) + a)
    torch.testing.assert_close(flat((u + 2 * v).tensors()), a + 2 * b)
    assert all(torch.equal(x, y) for x, y in zip(u.tensors(), tensors(0), strict=True))


@pytest.mark.parametrize("gap", [1.0, 1e-1, 1e-2, 1e-3, 0.0])
def test_the_norm_of_a_difference_keeps_its_digits(gap):
    """Inner products alone would lose them in single precision if the vectors are nearly equal."""
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(100_000, generator=generator)
    v = u + gap * torch.randn(100_000, generator=generator)
    ours = (Vector([u], layout := Layout([u])) - 1.0 * Vector([v], layout)).norm()
    torch.testing.assert_close(ours.double(), (u.double() - v.double()).norm(), rtol=2e-5, atol=0)


def test_mixed_precision_keeps_each_dtype():
    dtypes = (torch.bfloat16, torch.float32, torch.float64, torch.float32)
    u, v = Vector(tensors(0, dtypes)), Vector(tensors(1, dtypes))
    out = (u + torch.tensor(0.25) * v).tensors()
    assert [t.dtype for t in out] == list(dtypes)
    torch.testing.assert_close(
        flat(out), flat(tensors(0, dtypes)) + 0.25 * flat(tensors(1, dtypes)), rtol=1e-2, atol=1e-2
    )
    assert u.norm().dtype == torch.float64
    low = Vector([torch.full((1000,), 0.1, dtype=torch.bfloat16)])
    torch.testing.assert_close(low.norm(), torch.full((1000,), 0.1).bfloat16().float().norm(), rtol=1e-5, atol=0)
    assert low.norm().dtype == torch.float32


def test_complex_entries_count_as_their_real_and_imaginary_parts():
    z, y = torch.tensor([3 + 4j, 1 - 2j]), torch.tensor([1 + 1j, 2 + 0j])
    u, v = Vector([z]), Vector([y])
    torch.testing.assert_close(u.norm(), torch.linalg.vector_norm(z))
    torch.testing.assert_close(u.dot(v), (z.conj() * y).sum().real)


def test_vectors_of_different_parameters_cannot_be_combined():
    with pytest.raises(BsamError, match="parameters"):
        Vector([torch.ones(2)]) + Vector([torch.ones(2), torch.ones(3)])
    with pytest.raises(TypeError):
        Vector([torch.ones(2)]) + 1


def test_norms_of_large_tensors_keep_their_digits():
    """float32 sums of millions of squares would lose three of them."""
    t = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(Vector([t]).norm().double(), t.double().norm(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", ["contiguous", "channels last", "transposed", "sliced"])
def test_long_tensors_on_the_cpu_in_any_order(dtype, order):
    """Norms and inner products have the digits of float32 sums of chunks, and float16 squares do not vanish."""
    t = (torch.randn(512, 64, 6, 6, generator=torch.Generator().manual_seed(0)) * 1e-3).to(dtype)
    orders = {
        "contiguous": t,
        "channels last": t.to(memory_format=torch.channels_last),
        "transposed": t.view(512, -1).t(),
        "sliced": t[:, ::2],
    }
    x = orders[order]
    u, v = Vector([x]), Vector([(x + 1e-3).contiguous()])
    y = (x + 1e-3).double().flatten()
    torch.testing.assert_close(
        u.norm().double(), x.double().norm(), rtol=3e-7 if dtype == torch.float32 else 1e-5, atol=0
    )
    torch.testing.assert_close(u.dot(v).double(), x.double().flatten() @ y, rtol=1e-5, atol=0)
