"""``optimizer.check`` finds silent mistakes in a loop."""

from __future__ import annotations

import copy
import inspect
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import bsam
from bsam.methods import METHODS
from helpers import alike, detached, same, sgd


@pytest.fixture
def optimizer(problem):
    return bsam.BSAM(sgd(problem.model.parameters()), problem.model)


def finds(optimizer, closure, *words):
    """Whether ``check`` has a single finding, with these words."""
    (finding,) = optimizer.check(closure)
    assert all(word in finding for word in words), finding
    return True


@pytest.mark.parametrize("method", [name for name, entry in METHODS.items() if not entry.is_loss])
def test_a_correct_loop(problem, method, capsys):
    """No findings; weights, buffers, gradients, memory and generators stay, and training goes on as without it."""
    arguments = {"total_steps": 9} if method == "aesam" else {}
    twin = problem.clone()
    ours, other = (METHODS[method](sgd(p.model.parameters()), p.model, **arguments) for p in (problem, twin))
    closures = [lambda i=slice(None), p=p: F.dropout(p.losses(i), 0.2) for p in (problem, twin)]
    if method == "functional_sam":
        closures = [
            lambda p=p: (lambda out: (F.cross_entropy(F.dropout(out, 0.2), p.y), out))(p.model(p.x))
            for p in (problem, twin)
        ]
    for _ in range(2):
        torch.manual_seed(5)
        state = copy.deepcopy([problem.model.state_dict(), ours.state_dict()])
        grads, generator = [p.grad for p in problem.model.parameters()], torch.get_rng_state()
        assert ours.check(closures[0]) == []
        assert alike(state, [problem.model.state_dict(), ours.state_dict()])
        assert all(g is p.grad for g, p in zip(grads, problem.model.parameters(), strict=True))
        assert torch.equal(generator, torch.get_rng_state())
        ours.step(closures[0])
        torch.manual_seed(5)
        other.step(closures[1])
    assert alike(problem.model.state_dict(), twin.model.state_dict())
    assert capsys.readouterr().out.splitlines() == [f"{ours.method()}.check: nothing found"] * 2


def test_a_check_between_backward_and_step_keeps_the_prepared_step(problem, optimizer):
    twin = problem.clone()
    other = bsam.BSAM(sgd(twin.model.parameters()), twin.model)
    optimizer.backward(problem.loss)
    assert optimizer.check(problem.loss) == []
    optimizer.step()
    other.step(twin.loss)
    assert alike(problem.model.state_dict(), twin.model.state_dict())


