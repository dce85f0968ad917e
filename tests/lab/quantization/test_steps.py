"""Sharpness-aware steps of quantized networks: what is perturbed, and when statistics change."""

from __future__ import annotations

import copy
import io
import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bsam
from bsam.lab.quantization import calibrate, parameter_groups, quantize
from bsam.lab.quantization.arithmetic import fake_quantize
from bsam.lab.quantization.quantizers import SCHEMES
from helpers import alike, assert_close, detached, flat, same

KEYS = ("scale", "zero_point", "low", "high")
METHODS = {
    "bsam": partial(bsam.BSAM, rho_max=0.1, rho_min=0.1, rho_min_floor=0.05),
    "bsam-released": partial(bsam.BSAM, rho_max=0.1, rho_min=0.1, start_from_min=True),
    "sam": partial(bsam.SAM, rho=0.1),
    "looksam": partial(bsam.LookSAM, k=3, rho=0.1),  # a vector between steps
}


class Case:
    """A quantized network with batch norm, a batch, and a sharpness-aware optimizer."""

    def __init__(self, scheme="lsq", *, method="bsam", calibrated=True, dtype=torch.float64, **groups):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.Flatten(), nn.Linear(24, 3)
        ).to(dtype)
        self.model = quantize(net, scheme=scheme)
        self.x, self.y = torch.randn(12, 2, 6, 6, dtype=dtype), torch.randint(0, 3, (12,))
        if calibrated:
            calibrate(self.model, self.x)
        base = torch.optim.SGD(parameter_groups(self.model, **groups), lr=0.05, momentum=0.9)
        self.optimizer = METHODS[method](base, self.model)

    def loss(self, part=slice(None)):
        return F.cross_entropy(self.model(self.x[part]), self.y[part])

    def grads(self):
        return [p.grad.clone() for p in self.model.parameters()]

    def state(self):
        return {**copy.deepcopy(self.model.state_dict())}

    def statistics(self):
        """The input statistics of the quantizers."""
        return {k: t for k, t in self.state().items() if "input_quantizer" in k and k.rpartition(".")[2] in KEYS}


