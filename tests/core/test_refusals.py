"""Closures, steps and groups that raise an error: the word says what is wrong, and nothing changes."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import nn

import bsam
from helpers import same, sgd


def yields_and_runs_backward(problem):
    for _ in range(2):
        loss = problem.loss()
        loss.backward()
        yield loss


CLOSURES = {  # of the problem and its optimizer, and a word of the message
    "None": (lambda p, o: None, "None"),
    "a tuple": (lambda p, o: (p.loss(), 1), "tuple"),
    "detached": (lambda p, o: p.loss().detach(), "grad"),
    "a number": (lambda p, o: p.loss().item(), "grad"),
    "a matrix": (lambda p, o: p.model(p.x), "shape"),
    "an empty batch": (lambda p, o: p.loss().expand(0), "empty"),
    "complex": (lambda p, o: p.loss() * 1j, "complex128"),
    "another loss": (lambda p, o: torch.ones((), requires_grad=True) * 2, "base"),
    "no micro-batch": (lambda p, o: iter(()), "yield"),
    "None, later": (lambda p, o: iter([p.loss(), None]), "None"),
    "means and samples": (lambda p, o: iter([p.loss(), p.loss().expand(2)]), "yield"),
    "complex, yielded": (lambda p, o: iter([p.loss() * 1j]), "complex128"),
    "yields and runs backward": (lambda p, o: yields_and_runs_backward(p), "backward"),
    "a step inside": (lambda p, o: o.step(p.loss), "inside"),
    "a backward inside": (lambda p, o: o.backward(p.loss), "inside"),
    "a check inside": (lambda p, o: o.check(p.loss), "inside"),
}


@pytest.mark.parametrize("name", CLOSURES)
def test_closures(problem, name):
    optimizer, before = bsam.BSAM(sgd(problem.model.parameters()), problem.model), problem.weights()
    closure, word = CLOSURES[name]
    with pytest.raises(bsam.BsamError, match=word):
        optimizer.backward(lambda: closure(problem, optimizer))
    with pytest.raises(bsam.BsamError, match="backward"):
        optimizer.step()
    assert all(p.grad is None for p in problem.model.parameters())
    assert same(before, problem.weights())


METHODS = {  # what direction does, the class of the error, and a word of the message
    "returns nothing": (lambda method, g: None, TypeError, "None"),
    "returns tensors": (lambda method, g: g.tensors(), TypeError, "list"),
    "remembers a vector": (lambda method, g: method.remember("old", g), ValueError, "vectors"),
    "remembers a number": (lambda method, g: method.remember("vector", 1.0), ValueError, "numbers"),
}


@pytest.mark.parametrize("name", METHODS)
def test_mistakes_of_methods(problem, name):
    does, error, word = METHODS[name]

    class Wrong(bsam.SharpnessAware):
        vectors, numbers = ("vector",), ("number",)

        def direction(self, L):
            return does(self, L.grad())

    optimizer, before = Wrong(sgd(problem.model.parameters()), problem.model, {}), problem.weights()
    with pytest.raises(error, match=word):
        optimizer.backward(problem.loss)
    assert all(p.grad is None for p in problem.model.parameters())
    assert same(before, problem.weights())


@pytest.mark.parametrize("call", ["backward", "check"])
def test_a_loss_is_no_closure(problem, call):
    optimizer = bsam.BSAM(sgd(problem.model.parameters()), problem.model)
    with pytest.raises(TypeError, match="closure"):
        getattr(optimizer, call)(problem.loss().detach())


def test_a_step_that_is_not_prepared(problem):
    optimizer = bsam.BSAM(sgd(problem.model.parameters()), problem.model)
    start = optimizer.state_dict()

    def gradient_of_another_backward():
        problem.loss().backward()

    def step_taken():
        optimizer.zero_grad()
        optimizer.backward(problem.loss)
        optimizer.step()

    def cleared():
        optimizer.backward(problem.loss)
        optimizer.zero_grad()

    def loaded():
        optimizer.backward(problem.loss)
        optimizer.load_state_dict(start)

    for action in (lambda: None, gradient_of_another_backward, step_taken, cleared, loaded):
        action()
        with pytest.raises(bsam.BsamError, match="backward"):
            optimizer.step()


def test_frozen_and_sparse_parameters():
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = bsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(bsam.BsamError, match="sparse"):
        optimizer.step(lambda: model(torch.tensor([1, 2])).sum())
    model.requires_grad_(False)
    with pytest.raises(bsam.BsamError, match="unfreeze"):
        optimizer.step(lambda: model(torch.tensor([1, 2])).sum())


GROUPS = [  # values of a parameter group, and a word of the message
    *(({"perturb": value}, "perturb") for value in (0, 1.0, None, "no")),
    ({"in_norm": 0}, "in_norm"),
    ({"rho_mx": 0.1}, "rho_mx"),
    ({"rho": 0.1}, "rho"),
    ({"rho_max": -1.0}, "rho_max"),
    ({"lr_max": 0.4}, "sharpness_lr_max"),
    ({"warmup": 4}, "sharpness_warmup"),
    ({"start": 4}, "sharpness_start"),
    ({"sharpness_warmup": 0.25}, "warmup"),
    ({"sharpness_start": -1}, "start"),
]


@pytest.mark.parametrize(("values", "word"), GROUPS)
def test_groups(plain, values, word):
    """At construction, added and assigned."""
    body, head = list(plain.model[:4].parameters()), list(plain.model[4].parameters())
    with pytest.raises(bsam.BsamError, match=word):
        bsam.BSAM(sgd([{"params": [*body, *head], **values}]), plain.model)
    optimizer = bsam.BSAM(sgd(body), None)
    with pytest.raises(bsam.BsamError, match=word):
        optimizer.add_param_group({"params": head, **values})
    common = {name: value for name, value in optimizer.base.defaults.items() if name != "params"}
    with pytest.raises(bsam.BsamError, match=word):
        optimizer.param_groups = [{**common, "params": head, **values}]
    assert [group["params"] for group in optimizer.param_groups] == [body]


@pytest.mark.parametrize("copied", [False, True])
def test_a_step_of_the_base_after_backward(problem, copied):
    """LookSAM would not count it, and run two passes in every step. Without a prepared step, the base may step."""
    optimizer = bsam.LookSAM(sgd(problem.model.parameters()), problem.model)
    if copied:
        problem.model, optimizer = copy.deepcopy((problem.model, optimizer))
    optimizer.backward(problem.loss)
    before = problem.weights()
    with pytest.raises(bsam.BsamError, match=r"call optimizer.step\(\)"):
        optimizer.base.step()
    assert same(problem.weights(), before)
    optimizer.step()
    optimizer.zero_grad()
    problem.loss().backward()
    optimizer.base.step()  # a warm-up without the method
    assert optimizer.t == 1


def test_a_closure_with_a_parameter(problem):
    optimizer = bsam.SAM(sgd(problem.model.parameters()), problem.model)
    with pytest.raises(bsam.BsamError, match=r"called without arguments.*'x'"):
        optimizer.step(lambda x: problem.model(x).mean())
    with pytest.raises(TypeError, match="positional") as caught:
        optimizer.step(lambda: problem.model(problem.x, 1))
    assert not isinstance(caught.value, bsam.BsamError)


def test_a_radius_without_its_name(problem):
    with pytest.raises(bsam.BsamError, match=r"SAM\(base, model, rho=0.1\)"):
        bsam.SAM(sgd(problem.model.parameters()), problem.model, 0.1)
    with pytest.raises(bsam.BsamError, match=r"BSAM\(base, model, rho_max=0.1\)"):
        bsam.BSAM(sgd(problem.model.parameters()), problem.model, 0.1, 0.2)
    with pytest.raises(bsam.BsamError, match="got a Sequential without one"):
        bsam.SAM(sgd(problem.model.parameters()), problem.model, problem.model)


def test_a_group_that_was_added_to_base(problem):
    base = sgd(problem.model.parameters())
    optimizer = bsam.SAM(base, problem.model)
    base.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(bsam.BsamError, match="add_param_group"):
        optimizer.step(problem.loss)


EDITS = [  # of a parameter group, and a word of the message
    *(({"rho_max": value}, "rho_max") for value in (-0.1, math.nan, math.inf, "0.1", None)),
    *((values, word) for values, word in GROUPS if values != {"rho_max": -1.0}),
    ({"rho_min_floor": 1.0}, "rho_min_floor"),
    ({"rho_maxx": 0.1}, "rho_maxx"),
    ({"sharpness_warm_up": 4}, "sharpness_warm_up"),
]


@pytest.mark.parametrize("call", ["step", "check", "begin_first_pass"])
@pytest.mark.parametrize(("values", "word"), EDITS)
def test_edited_groups(problem, values, word, call):
    """At the next step, before a pass; and again until they are right."""
    groups = [{"params": problem.model[:4].parameters()}, {"params": problem.model[4:].parameters()}]
    optimizer, before = bsam.BSAM(sgd(groups), problem.model), None
    for _ in range(2):
        optimizer.step(problem.loss)
        optimizer.zero_grad()
        before = problem.weights(), problem.buffers()
        group = optimizer.param_groups[1]
        correct = dict(group)
        group.update(values)
        for _ in range(2):
            with pytest.raises(bsam.BsamError, match=word):
                getattr(optimizer, call)(*([] if call == "begin_first_pass" else [problem.loss]))
        assert same(before[0] + before[1], problem.weights() + problem.buffers())
        group.clear()
        group.update(correct)


def test_groups_that_others_edit(problem):
    """Schedulers and frameworks add values; radii may be changed; tensors are not read."""
    optimizer = bsam.BSAM(sgd(problem.model.parameters()), problem.model, rho_min_floor=0.0)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=10)
    (group,) = optimizer.param_groups
    for values in ({"lr_scale": 0.5, "name": "head"}, {"rho_max": 0.3}, {"rho_min": 1e-3}, {"lr": 0.0}):
        group.update(values)
        optimizer.step(problem.loss)
    group["rho_max"] = torch.tensor(-0.1)
    optimizer.step(problem.loss)
    assert optimizer.t == 5


def step_in_backward(params):
    """As in torch's tutorial."""
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in params}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in params:
        p.register_post_accumulate_grad_hook(step)


