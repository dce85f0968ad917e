"""``optimizer.check``: what would be silently wrong in a loop."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import bsam
from bsam.methods import METHODS
from helpers import alike, same, sgd


@pytest.fixture
def optimizer(problem):
    return bsam.BSAM(sgd(problem.model.parameters()), problem.model)


def found(optimizer, closure, *words):
    """Whether there is one finding, with these words."""
    (finding,) = optimizer.check(closure)
    assert all(word in finding for word in words), finding
    return True


@pytest.mark.parametrize("method", [name for name, entry in METHODS.items() if not entry.is_loss])
def test_nothing_is_found_in_a_right_loop_and_nothing_changes(problem, method, capsys):
    """Not the weights, buffers, gradients, memory or generators; a training goes on as without the call."""
    needs = {"total_steps": 9} if method == "aesam" else {}
    own = METHODS[method](sgd(problem.model.parameters()), problem.model, **needs)
    twin = problem.clone()
    other = METHODS[method](sgd(twin.model.parameters()), twin.model, **needs)
    closures = [lambda i=slice(None), p=p: F.dropout(p.losses(i), 0.2) for p in (problem, twin)]
    for _ in range(3):
        torch.manual_seed(5)
        state = copy.deepcopy([problem.model.state_dict(), own.state_dict()])
        grads, generator = [p.grad for p in problem.model.parameters()], torch.get_rng_state()
        assert own.check(closures[0]) == []
        assert alike(state, [problem.model.state_dict(), own.state_dict()])
        assert all(a is b.grad for a, b in zip(grads, problem.model.parameters(), strict=True))
        assert torch.equal(generator, torch.get_rng_state())
        own.step(closures[0])
        torch.manual_seed(5)
        other.step(closures[1])
    assert alike(problem.model.state_dict(), twin.model.state_dict())
    assert capsys.readouterr().out.splitlines() == [f"{own.method()}.check: nothing found"] * 3


def test_a_check_between_backward_and_step_keeps_what_was_prepared(problem, optimizer):
    twin = problem.clone()
    other = bsam.BSAM(sgd(twin.model.parameters()), twin.model)
    optimizer.backward(problem.loss)
    assert optimizer.check(problem.loss) == []
    optimizer.step()
    other.step(twin.loss)
    assert alike(problem.model.state_dict(), twin.model.state_dict())


def test_another_batch_in_each_pass(problem, optimizer, capsys):
    batches = iter(problem.x.split(6))
    assert found(optimizer, lambda: problem.model(next(batches)).square().mean(), "two evaluations", "take the batch")
    assert capsys.readouterr().out.startswith("BSAM.check: two evaluations of the closure")


def test_an_iterator_that_ends(problem, optimizer):
    batches = iter([problem.x])
    assert found(optimizer, lambda: problem.model(next(batches)).square().mean(), "which has ended")


def test_another_batch_is_found_by_its_gradient_where_losses_are_equal(plain):
    """With zeros in the last layer, every batch has the same loss."""
    nn.init.zeros_(plain.model[-1].weight)
    nn.init.zeros_(plain.model[-1].bias)
    optimizer = bsam.SAM(sgd(plain.model.parameters()), plain.model)
    batches = iter(zip(plain.x.split(6), plain.y.split(6), strict=True))

    def closure():
        x, y = next(batches)
        return F.cross_entropy(plain.model(x), y)

    assert found(optimizer, closure, "two evaluations")


@pytest.mark.parametrize("draw", [np.random.randn, random.random, lambda: torch.rand((), generator=GENERATOR).item()])
def test_draws_that_are_not_repeated(problem, optimizer, draw):
    assert found(optimizer, lambda: (problem.model(problem.x) + draw()).square().mean(), "two evaluations")


GENERATOR = torch.Generator().manual_seed(0)


def test_draws_are_the_same_in_the_check_also_with_same_draws_false(problem):
    optimizer = bsam.SAM(sgd(problem.model.parameters()), problem.model, same_draws=False)
    assert optimizer.check(lambda: F.dropout(problem.model(problem.x), 0.5).square().mean()) == []


def test_state_that_is_no_buffer(problem, optimizer):
    mean = [torch.zeros(3, dtype=torch.float64)]

    def closure():
        out = problem.model(problem.x)
        mean[0] = 0.9 * mean[0] + out.detach().mean(0)
        return (out - mean[0]).square().mean()

    assert found(optimizer, closure, "two evaluations")


def test_a_loss_and_parts_of_it_from_outside(plain):
    optimizer = bsam.SAM(sgd(plain.model.parameters()), plain.model)
    loss, features = plain.loss(), plain.model[:2](plain.x)
    penalty = sum(p.sum() for p in plain.model.parameters())
    assert found(optimizer, lambda: loss, "computed before this pass")
    assert found(optimizer, lambda: F.cross_entropy(plain.model[2:](features), plain.y), "inside the closure")
    assert found(optimizer, lambda: plain.loss() + penalty, "inside the closure")

    def retained():
        loss = F.cross_entropy(plain.model[2:](features), plain.y)
        loss.backward(retain_graph=True)
        return loss

    def own_backward():
        loss = F.cross_entropy(plain.model[2:](plain.model[:2](plain.x) + 0 * features), plain.y)
        loss.backward()
        return loss

    assert found(optimizer, retained, "inside the closure")
    features = plain.model[:2](plain.x)
    assert found(optimizer, own_backward, "inside the closure")


def test_a_weight_that_is_cached_between_the_passes():
    class Symmetric(nn.Module):
        def forward(self, w):
            return w.triu() + w.triu(1).T

    layer, x = nn.Linear(3, 3), torch.randn(8, 3)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    optimizer = bsam.SAM(sgd(layer.parameters()), layer)
    assert optimizer.check(lambda: layer(x).square().mean()) == []
    with parametrize.cached():
        assert found(optimizer, lambda: layer(x).square().mean(), "inside the closure")


@pytest.mark.parametrize("own_backward", [False, True])
def test_modules_that_model_does_not_contain(problem, own_backward):
    """Batch norm that moves in every pass, and parameters that nobody trains; both are as before afterwards."""
    head = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)).double()
    head(problem.model(problem.x).detach()).sum().backward()
    before = copy.deepcopy([head.state_dict(), [p.grad for p in head.parameters()]])
    optimizer = bsam.BSAM(sgd(problem.model.parameters()), problem.model)

    def closure():
        loss = F.cross_entropy(head(problem.model(problem.x)), problem.y)
        if own_backward:
            loss.backward()
        return loss

    buffers, parameters = optimizer.check(closure)
    assert "BatchNorm1d" in buffers
    assert "model=[network, other]" in buffers
    assert "4 parameter(s) get a gradient in every pass and are not in base" in parameters
    assert alike(before, [head.state_dict(), [p.grad for p in head.parameters()]])
    both = bsam.BSAM(sgd([*problem.model.parameters(), *head.parameters()]), [problem.model, head])
    assert both.check(closure) == []
    assert bsam.BSAM(sgd(problem.model.parameters()), [problem.model, head]).check(closure) == []  # as in a GAN


def test_a_parameter_of_no_module(problem, optimizer):
    temperature = nn.Parameter(torch.ones((), dtype=torch.float64))
    assert found(optimizer, lambda: (problem.model(problem.x) / temperature).square().mean(), "not in base", "shape ()")
    assert temperature.grad is None


def test_a_key_encoder_that_the_forward_pass_updates(plain):
    """As in MoCo: it would move in every pass, towards perturbed weights."""

    class Moco(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key = plain.model, copy.deepcopy(plain.model).requires_grad_(False)

        def forward(self, x):
            for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
                k.data = 0.9 * k.data + 0.1 * q.data
            return (self.query(x) - self.key(x.flip(0))).square().mean()

    model = Moco()
    optimizer = bsam.SAM(sgd(model.query.parameters()), model)
    assert found(optimizer, lambda: model(plain.x), "6 frozen parameter(s)", "key.0.weight", "after optimizer.step")


def test_a_step_of_the_base_in_the_closure(problem, optimizer):
    before = problem.weights()

    def closure():
        loss = problem.loss()
        loss.backward()
        optimizer.base.step()
        return loss

    assert found(optimizer, closure, "change nothing but buffers")
    assert same(before, problem.weights())


@pytest.mark.parametrize("wrap", [lambda m: torch.compile(m, backend="eager"), torch.jit.script])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # which torch.compile reads
def test_compiled_and_scripted_modules_that_model_does_not_contain(problem, optimizer, wrap):
    norm = nn.BatchNorm1d(3).double().requires_grad_(False)
    called = wrap(norm)
    assert found(
        optimizer, lambda: called(problem.model(problem.x)).square().mean(), "buffers of", "move in every pass"
    )
    assert all(int(t) == 0 for name, t in called.named_buffers() if name.endswith("num_batches_tracked"))


def test_a_graph_of_the_user_through_a_teacher_stays_valid(problem, optimizer):
    teacher = problem.clone().model.eval()
    teacher.register_buffer("wide", torch.zeros(1).expand(3))
    teacher.register_buffer("nan", torch.tensor(float("nan")))
    with torch.inference_mode():
        teacher.register_buffer("constant", torch.ones(3))
    held = teacher(problem.x).sum()
    assert optimizer.check(lambda: (problem.model(problem.x) - teacher(problem.x).detach()).square().mean()) == []
    held.backward()


def test_right_loops_in_which_nothing_is_found(problem, optimizer):
    """Autocast around the call, gradients by inputs, a scale that overflows, constant NaN."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert optimizer.check(problem.loss) == []

    def penalised():
        x = problem.x.clone().requires_grad_()
        (g,) = torch.autograd.grad(problem.model(x).sum(), x, create_graph=True)
        return problem.loss() + g.square().mean()

    def overflowing():
        loss = problem.loss()
        (loss * 1e308 * 1e10).backward()
        return loss

    assert optimizer.check(penalised) == []
    assert optimizer.check(overflowing) == []


