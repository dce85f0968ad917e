"""Sums of integers in floating point are exact."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bsam.lab.quantization.arithmetic import EXACT, Codes, integer_output, sum_dtype
from bsam.lab.quantization.quant_layers import QuantConv2d, QuantLinear


@pytest.mark.parametrize(("weight_bits", "activation_bits"), [(2, 2), (4, 4), (4, 8), (8, 8)])
def test_largest_sum_decides_the_dtype(weight_bits, activation_bits):
    largest = 2 ** (weight_bits - 1) * (2**activation_bits - 1)
    n = (EXACT - 1) // largest  # the largest number of weights in a channel
    assert sum_dtype(torch.empty(1, n), weight_bits, activation_bits) == torch.float32
    assert sum_dtype(torch.empty(1, n + 1), weight_bits, activation_bits) == torch.float64


@pytest.mark.parametrize(("n", "dtype"), [(512, torch.float32), (1500, torch.float64)])
def test_extreme_sums_are_exact(n, dtype):
    """All codes are at the ends of the range, and the sum is odd."""
    weight = torch.full((2, n), -128, dtype=torch.int8)
    weight[1] = 127
    weight[:, 0] = 1
    one = torch.ones(1)
    assert sum_dtype(weight, 8, 8) == dtype
    codes = Codes(weight, torch.ones(2), one, torch.zeros(1), None, 8, 8)
    out = integer_output(QuantLinear(nn.Linear(1, 1)), codes, torch.full((1, n), 300.0, dtype=torch.float64))
    assert out.dtype == torch.float64
    assert out.tolist() == [[255 - 128 * 255 * (n - 1), 255 + 127 * 255 * (n - 1)]]


def test_convolution_equals_integer_arithmetic():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 32, 9, 9, generator=g)
    weight = torch.randint(-8, 8, (16, 32, 3, 3), generator=g, dtype=torch.int8)
    scale, zero_point, bias = torch.rand(16, generator=g) + 0.1, torch.tensor([6.0]), torch.randn(16, generator=g)
    codes = Codes(weight, scale, torch.tensor([0.21]), zero_point, bias, 4, 4)
    q = (torch.round(x / 0.21) + 6).clamp(0, 15).long() - 6
    columns = F.unfold(q.double(), 3, padding=1).long()  # copies, exactly
    sums = torch.einsum("ok,nkl->nol", weight.long().flatten(1), columns).view(3, 16, 9, 9)
    expected = sums.float() * (torch.tensor([0.21]) * scale).view(-1, 1, 1) + bias.view(-1, 1, 1)
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = integer_output(QuantConv2d(nn.Conv2d(32, 16, 3, padding=1)), codes, x)
        assert torch.equal(out, expected)
