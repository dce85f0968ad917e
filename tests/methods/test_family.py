"""Properties of single methods: identities between them, selection of samples, refusals, and features of the base."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bsam
from bsam.common.method_info import Need
from helpers import assert_close, detached, distance, flat, sgd, train, train_base

FAMILY = {
    "asam": bsam.ASAM,
    "looksam": partial(bsam.LookSAM, k=3),
    "esam": bsam.ESAM,
    "ksam": partial(bsam.KSAM, k=10),
    "msam": partial(bsam.MSAM, rho=0.2),
    "bsam": bsam.BSAM,
    "bsam-adaptive": partial(bsam.BSAM, adaptive=True, rho_max=0.5, rho_min=0.5),
}


def closure_of(optimizer, problem):
    return problem.losses if Need.PER_SAMPLE_LOSSES in optimizer.needs else problem.loss


def trained(problem, make, make_base=sgd, steps=6, model=True):
    """Return the weights after some steps on a copy."""
    problem = problem.clone()
    optimizer = make(make_base(problem.model.parameters()), problem.model if model else None)
    train(problem, optimizer, steps, closure_of(optimizer, problem))
    return problem.weights()


def base_alone(problem, make_base=sgd, steps=6):
    problem = problem.clone()
    train_base(problem, make_base(problem.model.parameters()), steps)
    return problem.weights()


# Identities.

SAM = partial(bsam.SAM, rho=0.2)
IDENTITIES = {
    "F-SAM that subtracts no mean is SAM": (partial(bsam.FriendlySAM, rho=0.2, sigma=0.0), SAM),
    "GSAM without its orthogonal part is SAM": (partial(bsam.GSAM, rho=0.2, alpha=0.0), SAM),
    "SAM whose floor is its radius has a fixed one": (partial(bsam.SAM, rho=0.2, rho_floor=0.2), SAM),
    "Fisher SAM without Fisher information is SAM": (partial(bsam.FisherSAM, rho=0.2, eta=0.0), SAM),
    "PGN with all weight on the second gradient is SAM": (partial(bsam.PGN, rho=0.2, alpha=1.0), SAM),
    "GAM with g1 alone is SAM": (partial(bsam.GAM, rho=0.2, beta=(1, 0, 0), gamma=0.0), SAM),
    "LookSAM with k=1 is SAM": (partial(bsam.LookSAM, rho=0.2, k=1), SAM),
    "ESAM with all weights and samples is SAM": (partial(bsam.ESAM, rho=0.2, beta=1.0, gamma=1.0), SAM),
    "K-SAM with all samples is SAM": (partial(bsam.KSAM, rho=0.2, k=24), SAM),
    "AE-SAM with a threshold below all is SAM": (
        partial(bsam.AESAM, rho=0.2, total_steps=6, lambda_1=-1e9, lambda_2=-1e9),
        SAM,
    ),
    "RST with probability 1 is SAM": (partial(bsam.RST, rho=0.2, p=1.0), SAM),
    "G-RST with probability 1 is PGN": (
        partial(bsam.RST, rho=0.2, p=1.0, gamma=0.7),
        partial(bsam.PGN, rho=0.2, alpha=0.7),
    ),
    "AE-SAM with one SAM step and alpha is LookSAM": (  # the first gradient reaches any threshold
        partial(bsam.AESAM, rho=0.2, total_steps=6, lambda_1=1e9, lambda_2=1e9, alpha=0.3),
        partial(bsam.LookSAM, rho=0.2, k=100, alpha=0.3),
    ),
}


@pytest.mark.parametrize("identity", IDENTITIES)
def test_identities(plain, identity):
    ours, theirs = (trained(plain, make) for make in IDENTITIES[identity])
    assert distance(ours, theirs) < 1e-12
    assert distance(ours, base_alone(plain)) > 1e-3


@pytest.mark.parametrize(
    "make", [partial(bsam.PGN, alpha=0.0), partial(bsam.RST, p=0.0), partial(bsam.GAM, rho_norm=0.0, form="paper")]
)
def test_these_are_the_base_optimizer(plain, make):
    assert distance(trained(plain, make), base_alone(plain)) < 1e-12


class Rescaled(nn.Module):
    """A ReLU network without biases, which is the same function for all c."""

    def __init__(self, c: float):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 12, bias=False).double(), nn.Linear(12, 3, bias=False).double()
        with torch.no_grad():
            self.first.weight *= c
            self.second.weight /= c

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


@pytest.mark.parametrize(
    ("make", "invariant"),
    [
        (partial(bsam.ASAM, eta=0.0), True),
        (partial(bsam.BSAM, adaptive=True, eta=0.0, rho_max=0.5, rho_min=0.5), True),
        (partial(bsam.SAM, rho=0.5), False),
        (partial(bsam.BSAM, rho_max=0.5, rho_min=0.5), False),
    ],
)
def test_losses_nearby_do_not_change_with_the_scale_of_a_layer(problem, make, invariant):
    seen = []
    for c in (1.0, 4.0):
        model = Rescaled(c)
        losses = []
        optimizer = make(sgd(model.parameters()), model)
        optimizer.backward(lambda: losses.append(F.cross_entropy(model(problem.x), problem.y)) or losses[-1])
        seen.append([loss.item() for loss in losses])
    (at_w, *nearby), (same_at_w, *other) = seen
    assert at_w == pytest.approx(same_at_w, rel=1e-12)
    assert all(abs(a - at_w) > 1e-2 for a in nearby)
    gaps = [abs(a - b) for a, b in zip(nearby, other, strict=True)]
    assert max(gaps) < 1e-12 if invariant else min(gaps) > 1e-2


@pytest.mark.parametrize("model", [True, False])
def test_asam_finds_norm_scales_by_name(problem, model):
    """They have one dimension, as biases do; without a model, all of these count as biases."""
    with torch.no_grad():
        problem.model[1].weight.uniform_(2.0, 5.0)
    problem.model[1].track_running_stats = False  # otherwise ASAM requires the model
    before, gradients = problem.weights(), torch.autograd.grad(problem.loss(), list(problem.model.parameters()))
    seen, lengths = [], []
    optimizer = bsam.ASAM(sgd(problem.model.parameters()), problem.model if model else None, eta=0.1)
    optimizer.backward(lambda: seen.append(problem.weights()) or problem.loss())
    for (name, _), w, g, moved in zip(problem.model.named_parameters(), before, gradients, seen[1], strict=True):
        T = (
            w.abs() + 0.1
            if name in ("0.weight", "3.weight", "5.weight") or (name == "1.weight" and model)
            else torch.ones_like(w)
        )
        expected = T**2 * g
        if name != "0.bias":  # before batch norm, its gradient is only rounding error
            assert F.cosine_similarity((moved - w).flatten(), expected.flatten(), dim=0) > 1 - 1e-12
            lengths.append(float((moved - w).norm() / expected.norm()))
    assert max(lengths) == pytest.approx(min(lengths))


@pytest.mark.parametrize("name", FAMILY)
def test_without_a_model(plain, name):
    assert distance(trained(plain, FAMILY[name]), trained(plain, FAMILY[name], model=False)) == 0


# Selection.


def test_esam_computes_only_the_selected_gradients(plain):
    """Hooks of parameters see a gradient in the first pass of those that the seed and the step select."""
    optimizer = bsam.ESAM(sgd(plain.model.parameters()), plain.model, beta=0.5)
    params, computed, calls = list(plain.model.parameters()), set(), []
    for i, p in enumerate(params):
        p.register_hook(lambda g, i=i: computed.add(i) if len(calls) == 1 else None)
    for t in range(4):
        calls.clear()
        computed.clear()
        optimizer.step(lambda *indices: calls.append(1) or plain.losses(*indices))
        draws = np.random.default_rng((0, t)).random(len(params))
        assert computed == {i for i, number in enumerate(draws) if number < 0.5}


@pytest.mark.parametrize(("gamma", "samples"), [(0.0, 1), (0.3, 7), (1.0, 24)])
def test_esams_second_pass_sees_a_share_of_the_samples(plain, gamma, samples):
    optimizer = bsam.ESAM(sgd(plain.model.parameters()), plain.model, gamma=gamma)
    asked = []
    optimizer.step(lambda *indices: asked.append(indices) or plain.losses(*indices))
    assert [len(indices) for indices in asked] == [0, 0, 1]
    ((chosen,),) = asked[2:]
    assert len(set(chosen.tolist())) == samples


@pytest.mark.parametrize(("k", "samples"), [(1, 1), (10, 10), (100, 24)])
def test_ksam_sees_the_hardest_samples(plain, k, samples):
    optimizer = bsam.KSAM(sgd(plain.model.parameters()), plain.model, k=k)
    hardest = plain.clone().losses().topk(samples).indices
    asked = []
    optimizer.step(lambda *indices: asked.append(indices) or plain.losses(*indices))
    assert asked[0] == ()
    assert all(torch.equal(chosen, hardest.sort().values) for (chosen,) in asked[1:])
    assert len(asked) == 3


@pytest.mark.parametrize("make", [bsam.RST, bsam.ESAM])
def test_another_seed_is_another_run(plain, make):
    once, again, other = (trained(plain, partial(make, seed=seed, rho=0.3)) for seed in (4, 4, 5))
    assert distance(once, again) == 0
    assert distance(once, other) > 1e-4


# Refusals.

NAN, INF = float("nan"), float("inf")
REFUSED = {  # the last argument of each row is wrong
    bsam.VaSSO: [{"theta": 0.0}, {"theta": 1.1}],
    bsam.SAM: [{"rho": -0.1}, {"rho_floor": 0.6}],
    bsam.ASAM: [{"eta": -1.0}, {"rho_floor": -0.1}],
    bsam.GSAM: [{"alpha": NAN}, {"lr_min": 0.2, "lr_max": 0.1}],
    bsam.FisherSAM: [{"eta": INF}],
    bsam.FriendlySAM: [{"sigma": NAN}, {"decay": 1.1}],
    bsam.PGN: [{"alpha": None}],
    bsam.GAM: [
        *({"beta": beta} for beta in ((1, 1), (1, NAN, 1))),
        *({"rho_norm": -1.0}, {"gamma": INF}, {"form": "accelerated"}),
    ],
    bsam.LookSAM: [{"k": 0}, {"alpha": NAN}],
    bsam.ESAM: [{"beta": 0.0}, {"gamma": -0.5}, {"seed": -1}],
    bsam.KSAM: [{"k": 0}],
    bsam.AESAM: [
        {"total_steps": 0},
        *({"total_steps": 9, name: value} for name, value in {"decay": -0.1, "lambda_1": NAN, "alpha": INF}.items()),
    ],
    bsam.RST: [{"p": 2}, {"gamma": NAN}, {"seed": 0.5}],
    bsam.BSAM: [{"adaptive": 1}, {"eta": -0.1}, {"eta": 0.1}],  # eta needs adaptive
}


@pytest.mark.parametrize(
    ("cls", "arguments"), [(cls, arguments) for cls, rows in REFUSED.items() for arguments in rows], ids=str
)
def test_wrong_arguments(problem, cls, arguments):
    base = sgd(problem.model.parameters())
    before = copy.deepcopy(base.state_dict())
    with pytest.raises(ValueError, match=f"^{list(arguments)[-1]} "):
        cls(base, problem.model, **arguments)
    assert base.state_dict() == before


@pytest.mark.parametrize("name", FAMILY)
def test_unknown_positional_and_missing_arguments(problem, name):
    base = sgd(problem.model.parameters())
    with pytest.raises(TypeError, match="radius"):
        FAMILY[name](base, problem.model, radius=0.1)
    with pytest.raises(TypeError, match="settings by name"):
        FAMILY[name](base, problem.model, 0.1)
    with pytest.raises(TypeError, match="total_steps"):
        bsam.AESAM(base, problem.model)


class Velocity(torch.optim.Optimizer):
    """Has momentum, but under another name."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "momentum": 0.9})

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["velocity"] = p.grad


