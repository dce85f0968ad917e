"""One state dict for the base optimizer and the method, and parameter groups that both use."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import bsam
from bsam.core.schedule import top_lr
from bsam.core.wrapper import METHOD
from helpers import detached, same, sgd


def test_add_param_group(plain):
    head = list(plain.model[4].parameters())
    for p in head:
        p.requires_grad_(False)
    optimizer = bsam.BSAM(sgd([p for p in plain.model.parameters() if p.requires_grad]), plain.model)
    optimizer.step(plain.loss)
    for p in head:
        p.requires_grad_(True)
    optimizer.add_param_group({"params": head, "rho_max": 0.2, "lr": 0.01})
    assert optimizer.param_groups[1]["rho_max"] == 0.2
    assert top_lr(optimizer.param_groups[1]) == 0.01
    assert optimizer.param_groups[1]["steps_taken"] == 1
    before = detached(head)
    optimizer.step(plain.loss)
    assert not same(before, detached(head))
    assert optimizer.param_groups is optimizer.base.param_groups


def test_groups_that_are_assigned(plain):
    """As Lightning's BaseFinetuning does; they get the settings that they lack."""
    body, head = list(plain.model[:4].parameters()), list(plain.model[4].parameters())
    optimizer = bsam.BSAM(sgd(body), None, rho_max=0.3)
    common = {name: value for name, value in optimizer.base.defaults.items() if name != "params"}
    optimizer.param_groups = [{**common, "params": body, "rho_max": 0.2}, {**common, "params": head}]
    assert [group["rho_max"] for group in optimizer.base.param_groups] == [0.2, 0.3]
    before = detached(head)
    optimizer.step(plain.loss)
    assert not same(before, detached(head))
    for group in optimizer.param_groups:
        group["lr"] *= 0.1
    radii = [optimizer.radius(group, "rho_min") for group in optimizer.param_groups]
    optimizer.param_groups = optimizer.param_groups  # keeps the known learning rates
    assert [optimizer.radius(group, "rho_min") for group in optimizer.param_groups] == radii
    optimizer.param_groups = [{**common, "params": [*body, *head]}]
    assert optimizer.t == 1


def test_distributed_checkpoints_go_through_the_base(problem):
    """torch.distributed.checkpoint takes a step to create state, which only the base can do without a closure."""
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


def test_a_checkpoint_of_the_base_can_be_loaded(problem):
    base = sgd(problem.model.parameters())
    problem.loss().backward()
    base.step()
    saved = base.state_dict()
    optimizer = bsam.BSAM(sgd(problem.model.parameters()), problem.model, rho_max=0.2)
    optimizer.step(problem.loss)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["rho_max"] == 0.2
    assert optimizer.t == 0
    momentum = optimizer.state[next(problem.model.parameters())]["momentum_buffer"]
    assert torch.equal(momentum, saved["state"][0]["momentum_buffer"])
    optimizer.step(problem.loss)


def test_a_wrong_checkpoint_changes_nothing(problem):
    optimizer = bsam.BSAM(sgd(problem.model.parameters()), problem.model)
    optimizer.step(problem.loss)
    before = str(optimizer.state_dict())
    saved = optimizer.state_dict()
    saved = {**saved, "param_groups": saved["param_groups"] * 2}
    with pytest.raises(ValueError, match="groups"):
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
    assert pickle.loads(pickle.dumps(optimizer)).t == 1  # without the hooks


class MySAM(bsam.SAM):
    """A user's class with the same direction."""


class MyDirection(bsam.SAM):
    """A user's class with another direction."""

    def direction(self, L):
        return L.grad()


def test_only_the_base_part_of_another_methods_state_is_loaded(problem):
    saver = bsam.SAM(sgd(problem.model.parameters()), problem.model, rho=0.5)
    for _ in range(3):
        saver.step(problem.loss)
    saved = copy.deepcopy(saver.state_dict())
    other = bsam.ASAM(sgd(problem.model.parameters(), lr=0.7), problem.model, rho=2.0)
    with pytest.warns(UserWarning, match="SAM, .*ASAM"):
        other.load_state_dict(saved)
    (group,) = other.param_groups
    assert (group["rho"], other.t, group[METHOD], group["lr"]) == (2.0, 0, "ASAM", 0.1)
    for i, p in enumerate(problem.model.parameters()):
        assert torch.equal(other.state[p]["momentum_buffer"], saved["state"][i]["momentum_buffer"])
    clean = problem.clone()
    fresh = bsam.ASAM(sgd(clean.model.parameters()), clean.model, rho=2.0)
    fresh.base.load_state_dict(bare(copy.deepcopy(saved)))
    fresh.param_groups[0].update({k: v for k, v in group.items() if k != "params"})
    other.step(problem.loss)
    fresh.step(clean.loss)
    assert same(problem.weights(), clean.weights())


def bare(saved):
    """The state of SGD, selected by the names that SGD has."""
    known = set(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).param_groups[0])
    groups = [{k: v for k, v in group.items() if k in known} for group in saved["param_groups"]]
    return {
        "state": {i: {"momentum_buffer": entry["momentum_buffer"]} for i, entry in saved["state"].items()},
        "param_groups": groups,
    }


