"""Several optimizers as one: Muon for matrices, AdamW for the rest."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from torch import nn

import bsam
from helpers import alike, same

Muon = getattr(torch.optim, "Muon", partial(torch.optim.SGD, momentum=0.95, nesterov=True))  # new in torch 2.9


def members(model):
    """Muon for the matrices, AdamW with two groups for the rest."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return [
        Muon(matrices, lr=0.02, weight_decay=0.1),
        torch.optim.AdamW([{"params": rest[:2]}, {"params": rest[2:], "lr": 0.002}], lr=0.01),
    ]


def scheduled(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)


def test_it_equals_its_members(problem):
    """Bit for bit, with a scheduler."""
    separate, joint = problem.clone(), problem.clone()
    optimizers, combined = members(separate.model), bsam.CombinedOptimizer(members(joint.model))
    schedulers, scheduler = [scheduled(optimizer) for optimizer in optimizers], scheduled(combined)
    for _ in range(4):
        separate.model.zero_grad()
        separate.loss().backward()
        combined.zero_grad()
        joint.loss().backward()
        for part in (*optimizers, combined, *schedulers, scheduler):
            part.step()
    assert same(separate.weights(), joint.weights())
    assert not same(joint.weights(), problem.weights())


def test_groups_and_state_belong_to_the_members(problem):
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
    joint.load_state_dict(saved)  # creates new groups in the members
    assert all(a is b for a, b in zip(joint.param_groups, muon.param_groups + adamw.param_groups, strict=True))


@pytest.mark.parametrize("method", [bsam.FriendlySAM, partial(bsam.MSAM, rho=0.1)])
def test_as_the_base_of_a_method(problem, method):
    """The members step on the direction; a run resumed from a file is identical."""
    separate, second, file = problem.clone(), problem.clone(), io.BytesIO()
    optimizer = method(bsam.CombinedOptimizer(members(problem.model)), problem.model)
    scheduler, optimizers = scheduled(optimizer), members(separate.model)
    schedulers = [scheduled(member) for member in optimizers]
    for t in range(4):
        if t == 2:
            torch.save([problem.model.state_dict(), optimizer.state_dict(), scheduler.state_dict()], file)
        optimizer.zero_grad()
        optimizer.backward(problem.loss)
        for p, q in zip(problem.model.parameters(), separate.model.parameters(), strict=True):
            q.grad = p.grad.clone()
        for part in (optimizer, scheduler, *optimizers, *schedulers):
            part.step()
        assert same(problem.weights(), separate.weights())
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second.model.load_state_dict(saved[0])
    optimizer = method(bsam.CombinedOptimizer(members(second.model)), second.model)
    scheduler = scheduled(optimizer)
    optimizer.load_state_dict(saved[1])
    scheduler.load_state_dict(saved[2])
    for _ in range(2):
        optimizer.step(second.loss)
        scheduler.step()
    assert same(problem.weights(), second.weights())


def test_state_that_belongs_to_no_parameter(plain):
    """MADGRAD counts its steps in such an entry; two members must not share it."""
    from pytorch_optimizer import MADGRAD

    first, rest = list(plain.model[0].parameters()), list(plain.model[2:].parameters())

    def build():
        return bsam.CombinedOptimizer(
            [MADGRAD(first, lr=0.01), torch.optim.SGD(rest[:2], lr=0.1), MADGRAD(rest[2:], lr=0.02)]
        )

    def counts(combined):
        return [int(combined.members[i].state["k"]) for i in (0, 2)]

    combined, loaded = build(), build()
    combined.members[2].state["k"] = torch.tensor([5])
    plain.loss().backward()
    combined.step()
    loaded.load_state_dict(copy.deepcopy(combined.state_dict()))
    assert counts(loaded) == counts(combined)
    assert len(set(counts(loaded))) == 2


def test_hooks_copies_and_modes(problem):
    class Moded(torch.optim.SGD):
        mode = "new"

        def train(self):
            self.mode = "train"

        def eval(self):
            self.mode = "eval"

    params = list(problem.model.parameters())
    joint = bsam.CombinedOptimizer([Moded(params[:2], lr=0.1), torch.optim.SGD(params[2:], lr=0.1)])
    called = []
    joint.register_step_pre_hook(lambda *_: called.append("before step"))
    joint.register_step_post_hook(lambda *_: called.append("after step"))
    joint.register_state_dict_pre_hook(lambda *_: called.append("before save"))
    joint.register_state_dict_post_hook(lambda o, s: called.append("after save"))
    joint.register_load_state_dict_pre_hook(lambda o, s: called.append("before load"))
    joint.register_load_state_dict_post_hook(lambda o: called.append("after load"))
    problem.loss().backward()
    joint.step()
    joint.load_state_dict(joint.state_dict())
    assert called == ["before step", "after step", "before save", "after save", "before load", "after load"]
    for mode in ("train", "eval"):
        getattr(joint, mode)()
        assert joint.members[0].mode == mode
    plain = bsam.CombinedOptimizer(members(problem.model))
    assert not hasattr(plain, "train")
    for twin in (copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        assert alike(twin.state_dict(), plain.state_dict())
        assert same(parameters_of(twin), parameters_of(plain))


def parameters_of(optimizer):
    return [p.detach() for group in optimizer.param_groups for p in group["params"]]


def test_errors(problem):
    muon, adamw = members(problem.model)
    sgd = torch.optim.SGD(problem.model.parameters(), lr=0.1)
    for wrong, word in [
        ([], "members"),
        (muon, "members"),
        ([muon, "adamw"], "str"),
        ([torch.optim.LBFGS(problem.model.parameters())], "LBFGS"),
        ([muon, sgd], r"\(12, 6\)"),
    ]:
        with pytest.raises(bsam.BsamError, match=word):
            bsam.CombinedOptimizer(wrong)
    joint = bsam.CombinedOptimizer([muon, adamw])
    new = {"params": [nn.Parameter(torch.ones(2))]}
    for optimizer in (joint, bsam.SAM(joint, problem.model)):
        with pytest.raises(bsam.BsamError, match="member"):
            optimizer.add_param_group(new)
    saved = bsam.CombinedOptimizer(members(problem.model)[::-1]).state_dict()
    before = str(joint.state_dict())
    with pytest.raises(bsam.BsamError, match=r"\[2, 3, 3\]"):
        joint.load_state_dict(saved)
    assert str(joint.state_dict()) == before


def test_members_without_state_keep_their_indices(plain):
    """SGD without momentum has no state: the entries of the next member must not move to its parameters."""
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