def test_msam_needs_momentum(problem):
    parts = [{"params": problem.model[0].parameters()}, {"params": problem.model[1:].parameters(), "momentum": 0.0}]
    params = list(problem.model.parameters())
    for base in (torch.optim.SGD(params, lr=0.1), torch.optim.Adam(params, betas=(0.0, 0.9)), sgd(parts)):
        keys = set(base.param_groups[0])
        with pytest.raises(ValueError, match="momentum"):
            bsam.MSAM(base, problem.model)
        assert set(base.param_groups[0]) == keys
    optimizer = bsam.MSAM(sgd(params), problem.model)
    with pytest.raises(ValueError, match="momentum"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "momentum": 0.0})
    assert len(optimizer.param_groups) == 1
    optimizer = bsam.MSAM(Velocity(params), problem.model)
    optimizer.step(problem.loss)
    with pytest.raises(ValueError, match="Velocity"):
        optimizer.step(problem.loss)


def test_msam_does_not_perturb_new_parameters(plain):
    """A group that was added has no momentum yet."""
    head = nn.Linear(6, 3).double()
    optimizer = bsam.MSAM(sgd(plain.model.parameters()), None, rho=0.5)
    optimizer.step(plain.loss)
    optimizer.add_param_group({"params": head.parameters()})
    seen = []

    def closure():
        seen.append((head.weight.detach().clone(), plain.model[0].weight.detach().clone()))
        return F.cross_entropy(plain.model(plain.x) + head(plain.x), plain.y)

    before = head.weight.detach().clone(), plain.model[0].weight.detach().clone()
    optimizer.backward(closure)
    assert torch.equal(seen[0][0], before[0])
    assert not torch.equal(seen[0][1], before[1])


