import copy
import pickle
from dataclasses import astuple
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bsam
from bsam.flatness import Probe
from bsam.methods import METHODS

VARIANTS = {name: method for name, method in METHODS.items() if not method.is_loss} | {
    "aesam": partial(bsam.AESAM, total_steps=20),
    "aesam-reuse": partial(bsam.AESAM, total_steps=20, alpha=0.2),
    "bsam-2": partial(bsam.BSAM, passes=2),
    "bsam-adaptive": partial(bsam.BSAM, adaptive=True),
    "bsam-released": partial(bsam.BSAM, start_from_min=True),
    "gam-paper": partial(bsam.GAM, form="paper"),
    "ksam": partial(bsam.KSAM, k=10),
    "msam": partial(bsam.MSAM, rho=0.1),
}
CHOOSING = ("esam", "ksam")
# Extra passes of a reading in the first three steps.
EXTRA = {
    "bsam": [0, 0, 0],
    "bsam-released": [0, 0, 0],
    "bsam-2": [1, 1, 1],  # g_min is extrapolated
    "bsam-adaptive": [2, 2, 2],  # its points are not on the gradient
    "sam": [1, 1, 1],  # never downhill
    "gsam": [1, 1, 1],
    "pgn": [1, 1, 1],
    "gam": [1, 1, 1],
    "asam": [2, 2, 2],
    "friendly_sam": [1, 2, 2],  # the first step perturbs along the gradient
    "looksam": [1, 2, 2],  # it looks up every fifth step
    "msam": [2, 3, 3],  # no gradient at w once there is momentum
    "ksam": [3, 3, 3],  # never sees the whole batch
    "esam": [3, 3, 3],  # never has the gradient of all weights on the whole batch
}


def base(params, lr=0.1):
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


def built(method, problem):
    return VARIANTS[method](base(problem.model.parameters()), problem.model)


def closure_of(method, problem):
    return problem.losses if method in CHOOSING else problem.loss


def reference(problem, uphill, downhill=None):
    """From the equations, on copies: ``uphill(g / |g|)`` is added, and ``downhill(g / |g|)`` subtracted."""

    def at(by):
        model = copy.deepcopy(problem.model)
        params = list(model.parameters())
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(params).detach() + by, params)
        loss = F.cross_entropy(model(problem.x), problem.y)
        return loss.item(), torch.cat([g.flatten() for g in torch.autograd.grad(loss, params)])

    loss, g = at(0.0)
    u = g / g.norm()
    (upper, g_max), (lower, g_min) = at(uphill(u)), at(-(downhill or uphill)(u))
    cosine = float(g @ g_min / (g.norm() * g_min.norm()))
    return [loss, upper - loss, loss - lower, upper - lower, *(float(v.norm()) for v in (g, g_max, g_min)), cosine]


def numbers(reading):
    return list(astuple(reading)[1:9])


class Counted:
    def __init__(self, closure):
        self.closure, self.calls = closure, 0

    def __call__(self, *arguments):
        self.calls += 1
        return self.closure(*arguments)


@pytest.mark.parametrize("method", EXTRA)
def test_readings_equal_the_reference_and_reuse_passes(problem, method):
    optimizer, alone = built(method, problem), problem.clone()
    without = built(method, alone)
    probe = Probe(every=1).attach(optimizer)
    radius = 0.1 if method == "msam" else optimizer.param_groups[0].get("rho_max", optimizer.param_groups[0].get("rho"))
    for step, extra in enumerate(EXTRA[method]):
        expected = reference(
            problem, lambda u: radius * u, lambda u: optimizer.param_groups[0].get("rho_min", radius) * u
        )
        seen, plain = Counted(closure_of(method, problem)), Counted(closure_of(method, alone))
        optimizer.step(seen)
        without.step(plain)
        reading = probe.readings[-1]
        assert (reading.step, reading.extra_passes) == (step, extra)
        assert seen.calls - plain.calls == extra
        assert numbers(reading) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert len(probe.readings) == 3
    assert abs(reading.max_sharpness) > 1e-3
    assert reading.cosine < 1 - 1e-7


@pytest.mark.parametrize("method", sorted(VARIANTS))
def test_probes_do_not_change_training(method):
    def run(probe):
        torch.manual_seed(0)
        layers = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.4), nn.Linear(12, 3)
        model = nn.Sequential(*layers)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
        optimizer = VARIANTS[method](sgd, model)
        if probe is not None:
            probe.attach(optimizer)
        losses = []
        for _ in range(6):  # two backward calls per step
            for _ in range(2):
                x, y = torch.randn(24, 6), torch.randint(0, 3, (24,))

                def closure(indices=slice(None)):
                    outputs = model(x[indices])
                    losses = F.cross_entropy(outputs, y[indices], reduction="none")
                    if method == "functional_sam":
                        return losses.mean(), outputs
                    return losses if method in CHOOSING else losses.mean()

                losses.append(optimizer.backward(closure))
            optimizer.step()
            optimizer.zero_grad()
        tensors = [*losses, *model.parameters(), *model.buffers(), torch.random.get_rng_state()]
        return [t.detach().clone() for t in tensors], optimizer.state_dict()

    probe = Probe(every=2)
    (seen, state), (expected, expected_state) = run(probe), run(None)
    assert all(torch.equal(s, t) for s, t in zip(seen, expected, strict=True))
    torch.testing.assert_close(state["state"], expected_state["state"], rtol=0, atol=0)
    assert state["param_groups"] == expected_state["param_groups"]
    assert [reading.step for reading in probe] == [0, 0, 2, 2, 4, 4]


