import copy
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bsam.flatness.sharpness import sharpness


def setting(dtype=torch.float32):
    torch.manual_seed(0)
    first = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5)
    model = nn.Sequential(*first, nn.Flatten(), nn.Linear(4 * 36, 10))
    x, y = torch.randn(50, 1, 8, 8), torch.randint(0, 10, (50,))
    model(x)  # running statistics that are not those of a new network
    return model.to(dtype), x.to(dtype), y


def at(model, data, displacement, mode):
    """Loss and gradient of a displaced copy, by a plain loop over batches, in float64; each counts with its size."""
    model = copy.deepcopy(model).double().eval()
    for norm in (m for m in model.modules() if mode == "train" and isinstance(m, nn.BatchNorm2d)):
        norm.train()
    params = [p for p in model.parameters() if p.requires_grad]
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(params).detach() + displacement, params)
    loss = sum(F.cross_entropy(model(x.double()), y) * len(y) for x, y in data) / sum(len(y) for _, y in data)
    return loss.item(), torch.cat([g.flatten() for g in torch.autograd.grad(loss, params)])


def reference(model, data, rho_max, rho_min, steps=1, mode="eval"):
    """From the equations: loss, MaxS, MinS, BilS and the cosine."""
    loss, g = at(model, data, 0, mode)
    ends = []
    for rho in (rho_max, -rho_min):
        displacement = torch.zeros_like(g)
        for _ in range(steps):
            _, here = at(model, data, displacement, mode)
            displacement = displacement + rho / steps * here / here.norm()
        ends.append(at(model, data, displacement, mode))
    (upper, _), (lower, g_min) = ends
    return loss, upper - loss, loss - lower, upper - lower, float(g @ g_min / (g.norm() * g_min.norm()))


def numbers(result):
    return result.loss, result.max_sharpness, result.min_sharpness, result.bilateral, result.cosine


@pytest.mark.parametrize(
    ("rho_max", "rho_min", "sizes", "dtype", "tolerance"),
    [
        (0.3, 0.1, [50], torch.float64, 1e-12),
        (0.02, 0.5, [7, 30, 13], torch.float64, 1e-12),
        (0.3, 0.1, [7, 30, 13], torch.float32, 3e-6),
    ],
)
def test_equals_a_plain_reference(rho_max, rho_min, sizes, dtype, tolerance):
    model, x, y = setting(dtype)
    result = sharpness(model, F.cross_entropy, list(zip(x.split(sizes), y.split(sizes), strict=True)), rho_max, rho_min)
    expected = reference(model, [(x, y)], rho_max, rho_min)
    assert numbers(result) == pytest.approx(expected, abs=tolerance)
    assert min(expected[1:3]) > 1e-3  # there is something to measure


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_several_steps_equal_a_plain_loop(mode):
    model, x, y = setting(torch.float64)
    model[0].bias.requires_grad_(False)
    model[1].running_mean += 1  # so that the mode matters
    data = list(zip(x.split([20, 13, 17]), y.split([20, 13, 17]), strict=True))
    measured = partial(sharpness, model, F.cross_entropy, data, rho_max=0.6, rho_min=0.4)
    other = measured(mode="train" if mode == "eval" else "eval")
    rises = []
    for steps in (1, 3):
        result = measured(steps=steps, mode=mode)
        assert numbers(result) == pytest.approx(reference(model, data, 0.6, 0.4, steps, mode), abs=1e-11)
        assert (result.average_sharpness, result.average_error) == (None, None)
        rises.append(result.max_sharpness)
    assert rises == sorted(set(rises))
    assert abs(result.loss - other.loss) > 0.05


def test_frozen_and_unreached_parameters_do_not_move():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            twos = (nn.Parameter(torch.tensor([2.0], dtype=torch.float64)) for _ in range(3))
            self.used, self.unused, self.frozen = twos
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return x * self.used * self.frozen

    data = [(torch.ones(4, 1, dtype=torch.float64), torch.zeros(4, 1, dtype=torch.float64))]
    result = sharpness(Two(), F.mse_loss, data, rho_max=0.1, rho_min=0.1)  # L(u) = (2 u)**2 along u alone
    assert result.max_sharpness == pytest.approx(4 * (2.1**2 - 2**2), rel=1e-9)
    assert result.min_sharpness == pytest.approx(4 * (2**2 - 1.9**2), rel=1e-9)
    assert result.cosine == pytest.approx(1.0)