@pytest.mark.parametrize("name", ["esam", "ksam"])
def test_closures_that_cannot_choose(problem, name):
    """A closure without indices raises an error that shows how to take them."""
    optimizer = FAMILY[name](sgd(problem.model.parameters()), problem.model)
    before = problem.weights()
    for word, closure in (
        ("indices", lambda indices=slice(None): problem.losses()),
        (r"def closure\(indices=slice\(None\)\)", lambda: problem.losses()),
        (r"def closure\(indices=slice\(None\)\)", lambda *, indices=slice(None): problem.losses(indices)),
    ):
        with pytest.raises(bsam.BsamError, match=word):
            optimizer.step(closure)
        assert distance(before, problem.weights()) == 0
    optimizer.step(problem.losses)
    assert distance(before, problem.weights()) > 0


# Features of the base optimizer.

BASES = {
    "nesterov": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"nesterov": False},
    ),
    "weight decay": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, {"weight_decay": 0.0}),
    "amsgrad": (
        torch.optim.AdamW,
        {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1, "betas": (0.5, 0.5)},
        {"amsgrad": False},
    ),
}


ENGINE = ("bsam", "looksam", "esam", "msam")  # MSAM reads the state of the base


@pytest.mark.parametrize("feature", BASES)
@pytest.mark.parametrize("name", ENGINE)
def test_features_of_the_base_work(plain, name, feature):
    """foreach and fused kernels equal the loop over parameters, and the feature makes a difference."""
    cls, options, without = BASES[feature]
    loop = trained(plain, FAMILY[name], partial(cls, **options, foreach=False))
    for kernel in ({"foreach": True}, {"fused": True}):
        assert distance(loop, trained(plain, FAMILY[name], partial(cls, **options, **kernel))) < 1e-10
    assert distance(loop, trained(plain, FAMILY[name], partial(cls, **{**options, **without}))) > 1e-4