class Branching(nn.Module):
    """The second weight is used only away from the current weights."""

    def __init__(self):
        super().__init__()
        self.w, self.other = nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([1.0]))

    def forward(self):
        return (self.w**2).sum() if self.w.item() >= 1.0 else (self.w**2 + self.other**2).sum()


def test_parameters_that_only_the_probe_reaches_keep_no_gradient():
    results = []
    for probe in (Probe(every=1), None):
        model = Branching()
        optimizer = bsam.SAM(torch.optim.SGD(model.parameters(), lr=0.001, weight_decay=0.1), model)
        if probe is not None:
            probe.attach(optimizer)
        optimizer.backward(model)
        results.append(model.other.grad)
    assert probe is None
    assert results == [None, None]


def test_every_so_many_steps(problem):
    probes = [Probe(every=n) for n in (1, 3)]
    optimizer = built("sam", problem)
    for probe in probes:
        probe.attach(optimizer)
    seen = Counted(problem.loss)
    for _ in range(7):
        optimizer.step(seen)
    assert [[reading.step for reading in probe] for probe in probes] == [[0, 1, 2, 3, 4, 5, 6], [0, 3, 6]]
    assert seen.calls == 7 * 3  # the probes share their evaluations
    assert [reading.extra_passes for reading in probes[1]] == [0, 0, 0]
    assert [numbers(r) for r in probes[1]] == [numbers(r) for r in list(probes[0])[::3]]


@pytest.mark.parametrize(("rho_max", "rho_min", "extra"), [(0.2, 0.1, 2), (0.05, 0.05, 0), (0.05 * 1.001, 0.05, 1)])
def test_radii_of_the_probe(problem, rho_max, rho_min, extra):
    optimizer = built("bsam", problem)
    probe = Probe(every=1, rho_max=rho_max, rho_min=rho_min).attach(optimizer)
    expected = reference(problem, lambda u: rho_max * u, lambda u: rho_min * u)
    optimizer.step(problem.loss)
    (reading,) = probe
    assert numbers(reading) == pytest.approx(expected, rel=1e-9)
    assert (reading.rho_max, reading.rho_min, reading.extra_passes) == (rho_max, rho_min, extra)


@pytest.mark.parametrize("method", ["bsam", "sam"])
def test_radii_of_groups(problem, method):
    names = ("rho_max", "rho_min") if method == "bsam" else ("rho", "rho")
    first, *rest = problem.model.parameters()
    groups = [{"params": [first], names[0]: 0.3, names[1]: 0.2 if method == "bsam" else 0.3}, {"params": rest}]
    optimizer = VARIANTS[method](base(groups), problem.model)
    probe = Probe(every=1).attach(optimizer)
    n, total = first.numel(), sum(p.numel() for p in problem.model.parameters())

    radii = {rho: torch.tensor([rho] * n + [0.05] * (total - n), dtype=torch.float64) for rho in (0.3, 0.2)}
    lengths = []

    def uphill(u):
        lengths.append(float((radii[0.3] * u).norm()))
        return radii[0.3] * u

    expected = reference(problem, uphill, lambda u: radii[groups[0][names[1]]] * u)
    optimizer.step(problem.loss)
    (reading,) = probe
    assert numbers(reading) == pytest.approx(expected, rel=1e-9)
    assert reading.rho_max == pytest.approx(lengths[0], rel=1e-9)
    assert reading.extra_passes == EXTRA[method][0]


def test_radii_that_follow_the_learning_rate(problem):
    optimizer = built("bsam", problem)
    probe = Probe(every=1).attach(optimizer)
    for lr in (0.1, 0.05, 0.0):
        optimizer.param_groups[0]["lr"] = lr
        expected = reference(problem, lambda u: 0.05 * u, lambda u: lr / 2 * u)
        optimizer.step(problem.loss)
        assert numbers(probe.readings[-1]) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert [reading.rho_min for reading in probe] == pytest.approx([0.05, 0.025, 0.0])
    assert [reading.rho_max for reading in probe] == pytest.approx([0.05] * 3)
    assert [reading.extra_passes for reading in probe] == [0, 0, 0]
    assert probe.readings[-1].min_sharpness == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("method", ["bsam", "msam"])