def apply_in_backward(params):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, at the import
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(torch.optim.SGD, params, {"lr": 0.1})


def write_in_backward(params):
    """As some optimizers do that save the memory of gradients: without a new version of the tensor."""

    def write(p):
        p.data.add_(p.grad, alpha=-0.1)

    for p in params:
        p.register_post_accumulate_grad_hook(write)


@pytest.mark.parametrize("apply", [step_in_backward, apply_in_backward, write_in_backward])
@pytest.mark.parametrize("method", [bsam.SAM, bsam.MSAM, bsam.BSAM])
@pytest.mark.parametrize("by_closure", [False, True])
def test_an_optimizer_in_backward(problem, apply, method, by_closure):
    optimizer = method(sgd(problem.model.parameters()), problem.model)
    optimizer.step(problem.loss)
    optimizer.zero_grad()
    apply([*problem.model.parameters()])
    before = problem.weights(), problem.buffers()

    def closure():
        loss = problem.loss()
        if by_closure:
            loss.backward()
        return loss

    with pytest.raises(bsam.BsamError, match="optimizer in backward"):
        optimizer.step(closure)
    assert same(before[0], problem.weights())
    assert same(before[1], problem.buffers())
    assert all(p.grad is None for p in problem.model.parameters())


def test_hooks_that_do_not_step(problem):
    """They see the gradients of all passes."""
    optimizer = bsam.SAM(sgd(problem.model.parameters()), problem.model)
    seen = []
    for p in problem.model.parameters():
        p.register_post_accumulate_grad_hook(seen.append)
    optimizer.step(problem.loss)
    assert len(seen) == 2 * len([*problem.model.parameters()])


def test_unknown_radii_of_authors(problem):
    optimizer = bsam.BSAM(sgd(problem.model.parameters()), problem.model)
    optimizer.step(problem.loss)
    for ask in (lambda: optimizer.radii("rho"), lambda: optimizer.epsilon(optimizer.vector(optimizer.params), "rho")):
        with pytest.raises(ValueError, match="BSAM has no radius rho; its radii are rho_max, rho_min"):
            ask()
