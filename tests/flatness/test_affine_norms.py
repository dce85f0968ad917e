import pytest
import torch
from torch import nn

from bsam.flatness.affine_norms import AffineNorms


def used(norm):
    """A norm whose statistics, weights and biases are not those of a new one."""
    torch.manual_seed(0)
    for tensor in (norm.running_mean, norm.running_var, *norm.parameters()):
        with torch.no_grad():
            tensor.copy_(torch.rand_like(tensor) + 0.5)
    return norm.double()


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    ("kind", "shape"), [(nn.BatchNorm1d, (4, 3)), (nn.BatchNorm1d, (4, 3, 5)), (nn.BatchNorm2d, (4, 3, 5, 6)), (nn.BatchNorm3d, (2, 3, 2, 3, 4))]
)
def test_values_and_first_and_second_derivatives_are_torchs(kind, shape, affine):
    norm = used(kind(3, eps=1e-2, affine=affine)).eval()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    variables = [x, *norm.parameters()]

    def derivatives():
        y = norm(x)
        first = torch.autograd.grad((y**3).sum(), variables, create_graph=True)
        return [y, *first, *torch.autograd.grad(sum((g**2).sum() for g in first), variables)]

    expected = derivatives()
    with AffineNorms():
        found = derivatives()
    assert "AddcmulBackward" in str(found[0].grad_fn)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_statistics_of_the_batch_and_mixed_precision_are_left_to_torch():
    norm, x = used(nn.BatchNorm1d(3)).train(), torch.randn(8, 3, dtype=torch.float64)
    before = norm.running_mean.clone()
    with AffineNorms():
        y = norm(x)
    assert torch.allclose(y, (x - x.mean(0)) / (x.var(0, unbiased=False) + norm.eps).sqrt() * norm.weight + norm.bias)
    assert not torch.equal(norm.running_mean, before)
    half, x = nn.BatchNorm2d(3).eval(), torch.randn(2, 3, 4, 4, dtype=torch.bfloat16)
    with AffineNorms():
        assert torch.equal(half(x), nn.functional.batch_norm(x, half.running_mean, half.running_var, half.weight, half.bias, eps=half.eps))
