"""Attention in eval mode: torch's fast path computes a different function at padded positions."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bsam.flatness import HessianOperator, landscape, sharpness, trace

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


class Padded(nn.Module):
    """Classifies sequences, whose ends are padded with NaN, from the mean over all positions."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, 3)

    def forward(self, x):
        encoded = self.encoder(x.nan_to_num(), src_key_padding_mask=x.isnan().any(-1))
        return self.head(encoded.mean(1))


@pytest.fixture
def padded():
    torch.manual_seed(0)
    model = Padded().eval()
    x, y = torch.randn(16, 6, 8), torch.randint(0, 3, (16,))
    x[::2, 3:] = float("nan")
    return model, x, y


def loss_at(model, x, y, displacement=None):
    """Loss and gradient of a displaced copy; torch does not use the fast path when it builds a graph."""
    model = copy.deepcopy(model)
    params = list(model.parameters())
    if displacement is not None:
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(params).detach() + displacement, params)
    loss = F.cross_entropy(model(x), y)
    return loss.item(), torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, params)])


def test_sharpness_and_landscape_are_those_of_one_function(padded):
    model, x, y = padded
    data = list(zip(x.split(10), y.split(10), strict=True))
    loss, g = loss_at(model, x, y)
    upper, lower = (loss_at(model, x, y, rho * g / g.norm())[0] for rho in (0.2, -0.1))
    with torch.no_grad():
        assert abs(F.cross_entropy(model(x), y).item() - loss) > 0.01  # the fast path is there, and differs
    near = sharpness(model, F.cross_entropy, data, rho_max=0.2, rho_min=0.1)
    assert (near.loss, near.max_sharpness, near.min_sharpness) == pytest.approx(
        (loss, upper - loss, loss - lower), abs=1e-5
    )
    assert landscape(model, F.cross_entropy, data, points=3).loss[1, 1] == pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize("enabled", [True, False])
def test_switch_is_restored_after_an_error(padded, enabled):
    model, x, y = padded

    def failing(out, y):
        assert not torch.backends.mha.get_fastpath_enabled()
        raise ZeroDivisionError

    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        for measure in (sharpness, landscape, lambda *arguments: trace(HessianOperator(*arguments))):
            with pytest.raises(ZeroDivisionError):
                measure(model, failing, [(x, y)])
            assert torch.backends.mha.get_fastpath_enabled() is enabled
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