def next_batch(p, o, n):
    batches = iter(p.x.split(24 // n))
    return lambda: p.model(next(batches)).square().mean()


def with_draws(p, draw):
    return lambda: (p.model(p.x) + draw()).square().mean()


def with_state(p, o):
    mean = torch.zeros(3, dtype=torch.float64)  # no buffer
    return lambda: (p.model(p.x) - mean.lerp_(p.model(p.x).detach().mean(0), 0.1)).square().mean()


def with_step(p, o):
    def closure():
        loss = p.loss()
        loss.backward()
        o.base.step()
        return loss

    return closure


MISTAKES = {  # build a closure from the problem and its optimizer; words of the finding
    "another batch": (partial(next_batch, n=2), ["two evaluations", "batch"]),
    "the end of an iterator": (partial(next_batch, n=1), ["ended"]),
    "NumPy": (lambda p, o: with_draws(p, np.random.randn), ["two evaluations", "NumPy"]),
    "random": (lambda p, o: with_draws(p, random.random), ["two evaluations"]),
    "a generator": (lambda p, o: with_draws(p, partial(torch.rand, (), generator=torch.Generator())), ["two"]),
    "state that is no buffer": (with_state, ["two evaluations", "buffers"]),
    "a step inside": (with_step, ["nothing but buffers"]),
    "NaN": (lambda p, o: lambda: p.loss() * float("nan"), ["finite"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_the_closure(problem, optimizer, name, capsys):
    before = problem.weights()
    build, words = MISTAKES[name]
    assert finds(optimizer, build(problem, optimizer), *words)
    assert same(before, problem.weights())
    assert capsys.readouterr().out.startswith("BSAM.check: ")


def test_another_batch_with_the_same_loss(plain):
    """With zeros in the last layer, only the gradients differ."""
    nn.init.zeros_(plain.model[-1].weight)
    nn.init.zeros_(plain.model[-1].bias)
    optimizer = bsam.SAM(sgd(plain.model.parameters()), plain.model)
    batches = iter(zip(plain.x.split(6), plain.y.split(6), strict=True))

    def closure():
        x, y = next(batches)
        return F.cross_entropy(plain.model(x), y)

    assert finds(optimizer, closure, "two evaluations")


def test_the_check_repeats_draws_even_without_same_draws(problem):
    optimizer = bsam.SAM(sgd(problem.model.parameters()), problem.model, same_draws=False)
    assert optimizer.check(lambda: F.dropout(problem.model(problem.x), 0.5).square().mean()) == []


def test_a_loss_and_parts_of_it_from_outside(plain):
    optimizer = bsam.SAM(sgd(plain.model.parameters()), plain.model)
    loss, features = plain.loss(), plain.model[:2](plain.x)
    penalty = sum(p.sum() for p in plain.model.parameters())

    def retained():
        loss = F.cross_entropy(plain.model[2:](features), plain.y)
        loss.backward(retain_graph=True)
        return loss

    def runs_backward():
        loss = F.cross_entropy(plain.model[2:](plain.model[:2](plain.x) + 0 * features), plain.y)
        loss.backward()
        return loss

    for closure in (
        lambda: loss,
        lambda: F.cross_entropy(plain.model[2:](features), plain.y),
        lambda: plain.loss() + penalty,
        retained,
        runs_backward,
    ):
        features = plain.model[:2](plain.x)
        assert finds(optimizer, closure, "inside the closure")


def test_a_weight_that_is_cached_around_the_step():
    """The step clears the cache between its passes, and so does the check."""
    layer, x = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), torch.randn(8, 3)
    optimizer = bsam.SAM(sgd(layer.parameters()), layer)
    with parametrize.cached():
        assert optimizer.check(lambda: layer(x).square().mean()) == []


def test_a_model_in_eval_mode(problem, optimizer):
    problem.model.eval()
    assert finds(optimizer, problem.loss, "eval mode", "model.train()")


def test_gradients_that_were_not_cleared(problem, optimizer):
    """Not in loops that clear them before each backward, or accumulate."""
    for clear in (optimizer.zero_grad, lambda: optimizer.zero_grad(set_to_none=False), problem.model.zero_grad):
        for _ in range(2):
            clear()
            for _ in range(2):
                optimizer.backward(problem.loss)
                assert optimizer.check(problem.loss) == []
            optimizer.step()
            assert optimizer.check(problem.loss) == []
    problem.model.zero_grad(set_to_none=False)
    optimizer.backward(problem.loss)
    optimizer.step()
    assert optimizer.check(problem.loss) == []
    optimizer.backward(problem.loss)
    optimizer.step()
    assert finds(optimizer, problem.loss, "last step", "zero_grad()")
    optimizer.zero_grad()
    assert optimizer.check(problem.loss) == []


def test_a_loss_that_is_already_scaled(problem, optimizer):
    scaler = torch.amp.GradScaler("cpu")
    assert finds(optimizer, lambda: scaler.scale(problem.loss()), "times 65536", "scaler=scaler")
    assert finds(optimizer, lambda: scaler.scale(problem.losses()), "times 65536")
    assert optimizer.check(lambda: 1024.0 * problem.loss()) == []

    def scaled_backward():
        loss = problem.loss()
        scaler.scale(loss).backward()
        return loss

    assert optimizer.check(scaled_backward) == []


def test_parameters_that_share_memory(plain):
    first = next(m for m in plain.model if isinstance(m, nn.Linear))
    layer = nn.Linear(first.in_features, first.out_features).double()
    layer.weight.data = first.weight.data
    model = nn.ModuleList([plain.model, layer])
    optimizer = bsam.SAM(sgd(model.parameters()), model)
    assert finds(optimizer, lambda: plain.loss() + layer(plain.x).square().mean(), "share memory", "1.weight")


@pytest.mark.parametrize("runs_backward", [False, True])
def test_modules_that_are_not_in_model(problem, optimizer, runs_backward):
    """Batch norm that is updated in every pass, and parameters that nobody trains; both are restored."""
    head = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)).double()
    head(problem.model(problem.x).detach()).sum().backward()
    before = copy.deepcopy([head.state_dict(), [p.grad for p in head.parameters()]])

    def closure():
        loss = F.cross_entropy(head(problem.model(problem.x)), problem.y)
        if runs_backward:
            loss.backward()
        return loss

    buffers, parameters = optimizer.check(closure)
    assert "BatchNorm1d" in buffers
    assert "model=[network, other]" in buffers
    assert "4 parameter(s)" in parameters
    assert alike(before, [head.state_dict(), [p.grad for p in head.parameters()]])
    both = bsam.BSAM(sgd([*problem.model.parameters(), *head.parameters()]), [problem.model, head])
    assert both.check(closure) == []
    assert bsam.BSAM(sgd(problem.model.parameters()), [problem.model, head]).check(closure) == []  # as in a GAN


def test_a_parameter_of_no_module(problem, optimizer):
    temperature = nn.Parameter(torch.ones((), dtype=torch.float64))
    assert finds(optimizer, lambda: (problem.model(problem.x) / temperature).square().mean(), "base", "shape ()")
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
    assert finds(optimizer, lambda: model(plain.x), "6 frozen", "key.0.weight", "after optimizer.step")


@pytest.mark.parametrize("wrap", [lambda m: torch.compile(m, backend="eager"), torch.jit.script])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # which torch.compile reads
def test_compiled_and_scripted_modules_that_are_not_in_model(problem, optimizer, wrap):
    norm = nn.BatchNorm1d(3).double().requires_grad_(False)
    called = wrap(norm)
    assert finds(optimizer, lambda: called(problem.model(problem.x)).square().mean(), "buffers", "every pass")
    assert all(int(t) == 0 for name, t in called.named_buffers() if name.endswith("num_batches_tracked"))


def test_the_graph_of_a_teacher_stays_valid(problem, optimizer):
    teacher = problem.clone().model.eval()
    teacher.register_buffer("wide", torch.zeros(1).expand(3))
    teacher.register_buffer("nan", torch.tensor(float("nan")))
    with torch.inference_mode():
        teacher.register_buffer("constant", torch.ones(3))
    kept = teacher(problem.x).sum()
    assert optimizer.check(lambda: (problem.model(problem.x) - teacher(problem.x).detach()).square().mean()) == []
    kept.backward()


def test_unusual_correct_loops(problem, optimizer):
    """Autocast around the call, gradients with respect to inputs, a scale that overflows."""
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


@pytest.mark.parametrize("scheme", ["lsq", "minmax"])
def test_the_check_does_not_initialize_quantizers(plain, scheme):
    from bsam.lab.quantization import quantize

    models = [quantize(copy.deepcopy(plain.model), scheme=scheme) for _ in range(2)]
    optimizers = [bsam.SAM(sgd(m.parameters()), m) for m in models]
    other = torch.randn_like(plain.x)
    assert optimizers[0].check(lambda: models[0](other).square().mean()) == []
    for m, optimizer in zip(models, optimizers, strict=True):
        optimizer.step(lambda m=m: m(plain.x).square().mean())
    assert alike(models[0].state_dict(), models[1].state_dict())


def test_without_a_model(problem):
    optimizer = bsam.BSAM(sgd(problem.model.parameters()), None)
    assert finds(optimizer, problem.loss, "BatchNorm1d")
    assert int(problem.model[1].num_batches_tracked) == 0


def test_a_closure_that_calls_a_copy(problem, optimizer):
    other = problem.clone()
    _, foreign, without = optimizer.check(lambda: other.loss() + 0 * problem.model[5].bias.sum())
    assert "8 parameter(s)" in foreign
    assert "7 parameter(s)" in without
    assert "(0.weight, 0.bias, 1.weight, ...)" in without
    assert any("8 parameter(s) of base" in finding for finding in optimizer.check(other.loss))
    problem.model.requires_grad_(False)
    assert finds(optimizer, problem.loss, "frozen")


def test_a_method_that_selects_samples(problem):
    optimizer = bsam.KSAM(sgd(problem.model.parameters()), problem.model, k=4)
    assert optimizer.check(problem.losses) == []
    assert finds(optimizer, problem.loss, "one loss per")
    assert finds(optimizer, lambda: problem.losses(), "argument")


def test_errors_in_the_closure_are_raised(problem, optimizer):
    before = copy.deepcopy(problem.model.state_dict())

    def closure():
        problem.loss()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        optimizer.check(closure)
    assert alike(before, problem.model.state_dict())
    assert optimizer.step(problem.loss) > 0


@pytest.mark.parametrize("start", [0, 5])
def test_a_head_that_the_outputs_leave_out(problem, start):
    """Functional SAM would raise in its first step, which may come late."""
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    parameters = [*problem.model.parameters(), scale]
    optimizer = bsam.FunctionalSAM(sgd(parameters), problem.model, start=start)

    def closure(factor):
        outputs = problem.model(problem.x)
        return (factor * outputs).square().mean(), outputs

    assert finds(optimizer, lambda: closure(scale), "another head")
    assert "another head" not in " ".join(optimizer.check(lambda: closure(1.0)))


@pytest.mark.parametrize("start", [0, 5])
def test_a_penalty_that_the_outputs_leave_out(problem, start):
    """Functional SAM would train without it, but only from its start on."""
    optimizer = bsam.FunctionalSAM(sgd(problem.model.parameters()), problem.model, start=start)

    def closure(weight):
        outputs = problem.model(problem.x)
        penalty = sum(p.square().sum() for p in problem.model.parameters())
        return F.cross_entropy(outputs, problem.y) + weight * penalty, outputs

    assert finds(optimizer, lambda: closure(0.1), "through the outputs")
    assert optimizer.check(lambda: closure(0.0)) == []


def test_outputs_of_another_batch(problem):
    """Their shapes differ."""
    optimizer = bsam.FunctionalSAM(sgd(problem.model.parameters()), problem.model)
    batches = iter([problem.x, problem.x[:4], problem.x, problem.x[:3]])

    def closure():
        outputs = problem.model(next(batches))
        return outputs.square().mean(), outputs

    assert finds(optimizer, closure, "two evaluations")


RADII = {
    name: [r for r in inspect.signature(entry).parameters if r in ("rho", "rho_max", "rho_norm")]
    for name, entry in METHODS.items()
    if not entry.is_loss
}


@pytest.mark.parametrize(
    ("method", "radius"), [(method, radius) for method, radii in RADII.items() for radius in radii]
)
@pytest.mark.parametrize(("warmup", "start"), [(0, 0), (100, 5)])
def test_a_radius_that_is_far_too_large(problem, method, radius, warmup, start):
    """The radii of usual steps are not reported; 200 times as large, one is, by its name, and nothing has changed.

    Before the first step, when MSAM has no momentum yet, and after it; whichever steps RST's coin leaves plain.
    """
    cls = METHODS[method]
    options = {"warmup": warmup, "start": start} | ({"total_steps": 9} if method == "aesam" else {})
    large = inspect.signature(cls).parameters[radius].default * 200
    usual, other = cls(sgd(problem.model.parameters()), problem.model, **options), problem.clone()
    far = cls(sgd(other.model.parameters()), other.model, **options, **{radius: large})
    closures = [p.loss_and_outputs if method == "functional_sam" else p.losses for p in (problem, other)]
    for _ in range(2):
        before = copy.deepcopy([other.model.state_dict(), far.state_dict()])
        assert usual.check(closures[0]) == []
        finding = far.check(closures[1])[0]
        assert f"the radius {radius}={large:g} is too large" in finding
        assert f"Try a smaller {radius}" in finding
        assert alike(before, [other.model.state_dict(), far.state_dict()])
        assert "epsilon" not in vars(far)
        usual.step(closures[0])
        far.base.param_groups[0]["lr"] = 0.0  # such steps would make any radius too large
        far.step(closures[1])
        for p in (problem, other):  # another batch: Friendly SAM subtracts the mean gradient
            p.x = p.x.roll(1, 0)


def test_a_radius_in_closures_of_other_kinds(problem):
    """They run backward themselves, or yield micro-batches."""

    def runs_backward():
        loss = problem.loss()
        loss.backward()
        return loss

    def micro_batches():
        for rows in torch.arange(24).split(8):
            yield problem.losses(rows)

    for closure in (runs_backward, micro_batches):
        assert bsam.SAM(sgd(problem.model.parameters()), problem.model).check(closure) == []
        large = bsam.SAM(sgd(problem.model.parameters()), problem.model, rho=10.0)
        assert finds(large, closure, "the radius rho=10 ")


def test_the_lengths_and_losses_of_a_radius():
    """Of w**2 at w = 3, and one radius uphill."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 3.0)
    x = torch.ones(2, 1)
    numbers = ("rho=2 ", "length 3 ", "by 2,", "is 25 ", "of 9.")
    assert finds(bsam.SAM(sgd(model.parameters()), model, rho=2.0), lambda: model(x).square().mean(), *numbers)
    infinite = bsam.SAM(sgd(model.parameters()), model, rho=1e20)
    assert finds(infinite, lambda: model(x).square().mean(), "inf", "smaller rho")


@pytest.mark.parametrize(
    ("loss", "rise", "found"), [(2.0, 9.9, False), (2.0, 10.1, True), (0.0, 0.49, False), (0.0, 0.51, True)]
)
def test_a_small_share_of_the_weights(loss, rise, found):
    """As in wide networks: the perturbation is 1% of w, and the loss rises by a given number."""
    w = nn.Parameter(torch.tensor(100.0, dtype=torch.float64))
    optimizer = bsam.SAM(torch.optim.SGD([w], lr=0.1), None, rho=1.0)
    assert bool(optimizer.check(lambda: loss + rise * (w - 100))) == found


@pytest.mark.parametrize("method", ["sam", "rst", "ksam"])
def test_a_loss_that_raises_at_the_perturbed_weights(problem, method):
    """As torch.distributions do if logits are NaN."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 3)).double()
    before = detached(model.parameters())
    optimizer = METHODS[method](sgd(model.parameters()), model, rho=1e200)

    def closure(i=slice(None)):
        logits = model(problem.x[i])
        if not logits.isfinite().all():
            raise ValueError("invalid logits")
        return F.cross_entropy(logits, problem.y[i], reduction="none")

    assert finds(
        optimizer, closure, "the radius rho=1e+200 ", "raises ValueError (invalid logits)", "Try a smaller rho"
    )
    assert same(before, detached(model.parameters()))


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_other_errors_at_the_perturbed_weights_are_raised(problem, error):
    before = problem.weights()

    def closure():
        if not same(before, problem.weights()):
            raise error
        return problem.loss()

    optimizer = bsam.SAM(sgd(problem.model.parameters()), problem.model)
    with pytest.raises(error):
        optimizer.check(closure)
    assert same(before, problem.weights())
    assert "epsilon" not in vars(optimizer)


def test_a_small_network_may_begin_at_zero():
    model = nn.Linear(4, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    assert bsam.SAM(sgd(model.parameters()), model).check(lambda: F.cross_entropy(model(x), y)) == []
