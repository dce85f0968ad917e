"""Groups, base optimizers, precision and models of every kind; and how backward and step work together."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bsam
from bsam.core.schedule import top_lr
from helpers import assert_close, detached, flat, same, sgd


def recorded_points(model, optimizer, loss):
    """The weights at which the closure was called in one backward."""
    points = []

    def closure():
        points.append(detached(model.parameters()))
        return loss()

    optimizer.backward(closure)
    return points


def test_each_group_has_its_own_radius(plain):
    first, rest = list(plain.model[0].parameters()), list(plain.model[2:].parameters())
    base = torch.optim.SGD([{"params": first, "rho_max": 0.2, "lr": 0.3}, {"params": rest}], lr=0.1)
    optimizer = bsam.BSAM(base, plain.model, rho_max=0.05, rho_min=0.04, rho_min_floor=0.04)
    assert [g["rho_max"] for g in optimizer.param_groups] == [0.2, 0.05]
    assert [top_lr(g) for g in optimizer.param_groups] == [0.3, 0.1]
    g = torch.autograd.grad(plain.loss(), list(plain.model.parameters()))
    length = flat(g).norm()
    w, at_max, at_min = recorded_points(plain.model, optimizer, plain.loss)
    for i, radius in enumerate([0.2, 0.2, 0.05, 0.05, 0.05, 0.05]):
        torch.testing.assert_close(at_max[i] - w[i], radius * g[i] / length, rtol=1e-9, atol=1e-14)
        torch.testing.assert_close(at_min[i] - w[i], -0.04 * g[i] / length, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize(
    ("cls", "radii"),
    [
        (bsam.BSAM, {"rho_max": 0.2, "rho_min": 0.2, "rho_min_floor": 0.1}),
        (partial(bsam.BSAM, passes=2, start_from_min=True), {}),
        (bsam.GSAM, {"rho": 0.2, "rho_floor": 0.1}),
        (bsam.GAM, {}),
        (bsam.ASAM, {}),
    ],
)
def test_a_group_that_is_not_perturbed(plain, cls, radii):
    """It stays at w in every pass, whatever the radii are called, and takes its step; others move as ever."""
    first, rest = list(plain.model[0].parameters()), list(plain.model[2:].parameters())
    other = plain.clone()
    base = torch.optim.SGD([{"params": first, "perturb": False}, {"params": rest, "perturb": True}], lr=0.1)
    optimizer = cls(base, plain.model, **radii)
    w, *perturbed = recorded_points(plain.model, optimizer, plain.loss)
    assert all(same(point[:2], w[:2]) for point in perturbed)
    _, moved, *_ = recorded_points(other.model, cls(sgd(other.model.parameters()), other.model, **radii), other.loss)
    assert same(perturbed[0][2:], moved[2:])
    assert perturbed
    optimizer.step()
    assert not any(torch.equal(p, before) for p, before in zip(plain.model.parameters(), w, strict=True))
    resumed = cls(sgd([{"params": first}, {"params": rest}]), plain.model, **radii)
    resumed.load_state_dict(optimizer.state_dict())
    assert [group["perturb"] for group in resumed.param_groups] == [False, True]


@pytest.mark.parametrize("value", [0, 1.0, None, "no"])
def test_perturb_is_true_or_false(plain, value):
    base = torch.optim.SGD([{"params": list(plain.model.parameters()), "perturb": value}], lr=0.1)
    with pytest.raises(bsam.BsamError, match="perturb of a parameter group must be True or False, got"):
        bsam.SAM(base, plain.model)


@pytest.mark.parametrize("passes", [2, 3])
def test_groups_of_one_radius_are_one_group(plain, passes):
    other = plain.clone()
    halves = [{"params": plain.model[0].parameters()}, {"params": plain.model[2:].parameters(), "rho_max": 0.05}]
    split = bsam.BSAM(sgd(halves), plain.model, passes=passes)
    whole = bsam.BSAM(sgd(other.model.parameters()), other.model, passes=passes)
    for _ in range(5):
        split.step(plain.loss)
        whole.step(other.loss)
    assert_close(plain.weights(), other.weights(), atol=1e-14)


def test_a_learning_rate_that_is_a_tensor(plain):
    other = plain.clone()
    ours = bsam.BSAM(
        torch.optim.AdamW(plain.model.parameters(), lr=torch.tensor(0.01, dtype=torch.float64)),
        plain.model,
        lr_max=0.02,
    )
    whole = bsam.BSAM(torch.optim.AdamW(other.model.parameters(), lr=0.01), other.model, lr_max=0.02)
    assert isinstance(ours.radii("rho_min"), torch.Tensor)
    for _ in range(3):
        ours.step(plain.loss)
        whole.step(other.loss)
    assert_close(plain.weights(), other.weights(), atol=1e-8)


def test_other_bases(problem):
    for base in (torch.optim.Adam, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adagrad, torch.optim.Adafactor):
        copy = problem.clone()
        optimizer = bsam.BSAM(base(copy.model.parameters(), lr=0.01), copy.model)
        losses = [float(optimizer.step(copy.loss)) for _ in range(15)]
        assert losses[-1] < losses[0], base


@pytest.mark.parametrize("options", [{"nesterov": True}, {"foreach": True}, {"foreach": False}, {"fused": True}])
def test_options_of_the_base_are_its_own(problem, options):
    """A direction d given to the base by hand moves the weights as the wrapped base does."""
    other = problem.clone()
    optimizer = bsam.BSAM(torch.optim.SGD(problem.model.parameters(), lr=0.1, momentum=0.9, **options), problem.model)
    plain = torch.optim.SGD(other.model.parameters(), lr=0.1, momentum=0.9, **options)
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.backward(problem.loss)
        for p, q in zip(problem.model.parameters(), other.model.parameters(), strict=True):
            q.grad = p.grad.clone()
        optimizer.step()
        plain.step()
        assert same(problem.weights(), other.weights())


def test_a_base_that_raises_leaves_the_weights(problem):
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise MemoryError

    optimizer = bsam.BSAM(Failing(problem.model.parameters(), lr=0.1), problem.model, start_from_min=True)
    before = problem.weights()
    with pytest.raises(MemoryError):
        optimizer.step(problem.loss)
    assert same(before, problem.weights())


@pytest.mark.parametrize("where", ["inside the closure", "around the step"])
def test_bf16_autocast(where):
    """Around the step, autocast keeps casts of the weights between passes: they must not be those of other points."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    x, y = torch.randn(32, 8), torch.randint(0, 3, (32,))
    optimizer = bsam.BSAM(sgd(model.parameters()), model, rho_max=2.0, rho_min=2.0)
    seen = []

    def closure():
        if where == "inside the closure":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(x)
                seen.append(out.detach().clone())
                return F.cross_entropy(out, y)
        out = model(x)
        seen.append(out.detach().clone())
        return F.cross_entropy(out, y)

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where == "around the step"):
        before = model(x).detach()
        optimizer.backward(closure)
        after = model(x).detach()
    assert seen[0].dtype == torch.bfloat16
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])
    assert torch.equal(before, after)
    assert model[0].weight.grad.dtype == torch.float32


