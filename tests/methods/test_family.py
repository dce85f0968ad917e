"""What is particular to a method: identities between them, what they save, what they refuse, and the base optimizers
that they stand on.
"""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import bsam
from bsam.common.method_info import Need
from helpers import distance, flat, sgd, train, train_base

FAMILY = {
    "sam": bsam.SAM,
    "asam": bsam.ASAM,
    "gsam": partial(bsam.GSAM, rho=0.1, rho_floor=0.01),
    "fisher": bsam.FisherSAM,
    "friendly": bsam.FriendlySAM,
    "pgn": bsam.PGN,
    "gam": bsam.GAM,
    "gam-paper": partial(bsam.GAM, form="paper"),
    "looksam": partial(bsam.LookSAM, k=3),
    "esam": bsam.ESAM,
    "ksam": partial(bsam.KSAM, k=10),
    "msam": partial(bsam.MSAM, rho=0.2),
    "aesam": partial(bsam.AESAM, total_steps=6),
    "rst": bsam.RST,
    "bsam": bsam.BSAM,
    "bsam-adaptive": partial(bsam.BSAM, adaptive=True, rho_max=0.5, rho_min=0.5),
}


def closure_of(optimizer, problem):
    return problem.losses if Need.PER_SAMPLE_LOSSES in optimizer.needs else problem.loss


