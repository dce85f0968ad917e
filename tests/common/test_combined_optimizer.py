"""Several optimizers as one: Muon for matrices, AdamW for the rest."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import bsam
from helpers import same


def members(model):
    """Muon on the matrices, AdamW on the rest, with groups of their own."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1),
        torch.optim.AdamW([{"params": rest[:2]}, {"params": rest[2:], "lr": 0.002}], lr=0.01),
    ]


def scheduled(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)


def test_it_equals_its_members(problem):
    """Bit for bit, with a scheduler, from the beginning and resumed through a file."""
    apart, whole, second = problem.clone(), problem.clone(), problem.clone()
    optimizers = members(apart.model)
    schedulers = [scheduled(optimizer) for optimizer in optimizers]
    joint = bsam.CombinedOptimizer(members(whole.model))
    scheduler, file = scheduled(joint), io.BytesIO()
    for t in range(8):
        if t == 4:
            torch.save([whole.model.state_dict(), joint.state_dict(), scheduler.state_dict()], file)
        apart.model.zero_grad()
        apart.loss().backward()
        for optimizer, own in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            own.step()
        joint.zero_grad()
        whole.loss().backward()
        joint.step()
        scheduler.step()
    assert same(apart.weights(), whole.weights())
    assert not same(apart.weights(), problem.weights())
    file.seek(0)
    weights, state, schedule = torch.load(file, weights_only=True)
    second.model.load_state_dict(weights)
    joint = bsam.CombinedOptimizer(members(second.model))
    scheduler = scheduled(joint)
    joint.load_state_dict(state)
    scheduler.load_state_dict(schedule)
    for _ in range(4):
        joint.zero_grad()
        second.loss().backward()
        joint.step()
        scheduler.step()
    assert same(apart.weights(), second.weights())


def test_the_groups_and_the_state_are_the_members_own(problem):
    muon, adamw = members(problem.model)
    joint = bsam.CombinedOptimizer([muon, adamw])
    assert all(a is b for a, b in zip(joint.param_groups, muon.param_groups + adamw.param_groups, strict=True))
    assert joint.step(lambda: (problem.loss().backward(), 3.5)[1]) == 3.5
    for p in problem.model.parameters():
        assert joint.state[p] is (muon if p.dim() == 2 else adamw).state[p]
    saved = joint.state_dict()
    assert set(saved) == {"state", "param_groups"}
    assert [group["params"] for group in saved["param_groups"]] == [[0, 1, 2], [3, 4], [5, 6, 7]]
    assert {i: sorted(entry)[0] for i, entry in saved["state"].items()} == {
        **dict.fromkeys(range(3), "momentum_buffer"),
        **dict.fromkeys(range(3, 8), "exp_avg"),
    }
    joint.load_state_dict(saved)  # the members make new groups
    assert all(a is b for a, b in zip(joint.param_groups, muon.param_groups + adamw.param_groups, strict=True))


@pytest.mark.parametrize("method", [bsam.BSAM, bsam.FriendlySAM, bsam.MSAM])
def test_as_the_base_of_a_method(problem, method):
    """The base of a method steps as its members do on the direction; and a resumed run goes on bit for bit."""
    apart, second = problem.clone(), problem.clone()
    options = {"rho": 0.1} if method is bsam.MSAM else {}
    optimizer = method(bsam.CombinedOptimizer(members(problem.model)), problem.model, **options)
    scheduler, optimizers = scheduled(optimizer), members(apart.model)
    others = [scheduled(own) for own in optimizers]
    for t in range(6):
        if t == 3:
            saved = copy.deepcopy([problem.model.state_dict(), optimizer.state_dict(), scheduler.state_dict()])
        optimizer.zero_grad()
        optimizer.backward(problem.loss)
        for p, q in zip(problem.model.parameters(), apart.model.parameters(), strict=True):
            q.grad = p.grad.clone()
        for each in (optimizer, scheduler, *optimizers, *others):
            each.step()
        assert same(problem.weights(), apart.weights())
    second.model.load_state_dict(saved[0])
    optimizer = method(bsam.CombinedOptimizer(members(second.model)), second.model, **options)
    scheduler = scheduled(optimizer)
    optimizer.load_state_dict(saved[1])
    scheduler.load_state_dict(saved[2])
    for _ in range(3):
        optimizer.step(second.loss)
        scheduler.step()
    assert same(problem.weights(), second.weights())