def test_bf16_parameters():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).bfloat16()
    x, y = torch.randn(32, 8).bfloat16(), torch.randint(0, 3, (32,))
    optimizer = bsam.BSAM(sgd(model.parameters()), model, rho_max=1.0, rho_min=1.0)

    def loss():
        return F.cross_entropy(model(x), y)

    w, at_max, _ = recorded_points(model, optimizer, loss)
    moved = torch.cat([(a.float() - b.float()).flatten() for a, b in zip(at_max, w, strict=True)])
    assert float(moved.norm()) == pytest.approx(1.0, rel=0.02)
    assert model[0].weight.grad.dtype == torch.bfloat16
    losses = [float(optimizer.step(loss)) for _ in range(20)]
    assert losses[-1] < losses[0]


def test_complex_parameters():
    """A complex parameter is the pair of its real and imaginary parts."""
    torch.manual_seed(1)
    start, target = torch.randn(6, dtype=torch.complex128), torch.randn(6, dtype=torch.complex128)
    z = nn.Parameter(start.clone())
    xy = nn.Parameter(torch.view_as_real(start).clone())

    def steps(parameter, loss):
        optimizer = bsam.BSAM(torch.optim.SGD([parameter], lr=1e-3, momentum=0.9), None, rho_max=0.3, rho_min=0.2)
        for _ in range(10):
            optimizer.step(loss)
        return parameter.detach()

    complex_end = steps(z, lambda: ((z - target).abs() ** 4).sum())
    real_end = steps(xy, lambda: ((torch.view_as_complex(xy) - target).abs() ** 4).sum())
    torch.testing.assert_close(torch.view_as_real(complex_end), real_end, rtol=0, atol=1e-12)


