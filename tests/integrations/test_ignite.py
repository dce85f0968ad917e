"""Engines of Ignite with the update function of the example, against plain bsam training."""

from __future__ import annotations

import copy
import logging
import runpy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import bsam
from docs_guides import definition
from integrations.conftest import ROOT, import_framework
from lightning_training import BSAM, EPOCHS, Batches, compare, network, plain, sgd

CLIP = partial(nn.utils.clip_grad_norm_, max_norm=0.3)
HUGE = {"init_scale": 2.0**127, "backoff_factor": 2.0**-100, "growth_interval": 2}  # the first step overflows


@pytest.fixture(scope="module")
def ignite():
    return SimpleNamespace(**{
        name: import_framework(f"ignite.{name}") for name in ("distributed", "engine", "handlers", "metrics")
    })  # fmt: skip


@pytest.fixture
def engine_of(ignite):
    """A function that makes an engine with the update function of the example."""
    step = runpy.run_path(str(ROOT / "examples/ignite_engine.py"))["sharpness_aware_step"]

    def make(net, optimizer, scaler=None, **settings):
        scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
        engine = ignite.engine.Engine(step(net, optimizer, scaler, **{"max_norm": 0.3, **settings}))
        engine.losses = []
        after = ignite.engine.Events.ITERATION_COMPLETED
        engine.add_event_handler(after, lambda: engine.losses.append(engine.state.output["loss"]))
        return engine

    return make


def test_the_supervised_trainer_is_refused(ignite):
    net, data = network(), Batches()
    optimizer, before = BSAM(sgd(net.parameters()), net), copy.deepcopy(net.state_dict())
    trainer = ignite.engine.create_supervised_trainer(net, optimizer, nn.functional.cross_entropy)
    trainer.logger.setLevel(logging.CRITICAL)
    with pytest.raises(bsam.BsamError, match="step"):
        trainer.run(data.all)
    assert all(torch.equal(before[name], p) for name, p in net.named_parameters())


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("max_norm", [0.3, 1e9])
def test_clipping_and_accumulation(engine_of, max_norm, accumulate):
    net, data, calls = network(), Batches(), []
    ours = copy.deepcopy(net)
    ours.register_forward_pre_hook(lambda *_: calls.append(1))
    optimizer = BSAM(sgd(ours.parameters()), ours)
    trainer = engine_of(ours, optimizer, accumulate=accumulate, max_norm=max_norm)
    ours.eval()  # as after an evaluation
    torch.manual_seed(0)
    trainer.run(data.all, max_epochs=EPOCHS)
    clip = CLIP if max_norm == 0.3 else None
    losses, other = plain(net, data.all * EPOCHS, epochs=1, accumulate=accumulate, clip=clip)  # windows cross epochs
    assert trainer.losses == pytest.approx(losses, abs=1e-12)  # of the first pass, not divided
    compare(ours, net)
    assert len(calls) == 3 * 10
    assert optimizer.t == other.t == 10 // accumulate


def test_metrics_are_of_the_first_pass(ignite, engine_of):
    net, data, seen = network(), Batches(), []
    ours = copy.deepcopy(net)
    trainer = engine_of(ours, BSAM(sgd(ours.parameters()), ours))
    ignite.metrics.Accuracy().attach(trainer, "accuracy")
    ignite.metrics.Average(lambda output: output["loss"]).attach(trainer, "loss")
    torch.manual_seed(0)
    metrics = trainer.run(data.all).metrics
    net.register_forward_hook(lambda module, args, output: seen.append(output.argmax(1)))
    losses, _ = plain(net, data, epochs=1, clip=CLIP)
    right = [(guess == y).double().mean().item() for guess, (_, y) in zip(seen[::3], data, strict=True)]
    assert metrics["loss"] == pytest.approx(sum(losses) / 5, abs=1e-9)
    assert metrics["accuracy"] == pytest.approx(sum(right) / 5)
    assert [(guess == y).double().mean().item() for guess, (_, y) in zip(seen[1::3], data, strict=True)] != right


def test_an_overflow_and_a_checkpoint(ignite, engine_of, tmp_path):
    """The second epoch starts from the checkpoint, with new objects and in the middle of LookSAM's period."""
    method, net, data = partial(bsam.LookSAM, k=3, rho=0.2), network(torch.float32, 0.0), Batches(torch.float32)
    losses = []
    for epoch in range(EPOCHS):
        ours = copy.deepcopy(net)
        optimizer, scaler = method(sgd(ours.parameters()), ours), torch.amp.GradScaler("cpu", **HUGE)
        trainer = engine_of(ours, optimizer, scaler)
        states = {"trainer": trainer, "model": ours, "optimizer": optimizer, "scaler": scaler}
        saver = ignite.handlers.DiskSaver(tmp_path, require_empty=False)
        trainer.add_event_handler(ignite.engine.Events.EPOCH_COMPLETED, ignite.handlers.Checkpoint(states, saver))
        if epoch > 0:
            ignite.handlers.Checkpoint.load_objects(states, tmp_path / "checkpoint_5.pt")
        trainer.run(data.all, max_epochs=epoch + 1)
        losses += trainer.losses
    expected = torch.amp.GradScaler("cpu", **HUGE)
    expected_losses, other = plain(net, data, method=method, clip=CLIP, scaler=expected)
    assert losses == pytest.approx(expected_losses, abs=1e-6)
    compare(ours, net, atol=1e-7)
    assert optimizer.t == other.t == 9
    assert scaler.state_dict() == expected.state_dict()


def test_schedules_of_the_learning_rate_and_of_a_radius(ignite, engine_of):
    method, net, data = partial(bsam.SAM, rho=0.3), network(), Batches()
    ours = copy.deepcopy(net)
    optimizer = ignite.distributed.auto_optim(method(sgd(ours.parameters()), ignite.distributed.auto_model(ours)))
    trainer = engine_of(ours, optimizer)
    for name, first, last in (("lr", 0.2, 0.1), ("rho", 0.3, 0.1)):
        line = ignite.handlers.PiecewiseLinear(optimizer, name, [(0, first), (10, last)])
        trainer.add_event_handler(ignite.engine.Events.ITERATION_STARTED, line)
    torch.manual_seed(0)
    trainer.run(data.all, max_epochs=EPOCHS)

    def by_hand(other):
        def step():
            other.param_groups[0] |= {"lr": 0.2 - 0.01 * other.t, "rho": 0.3 - 0.02 * other.t}

        return SimpleNamespace(step=step)

    plain(net, data, method=method, clip=CLIP, scheduler=by_hand)
    compare(ours, net)
    assert isinstance(optimizer, bsam.SAM)


def test_the_example(ignite, example):
    _, (model, optimizer, state), out = example("ignite_engine")
    assert optimizer.t == 30
    assert int(model[2].num_batches_tracked) == 60
    assert state.metrics["accuracy"] > 0.9
    assert out.splitlines()[-1] == f"3 {state.metrics}"
    text, page = ((ROOT / name).read_text("utf-8") for name in ("examples/ignite_engine.py", "docs/guides/ignite.md"))
    assert definition(text, "sharpness_aware_step") == definition(page, "sharpness_aware_step")


def test_the_guide(ignite, guide):
    names = guide("ignite")
    assert names["state"].epoch == 3
    assert (names["state"].iteration, names["optimizer"].t) == (12, 6)
