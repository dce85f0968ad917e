"""What ``keep`` frees, that it changes no numbers, and that what is remembered outlives the gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bsam
from bsam.core import vector
from bsam.core.objective import Objective
from bsam.core.tensors import Bucket
from bsam.core.vector import Vector
from bsam.flatness import Probe


class UpAndDown(bsam.SharpnessAware):
    """A method whose passes and combinations the tests replace."""

    vectors = ("seen",)

    def __init__(self, base, model, way):
        self.way = way
        super().__init__(base, model, {"rho": 0.1})

    def direction(self, L):
        return self.way(self, L)


@pytest.fixture(params=["cpu", "branches of a GPU"])
def memory(request, monkeypatch):
    """The branches of a step: those of a GPU evaluate sums in the memory of gradients. A slice is one tensor."""
    monkeypatch.setattr(vector, "SLICE", 1)
    if request.param != "cpu":
        monkeypatch.setattr(Bucket, "on_cpu", False)
    return request.param


def optimizer_of(way, model=None, lr=0.1):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    optimizer = UpAndDown(torch.optim.SGD(model.parameters(), lr=lr), model, way)
    x = torch.randn(8, 4)
    return optimizer, lambda: model(x).square().mean()


def flat(v):
    return torch.cat([t.flatten() for t in v.tensors()])


USES = {
    "norm": lambda v: v.norm(),
    "dot": lambda v: v.dot(v),
    "sum": lambda v: (2 * v).tensors(),
    "map": lambda v: v.map(lambda _, t: t.abs()),
    "product": lambda v: v.times(v),
    "direction": lambda v: v,
}


@pytest.mark.parametrize("use", USES)
def test_a_vector_that_was_given_up_cannot_be_used(memory, use):
    def way(self, L):
        g = L.grad()
        e = 0.1 * g
        g_e = L.grad(at=e, keep=())
        return g_e + USES[use](g) if use == "direction" else USES[use](g)

    optimizer, closure = optimizer_of(way)
    before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    with pytest.raises(bsam.BsamError, match=r"given up by keep=: list it, or a combination that contains it, in keep"):
        optimizer.step(closure)
    assert all(torch.equal(p, w) for p, w in zip(optimizer.params, before, strict=True))
    assert all(p.grad is None for p in optimizer.params)


def test_a_kept_sum_is_one_vector_and_its_terms_are_gone(memory):
    found = {}

    def way(self, L):
        g = L.grad()
        g_up = L.grad(at=0.1 * g)
        rise, expected = g + 2 * g_up, flat(g + 2 * g_up)
        addresses = {t.data_ptr() for v in (g, g_up) for term in v.terms for t in term.buckets[0]}
        g_down = L.grad(at=-0.1 * g, keep=rise)
        found["equal"] = torch.equal(flat(rise), expected)
        found["terms"] = len(rise.terms)
        found["in place"] = {t.data_ptr() for term in rise.terms for t in term.buckets[0]} < addresses
        if memory != "cpu":
            with pytest.raises(bsam.BsamError, match="given up"):
                g_up.norm()
        return rise - g_down

    optimizer, closure = optimizer_of(way)
    optimizer.step(closure)
    # on a CPU, sums are not evaluated early: it would be one more pass over the memory
    wanted = {"terms": 2, "in place": False} if memory == "cpu" else {"terms": 1, "in place": True}
    assert found["equal"]
    assert memory == "cpu" or {name: found[name] for name in wanted} == wanted


def test_what_only_the_perturbation_needs_is_freed(memory):
    def way(self, L):
        g = L.grad()
        T2_g = g.times(g)
        d = L.grad(at=0.1 * T2_g, keep=g)
        with pytest.raises(bsam.BsamError, match="given up"):
            T2_g.tensors()
        return d + g

    optimizer, closure = optimizer_of(way)
    optimizer.step(closure)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keep_changes_no_numbers(memory, monkeypatch, dtype):
    """Every method, with what it would do if everything were kept; GAM adds in another order on a GPU."""
    cases = {name: (m, {}) for name, m in bsam.METHODS.items() if not m.is_loss and name not in ("esam", "ksam")}
    cases.pop("functional_sam")  # needs outputs
    cases["aesam"] = (bsam.AESAM, {"total_steps": 20, "alpha": 0.3})
    cases |= {
        "bsam, 2 passes": (bsam.BSAM, {"passes": 2}),
        "bsam, every": (bsam.BSAM, {"every": 3}),
        "bsam, 2 passes, every": (bsam.BSAM, {"passes": 2, "every": 3}),
        "bsam, adaptive": (bsam.BSAM, {"adaptive": True}),
        "bsam, released": (bsam.BSAM, {"start_from_min": True}),
        "looksam, 2": (bsam.LookSAM, {"k": 2}),
    }

    def train(method, settings, probe=False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
        groups = [{"params": model[0].parameters(), "in_norm": False}, {"params": [*model[1:].parameters()]}]
        optimizer = method(torch.optim.SGD(groups, lr=0.1, momentum=0.9), model, **settings)
        if probe:
            Probe(every=1).attach(optimizer)
        for _ in range(6):
            x = torch.randn(16, 6, dtype=dtype)
            optimizer.step(lambda x=x: model(x).square().mean())
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    grad = Objective.grad
    results = {name: [train(*case), train(*case, probe=True)] for name, case in cases.items()}
    monkeypatch.setattr(Objective, "grad", lambda self, *a, keep=None, **named: grad(self, *a, **named))
    for name, (kept, observed) in results.items():
        assert torch.equal(kept, observed), name
        everything = train(*cases[name])
        if name == "gam" and memory != "cpu":
            torch.testing.assert_close(kept, everything, rtol=1e-4, atol=1e-6)
        else:
            assert torch.equal(kept, everything), name


def test_the_backup_of_the_weights_ends_with_the_passes(memory):
    optimizer, closure = optimizer_of(lambda self, L: L.grad(at=0.1 * L.grad(), keep=()))
    optimizer.step(closure)
    assert bool(optimizer._weights._backup) == (memory == "cpu")  # there, allocating it costs more than copying


def test_a_remembered_sum_with_the_weights_is_that_at_w(memory):
    """It is evaluated at once: while the weights are moved, they are other ones."""

    def way(self, L):
        g = L.grad()
        self.remember("seen", 0.5 * self.vector(self.params) + 0.5 * g)
        self.expected = 0.5 * torch.cat([p.detach().flatten() for p in self.params]) + 0.5 * flat(g)
        return L.grad(at=0.1 * g, keep=())

    optimizer, closure = optimizer_of(way)
    optimizer.step(closure)
    torch.testing.assert_close(flat(optimizer.recall("seen")), optimizer.expected)


def test_a_remembered_gradient_outlives_restart_and_a_second_backward(memory):
    first = []

    def way(self, L):
        g = L.grad()
        g_up = L.grad(at=0.1 * g)
        self.remember("seen", g - 0.5 * g_up)
        if not first:
            first.append(flat(g - 0.5 * g_up))
            L.restart()
            for size in (0.1, 0.2, 0.3):
                g = L.grad(at=self.vector([torch.full_like(p, size) for p in self.params]))
        return g

    optimizer, closure = optimizer_of(way)
    optimizer.step(closure)
    assert torch.equal(flat(optimizer.recall("seen")), first[0])


def test_values_of_the_last_backward_are_stored_by_the_step(memory):
    seen = []

    def way(self, L):
        g = L.grad()
        self.remember("seen", g)
        seen.append(flat(g))
        return L.grad(at=0.1 * g, keep=())

    optimizer, closure = optimizer_of(way)
    optimizer.backward(closure)
    optimizer.backward(lambda: 3 * closure())
    optimizer.zero_grad()
    optimizer.backward(lambda: 2 * closure())
    optimizer.step()
    assert torch.equal(flat(optimizer.recall("seen")), seen[2])
    optimizer.step(closure)
    assert torch.equal(flat(optimizer.recall("seen")), seen[3])


def test_map_in_place(memory):
    def way(self, L):
        g = L.grad()
        expected, double = 3 * flat(g) * flat(g), 2 * g
        (term,) = g.terms
        address = term.buckets[0][0].data_ptr()
        v = g.map_(lambda _, t, other: 3 * t * other, g.copy())
        assert v is g
        assert torch.equal(flat(g), expected)
        assert next(iter(g.terms)).buckets[0][0].data_ptr() == address
        with pytest.raises(bsam.BsamError, match="map_ has overwritten: use map"):
            double.norm()
        state = Vector([torch.ones_like(p) for p in self.params], g.layout)
        (before,) = state.terms
        state.map_(lambda _, t: t + 1)
        assert before.buckets[0][0].eq(1).all()  # memory that is not the step's is not overwritten
        return L.grad(at=0.1 * g, keep=())

    optimizer, closure = optimizer_of(way)
    optimizer.step(closure)


@pytest.mark.parametrize("at", [[torch.zeros(3)], torch.zeros(3), 0.1])
def test_a_perturbation_that_is_no_vector(at):
    optimizer, closure = optimizer_of(lambda self, L: L.grad(at=at))
    with pytest.raises(bsam.BsamError, match=rf"at must be a Vector, .* got {type(at).__name__}"):
        optimizer.step(closure)


def test_keep_must_be_vectors():
    optimizer, closure = optimizer_of(lambda self, L: L.grad(at=0.1 * L.grad(), keep=[3.0]))
    with pytest.raises(bsam.BsamError, match=r"keep must be a Vector, several, or \(\), got float"):
        optimizer.step(closure)


def test_gradients_from_before_a_restart_cannot_be_used(memory):
    def way(self, L):
        g = L.grad()
        L.restart()
        return L.grad() + g

    optimizer, closure = optimizer_of(way)
    with pytest.raises(bsam.BsamError, match=r"from before L.restart"):
        optimizer.step(closure)