def test_closures_of_every_kind(plain, method):
    expected = []

    def with_backward():
        plain.model.zero_grad()
        loss = plain.loss()
        loss.backward()
        return loss

    def micro_batches():
        for x, y in zip(plain.x.split(8), plain.y.split(8), strict=True):
            yield F.cross_entropy(plain.model(x), y)

    for closure in (plain.loss, with_backward, micro_batches, plain.losses):
        optimizer = VARIANTS[method](base(plain.model.parameters()), plain.model)
        probe = Probe().attach(optimizer)
        before = [p.detach().clone() for p in plain.model.parameters()]
        optimizer.backward(closure)
        assert all(torch.equal(p, q) for p, q in zip(before, plain.model.parameters(), strict=True))
        optimizer.zero_grad()
        expected = expected or reference(plain, lambda u: (0.1 if method == "msam" else 0.05) * u)
        assert numbers(probe.readings[0]) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("method", "overflow"), [("bsam", False), ("sam", False), ("sam", True)])
def test_scaler_ignores_an_overflow_in_a_pass_of_the_probe(problem, method, overflow):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer, seen = built(method, problem), Counted(problem.loss)
    probe = Probe(every=1).attach(optimizer)
    expected = reference(problem, lambda u: 0.05 * u)
    optimizer.backward(lambda: seen() * (float("inf") if overflow and seen.calls == 3 else 1.0), scaler=scaler)
    scaler.step(optimizer)
    scaler.update()
    assert (optimizer.t, scaler.get_scale()) == (1, 2.0**10)
    assert [r.extra_passes for r in probe] == [EXTRA[method][0]]
    assert overflow or numbers(probe.readings[0]) == pytest.approx(expected, rel=1e-9)


def test_an_overflow_in_a_pass_of_the_probe_does_not_move_the_start(problem):
    """BSAM from the released code starts its step at a point other than w; with two passes the probe adds one."""
    ends = []
    for probed in (False, True):
        own, scaler = problem.clone(), torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = bsam.BSAM(base(own.model.parameters()), own.model, passes=2, start_from_min=True)
        seen = Counted(own.loss)
        if probed:
            Probe(every=1).attach(optimizer)
        optimizer.backward(lambda seen=seen: seen() * (float("inf") if seen.calls == 3 else 1.0), scaler=scaler)
        scaler.step(optimizer)
        assert seen.calls == 2 + probed
        ends.append(own.weights())
    torch.testing.assert_close(*ends, rtol=0, atol=0)


def test_a_step_that_overflows_is_not_recorded(problem):
    optimizer, scaler = built("bsam", problem), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    probe = Probe(every=1).attach(optimizer)
    optimizer.backward(lambda: problem.loss() * float("inf"), scaler=scaler)
    scaler.step(optimizer)
    assert (optimizer.t, probe.readings) == (0, [])


def test_copies_of_the_optimizer_have_no_observers(problem):
    optimizer = built("bsam", problem)
    probe = Probe(every=1).attach(optimizer)
    probe.unpicklable = lambda: None
    optimizer.step(problem.loss)
    assert optimizer.observers == [probe]
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert other.observers == []
        assert other.t == 1
    optimizer.step(problem.loss)
    assert len(probe.readings) == 2


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_closures_that_raise_leave_everything_unchanged(problem, unchanged, failing):
    optimizer = built("sam", problem)
    probe = Probe(every=1).attach(optimizer)
    problem.model.eval()  # the first pass of a step moves the statistics, raise or not
    seen = Counted(problem.loss)

    def closure():
        if seen.calls + 1 == failing:
            raise KeyboardInterrupt
        return seen()

    with unchanged(problem.model), pytest.raises(KeyboardInterrupt):
        optimizer.backward(closure)
    assert probe.readings == []
    optimizer.step(problem.loss)
    assert [reading.step for reading in probe] == [0]


def test_a_zero_gradient_gives_zeros():
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    for method in (bsam.BSAM, bsam.SAM):
        optimizer = method(base(model.parameters()), model)
        probe = Probe().attach(optimizer)
        optimizer.step(lambda: F.mse_loss(model(torch.ones(1, 1)), torch.zeros(1, 1)))
        assert numbers(probe.readings[0]) == [0.0] * 8


def test_steps_before_the_start_are_not_measured(problem):
    optimizer = bsam.SAM(torch.optim.SGD(problem.model.parameters(), lr=0.1), problem.model, start=3)
    probe = Probe(every=2).attach(optimizer)
    for _ in range(6):
        optimizer.step(problem.loss)
    assert [reading.step for reading in probe] == [4]


def test_the_pass_of_functional_sam_at_the_weights_is_not_repeated(problem):
    optimizer = bsam.FunctionalSAM(torch.optim.SGD(problem.model.parameters(), lr=0.1), problem.model)
    probe = Probe(every=1).attach(optimizer)
    optimizer.step(problem.loss_and_outputs)
    assert [reading.extra_passes for reading in probe] == [2]
