import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bsam
from bsam.flatness.sharpness import sharpness


def setting(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(4 * 36, 10)
    )
    x, y = torch.randn(50, 1, 8, 8), torch.randint(0, 10, (50,))
    model(x)  # running statistics that are not those of a new network
    return model.to(dtype), x.to(dtype), y


def reference(model, x, y, rho_max, rho_min):
    """From the equations, in float64 on copies, with the whole set as one batch."""
    model = copy.deepcopy(model).double().eval()
    x = x.double()

    def loss_and_gradient(net):
        loss = F.cross_entropy(net(x), y)
        return loss.item(), torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])

    def moved(by):
        net = copy.deepcopy(model)
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(net.parameters()).detach() + by, net.parameters())
        return net

    loss, g = loss_and_gradient(model)
    upper, _ = loss_and_gradient(moved(rho_max * g / g.norm()))
    lower, g_min = loss_and_gradient(moved(-rho_min * g / g.norm()))
    return loss, upper - loss, loss - lower, upper - lower, float(g @ g_min / (g.norm() * g_min.norm()))


@pytest.mark.parametrize(("rho_max", "rho_min"), [(0.05, 0.05), (0.3, 0.1), (0.02, 0.5)])
@pytest.mark.parametrize("sizes", [[50], [7, 30, 13], [1] * 50])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-6)])
def test_equals_a_plain_reference_whatever_the_batches(rho_max, rho_min, sizes, dtype, tolerance):
    model, x, y = setting(dtype)
    found = sharpness(model, F.cross_entropy, list(zip(x.split(sizes), y.split(sizes), strict=True)), rho_max, rho_min)
    expected = reference(model, x, y, rho_max, rho_min)
    actual = (found.loss, found.max_sharpness, found.min_sharpness, found.bilateral, found.cosine)
    assert actual == pytest.approx(expected, abs=tolerance)
    assert expected[1] > 1e-3  # there is something to measure
    assert expected[2] > 1e-3


def state(model):
    return (
        [p.detach().clone() for p in model.parameters()],
        [b.clone() for b in model.buffers()],
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        [m.training for m in model.modules()],
        [p.requires_grad for p in model.parameters()],
    )


def same(a, b):
    tensors = all(
        (s is None and t is None) or torch.equal(s, t)
        for left, right in zip(a[:3], b[:3], strict=True)
        for s, t in zip(left, right, strict=True)
    )
    return tensors and a[3:] == b[3:]


class Stop(Exception):
    pass


def failing(after):
    calls = []

    def loss_fn(logits, y):
        calls.append(1)
        if len(calls) > after:
            raise Stop
        return F.cross_entropy(logits, y)

    return loss_fn


@pytest.mark.parametrize("after", [0, 1, 2, 3, 4, 5, None])  # two batches, walked three times
def test_leaves_no_trace_also_when_it_fails(after):
    model, x, y = setting()
    F.cross_entropy(model(x), y).backward()  # gradients that belong to the user
    model[5].bias.grad = None
    model[0].bias.requires_grad_(False)
    model[1].eval()
    before, noise = state(model), torch.random.get_rng_state()
    data = list(zip(x.split(25), y.split(25), strict=True))
    if after is None:
        sharpness(model, F.cross_entropy, data)
    else:
        with pytest.raises(Stop):
            sharpness(model, failing(after), data)
    assert same(state(model), before)
    assert torch.equal(torch.random.get_rng_state(), noise)


def test_works_inside_no_grad():
    model, x, y = setting()
    with torch.no_grad():
        inside = sharpness(model, F.cross_entropy, [(x, y)])
    assert inside == sharpness(model, F.cross_entropy, [(x, y)])


def test_frozen_and_unreached_parameters_do_not_move():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused, self.frozen = (
                nn.Parameter(torch.tensor([2.0], dtype=torch.float64)) for _ in range(3)
            )
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return x * self.used * self.frozen

    data = [(torch.ones(4, 1, dtype=torch.float64), torch.zeros(4, 1, dtype=torch.float64))]
    found = sharpness(Two(), F.mse_loss, data, rho_max=0.1, rho_min=0.1)  # L(u) = (2 u)**2 along u alone
    assert found.max_sharpness == pytest.approx(4 * (2.1**2 - 2**2), rel=1e-9)
    assert found.min_sharpness == pytest.approx(4 * (2**2 - 1.9**2), rel=1e-9)
    assert found.cosine == pytest.approx(1.0)