@pytest.mark.parametrize("perturb", [False, True])
def test_scales_are_perturbed_on_request(perturb):
    case = Case(perturb_scales=perturb)
    weights, scales = (group["params"] for group in case.optimizer.param_groups)
    assert len(scales) == 6
    seen = []

    def closure():
        seen.append((detached(weights), detached(scales)))
        return case.loss()

    case.optimizer.backward(closure)
    (w, s), *perturbed = seen
    assert same(detached(weights), w)
    assert same(detached(scales), s)

    def gradient(w, s):
        for p, value in zip([*weights, *scales], [*w, *s], strict=True):
            p.data.copy_(value)
        return torch.autograd.grad(case.loss(), [*weights, *scales])

    def moved(rho):
        e = [rho * t / flat(g).norm() for t in g]
        s_e = [a + b for a, b in zip(s, e[len(w) :], strict=True)] if perturb else s
        return [a + b for a, b in zip(w, e[: len(w)], strict=True)], s_e

    g = gradient(w, s)  # weights and scales both count in its norm
    expected = [moved(0.1), moved(-0.1)]
    for actual, point in zip(perturbed, expected, strict=True):
        assert_close(actual[0], point[0])
        assert_close(actual[1], point[1], atol=1e-12 if perturb else 0)
    g_max, g_min = (gradient(*point) for point in expected)
    factor = flat(g_max).norm() / flat(g_min).norm()
    assert all(t.abs().sum() > 0 for t in g[len(w) :])  # scales are learned either way
    assert_close(
        [p.grad for p in [*weights, *scales]], [a + b - factor * c for a, b, c in zip(g, g_max, g_min, strict=True)]
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_latent_weights_are_perturbed(scheme):
    """Compare with a step by hand, from the float weights and the formulas of fake quantization."""
    torch.manual_seed(0)
    layer, x, y = nn.Linear(4, 3).double(), torch.randn(8, 4).double(), torch.randint(0, 3, (8,))
    model = quantize(nn.Sequential(layer), first_last_bits=None, scheme=scheme)
    calibrate(model, x)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    s_x, z = (t.detach() for t in model[0].input_quantizer.current_scale())
    s_w = model[0].weight_quantizer.current_scale(weight).detach()
    x_q = s_x * ((torch.round(x / s_x) + z).clamp(0, 15) - z)

    def gradient(w, b):
        """With respect to weight, bias and learned scales, with the straight-through estimator."""
        leaves = [w.clone().requires_grad_(), b.clone().requires_grad_()]
        scale = s_w if scheme == "lsq" else w.abs().amax(1, keepdim=True) / 7
        learned = [t.clone().requires_grad_() for t in (scale, s_x)] if scheme == "lsq" else []
        scales = learned or [scale, s_x]
        inputs = fake_quantize(x, scales[1], z, 0, 15, grad_scale=(4 * 15) ** -0.5)
        assert torch.equal(inputs, x_q)
        out = inputs @ fake_quantize(leaves[0], scales[0], None, -8, 7, grad_scale=(4 * 7) ** -0.5).T + leaves[1]
        return torch.autograd.grad(F.cross_entropy(out, y), [*leaves, *learned])

    g = gradient(weight, bias)
    length = torch.cat([t.flatten() for t in g]).norm()
    g_max = gradient(weight + 0.1 * g[0] / length, bias + 0.1 * g[1] / length)
    base = torch.optim.SGD(parameter_groups(model), lr=0.1)
    optimizer = bsam.SAM(base, model, rho=0.1)
    model[0].input_quantizer.eval()  # keep the ranges of the calibration
    optimizer.step(lambda: F.cross_entropy(model(x), y))
    torch.testing.assert_close(model[0].weight.detach(), weight - 0.1 * g_max[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(model[0].bias.detach(), bias - 0.1 * g_max[1], rtol=0, atol=1e-12)
    if scheme == "lsq":
        scale = model[0].weight_quantizer.scale.detach()
        torch.testing.assert_close(scale, (s_w - 0.1 * g_max[2]).squeeze(1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("calibrated", [True, False])
def test_statistics_change_once_per_step(scheme, calibrated):
    case, other = Case(scheme, calibrated=calibrated), Case(scheme, calibrated=calibrated)
    for _ in range(3):
        other.model.load_state_dict(case.model.state_dict())
        other.loss()  # one forward pass at w
        seen = []

        def closure():
            seen.append({name: t.clone() for name, t in case.model.named_buffers() if "zero_point" not in name})
            return case.loss()

        case.optimizer.backward(closure)
        assert alike(case.statistics(), other.statistics())
        assert len(seen) == 3
        assert alike(seen[1], seen[0])
        assert alike(seen[2], seen[0])
        assert int(case.model[1].num_batches_tracked) == int(other.model[1].num_batches_tracked)
        case.optimizer.step()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_uncalibrated_steps_equal_the_base_at_radius_zero(scheme):
    case, other = Case(scheme, calibrated=False), Case(scheme, calibrated=False)
    optimizer = bsam.SAM(torch.optim.SGD(case.model.parameters(), lr=0.05), case.model, rho=0.0)
    base = torch.optim.SGD(other.model.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.step(case.loss)
        base.zero_grad()
        other.loss().backward()
        base.step()
    assert alike(case.state(), other.state())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("failing", [1, 3])
@pytest.mark.parametrize(("where", "error"), [("forward", KeyboardInterrupt), ("backward", ValueError)])
def test_networks_that_raise_leave_everything_unchanged(scheme, failing, where, error):
    """In the forward or the backward pass; an accumulated direction is kept, and training continues."""
    case, other, calls = Case(scheme, calibrated=False), Case(scheme, calibrated=False), itertools.count(1)

    def fail(*_):
        raise error

    def closure(c, fails):
        if fails and where == "forward":
            with c.model[3].register_forward_pre_hook(fail):  # after a quantized layer and batch norm
                return c.loss()
        loss = c.loss()
        if fails:
            loss.register_hook(fail)
        return loss

    for c in (case, other):
        c.optimizer.backward(c.loss)
    state, grads = copy.deepcopy(case.optimizer.state_dict()), case.grads()
    with pytest.raises(error):
        case.optimizer.backward(lambda: closure(case, next(calls) == failing))
    assert alike(case.state(), other.state())
    assert alike(case.optimizer.state_dict(), state)
    assert same(case.grads(), grads)
    for c in (case, other):
        c.optimizer.backward(c.loss)
        c.optimizer.step()
    assert alike(case.state(), other.state())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("method", METHODS)
def test_running_statistics_equal_a_loop_over_first_passes(scheme, method):
    case = Case(scheme, method=method)
    seen = []

    def watch(_module, args):
        seen.append(args[0].detach())

    norm, quantizers = case.model[1], [case.model[i].input_quantizer for i in (0, 3, 5)]
    for module in (norm, *quantizers):
        module.register_forward_pre_hook(watch)
    expected = case.state()
    for _ in range(4):
        seen.clear()
        case.optimizer.step(case.loss)
        assert len(seen) in (4, 8, 12)  # of one to three passes
        first, of_norm, *others = seen[:4]
        for key, value in (("mean", of_norm.mean((0, 2, 3))), ("var", of_norm.var((0, 2, 3)))):
            expected[f"1.running_{key}"] = 0.9 * expected[f"1.running_{key}"] + 0.1 * value
        expected["1.num_batches_tracked"] += 1
        if scheme == "minmax":
            for i, x in zip((0, 3, 5), (first, *others), strict=True):
                for key, value in (("low", x.min()), ("high", x.max())):
                    name = f"{i}.input_quantizer.{key}"
                    expected[name] = 0.9 * expected[name] + 0.1 * value
        buffers = dict(case.model.named_buffers())
        assert_close([*buffers.values()], [expected[key] for key in buffers])


@pytest.mark.parametrize(
    ("scheme", "method"), [*((scheme, "bsam") for scheme in SCHEMES), ("lsq", "looksam"), ("minmax", "sam")]
)
def test_resumed_training_continues_bit_for_bit(scheme, method):
    case, other = (Case(scheme, method=method, calibrated=False) for _ in range(2))
    for _ in range(2):
        case.optimizer.step(case.loss)
    file = io.BytesIO()
    torch.save([case.model.state_dict(), case.optimizer.state_dict()], file)
    file.seek(0)
    network, optimizer = torch.load(file, weights_only=True)
    other.model.load_state_dict(network)
    other.optimizer.load_state_dict(optimizer)
    for _ in range(2):
        assert torch.equal(case.optimizer.step(case.loss), other.optimizer.step(other.loss))
    assert alike(case.state(), other.state())
    assert other.optimizer.param_groups[-1].get("perturb", scheme == "minmax") is (scheme == "minmax")