@pytest.mark.parametrize("name", ENGINE)
def test_nesterov_with_weight_decay_by_hand(plain, name):
    """SGD uses the direction as its gradient, and decays at w, not at a perturbed point."""
    make, twin = FAMILY[name], plain.clone()
    ours = make(sgd(plain.model.parameters(), nesterov=True, weight_decay=0.1), plain.model)
    by_hand = make(sgd(twin.model.parameters(), nesterov=True, weight_decay=0.1), twin.model)
    buffers = None
    for _ in range(5):
        ours.step(closure_of(ours, plain))
        by_hand.zero_grad()
        before = twin.weights()
        by_hand.backward(closure_of(by_hand, twin))
        d = [p.grad + 0.1 * w for p, w in zip(twin.model.parameters(), before, strict=True)]
        buffers = d if buffers is None else [0.9 * b + a for a, b in zip(d, buffers, strict=True)]
        expected = [w - 0.1 * (a + 0.9 * b) for w, a, b in zip(before, d, buffers, strict=True)]
        by_hand.step()
        assert distance(twin.weights(), expected) < 1e-12
    assert distance(plain.weights(), twin.weights()) == 0


@pytest.mark.parametrize("name", ["LookSAM", "FriendlySAM"])
def test_no_memory_is_kept_for_a_parameter_without_gradient(name, problem):
    """AdamW has no state for it either, so a plain AdamW can load the state."""
    problem.model.append(nn.Linear(4, 4).double())
    idle = list(problem.model[-1].parameters())

    def loss():
        return F.cross_entropy(problem.model[:-1](problem.x), problem.y)

    optimizer = getattr(bsam, name)(torch.optim.AdamW(problem.model.parameters()), problem.model)
    for _ in range(2):
        optimizer.step(loss)
    saved = optimizer.state_dict()
    used = len(list(problem.model.parameters())) - len(idle)
    assert sorted(saved["state"]) == list(range(used))
    plain = torch.optim.AdamW(problem.model.parameters())
    plain.load_state_dict(saved)
    loss().backward()
    plain.step()