def test_cosine_is_negative_beyond_the_minimum():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.01)
    result = sharpness(model, F.mse_loss, [(torch.ones(1, 1), torch.zeros(1, 1))], rho_min=0.05)
    assert result.cosine == pytest.approx(-1.0)
    assert result.min_sharpness < 0


def test_a_zero_gradient_gives_zeros():
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    result = sharpness(model, F.mse_loss, [(torch.ones(1, 1), torch.zeros(1, 1))])
    assert numbers(result) == (0, 0, 0, 0, 0)


class Bowl(nn.Module):
    """``L = w A w / 2`` in three dimensions, of which one is frozen."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.3, -0.2], dtype=torch.float64))
        self.frozen = nn.Parameter(torch.tensor([1.0], dtype=torch.float64), requires_grad=False)

    def forward(self, A):
        return A @ self.w**2 / 2


def bowl_loss(out, y):
    return out.mean()


def test_random_directions_average_the_rise_on_the_sphere():
    data = [(torch.tensor([[4.0, 1.0]], dtype=torch.float64), torch.zeros(1))]
    result = sharpness(Bowl(), bowl_loss, data, rho_max=0.5, random_directions=400)
    expected = 0.5**2 * (4 + 1) / 4  # E[u A u / 2] rho^2 = rho^2 tr(A) / 2 n; the linear part averages out
    assert abs(result.average_sharpness - expected) < 3.5 * result.average_error
    # the rise is rho (w A u) + rho^2 (u A u) / 2 for u on the circle
    angles = np.linspace(0, 2 * np.pi, 10_000, endpoint=False)
    u = np.stack([np.cos(angles), np.sin(angles)])
    rises = 0.5 * (np.array([0.3 * 4, -0.2]) @ u) + 0.125 * (np.array([4.0, 1.0]) @ u**2)
    assert result.average_error == pytest.approx(rises.std() / 20, rel=0.1)


def test_random_directions_have_a_seed_and_an_error():
    model, x, y = setting()
    measured = partial(sharpness, model, F.cross_entropy, [(x, y)])
    first, again, other = (measured(random_directions=4, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.average_sharpness != other.average_sharpness
    single = measured(random_directions=1)
    assert single.average_sharpness is not None
    assert single.average_error is None  # a single number has no spread
    nothing = measured(rho_max=0.0, random_directions=3)
    assert (nothing.average_sharpness, nothing.average_error) == (0, 0)


def test_micro_batches_do_not_change_the_numbers():
    model, x, y = setting(torch.float64)
    seen = []

    def loss_fn(out, y):
        seen.append((len(y), torch.is_grad_enabled()))
        return F.cross_entropy(out, y)

    small, whole = sharpness(model, loss_fn, [(x, y)], micro_batch=8), sharpness(model, F.cross_entropy, [(x, y)])
    assert max(n for n, has_a_graph in seen if has_a_graph) == 8
    assert small.max_sharpness == pytest.approx(whole.max_sharpness, abs=1e-12)
    assert small.loss == pytest.approx(whole.loss, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cosine_is_at_most_one(dtype):
    model = nn.Linear(7, 3).to(dtype)
    for seed in range(20):
        torch.manual_seed(seed)
        model.reset_parameters()
        data = [(torch.randn(9, 7, dtype=dtype), torch.randint(0, 3, (9,)))]
        assert 0.99 < sharpness(model, F.cross_entropy, data, rho_min=0).cosine <= 1  # of a gradient with itself
    x, y = torch.ones(1, 7, dtype=dtype), torch.zeros(1).long()
    assert np.isnan(sharpness(model, lambda out, y: F.cross_entropy(out, y) * float("nan"), [(x, y)]).cosine)