def test_what_a_member_keeps_beside_its_parameters_stays_with_it(plain):
    """MADGRAD counts its steps in an entry of its own; two of them must not share it."""
    from pytorch_optimizer import MADGRAD

    first, rest = list(plain.model[0].parameters()), list(plain.model[2:].parameters())
    joint = bsam.CombinedOptimizer(
        [MADGRAD(first, lr=0.01), torch.optim.SGD(rest[:2], lr=0.1), MADGRAD(rest[2:], lr=0.02)]
    )
    joint.members[2].state["k"] = torch.tensor([5])
    plain.loss().backward()
    joint.step()
    saved = copy.deepcopy(joint.state_dict())
    beside = {k: int(v) for k, v in saved["state"].items() if isinstance(k, str)}
    assert set(beside.values()) == {int(joint.members[0].state["k"]), int(joint.members[2].state["k"])}
    assert len(set(beside.values())) == 2
    other = bsam.CombinedOptimizer(
        [MADGRAD(first, lr=0.01), torch.optim.SGD(rest[:2], lr=0.1), MADGRAD(rest[2:], lr=0.02)]
    )
    other.load_state_dict(saved)
    assert [int(other.members[i].state["k"]) for i in (0, 2)] == [int(joint.members[i].state["k"]) for i in (0, 2)]


def test_hooks_copies_and_modes(problem):
    class Moded(torch.optim.SGD):
        mode = "new"

        def train(self):
            self.mode = "train"

        def eval(self):
            self.mode = "eval"

    matrices, rest = (
        [p for p in problem.model.parameters() if p.dim() == 2],
        [p for p in problem.model.parameters() if p.dim() != 2],
    )
    joint = bsam.CombinedOptimizer([Moded(matrices, lr=0.1), torch.optim.SGD(rest, lr=0.1)])
    called = []
    joint.register_step_pre_hook(lambda *_: called.append("before step"))
    joint.register_step_post_hook(lambda *_: called.append("after step"))
    joint.register_state_dict_pre_hook(lambda *_: called.append("before save"))
    joint.register_state_dict_post_hook(lambda o, s: called.append("after save"))
    joint.register_load_state_dict_pre_hook(lambda o, s: called.append("before load"))
    joint.register_load_state_dict_post_hook(lambda o: called.append("after load"))
    joint.members[0].register_step_post_hook(lambda *_: called.append("member"))
    problem.loss().backward()
    joint.step()
    joint.load_state_dict(joint.state_dict())
    assert called == ["before step", "member", "after step", "before save", "after save", "before load", "after load"]
    joint.train()
    assert joint.members[0].mode == "train"
    joint.eval()
    assert joint.members[0].mode == "eval"
    assert not hasattr(bsam.CombinedOptimizer(members(problem.model)), "train")
    plain = bsam.CombinedOptimizer(members(problem.model))
    for twin in (copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        assert [group["lr"] for group in twin.param_groups] == [0.02, 0.01, 0.002]
        assert same(
            [p.detach() for g in twin.param_groups for p in g["params"]],
            [p.detach() for g in plain.param_groups for p in g["params"]],
        )


def test_what_is_refused(problem):
    muon, adamw = members(problem.model)
    sgd = torch.optim.SGD(problem.model.parameters(), lr=0.1)
    for wrong, word in [
        ([], "list of optimizers"),
        (muon, "list of optimizers"),
        ([muon, "adamw"], "got str"),
        ([torch.optim.LBFGS(problem.model.parameters())], "LBFGS"),
        ([muon, sgd], r"shape \(12, 6\) belongs to two members"),
    ]:
        with pytest.raises(bsam.BsamError, match=word):
            bsam.CombinedOptimizer(wrong)
    joint = bsam.CombinedOptimizer([muon, adamw])
    new = {"params": [nn.Parameter(torch.ones(2))]}
    for optimizer in (joint, bsam.SAM(joint, problem.model)):
        with pytest.raises(bsam.BsamError, match="before CombinedOptimizer is built"):
            optimizer.add_param_group(new)
    saved = bsam.CombinedOptimizer(members(problem.model)[::-1]).state_dict()
    before = str(joint.state_dict())
    with pytest.raises(bsam.BsamError, match=r"groups of \[2, 3, 3\]"):
        joint.load_state_dict(saved)
    assert str(joint.state_dict()) == before


def test_members_without_state_keep_their_numbers(plain):
    """Plain SGD has none: the entries of the next member must not move to its parameters."""
    first, *rest = plain.model.parameters()

    def build():
        return bsam.CombinedOptimizer([torch.optim.SGD([first], lr=0.1), torch.optim.AdamW(rest, lr=0.01)])

    joint = build()
    plain.loss().backward()
    joint.step()
    saved = joint.state_dict()
    assert sorted(saved["state"]) == list(range(1, 1 + len(rest)))
    other = build()
    other.load_state_dict(saved)
    assert first not in other.state
    assert all(torch.equal(other.state[p]["exp_avg"], joint.state[p]["exp_avg"]) for p in rest)