def test_a_closure_that_runs_backward_under_a_scaler_scales_by_itself(problem):
    other = problem.clone()
    ours, whole = (bsam.BSAM(sgd(p.model.parameters()), p.model) for p in (problem, other))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)

    def closure():
        loss = problem.loss()
        scaler.scale(loss).backward()
        return loss

    for _ in range(3):
        ours.zero_grad()
        ours.backward(closure, scaler=scaler)
        scaler.step(ours)
        scaler.update()
        whole.step(other.loss)
    assert same(problem.weights(), other.weights())


def test_a_disabled_scaler_is_none(problem):
    other = problem.clone()
    ours, whole = (bsam.SAM(sgd(p.model.parameters()), p.model) for p in (problem, other))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    ours.backward(problem.loss, scaler=scaler)
    scaler.step(ours)
    scaler.update()
    whole.step(other.loss)
    assert same(problem.weights(), other.weights())


class LowRank(nn.Module):
    """As PEFT's LoRA layers: a frozen layer and a trainable product of two thin matrices beside it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, layer.in_features, dtype=torch.float64) / 2)
        self.b = nn.Parameter(torch.randn(layer.out_features, 2, dtype=torch.float64) / 2)

    def forward(self, x):
        return self.layer(x) + x @ self.a.T @ self.b.T


def bsam_by_hand(params, loss, rho):
    """Algorithm 1 with plain gradients; the direction."""

    def moved(by):
        with torch.no_grad():
            for p, e in zip(params, by, strict=True):
                p.add_(e)

    g = torch.autograd.grad(loss(), params)
    length = flat(g).norm()
    start, found = detached(params), []
    for sign in (1, -1):
        moved([sign * rho * t / length for t in g])
        found.append(torch.autograd.grad(loss(), params))
        with torch.no_grad():
            for p, w in zip(params, start, strict=True):
                p.copy_(w)
    up, down = found
    share = flat(up).norm() / flat(down).norm()
    return [a + b - share * c for a, b, c in zip(g, up, down, strict=True)]


def adapted(model):
    model.requires_grad_(False)
    for i in (0, 2, 4):
        model[i] = LowRank(model[i])
    return model


def tied(model):
    model[0] = nn.Linear(6, 6).double()
    model[2] = model[0]
    model[4] = nn.Linear(6, 3).double()
    return model


class Checkpointed(nn.Module):
    def __init__(self, model, reentrant):
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, x):
        x = x.requires_grad_()  # the reentrant kind needs an input with a gradient
        for layer in self.model:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


MODELS = {
    "adapters": adapted,
    "tied": tied,
    "checkpointed": lambda model: Checkpointed(model, False),
    "checkpointed, reentrant": lambda model: Checkpointed(model, True),
}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_models_of_every_make_get_the_direction_of_the_algorithm(plain, name):
    """Against plain gradients of the model without checkpoints and compiler, which has the same parameters."""
    model = MODELS[name](plain.model)
    x, y = plain.x.clone(), plain.y

    def reference_loss():
        return F.cross_entropy(plain.model(x), y)

    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = bsam.BSAM(sgd(params), model, rho_max=0.1, rho_min=0.1)
    frozen = [p.detach().clone() for p in model.parameters() if not p.requires_grad]
    for _ in range(3):
        expected = bsam_by_hand(params, reference_loss, 0.1)
        optimizer.zero_grad()
        optimizer.backward(lambda: F.cross_entropy(model(x.clone()), y))
        for p, d in zip(params, expected, strict=True):
            torch.testing.assert_close(p.grad, d, rtol=1e-9, atol=1e-13)
        optimizer.step()
    assert same(frozen, [p.detach() for p in model.parameters() if not p.requires_grad])
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_a_compiled_model(problem):
    other = problem.clone()
    compiled = torch.compile(problem.model, backend="aot_eager")
    ours = bsam.BSAM(sgd(compiled.parameters()), compiled)
    whole = bsam.BSAM(sgd(other.model.parameters()), other.model)
    for _ in range(4):
        ours.step(lambda: F.cross_entropy(compiled(problem.x), problem.y))
        whole.step(other.loss)
    assert_close(problem.weights() + problem.buffers(), other.weights() + other.buffers(), atol=1e-12)


def test_a_step_under_no_grad(problem):
    other = problem.clone()
    ours, whole = (bsam.BSAM(sgd(p.model.parameters()), p.model) for p in (problem, other))
    with torch.no_grad():
        ours.step(problem.loss)
    whole.step(other.loss)
    assert same(problem.weights(), other.weights())


def test_a_parameter_reached_in_the_first_pass_only_keeps_its_part(plain):
    plain.model.extra = nn.Linear(6, 3).double()
    extra = plain.model.extra
    optimizer = bsam.BSAM(sgd(plain.model.parameters()), plain.model)
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        out = plain.model[:5](plain.x)
        return F.cross_entropy(out + extra(plain.x) if calls == 1 else out, plain.y)

    optimizer.backward(closure)
    assert extra.weight.grad.abs().sum() > 0


def test_a_parameter_that_a_later_call_misses_keeps_what_it_has(plain):
    extra = plain.model.extra = nn.Linear(6, 3).double()
    optimizer = bsam.SAM(sgd(plain.model.parameters()), plain.model)
    optimizer.backward(lambda: F.cross_entropy(plain.model[:5](plain.x) + extra(plain.x), plain.y))
    first = extra.weight.grad.clone()
    optimizer.backward(lambda: F.cross_entropy(plain.model[:5](plain.x), plain.y))
    assert torch.equal(extra.weight.grad, first)


def test_an_interrupt_anywhere_leaves_weights_and_a_working_optimizer(problem):
    """Ctrl-C at every line that a backward runs in this library, one after the other."""
    optimizer = bsam.BSAM(sgd(problem.model.parameters()), problem.model)
    before = problem.weights()
    folder = str(Path(bsam.__file__).parent)
    line = at = 0

    def trace(frame, event, arg):
        nonlocal line
        if not frame.f_code.co_filename.startswith(folder) or frame.f_code.co_name == "__exit__":
            return None  # of the exit only what it calls: its own lines take no time
        if event == "line":
            line += 1
            if line == at:
                raise KeyboardInterrupt
        return trace

    finished = False
    while not finished:
        at, line = at + 7, 0  # every seventh, to save time: the loops shift it against the lines
        sys.settrace(trace)
        try:
            optimizer.backward(problem.loss)
            finished = True
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert same(before, problem.weights()), at
        optimizer.zero_grad()
        optimizer.backward(problem.loss)
        optimizer.zero_grad()
    assert at > 300