def test_the_state_of_the_base_holds_the_methods_vectors(problem):
    def build():
        return bsam.FriendlySAM(torch.optim.AdamW(problem.model.parameters(), lr=0.01), problem.model)

    saver, loader = build(), build()
    saver.step(problem.loss)
    saved = saver.state_dict()
    assert set(saved["state"][0]) == {"step", "exp_avg", "exp_avg_sq", "gradient_mean"}
    loader.load_state_dict(saved)
    assert set(loader.base.state[next(problem.model.parameters())]) == set(saved["state"][0])


def test_memory_of_another_method_is_not_loaded(problem):
    """LookSAM and AE-SAM use the same name for a vector, and BSAM has no vectors."""
    saver = bsam.LookSAM(sgd(problem.model.parameters()), problem.model, rho=0.2)
    saver.step(problem.loss)
    saved = copy.deepcopy(saver.state_dict())
    assert "g_v" in saved["state"][0]
    aesam = bsam.AESAM(sgd(problem.model.parameters()), problem.model, total_steps=9, alpha=0.5)
    with pytest.warns(UserWarning, match="LookSAM"):
        aesam.load_state_dict(saved)
    assert aesam.recall("g_v") is None
    bilateral = bsam.BSAM(sgd(problem.model.parameters()), problem.model)
    with pytest.warns(UserWarning, match="LookSAM"):
        bilateral.load_state_dict(saved)
    assert "rho" not in bilateral.param_groups[0]
    assert set(bilateral.state_dict()["state"][0]) == {"momentum_buffer"}
    fresh = bsam.BSAM(sgd(problem.model.parameters()), problem.model)
    assert bilateral.param_groups[0].keys() == fresh.param_groups[0].keys()


def test_the_state_of_a_subclass_and_of_an_older_version(problem):
    saver = MySAM(sgd(problem.model.parameters()), problem.model, rho=0.3)
    saver.step(problem.loss)
    for cls in (bsam.SAM, MySAM):
        loader = cls(sgd(problem.model.parameters()), problem.model)
        loader.load_state_dict(saver.state_dict())
        assert (loader.t, loader.param_groups[0]["rho"]) == (1, 0.3)
    with pytest.warns(UserWarning, match="MyDirection"):
        MyDirection(sgd(problem.model.parameters()), problem.model).load_state_dict(saver.state_dict())
    older = saver.state_dict()
    (group,) = older["param_groups"]
    older["param_groups"] = [{k: v for k, v in group.items() if not k.startswith("sharpness_")}]
    loader = bsam.ASAM(sgd(problem.model.parameters()), problem.model, rho=2.0)
    loader.load_state_dict(older)  # it does not name a method
    assert (loader.t, loader.param_groups[0]["rho"]) == (1, 0.3)


def of_another_library(name):
    import pytorch_optimizer  # not where the GPU tests run

    return getattr(pytorch_optimizer, name)


def test_schedule_free_optimizers(plain):
    """Their lr_max does not clash with ours, and the wrapper has their train and eval."""
    base = of_another_library("ScheduleFreeAdamW")
    other = plain.clone()
    optimizer = bsam.BSAM(base(plain.model.parameters(), lr=0.1, warmup_steps=2), plain.model, lr_max=0.4)
    reference = base(other.model.parameters(), lr=0.1, warmup_steps=2)
    optimizer.train()
    reference.train()
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.backward(plain.loss)
        for p, q in zip(plain.model.parameters(), other.model.parameters(), strict=True):
            q.grad = p.grad.clone()
        optimizer.step()
        reference.step()
        assert optimizer.radii("rho_min") == pytest.approx(0.05 / 4)
    optimizer.eval()
    reference.eval()
    assert same(plain.weights(), other.weights())
    ours, theirs = optimizer.param_groups[0], reference.param_groups[0]
    assert {k: ours[k] for k in theirs if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}
    averaged = plain.weights()
    optimizer.train()
    assert not same(averaged, plain.weights())


@pytest.mark.parametrize("name", ["MADGRAD", "SPAM"])
def test_state_that_belongs_to_no_parameter(problem, name):
    """These bases store a step count next to the parameters' entries; a resumed run is identical."""
    base = of_another_library(name)

    def build(p):
        return bsam.FriendlySAM(base(p.model.parameters(), lr=0.01), p.model)

    second = problem.clone()
    optimizer = build(problem)
    for t in range(6):
        if t == 3:
            saved = copy.deepcopy((problem.model.state_dict(), optimizer.state_dict()))
        optimizer.step(problem.loss)
    assert any(isinstance(k, str) for k in saved[1]["state"])
    second.model.load_state_dict(saved[0])
    optimizer = build(second)
    optimizer.load_state_dict(saved[1])
    for _ in range(3):
        optimizer.step(second.loss)
    assert same(problem.weights(), second.weights())


def test_printing_an_optimizer_shows_the_base_and_the_radii(plain):
    optimizer = bsam.BSAM(sgd(plain.model.parameters()), plain.model, rho_max=0.07)
    optimizer.step(plain.loss)
    text = str(optimizer)
    assert text.startswith("BSAM with SGD")
    assert all(line in text for line in ("momentum: 0.9", "rho_max: 0.07", "rho_min: 0.05"))
    assert not any(word in text for word in ("sharpness", "steps_taken", "tensor(", "foreach", "None"))
