"""The engine around a method: groups, schedulers, precision, parameters of every kind, and what is refused."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import functional as F

import bsam
from bsam.core.optimizer import SharpnessAware
from bsam.core.schedule import top_lr
from bsam.core.vector import Vector
from bsam.core.weights import Weights


def sgd(parameters, lr=0.1):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def same(a, b):
    return len(a) == len(b) and all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def recorded_points(model, optimizer, loss):
    """The weights at which the closure was called in one backward."""
    points = []

    def closure():
        points.append([p.detach().clone() for p in model.parameters()])
        return loss()

    optimizer.backward(closure)
    return points


# Groups and schedules


def test_each_group_has_its_own_radius(plain):
    first, rest = list(plain.model[0].parameters()), list(plain.model[2:].parameters())
    base = torch.optim.SGD([{"params": first, "rho_max": 0.2, "lr": 0.3}, {"params": rest}], lr=0.1)
    optimizer = bsam.BSAM(base, plain.model, rho_max=0.05, rho_min=0.04, rho_min_floor=0.04)
    assert [g["rho_max"] for g in optimizer.param_groups] == [0.2, 0.05]
    assert [top_lr(g) for g in optimizer.param_groups] == [0.3, 0.1]
    g = torch.autograd.grad(plain.loss(), list(plain.model.parameters()))
    length = torch.cat([t.flatten() for t in g]).norm()
    w, at_max, at_min = recorded_points(plain.model, optimizer, plain.loss)
    for i, radius in enumerate([0.2, 0.2, 0.05, 0.05, 0.05, 0.05]):
        torch.testing.assert_close(at_max[i] - w[i], radius * g[i] / length, rtol=1e-9, atol=1e-14)
        torch.testing.assert_close(at_min[i] - w[i], -0.04 * g[i] / length, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("passes", [2, 3])
def test_groups_of_one_radius_are_one_group(plain, passes):
    other = plain.clone()
    halves = [{"params": plain.model[0].parameters()}, {"params": plain.model[2:].parameters(), "rho_max": 0.05}]
    split = bsam.BSAM(sgd(halves), plain.model, passes=passes)
    whole = bsam.BSAM(sgd(other.model.parameters()), other.model, passes=passes)
    for _ in range(5):
        split.step(plain.loss)
        whole.step(other.loss)
    for a, b in zip(plain.weights(), other.weights(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


def test_add_param_group(plain):
    head = list(plain.model[4].parameters())
    for p in head:
        p.requires_grad_(False)
    optimizer = bsam.BSAM(sgd([p for p in plain.model.parameters() if p.requires_grad]), plain.model)
    optimizer.step(plain.loss)
    for p in head:
        p.requires_grad_(True)
    with pytest.raises(bsam.BsamError, match="rho_max"):
        optimizer.add_param_group({"params": head, "rho_max": -1.0})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": head, "rho_max": 0.2, "lr": 0.01})
    assert optimizer.param_groups[1]["rho_max"] == 0.2
    assert top_lr(optimizer.param_groups[1]) == 0.01
    assert optimizer.param_groups[1]["steps_taken"] == 1
    before = [p.detach().clone() for p in head]
    optimizer.step(plain.loss)
    assert not same(before, [p.detach() for p in head])
    assert optimizer.param_groups is optimizer.base.param_groups


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
    for a, b in zip(plain.weights(), other.weights(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-8)


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


# Precision


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


@pytest.mark.parametrize(
    "closure", [lambda m, x: (x @ m.mH).abs().pow(2).mean(), lambda m, x: (m.conj() * x[:1].mT).abs().pow(2).sum()]
)
def test_gradients_that_autograd_left_conjugated(closure):
    torch.manual_seed(0)
    m, x = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128)), torch.randn(3, 4, dtype=torch.complex128)
    optimizer = bsam.SAM(torch.optim.SGD([m], lr=0.01), None, rho=0.1)
    (g,) = torch.autograd.grad(closure(m, x), [m])
    moved = (m + 0.1 * g / torch.linalg.vector_norm(g)).detach().requires_grad_()
    (expected,) = torch.autograd.grad(closure(moved, x), [moved])
    optimizer.backward(lambda: closure(m, x))
    torch.testing.assert_close(m.grad, expected.resolve_conj(), rtol=1e-10, atol=1e-12)


# Models


def test_tied_parameters(plain):
    plain.model[0] = nn.Linear(6, 6).double()
    plain.model.insert(1, plain.model[0])  # the same layer twice
    plain.model[3] = nn.Linear(6, 8).double()
    optimizer = bsam.SAM(sgd(plain.model.parameters()), plain.model, rho=0.1)
    g = torch.autograd.grad(plain.loss(), list(plain.model.parameters()))
    w, at = recorded_points(plain.model, optimizer, plain.loss)
    length = torch.cat([t.flatten() for t in g]).norm()
    for a, b, t in zip(w, at, g, strict=True):
        torch.testing.assert_close(b - a, 0.1 * t / length, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_of_any_momentum_moves_once_a_step(problem, momentum):
    problem.model[1].momentum = momentum
    expected = problem.clone()
    optimizer = bsam.BSAM(sgd(problem.model.parameters(), lr=0.0), problem.model)
    for _ in range(3):
        optimizer.step(problem.loss)
        expected.loss()
    assert same(problem.buffers(), expected.buffers())
    assert problem.model[1].momentum == momentum


def test_sync_batch_norm_is_found(problem):
    """Its kernels need a GPU; its flag, which is all that is toggled, does not."""
    problem.model = nn.SyncBatchNorm.convert_sync_batchnorm(problem.model)
    flags = []

    def closure():
        flags.append(problem.model[1].track_running_stats)
        return (problem.model[0](problem.x) ** 2).mean()

    optimizer = bsam.BSAM(sgd(problem.model.parameters()), problem.model)
    optimizer.backward(closure)
    assert isinstance(problem.model[1], nn.SyncBatchNorm)
    assert flags == [True, False, False]
    assert problem.model[1].track_running_stats is True


def test_batch_norm_without_statistics_and_in_eval_mode_is_left_alone(problem):
    problem.model[1] = nn.BatchNorm1d(12, track_running_stats=False).double()
    bsam.BSAM(sgd(problem.model.parameters()), problem.model).backward(problem.loss)
    assert problem.model[1].track_running_stats is False

    problem.model[1] = nn.BatchNorm1d(12).double().eval()
    outputs = []
    problem.model[1].register_forward_hook(lambda module, args, out: outputs.append((args[0].detach(), out.detach())))
    bsam.BSAM(sgd(problem.model.parameters()), problem.model).backward(problem.loss)
    for given, out in outputs:  # mean 0, variance 1: the running statistics as they began
        affine = problem.model[1]
        assert (
            not torch.allclose(out.mean(0), torch.zeros(12, dtype=torch.float64), atol=1e-3)
            or given.mean(0).abs().max() < 1e-3
        )
    assert int(affine.num_batches_tracked) == 0


def test_a_compiled_model(problem):
    other = problem.clone()
    compiled = torch.compile(problem.model, backend="aot_eager")
    ours = bsam.BSAM(sgd(compiled.parameters()), compiled)
    whole = bsam.BSAM(sgd(other.model.parameters()), other.model)
    for _ in range(4):
        ours.step(lambda: F.cross_entropy(compiled(problem.x), problem.y))
        whole.step(other.loss)
    for a, b in zip(problem.weights() + problem.buffers(), other.weights() + other.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_each_micro_batch_frees_its_graph_before_the_next_is_built(plain):
    alive: list[weakref.ref] = []
    most = 0

    def micro_batches():
        nonlocal most
        for x, y in zip(plain.x.chunk(4), plain.y.chunk(4), strict=True):
            hidden = plain.model[:2](x)
            alive.append(weakref.ref(hidden))
            most = max(most, sum(r() is not None for r in alive))
            loss = F.cross_entropy(plain.model[2:](hidden), y)
            del hidden
            yield loss
            gc.collect()

    bsam.SAM(sgd(plain.model.parameters()), plain.model).backward(micro_batches)
    assert len(alive) == 8
    assert most == 1


def layouts() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "channels last": torch.randn(4, 3, 3, 3, dtype=torch.float64).to(memory_format=torch.channels_last),
        "transposed": torch.randn(6, 5, dtype=torch.float64).t(),
        "sliced": torch.randn(5, 8, dtype=torch.float64)[:, ::2],
        "empty": torch.randn(0, 3, dtype=torch.float64),
        "0-dim": torch.randn((), dtype=torch.float64),
    }


@pytest.mark.parametrize("passes", [2, 3])
@pytest.mark.parametrize("layout", list(layouts()))
def test_parameters_of_any_layout(layout, passes):
    """Laid out oddly or in order, a parameter goes the same way; and a gradient may be laid out in yet another way."""
    ends = []
    for order in (lambda t: t, lambda t: t.contiguous()):
        p, q = nn.Parameter(order(layouts()[layout])), nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer = bsam.BSAM(
            torch.optim.SGD([p, q], lr=0.1, momentum=0.9), None, rho_max=0.3, rho_min=0.2, passes=passes
        )

        def closure():
            loss = ((p**4).sum() + (p.sum() * q).pow(2).sum()) / 100
            loss.backward()
            if p.dim() == 2 and p.grad.numel():
                p.grad = p.grad.t().contiguous().t()  # as a hook or a kernel may leave it
            return loss

        for _ in range(4):
            optimizer.step(closure)
        ends.append([p.detach().clone(), q.detach().clone()])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_the_memory_format_may_change_between_steps():
    torch.manual_seed(0)
    model, x = nn.Conv2d(3, 4, 3).double(), torch.randn(2, 3, 5, 5, dtype=torch.float64)
    optimizer = bsam.BSAM(sgd(model.parameters()), model)
    optimizer.step(lambda: model(x).pow(2).mean())
    model.to(memory_format=torch.channels_last)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    optimizer.backward(lambda: model(x).pow(2).mean())
    assert same(before, [p.detach() for p in model.parameters()])
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


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


def test_parameters_may_be_cast_between_steps(problem):
    optimizer = bsam.SAM(torch.optim.SGD(problem.model.parameters(), lr=0.1), problem.model)
    optimizer.step(problem.loss)
    problem.model.float()
    problem.x = problem.x.float()
    optimizer.zero_grad()
    before = problem.weights()
    optimizer.backward(problem.loss)
    assert same(before, problem.weights())
    assert problem.model[0].weight.grad.dtype == torch.float32


# State


class Remembering(SharpnessAware):
    """A method with a memory: the running mean of its gradients."""

    vectors = ("mean",)

    def __init__(self, base, model):
        super().__init__(base, model, {})

    def direction(self, L):
        g = L.grad()
        m = self.recall("mean")
        self.remember("mean", g if m is None else 0.9 * m + 0.1 * g)
        return L.grad(at=0.01 * g) if m is None else L.grad(at=0.01 * g) + 0.5 * m


def test_memory_survives_a_checkpoint_bit_for_bit(problem):
    def build(p):
        return Remembering(torch.optim.AdamW(p.model.parameters(), lr=0.01), p.model)

    whole, first, second = problem.clone(), problem.clone(), problem.clone()
    o = build(whole)
    for _ in range(6):
        o.step(whole.loss)
    o = build(first)
    for _ in range(3):
        o.step(first.loss)
    saved = o.state_dict()
    assert set(saved["state"][0]) == {"step", "exp_avg", "exp_avg_sq", "mean"}
    second.model.load_state_dict(first.model.state_dict())
    o = build(second)
    o.load_state_dict(saved)
    assert set(o.state[next(second.model.parameters())]) == {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }  # the base keeps its state to itself
    for _ in range(3):
        o.step(second.loss)
    assert same(whole.weights(), second.weights())


def test_loading_forgets_what_was_prepared(problem):
    optimizer = bsam.BSAM(sgd(problem.model.parameters()), problem.model)
    saved = optimizer.state_dict()
    optimizer.backward(problem.loss)
    optimizer.load_state_dict(saved)
    with pytest.raises(bsam.BsamError, match="nothing to step with"):
        optimizer.step()


def test_whoever_clears_the_gradients_clears_the_start_with_them(problem):
    """An overflow under start_from_min, cleared by the model and not by the optimizer, must not reach the next step."""
    other = problem.clone()
    ours, whole = (bsam.BSAM(sgd(p.model.parameters()), p.model, start_from_min=True) for p in (problem, other))
    ours.backward(lambda: problem.loss() * float("inf"))
    problem.model.zero_grad()
    problem.model.load_state_dict(other.model.state_dict())  # the batch statistics of the pass before
    ours.backward(problem.loss)
    ours.step()
    whole.step(other.loss)
    assert same(problem.weights(), other.weights())


def test_a_closure_that_clears_keeps_the_starts_of_earlier_calls(plain):
    other = plain.clone()
    ours, whole = (bsam.BSAM(sgd(p.model.parameters()), p.model, start_from_min=True) for p in (plain, other))

    def closure(x, y):
        ours.zero_grad()
        loss = F.cross_entropy(plain.model(x), y)
        loss.backward()
        return loss

    for x, y in zip(plain.x.chunk(2), plain.y.chunk(2), strict=True):
        ours.backward(lambda: closure(x, y))
        whole.backward(lambda: F.cross_entropy(other.model(x), y))
    ours.step()
    whole.step()
    assert same(plain.weights(), other.weights())


def test_parameters_that_change_between_accumulated_starts_are_refused(plain):
    optimizer = bsam.BSAM(sgd(plain.model.parameters()), plain.model, start_from_min=True)
    optimizer.backward(plain.loss)
    plain.model[0].requires_grad_(False)
    with pytest.raises(bsam.BsamError, match="zero_grad"):
        optimizer.backward(plain.loss)


def test_distributed_checkpoints_go_through_the_base(problem):
    """torch.distributed.checkpoint takes a step of its own to make state, and a step without a direction is refused;
    the base takes it.
    """
    optimizer = bsam.BSAM(torch.optim.AdamW(problem.model.parameters(), lr=0.01), problem.model, rho_max=0.2)
    for _ in range(3):
        optimizer.step(problem.loss)
    saved = copy.deepcopy(get_optimizer_state_dict(problem.model, optimizer.base))
    other = problem.clone()
    resumed = bsam.BSAM(torch.optim.AdamW(other.model.parameters(), lr=0.01), other.model)
    set_optimizer_state_dict(other.model, resumed.base, saved)
    assert resumed.param_groups[0]["rho_max"] == 0.2
    assert resumed.t == 3
    optimizer.step(problem.loss)
    resumed.step(other.loss)
    assert same(problem.weights(), other.weights())


def test_hooks_do_not_stop_a_pickle(problem):
    optimizer = bsam.SAM(sgd(problem.model.parameters()), problem.model)
    optimizer.register_step_pre_hook(lambda *_: None)
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["rho"] == 0.05


def test_memory_is_not_touched_by_a_backward_that_raises(problem):
    optimizer = Remembering(sgd(problem.model.parameters()), problem.model)
    optimizer.step(problem.loss)
    before = [optimizer.state_dict()["state"][i]["mean"].clone() for i in range(8)]
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError
        return problem.loss()

    with pytest.raises(MemoryError):
        optimizer.backward(closure)
    assert same(before, [optimizer.state_dict()["state"][i]["mean"] for i in range(8)])


def test_a_checkpoint_of_the_base_alone_can_be_loaded(problem):
    base = sgd(problem.model.parameters())
    problem.loss().backward()
    base.step()
    saved = base.state_dict()
    optimizer = bsam.BSAM(sgd(problem.model.parameters()), problem.model, rho_max=0.2)
    optimizer.step(problem.loss)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["rho_max"] == 0.2
    assert optimizer.t == 0  # afresh
    momentum = optimizer.state[next(problem.model.parameters())]["momentum_buffer"]
    assert torch.equal(momentum, saved["state"][0]["momentum_buffer"])
    optimizer.step(problem.loss)


def test_a_wrong_checkpoint_changes_nothing(problem):
    optimizer = bsam.BSAM(sgd(problem.model.parameters()), problem.model)
    optimizer.step(problem.loss)
    before = str(optimizer.state_dict())
    saved = optimizer.state_dict()
    saved = {**saved, "param_groups": saved["param_groups"] * 2}
    with pytest.raises(ValueError, match="parameter groups"):
        optimizer.load_state_dict(saved)
    assert str(optimizer.state_dict()) == before


def test_hooks_of_torch_are_called(problem):
    optimizer = bsam.SAM(sgd(problem.model.parameters()), problem.model)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before step"))
    optimizer.register_step_post_hook(lambda *_: called.append("after step"))
    optimizer.register_state_dict_pre_hook(lambda *_: called.append("before save"))
    optimizer.register_state_dict_post_hook(lambda o, s: called.append("after save"))
    optimizer.register_load_state_dict_pre_hook(lambda o, s: called.append("before load"))
    optimizer.register_load_state_dict_post_hook(lambda o: called.append("after load"))
    optimizer.step(problem.loss)
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["before step", "after step", "before save", "after save", "before load", "after load"]


def test_methods_that_select_samples_and_parameters(plain):
    seen = []

    class Selecting(SharpnessAware):
        def __init__(self, base, model):
            super().__init__(base, model, {})

        def direction(self, L):
            wanted = [p.dim() > 1 for p in plain.model.parameters()]
            self.part: Vector = L.grad(wrt=wanted)
            self.mean = L.value(at=self.part * 0.1)
            return L.grad(subset=torch.tensor([0, 5]))

    def closure(indices=None):
        seen.append(indices)
        x, y = (plain.x, plain.y) if indices is None else (plain.x[indices], plain.y[indices])
        return F.cross_entropy(plain.model(x), y, reduction="none")

    optimizer = Selecting(sgd(plain.model.parameters()), plain.model)
    g = torch.autograd.grad(plain.loss(), list(plain.model.parameters()))
    optimizer.backward(closure)
    for ours, t in zip(optimizer.part.tensors(), g, strict=True):
        torch.testing.assert_close(ours, t if t.dim() > 1 else torch.zeros_like(t))
    moved = plain.clone()
    with torch.no_grad():
        for p, t in zip(moved.model.parameters(), g, strict=True):
            p.add_(t if t.dim() > 1 else 0.0, alpha=0.1)
    torch.testing.assert_close(optimizer.mean, moved.loss().detach())
    expected = torch.autograd.grad(
        F.cross_entropy(plain.model(plain.x[[0, 5]]), plain.y[[0, 5]]), list(plain.model.parameters())
    )
    for p, t in zip(plain.model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, t)
    assert [None if s is None else s.tolist() for s in seen] == [None, None, [0, 5]]


# What is refused


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "0.05", None, True])
@pytest.mark.parametrize("name", ["rho_max", "rho_min", "rho_min_floor"])
def test_bad_radii_are_refused_by_name(problem, name, value):
    base = sgd(problem.model.parameters())
    with pytest.raises(bsam.BsamError, match=name):
        bsam.BSAM(base, problem.model, **{name: value})
    assert set(base.param_groups[0]) == set(sgd(problem.model.parameters()).param_groups[0])  # nothing was written
    with pytest.raises(bsam.BsamError, match="rho"):
        bsam.SAM(base, problem.model, rho=value)
    bsam.BSAM(base, problem.model)  # and the base is as good as new


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"passes": 4}, "passes"),
        ({"passes": 1}, "passes"),
        ({"passes": "3"}, "passes"),
        ({"rho_min": 0.01, "rho_min_floor": 0.02}, "rho_min_floor"),
        ({"lr_max": 0.1, "lr_min": 0.1}, "lr_max"),
        ({"lr_max": 0.05, "lr_min": 0.1}, "lr_max"),
        ({"lr_min": 0.1}, "lr_min"),
        ({"lr_min": -0.1}, "lr_min"),
        ({"lr_max": 0.0}, "lr_max"),
        ({"passes": 3.0}, "passes"),
        ({"start_from_min": "no"}, "start_from_min"),
        ({"lr_max": float("nan")}, "lr_max"),
        ({"lr_max": "high"}, "lr_max"),
        ({"m_sharpness": True}, "m_sharpness"),
    ],
)
def test_other_bad_arguments_are_refused_by_name(problem, arguments, word):
    with pytest.raises(bsam.BsamError, match=word):
        bsam.BSAM(sgd(problem.model.parameters()), problem.model, **arguments)


def test_names_that_nobody_or_somebody_else_reads_are_refused(problem):
    first, rest = problem.model[:3].parameters(), problem.model[3:].parameters()
    with pytest.raises(bsam.BsamError, match="rho_mx"):
        bsam.BSAM(sgd([{"params": first, "rho_mx": 0.1}, {"params": rest}]), problem.model)
    with pytest.raises(bsam.BsamError, match="setting rho of its own"):
        bsam.SAM(torch.optim.Adadelta(problem.model.parameters()), problem.model)
    optimizer = bsam.SAM(sgd(problem.model.parameters()), problem.model)
    with pytest.raises(bsam.BsamError, match="rho_max"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "rho_max": 0.1})
    assert len(optimizer.param_groups) == 1


def test_a_typo_is_not_swallowed(problem):
    with pytest.raises(TypeError, match="rho_maks"):
        bsam.BSAM(sgd(problem.model.parameters()), problem.model, rho_maks=0.1)


def test_bad_bases_and_models_are_refused(problem):
    parameters = list(problem.model.parameters())
    cases = [
        (torch.optim.SGD, problem.model, "already built"),
        ("sgd", problem.model, "base"),
        (None, problem.model, "base"),
        (torch.optim.LBFGS(parameters), problem.model, "LBFGS"),
        (bsam.SAM(sgd(parameters), problem.model), problem.model, "already belongs"),
        (torch.optim.SGD(parameters, lr=0.1, maximize=True), problem.model, "maximize"),
        (sgd(parameters), "model", "model"),
        (sgd(parameters[:2]), problem.model, r"6 trainable.*1\.weight"),
    ]
    for base, model, word in cases:
        with pytest.raises(bsam.BsamError, match=word):
            bsam.BSAM(base, model)
    with pytest.raises(TypeError, match="model"):
        bsam.BSAM(sgd(parameters))  # it has to be said, if only as None


def test_a_base_that_serves_one_wrapper_is_refused_a_second(problem):
    base = sgd(problem.model.parameters())
    bsam.SAM(base, problem.model)
    with pytest.raises(bsam.BsamError, match="already belongs"):
        bsam.SAM(base, problem.model, rho=0.1)


def test_bad_closures_are_refused(problem):
    optimizer = bsam.BSAM(sgd(problem.model.parameters()), problem.model)
    before = problem.weights()

    def nested():
        optimizer.step(problem.loss)
        return problem.loss()

    def nested_backward():
        optimizer.backward(problem.loss)
        return problem.loss()

    cases = [
        (lambda: None, "returned None"),
        (lambda: (problem.loss(), 1), "tuple"),
        (lambda: problem.loss().detach(), "without a graph"),
        (lambda: problem.loss().item(), "without a graph"),
        (lambda: problem.model(problem.x), "shape"),
        (lambda: problem.loss().expand(0), "batch empty"),
        (lambda: iter(()), "yielded no loss"),
        (lambda: torch.ones((), requires_grad=True) * 2, "reaches no parameter"),
        (lambda: iter([problem.loss(), None]), "None"),
        (lambda: iter([problem.loss(), problem.loss().expand(2)]), "one kind"),
        (nested, "inside the closure"),
        (nested_backward, "inside the closure"),
    ]
    for closure, word in cases:
        with pytest.raises(bsam.BsamError, match=word):
            optimizer.backward(closure)
        with pytest.raises(bsam.BsamError, match="last backward raised"):
            optimizer.step()
        assert all(p.grad is None for p in problem.model.parameters())
    for nothing in (None, problem.loss().detach()):
        with pytest.raises(bsam.BsamError, match="closure"):
            optimizer.backward(nothing)
    with pytest.raises(TypeError, match="closure"):
        optimizer.backward()
    assert same(before, problem.weights())


def test_a_closure_that_yields_must_not_run_backward(plain):
    optimizer = bsam.SAM(sgd(plain.model.parameters()), plain.model)

    def closure():
        for _ in range(2):
            loss = plain.loss()
            loss.backward()
            yield loss

    with pytest.raises(bsam.BsamError, match="yields"):
        optimizer.backward(closure)


def test_step_with_nothing_prepared_is_refused(problem):
    optimizer = bsam.BSAM(sgd(problem.model.parameters()), problem.model)
    with pytest.raises(bsam.BsamError, match="nothing to step with"):
        optimizer.step()
    problem.loss().backward()  # an ordinary gradient is no direction
    with pytest.raises(bsam.BsamError, match="nothing to step with"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.backward(problem.loss)
    optimizer.step()
    with pytest.raises(bsam.BsamError, match="nothing to step with"):
        optimizer.step()
    optimizer.backward(problem.loss)
    optimizer.zero_grad()
    with pytest.raises(bsam.BsamError, match="nothing to step with"):
        optimizer.step()


def test_after_an_exception_the_next_backward_counts(problem):
    other = problem.clone()
    ours, whole = (bsam.BSAM(sgd(p.model.parameters()), p.model) for p in (problem, other))
    ours.backward(problem.loss)
    with pytest.raises(ZeroDivisionError):
        ours.backward(lambda: 1 / 0)
    ours.backward(problem.loss)
    ours.step()
    whole.backward(other.loss)
    whole.backward(other.loss)
    whole.step()
    assert same(problem.weights(), other.weights())


def test_everything_frozen_and_sparse_gradients_are_refused():
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = bsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(bsam.BsamError, match="sparse"):
        optimizer.step(lambda: model(torch.tensor([1, 2])).sum())
    model.requires_grad_(False)
    with pytest.raises(bsam.BsamError, match="unfreeze"):
        optimizer.step(lambda: model(torch.tensor([1, 2])).sum())


def test_a_second_interrupt_does_not_cut_the_way_back_short(problem, monkeypatch):
    halves = [{"params": problem.model[:3].parameters()}, {"params": problem.model[3:].parameters()}]
    optimizer = bsam.SAM(sgd(halves), problem.model)
    before = problem.weights()
    restore, copy_ = Weights.restore, torch._foreach_copy_
    on_the_way_back, passes, copies = False, 0, 0

    def restoring(self):
        nonlocal on_the_way_back
        on_the_way_back = passes == 2
        try:
            restore(self)
        finally:
            on_the_way_back = False

    def interrupted(*args):
        nonlocal copies
        copies += on_the_way_back
        if copies == 2 and on_the_way_back:  # the first half is back, the second is not
            raise KeyboardInterrupt("the second")
        return copy_(*args)

    def closure():
        nonlocal passes
        passes += 1
        if passes == 2:
            raise KeyboardInterrupt("the first")
        return problem.loss()

    monkeypatch.setattr(Weights, "restore", restoring)
    monkeypatch.setattr(torch, "_foreach_copy_", interrupted)
    with pytest.raises(KeyboardInterrupt, match="the second"):
        optimizer.backward(closure)
    assert copies == 4
    assert same(before, problem.weights())
    assert problem.model[1].track_running_stats is True
    monkeypatch.undo()
    optimizer.step(problem.loss)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_while_moving_restores_what_had_moved(problem, monkeypatch, when):
    """Parts that were not yet saved must not be restored from an empty backup, and those that moved must be."""
    for failing in range(1, 7):  # three groups, each saved and then moved
        layers = (problem.model[0], problem.model[1], problem.model[3:])
        optimizer = bsam.SAM(sgd([{"params": layer.parameters()} for layer in layers]), problem.model)
        before = problem.weights()
        calls = 0

        def count(real):
            def wrapped(*args, **kwargs):
                nonlocal calls
                calls += 1
                if calls == failing and when == "before":
                    raise KeyboardInterrupt
                out = real(*args, **kwargs)
                if calls == failing:
                    raise KeyboardInterrupt
                return out

            return wrapped

        with monkeypatch.context() as patch:
            patch.setattr(torch, "_foreach_copy_", count(torch._foreach_copy_))
            patch.setattr(torch, "_foreach_add_", count(torch._foreach_add_))
            with pytest.raises(KeyboardInterrupt):
                optimizer.backward(problem.loss)
        assert same(before, problem.weights()), failing


def test_an_interrupt_anywhere_leaves_weights_and_a_working_optimizer(problem):
    """Ctrl-C at every line that a backward runs in this library, one after the other."""
    optimizer = bsam.BSAM(sgd(problem.model.parameters()), problem.model)
    before = problem.weights()
    folder = str(Path(bsam.__file__).parent)
    line = at = 0

    def trace(frame, event, arg):
        nonlocal line
        if not frame.f_code.co_filename.startswith(folder):
            return None
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
        assert problem.model[1].track_running_stats is True, at
        optimizer.zero_grad()
        optimizer.backward(problem.loss)
        optimizer.zero_grad()
    assert at > 300


def test_a_generator_is_closed_when_its_micro_batch_fails(plain):
    optimizer = bsam.SAM(sgd(plain.model.parameters()), plain.model)
    closed = []

    def closure():
        try:
            yield plain.loss()
            yield plain.loss().detach()
        finally:
            closed.append(True)

    with pytest.raises(bsam.BsamError, match="without a graph") as error:
        optimizer.backward(closure)
    assert closed == [True]
    assert error.value is not None  # its traceback alone would keep the generator open


def test_a_base_that_raises_leaves_the_weights(problem):
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise MemoryError

    optimizer = bsam.BSAM(Failing(problem.model.parameters(), lr=0.1), problem.model, start_from_min=True)
    before = problem.weights()
    with pytest.raises(MemoryError):
        optimizer.step(problem.loss)
    assert same(before, problem.weights())