def trained(problem, make, make_base=sgd, steps=6, model=True):
    """The weights after some steps, on a copy."""
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
    "F-SAM that takes off no mean is SAM": (partial(bsam.FriendlySAM, rho=0.2, sigma=0.0), SAM),
    "GSAM without its orthogonal part is SAM": (partial(bsam.GSAM, rho=0.2, alpha=0.0), SAM),
    "SAM whose floor is its radius does not follow": (partial(bsam.SAM, rho=0.2, rho_floor=0.2), SAM),
    "GSAM whose floor is its radius does not follow": (
        partial(bsam.GSAM, rho=0.2, rho_floor=0.2),
        partial(bsam.GSAM, rho=0.2),
    ),
    "Fisher SAM without Fisher information is SAM": (partial(bsam.FisherSAM, rho=0.2, eta=0.0), SAM),
    "PGN with all weight on the second gradient is SAM": (partial(bsam.PGN, rho=0.2, alpha=1.0), SAM),
    "GAM with g1 alone is SAM": (partial(bsam.GAM, rho=0.2, beta=(1, 0, 0), gamma=0.0), SAM),
    "LookSAM that always looks is SAM": (partial(bsam.LookSAM, rho=0.2, k=1), SAM),
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
    "AE-SAM that looks once, and reuses, is LookSAM": (
        partial(
            bsam.AESAM, rho=0.2, total_steps=6, lambda_1=1e9, lambda_2=1e9, alpha=0.3
        ),  # a first gradient is as large as the mean of those seen
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


def test_fsam_perturbs_without_the_mean_of_earlier_batches(plain):
    """A batch whose gradient is the mean has nothing particular: with decay 0 the second step on the same weights has
    no direction to perturb along.
    """
    optimizer = bsam.FriendlySAM(torch.optim.SGD(plain.model.parameters(), lr=0.0), plain.model, rho=0.5, decay=0.0)
    losses = []
    for _ in range(2):
        optimizer.step(lambda: losses.append(plain.loss()) or losses[-1])
    first, perturbed, second, unperturbed = (loss.item() for loss in losses)
    assert perturbed > first + 0.1
    assert second == first
    assert unperturbed == pytest.approx(first, abs=1e-5)  # rounding over TINY is left


def test_looksam_reuses_the_part_orthogonal_to_the_gradient(plain):
    optimizer = bsam.LookSAM(torch.optim.SGD(plain.model.parameters(), lr=0.0), plain.model, alpha=0.5)
    gradients = []
    for _ in range(2):
        optimizer.step(plain.loss)
        gradients.append(flat(p.grad for p in plain.model.parameters()))
    plain.model.zero_grad()
    plain.loss().backward()
    g = flat(p.grad for p in plain.model.parameters())
    added = gradients[1] - g  # the weights did not move: g is the same in both steps
    assert abs(float(added @ g)) < 1e-12
    assert float(added.norm()) == pytest.approx(0.5 * float(g.norm()))
    orthogonal = gradients[0] - (gradients[0] @ g) / (g @ g) * g
    assert float(F.cosine_similarity(added, orthogonal, dim=0)) == pytest.approx(1.0)


class Rescaled(nn.Module):
    """A ReLU network without biases; the first layer times c, the second through c, is the same function."""

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
def test_asam_knows_norm_scales_by_name(problem, model):
    """They have one dimension, as biases have; without a model all those count as biases."""
    with torch.no_grad():
        problem.model[1].weight.uniform_(2.0, 5.0)
    problem.model[1].track_running_stats = False  # else it must be given
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
        if name != "0.bias":  # before batch norm it has no gradient but rounding
            assert F.cosine_similarity((moved - w).flatten(), expected.flatten(), dim=0) > 1 - 1e-12
            lengths.append(float((moved - w).norm() / expected.norm()))
    assert max(lengths) == pytest.approx(min(lengths))


@pytest.mark.parametrize("name", FAMILY)
def test_without_a_model(plain, name):
    assert distance(trained(plain, FAMILY[name]), trained(plain, FAMILY[name], model=False)) == 0


# What they save.


class Calls(TorchDispatchMode):
    """Every operation, with its arguments."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append((func, args))
        return func(*args, **(kwargs or {}))


def test_esams_first_backward_leaves_out_convolutions():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 3)).double()
    x, y = torch.randn(5, 2, 8, 8, dtype=torch.float64), torch.randint(0, 3, (5,))
    optimizer = bsam.ESAM(sgd(model.parameters()), model, beta=0.5)
    kinds = set()
    for t in range(8):
        starts = []

        def closure(indices=slice(None)):
            starts.append(len(calls.seen))
            return F.cross_entropy(model(x[indices]), y[indices], reduction="none")

        with Calls() as calls:
            optimizer.step(closure)
        w1, b1, w2, b2, _, _ = (bool(number < 0.5) for number in np.random.default_rng((0, t)).random(6))
        wanted = [(w1 or b1, w2, b2), (False, w1, b1)]
        masks = [
            tuple(args[-1])
            for func, args in calls.seen[: starts[1]]
            if func is torch.ops.aten.convolution_backward.default
        ]
        assert masks == [mask for mask in wanted if any(mask)]
        kinds.add(len(masks))
    assert kinds == {0, 1, 2}


@pytest.mark.parametrize(("gamma", "samples"), [(0.0, 1), (0.05, 1), (0.3, 7), (0.5, 12), (1.0, 24)])
def test_esams_second_pass_sees_a_share_of_the_samples(plain, gamma, samples):
    optimizer = bsam.ESAM(sgd(plain.model.parameters()), plain.model, gamma=gamma)
    asked = []
    optimizer.step(lambda *indices: asked.append(indices) or plain.losses(*indices))
    assert [len(indices) for indices in asked] == [0, 0, 1]
    ((chosen,),) = asked[2:]
    assert len(set(chosen.tolist())) == samples


@pytest.mark.parametrize(("k", "samples"), [(1, 1), (10, 10), (24, 24), (100, 24)])
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


# Arguments that are refused.

RADIUS = "rho must be a finite number that is not negative"
REFUSED = [
    (bsam.SAM, {"rho": -0.1}, RADIUS),
    (bsam.AESAM, {"rho": -0.1, "total_steps": 9}, RADIUS),
    (bsam.ASAM, {"eta": -1.0}, "eta must be a finite number of at least 0"),
    (bsam.GSAM, {"alpha": float("nan")}, "alpha must be a finite number, got nan"),
    (bsam.SAM, {"rho_floor": 0.6}, "rho_floor must not be above rho"),
    (bsam.ASAM, {"rho_floor": -0.1}, "rho_floor must be a finite number that is not negative"),
    (bsam.GSAM, {"lr_max": 0.1, "lr_min": 0.2}, "lr_max must be a finite number above lr_min"),
    (bsam.FisherSAM, {"eta": float("inf")}, "eta must be a finite number of at least 0"),
    (bsam.FriendlySAM, {"sigma": float("nan")}, "sigma must be a finite number"),
    (bsam.FriendlySAM, {"decay": 1.1}, "decay must be a finite number between 0 and 1"),
    (bsam.PGN, {"alpha": None}, "alpha must be a finite number"),
    (bsam.GAM, {"rho_norm": -1.0}, "rho_norm must be a finite number that is not negative"),
    (bsam.GAM, {"beta": (1, 1)}, "beta must be three numbers"),
    (bsam.GAM, {"beta": (1, float("nan"), 1)}, "beta must be a finite number"),
    (bsam.GAM, {"gamma": float("inf")}, "gamma must be a finite number"),
    (bsam.GAM, {"form": "accelerated"}, 'form must be "released" or "paper"'),
    (bsam.LookSAM, {"k": 0}, "k must be a whole number of at least 1"),
    (bsam.LookSAM, {"alpha": float("nan")}, "alpha must be a finite number"),
    (bsam.ESAM, {"beta": 0.0}, "beta must be a finite number between 0.001 and 1"),
    (bsam.ESAM, {"gamma": -0.5}, "gamma must be a finite number between 0 and 1"),
    (bsam.ESAM, {"seed": -1}, "seed must be a whole number of at least 0"),
    (bsam.KSAM, {"k": 0}, "k must be a whole number of at least 1"),
    (bsam.AESAM, {"total_steps": 0}, "total_steps must be a whole number of at least 1"),
    (bsam.AESAM, {"total_steps": 9, "decay": -0.1}, "decay must be a finite number between 0 and 1"),
    (bsam.AESAM, {"total_steps": 9, "lambda_1": float("nan")}, "lambda_1 must be a finite number"),
    (bsam.AESAM, {"total_steps": 9, "lambda_2": "1"}, "lambda_2 must be a finite number"),
    (bsam.AESAM, {"total_steps": 9, "alpha": float("inf")}, "alpha must be a finite number"),
    (bsam.RST, {"p": 2}, "p must be a finite number between 0 and 1"),
    (bsam.RST, {"gamma": float("nan")}, "gamma must be a finite number"),
    (bsam.RST, {"seed": 0.5}, "seed must be a whole number of at least 0"),
    (bsam.BSAM, {"adaptive": 1}, "adaptive must be True or False"),
    (bsam.BSAM, {"eta": -0.1}, "eta must be a finite number of at least 0"),
    (bsam.BSAM, {"eta": 0.1}, "eta belongs to the adaptive metric: also set adaptive=True"),
]


@pytest.mark.parametrize(
    ("cls", "arguments", "said"), REFUSED, ids=lambda v: v.__name__ if isinstance(v, type) else str(v)
)
def test_bad_arguments_are_refused_by_name_and_base_is_unchanged(problem, cls, arguments, said):
    base = sgd(problem.model.parameters())
    before = copy.deepcopy(base.state_dict())
    with pytest.raises(bsam.BsamError, match="^" + said):
        cls(base, problem.model, **arguments)
    assert base.state_dict() == before


@pytest.mark.parametrize("name", FAMILY)
def test_arguments_have_names_and_no_others_are_swallowed(problem, name):
    base = sgd(problem.model.parameters())
    with pytest.raises(TypeError, match="no argument radius"):
        FAMILY[name](base, problem.model, radius=0.1)
    with pytest.raises(TypeError, match="positional argument"):
        FAMILY[name](base, problem.model, 0.1)


def test_aesam_has_to_be_told_how_long_training_is(problem):
    with pytest.raises(TypeError, match="total_steps"):
        bsam.AESAM(sgd(problem.model.parameters()), problem.model)


@pytest.mark.parametrize(
    "make_base",
    [
        partial(torch.optim.SGD, lr=0.1),
        partial(torch.optim.Adam, lr=0.1, betas=(0.0, 0.9)),
    ],
)
def test_msam_needs_momentum(problem, make_base):
    base = make_base(problem.model.parameters())
    keys = set(base.param_groups[0])
    with pytest.raises(
        bsam.BsamError, match="perturbs along the momentum of base, and base has none: use SGD with momentum"
    ):
        bsam.MSAM(base, problem.model)
    assert set(base.param_groups[0]) == keys


def test_msam_needs_momentum_in_every_group(problem):
    groups = [{"params": problem.model[0].parameters()}, {"params": problem.model[1:].parameters(), "momentum": 0.0}]
    with pytest.raises(bsam.BsamError, match="base has none"):
        bsam.MSAM(sgd(groups), problem.model)
    optimizer = bsam.MSAM(sgd(problem.model.parameters()), problem.model)
    with pytest.raises(bsam.BsamError, match="base has none"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "momentum": 0.0})
    assert len(optimizer.param_groups) == 1


def test_msam_says_when_it_does_not_find_the_momentum(problem):
    class Own(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1, "momentum": 0.9})

        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                self.state[p]["velocity"] = p.grad

    optimizer = bsam.MSAM(Own(problem.model.parameters()), problem.model)
    optimizer.step(problem.loss)
    with pytest.raises(bsam.BsamError, match="neither momentum_buffer nor exp_avg in the state of Own"):
        optimizer.step(problem.loss)


def test_msam_perturbs_new_parameters_not_at_all(plain):
    """A group that was added has no momentum yet: zeros stand for it."""
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
def test_closures_that_cannot_choose_are_refused_with_a_hint(problem, name):
    optimizer = FAMILY[name](sgd(problem.model.parameters()), problem.model)
    before = problem.weights()
    wrong = {
        "it must use the indices it is called with": lambda indices=slice(None): problem.losses(),
        r"takes no argument: let it take their indices, as in `def closure\(indices=slice\(None\)\)`": lambda: (
            problem.losses()
        ),
        r"takes no argument: let it take": lambda *, indices=slice(None): problem.losses(indices),
        r"return one loss per selected sample \(reduction='none'\)": lambda indices=slice(None): problem.losses(
            indices
        ).mean(),
    }
    for said, closure in wrong.items():
        with pytest.raises(bsam.BsamError, match=said):
            optimizer.step(closure)
        assert distance(before, problem.weights()) == 0
    optimizer.step(problem.losses)
    assert distance(before, problem.weights()) > 0


# The base optimizer's own features.

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


ENGINE = ("bsam", "looksam", "esam", "msam")  # the last one reads the state of the base


@pytest.mark.parametrize("feature", BASES)
@pytest.mark.parametrize("name", ENGINE)
def test_features_of_the_base_work(plain, name, feature):
    """foreach and fused kernels equal the plain loop over parameters; the feature itself shows."""
    cls, options, without = BASES[feature]
    loop = trained(plain, FAMILY[name], partial(cls, **options, foreach=False))
    for kernel in ({"foreach": True}, {"fused": True}):
        assert distance(loop, trained(plain, FAMILY[name], partial(cls, **options, **kernel))) < 1e-10
    assert distance(loop, trained(plain, FAMILY[name], partial(cls, **{**options, **without}))) > 1e-4


@pytest.mark.parametrize("name", ENGINE)
def test_nesterov_with_weight_decay_by_hand(plain, name):
    """The direction is the gradient, and the rest is SGD's: decay at w, not at a perturbed point."""
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
def test_memory_of_a_parameter_that_was_never_reached_is_not_kept(name, problem):
    """Or the state of AdamW, which has none for it either, could not be loaded by anybody else."""
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
    """F-SAM: the first step has no mean, whatever the number of micro-batches, and the last one's mean is kept."""
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


def test_a_micro_batch_of_which_no_sample_was_chosen_is_passed_over(plain):
    other = plain.clone()

    def halves(indices=slice(None)):
        chosen = torch.arange(len(plain.y))[indices]
        for part in (chosen[chosen < 12], chosen[chosen >= 12]):
            yield F.cross_entropy(plain.model(plain.x[part]), plain.y[part], reduction="none")

    for p, closure in ((plain, halves), (other, other.losses)):
        bsam.KSAM(torch.optim.SGD(p.model.parameters(), lr=0.1), p.model, k=1).step(closure)
    for a, b in zip(plain.weights(), other.weights(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)