def test_quantizers_begin_with_the_first_step_not_with_the_check(plain):
    from bsam.quantization import quantize

    for scheme in ("lsq", "minmax"):
        models = [quantize(copy.deepcopy(plain.model), scheme=scheme) for _ in range(2)]
        optimizers = [bsam.SAM(sgd(m.parameters()), m) for m in models]
        other = torch.randn_like(plain.x)
        assert optimizers[0].check(lambda: models[0](other).square().mean()) == []
        for m, optimizer in zip(models, optimizers, strict=True):
            optimizer.step(lambda m=m: m(plain.x).square().mean())
        assert alike(models[0].state_dict(), models[1].state_dict())


def test_what_is_no_closure(problem, optimizer):
    with pytest.raises(bsam.BsamError, match="needs a closure"):
        optimizer.check(problem.loss())


def test_without_a_model(problem):
    optimizer = bsam.BSAM(sgd(problem.model.parameters()), None)
    assert found(optimizer, problem.loss, "BatchNorm1d")
    assert int(problem.model[1].num_batches_tracked) == 0


def test_a_closure_that_calls_a_copy(problem, optimizer):
    other = problem.clone()
    findings = optimizer.check(lambda: other.loss() + 0 * problem.model[5].bias.sum())
    assert any("7 parameter(s) of base get no gradient (0.weight, 0.bias, 1.weight, ...)" in f for f in findings)
    assert any("are not in base" in f for f in findings)
    assert any("8 parameter(s) of base get no gradient" in f for f in optimizer.check(other.loss))
    assert "does not require grad" in "".join(optimizer.check(lambda: other.loss().detach()))


def test_a_frozen_network(problem, optimizer):
    problem.model.requires_grad_(False)
    assert found(optimizer, problem.loss, "frozen")


def test_a_loss_that_is_not_finite(problem, optimizer):
    assert found(optimizer, lambda: problem.loss() * float("nan"), "not finite")


def test_a_method_that_chooses_samples(problem):
    optimizer = bsam.KSAM(sgd(problem.model.parameters()), problem.model, k=4)
    assert optimizer.check(problem.losses) == []
    assert found(optimizer, problem.loss, "one loss per")
    assert found(optimizer, lambda: problem.losses(), "takes no argument")


def test_other_errors_of_the_closure_pass_through_and_leave_everything(problem, optimizer):
    before = copy.deepcopy(problem.model.state_dict())

    def closure():
        problem.loss()
        raise ValueError("the user's")

    with pytest.raises(ValueError, match="the user's"):
        optimizer.check(closure)
    assert alike(before, problem.model.state_dict())
    assert optimizer.step(problem.loss) > 0