def test_beyond_the_minimum_the_gradients_oppose_each_other():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.01)
    found = sharpness(model, F.mse_loss, [(torch.ones(1, 1), torch.zeros(1, 1))], rho_min=0.05)
    assert found.cosine == pytest.approx(-1.0)
    assert found.min_sharpness < 0


def test_a_zero_gradient_gives_zeros():
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    found = sharpness(model, F.mse_loss, [(torch.ones(1, 1), torch.zeros(1, 1))])
    assert (found.loss, found.max_sharpness, found.min_sharpness, found.bilateral, found.cosine) == (0, 0, 0, 0, 0)


def loss_gradient_and_flat(model, data, mode="eval"):
    """Of a copy, by a plain loop over batches; each counts with its size."""
    model = copy.deepcopy(model).eval()
    for module in model.modules():
        if mode == "train" and isinstance(module, nn.BatchNorm2d):
            module.train()
    params = [p for p in model.parameters() if p.requires_grad]
    loss = sum(F.cross_entropy(model(x), y) * len(y) for x, y in data) / sum(len(y) for _, y in data)
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, params)])
    return loss.item(), gradient


def displaced(model, by):
    model = copy.deepcopy(model)
    params = [p for p in model.parameters() if p.requires_grad]
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(params).detach() + by, params)
    return model


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_several_steps_of_ascent_equal_a_plain_loop(steps, mode):
    model, x, y = setting(torch.float64)
    model[0].bias.requires_grad_(False)
    data = list(zip(x.split([20, 13, 17]), y.split([20, 13, 17]), strict=True))
    loss, g = loss_gradient_and_flat(model, data, mode)
    ends = []
    for rho in (0.6, -0.4):
        walked = torch.zeros_like(g)
        for _ in range(steps):
            _, here = loss_gradient_and_flat(displaced(model, walked), data, mode)
            walked = walked + rho / steps * here / here.norm()
        ends.append(loss_gradient_and_flat(displaced(model, walked), data, mode))
    (upper, _), (lower, g_min) = ends
    found = sharpness(model, F.cross_entropy, data, rho_max=0.6, rho_min=0.4, steps=steps, mode=mode)
    actual = (found.loss, found.max_sharpness, found.min_sharpness, found.bilateral, found.cosine)
    assert actual == pytest.approx(
        (loss, upper - loss, loss - lower, upper - lower, float(g @ g_min / (g.norm() * g_min.norm()))), abs=1e-11
    )
    assert (found.average_sharpness, found.average_error) == (None, None)


def test_more_steps_climb_higher():
    model, x, y = setting(torch.float64)
    rises = [sharpness(model, F.cross_entropy, [(x, y)], rho_max=1.0, steps=steps).max_sharpness for steps in (1, 2, 8)]
    assert rises[0] < rises[1] < rises[2]


def test_the_mode_matters():
    model, x, y = setting(torch.float64)
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean += 1
    assert (
        abs(
            sharpness(model, F.cross_entropy, [(x, y)]).loss
            - sharpness(model, F.cross_entropy, [(x, y)], mode="train").loss
        )
        > 0.05
    )


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
    for seed in range(4):
        found = sharpness(Bowl(), bowl_loss, data, rho_max=0.5, random_directions=400, seed=seed)
        expected = 0.5**2 * (4 + 1) / 4  # E[u A u / 2] rho^2 = rho^2 tr(A) / 2 n; the linear part averages out
        assert abs(found.average_sharpness - expected) < 3.5 * found.average_error
        # the rise is rho (w A u) + rho^2 (u A u) / 2 for u on the circle
        angles = np.linspace(0, 2 * np.pi, 10_000, endpoint=False)
        u = np.stack([np.cos(angles), np.sin(angles)])
        rises = 0.5 * (np.array([0.3 * 4, -0.2]) @ u) + 0.125 * (np.array([4.0, 1.0]) @ u**2)
        assert found.average_error == pytest.approx(rises.std() / 20, rel=0.1)