@pytest.mark.parametrize("name", ["LookSAM", "FriendlySAM"])
def test_memory_follows_parameters_that_are_cast(name, problem):
    optimizer = getattr(bsam, name)(torch.optim.SGD(problem.model.parameters(), lr=0.1), problem.model)
    optimizer.step(problem.loss)
    problem.model.float()
    problem.x = problem.x.float()
    optimizer.step(problem.loss)
    assert all(p.dtype == torch.float32 and torch.isfinite(p).all() for p in problem.model.parameters())


def test_every_backward_of_a_step_sees_what_the_step_before_left(plain):
    """F-SAM: no micro-batch of the first step sees a mean, and the mean of the last one is kept."""
    halves = list(zip(plain.x.chunk(2), plain.y.chunk(2), strict=True))
    other = plain.clone()
    ours, sam = (
        cls(torch.optim.SGD(p.model.parameters(), lr=0.1), p.model, rho=0.05)
        for cls, p in ((bsam.FriendlySAM, plain), (bsam.SAM, other))
    )
    gradient = None
    for x, y in halves:
        gradient = torch.autograd.grad(F.cross_entropy(plain.model(x), y), list(plain.model.parameters()))
        ours.backward(lambda: F.cross_entropy(plain.model(x), y))
        sam.backward(lambda: F.cross_entropy(other.model(x), y))
    for p, q in zip(plain.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-15)
    ours.step()
    kept = [entry["gradient_mean"] for entry in ours.state_dict()["state"].values()]
    for k, g in zip(kept, gradient, strict=True):
        torch.testing.assert_close(k, g, rtol=0, atol=1e-15)


def test_micro_batches_without_a_chosen_sample_are_skipped(plain):
    other = plain.clone()

    def halves(indices=slice(None)):
        chosen = torch.arange(len(plain.y))[indices]
        for part in (chosen[chosen < 12], chosen[chosen >= 12]):
            yield F.cross_entropy(plain.model(plain.x[part]), plain.y[part], reduction="none")

    for p, closure in ((plain, halves), (other, other.losses)):
        bsam.KSAM(torch.optim.SGD(p.model.parameters(), lr=0.1), p.model, k=1).step(closure)
    for a, b in zip(plain.weights(), other.weights(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


def test_friendly_sam_of_a_parameter_whose_first_gradient_comes_late(plain):
    """Its mean starts with that gradient, as in the authors' code, which keeps one mean per parameter."""
    params, rho, decay, steps = list(plain.model.parameters()), 0.2, 0.6, 12
    start, means, late = plain.weights(), {}, params[0]
    w = start

    def gradient(point):
        torch.nn.utils.vector_to_parameters(flat(point), params)
        return torch.autograd.grad(plain.loss(), params)

    for t in range(steps):
        chosen = [i for i, p in enumerate(params) if p is not late or t >= 4]
        g = gradient(w)
        v = {i: g[i] - means[i] if i in means else g[i] for i in chosen}
        means.update({i: decay * means[i] + (1 - decay) * g[i] if i in means else g[i] for i in chosen})
        length = flat(v.values()).norm()
        moved = gradient([p + rho * v[i] / length if i in v else p for i, p in enumerate(w)])
        w = [p - 0.1 * moved[i] if i in v else p for i, p in enumerate(w)]

    torch.nn.utils.vector_to_parameters(flat(start), params)
    optimizer = bsam.FriendlySAM(torch.optim.SGD(params, lr=0.1), plain.model, rho=rho, decay=decay)
    for t in range(steps):
        late.requires_grad_(t >= 4)
        optimizer.step(plain.loss)
    assert_close(detached(params), w, atol=1e-11)