def test_random_directions_have_a_seed_and_an_error():
    model, x, y = setting()
    first, again, other = (
        sharpness(model, F.cross_entropy, [(x, y)], random_directions=4, seed=seed) for seed in (0, 0, 1)
    )
    assert first == again
    assert first.average_sharpness != other.average_sharpness
    one = sharpness(model, F.cross_entropy, [(x, y)], random_directions=1)
    assert one.average_sharpness is not None
    assert one.average_error is None  # of one number there is no spread
    nothing = sharpness(model, F.cross_entropy, [(x, y)], rho_max=0.0, random_directions=3)
    assert (nothing.average_sharpness, nothing.average_error) == (0, 0)


def test_micro_batches_change_the_memory_and_not_the_numbers():
    model, x, y = setting(torch.float64)
    seen = []

    def loss_fn(out, y):
        seen.append((len(y), torch.is_grad_enabled()))
        return F.cross_entropy(out, y)

    small, whole = sharpness(model, loss_fn, [(x, y)], micro_batch=8), sharpness(model, F.cross_entropy, [(x, y)])
    assert {n for n, has_a_graph in seen if has_a_graph} == {8, 2}
    assert small.max_sharpness == pytest.approx(whole.max_sharpness, abs=1e-12)
    assert small.loss == pytest.approx(whole.loss, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cosine_is_one_at_most(dtype):
    model = nn.Linear(7, 3).to(dtype)
    for seed in range(40):
        torch.manual_seed(seed)
        model.reset_parameters()
        data = [(torch.randn(9, 7, dtype=dtype), torch.randint(0, 3, (9,)))]
        assert 0.99 < sharpness(model, F.cross_entropy, data, rho_min=0).cosine <= 1  # of a gradient with itself
    x, y = torch.ones(1, 7, dtype=dtype), torch.zeros(1).long()
    assert np.isnan(sharpness(model, lambda out, y: F.cross_entropy(out, y) * float("nan"), [(x, y)]).cosine)


def test_refusals():
    model, x, y = setting()
    with pytest.raises(bsam.BsamError, match="iterated more than once"):
        sharpness(model, F.cross_entropy, iter([(x, y)]))
    with pytest.raises(bsam.BsamError, match="empty"):
        sharpness(model, F.cross_entropy, [])
    with pytest.raises(bsam.BsamError, match="rho_min"):
        sharpness(model, F.cross_entropy, [(x, y)], rho_min=-1.0)
    with pytest.raises(bsam.BsamError, match="rho_max"):
        sharpness(model, F.cross_entropy, [(x, y)], rho_max=float("nan"))
    with pytest.raises(bsam.BsamError, match="no trainable parameter"):
        sharpness(model.requires_grad_(False), F.cross_entropy, [(x, y)])


def test_refusals_of_settings_and_losses():
    model, x, y = setting()
    data = [(x, y)]
    for arguments, message in (
        ({"steps": 0}, "steps must be"),
        ({"random_directions": -1}, "random_directions must be"),
        ({"random_directions": 1, "seed": -1}, "seed must be"),
        ({"mode": "both"}, "mode must be"),
        ({"mode": "train", "micro_batch": 4}, "leave one of them out"),
    ):
        with pytest.raises(bsam.BsamError, match=message):
            sharpness(model, F.cross_entropy, data, **arguments)
    with pytest.raises(bsam.BsamError, match=r"a 0-dim tensor; it gave the shape \(50,\)"):
        sharpness(model, lambda out, y: F.cross_entropy(out, y, reduction="none"), data)

    class Once:
        walks = 0

        def __iter__(self):
            self.walks += 1
            return iter(data if self.walks == 1 else [])

    with pytest.raises(bsam.BsamError, match="50 samples in the first pass and nothing in a later one: pass a list"):
        sharpness(model, F.cross_entropy, Once())
