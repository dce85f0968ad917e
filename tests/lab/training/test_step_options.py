"""Accumulation, clipping, averaged weights, fp16 and the base optimizers, compared with a hand-written loop."""

from __future__ import annotations

import contextlib
import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bsam.lab.config import BASES, Run
from bsam.lab.tasks.classification import Classification
from bsam.lab.training import Machine, RunCallbacks, fit
from bsam.lab.training.run_dir import RunDir
from bsam.lab.training.trainer import WeightAverage
from helpers import trained_as

SAME = {"lr": 0.1, "batch": 16, "label_smoothing": 0.0, "epochs": 1, "limit_train": 64, "limit_test": 20, "seed": 4}
SAME |= {"schedule": "constant"}
RHO = 0.1
METHODS = {"base": {}, "sam": {"rho": RHO}}


class Recorded(Classification):
    """Keeps the initial network and all batches of the last training."""

    factor = 1.0

    def network(self):
        network = super().network()
        Recorded.start, Recorded.seen, Recorded.evaluated = copy.deepcopy(network), [], []
        return network

    def _batch(self, x, index, on_host):
        batch = super()._batch(x, index, on_host)
        self.seen.append(batch)
        return batch

    def losses(self, outputs, y):
        return self.factor * super().losses(outputs, y)

    def evaluate(self, network):
        self.evaluated.append(copy.deepcopy(network))
        return super().evaluate(network)


class Linear(Recorded):
    """A network without batch norm."""

    def network(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
        Recorded.start, Recorded.seen, Recorded.evaluated = copy.deepcopy(network), [], []
        return network


def trained(run, folder=None, task=Recorded):
    """Return the trainer of a finished run, and its result."""
    trainers = []
    callbacks = RunCallbacks(at_start=lambda trainer, done: trainers.append(trainer))
    with trained_as(task):
        result = fit(run, folder, Machine("cpu"), callbacks=callbacks)
    return trainers[0], result


def pass_over(model, parts, run, scaler, factor):
    """Fill p.grad with the gradient of the mean loss of the batch, times the scale."""
    model.zero_grad()
    for x, y, _ in parts:
        with torch.autocast("cpu", torch.float16) if run.precision == "fp16" else contextlib.nullcontext():
            logits = model(x)
        loss = factor * F.cross_entropy(logits.float(), y) / len(parts)
        (loss if scaler is None else loss * scaler.get_scale()).backward()


def hand_written(run, base=None, factor=1.0):
    """Train the recorded network on the recorded batches. Return the network, its weights after each step, the scale.

    SAM, clipping and micro-batches as in their papers; only the base optimizer and the GradScaler are torch's.
    """
    model = copy.deepcopy(Recorded.start).train()
    params = list(model.parameters())
    if base is None:
        base = torch.optim.SGD(params, lr=run.lr, momentum=0.9, weight_decay=1e-3)
    else:
        base = base(params)
    scaler = torch.amp.GradScaler("cpu") if run.precision == "fp16" else None
    if scaler is not None:
        scaler.scale(torch.ones(()))  # creates its state
    steps = []
    for batch in Recorded.seen:
        micro = run.batch // run.accumulate
        parts = [tuple(t[i : i + micro] for t in batch) for i in range(0, run.batch, micro)]
        pass_over(model, parts, run, scaler, factor)
        if run.method == "sam":
            scale, w = 1.0 if scaler is None else scaler.get_scale(), [p.detach().clone() for p in params]
            statistics = [b.clone() for b in model.buffers()]
            norm = math.sqrt(sum(float((p.grad.double() / scale).square().sum()) for p in params))
            with torch.no_grad():
                for p in params if math.isfinite(norm) else ():
                    p += RHO / norm * (p.grad / scale)
            pass_over(model, parts, run, scaler, factor)
            with torch.no_grad():
                for now, before in zip((*params, *model.buffers()), (*w, *statistics), strict=True):
                    now.copy_(before)
        if scaler is not None:
            scaler.unscale_(base)
        if run.clip_norm is not None:
            norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in params))
            for p in params:
                p.grad *= min(1.0, run.clip_norm / (norm + 1e-6))
        if scaler is None:
            base.step()
        else:
            scaler.step(base)
            scaler.update()
        steps.append({name: t.clone() for name, t in model.state_dict().items()})
    return model, steps, None if scaler is None else scaler.get_scale()


def distance(ours, theirs):
    """Return the largest difference of two state dicts."""
    assert sorted(ours) == sorted(theirs)
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)


OPTIONS = {
    "plain": {},
    "accumulate": {"accumulate": 4},
    "clip": {"clip_norm": 0.3},
    "both": {"accumulate": 2, "clip_norm": 0.3},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_step_is_that_of_a_hand_written_loop(method, options):
    run = Run.of(method, METHODS[method], **SAME, **options)
    trainer, result = trained(run)
    model, steps, _ = hand_written(run)
    assert len(steps) == 4
    assert distance(trainer.network.state_dict(), model.state_dict()) < 1e-6
    assert result.last.metrics["train_loss"] > 0
    if "clip_norm" in options:  # every step is clipped
        with_momentum = 0.1 * 0.3 * sum((1 - 0.9 ** (t + 1)) / 0.1 for t in range(4))
        moved = [
            (p - q).detach() for p, q in zip(trainer.network.parameters(), Recorded.start.parameters(), strict=True)
        ]
        assert torch.cat([t.flatten() for t in moved]).norm() < 1.1 * with_momentum


@pytest.mark.parametrize("method", METHODS)
def test_the_batches_of_accumulation_give_the_step_of_the_whole_batch(method):
    """Without batch norm, which has statistics for each micro-batch."""
    whole, parts = (trained(Run.of(method, METHODS[method], **SAME, accumulate=n), task=Linear) for n in (1, 4))
    assert distance(whole[0].network.state_dict(), parts[0].network.state_dict()) < 1e-6
    losses = [[epoch.metrics["train_loss"] for epoch in result.epochs] for _, result in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_selected_samples_are_split_into_micro_batches_of_the_same_size():
    sizes = []

    class Sized(Classification):
        def losses(self, outputs, y):
            sizes.append(len(outputs))
            return super().losses(outputs, y)

    run = Run.of("ksam", {"k": 10}, **{**SAME, "epochs": 1, "limit_train": 16}, accumulate=2)
    with trained_as(Sized):
        fit(run, machine=Machine("cpu"))
    assert sizes == [8, 8, 8, 2, 8, 2]


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on CPUs without fp16
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("factor", "options"), [(1.0, {"accumulate": 2}), (20.0, {"clip_norm": 0.3})])
def test_fp16_scales_the_loss_and_skips_steps_that_overflow(method, factor, options, monkeypatch):
    monkeypatch.setattr(Linear, "factor", factor)
    run = Run.of(method, METHODS[method], **SAME, **options, precision="fp16")
    trainer, _ = trained(run, task=Linear)
    model, steps, scale = hand_written(run, factor=factor)
    assert trainer.train_step.scaler.get_scale() == scale
    start = Recorded.start.state_dict()
    skipped = [step for step in steps if all(torch.equal(step[name], start[name]) for name in start)]
    assert (scale < 2**16, len(skipped) > 0) == (factor > 1, factor > 1)
    assert len(skipped) < len(steps)
    assert distance(trainer.network.state_dict(), model.state_dict()) < 1e-6
    assert all(p.dtype == torch.float32 for p in trainer.network.parameters())
    exact = hand_written(replace(run, precision="fp32"), factor=factor)[0]
    assert distance(exact.state_dict(), model.state_dict()) > 1e-5  # fp16 was used


@pytest.mark.parametrize("method", METHODS)
def test_the_average_of_the_weights_is_evaluated_measured_and_saved(method, tmp_path):
    run = Run.of(method, METHODS[method], **SAME, ema=0.8, sharpness_rho=0.05)
    trainer, result = trained(run, tmp_path)
    _, steps, _ = hand_written(run)
    weights = [0.8 ** (len(steps) - i) for i in range(1, len(steps) + 1)]
    averages = {
        name: sum(w * step[name].double() for w, step in zip(weights, steps, strict=True)) / sum(weights)
        if steps[0][name].is_floating_point()
        else steps[-1][name]
        for name in steps[0]
    }
    assert any("running_var" in name for name in averages)
    assert distance(RunDir(tmp_path).weights(), averages) < 1e-6
    assert distance(trainer.network.state_dict(), steps[-1]) < 1e-6  # training is that of the weights
    assert distance(averages, steps[-1]) > 1e-3
    last = Recorded.evaluated[-1]
    assert distance(last.state_dict(), averages) < 1e-6
    assert not last.training
    x, y = (torch.cat(parts) for parts in zip(*trainer.task.examples(), strict=True))
    expected = copy.deepcopy(Recorded.start).eval()
    expected.load_state_dict(averages)
    assert result.last.sharpness.loss == pytest.approx(F.cross_entropy(expected(x), y).item(), rel=1e-4)


def test_an_average_copies_the_first_step_and_counts():
    """Ranges of observers begin at infinity, of which no average exists."""
    layer = nn.Linear(1, 1)
    layer.register_buffer("low", torch.tensor(math.inf))
    layer.register_buffer("seen", torch.tensor(0))
    average = WeightAverage(layer, 0.9)
    layer.low.fill_(-1.0)
    layer.seen.fill_(3)
    average.update()
    layer.seen.fill_(4)
    average.update()
    assert (average.network.low.item(), average.network.seen.item()) == (-1.0, 4)


BASE_ARGUMENTS = {  # the arguments that each class gets, written out
    "adadelta": {"weight_decay": 1e-3},
    "adafactor": {"weight_decay": 1e-3},
    "adagrad": {"weight_decay": 1e-3, "lr_decay": 0.1},
    "adam": {"weight_decay": 1e-3, "betas": (0.8, 0.99), "amsgrad": True},
    "adamax": {"weight_decay": 1e-3, "betas": (0.7, 0.999)},
    "adamw": {"weight_decay": 1e-3, "betas": (0.7, 0.999), "eps": 1e-3},
    "asgd": {"weight_decay": 1e-3},
    "nadam": {"weight_decay": 1e-3, "betas": (0.7, 0.999), "decoupled_weight_decay": True},
    "radam": {"weight_decay": 1e-3, "betas": (0.7, 0.999)},
    "rmsprop": {"weight_decay": 1e-3, "momentum": 0.7, "alpha": 0.9},
    "sgd": {"weight_decay": 1e-3, "momentum": 0.7, "dampening": 0.2},
}


def test_every_base_optimizer_is_tested():
    assert list(BASE_ARGUMENTS) == list(BASES)


@pytest.mark.parametrize("base", BASE_ARGUMENTS)
def test_a_base_optimizer_by_name_is_the_class_of_torch(base):
    named = BASE_ARGUMENTS[base]
    by_hand = [name for name in named if name not in ("weight_decay", "momentum")]
    given = {name: named[name] for name in by_hand if named[name] != (0.7, 0.999)}
    momentum = {"momentum": 0.7} if {"betas", "momentum"} & set(named) else {}
    method = "base" if base == "adadelta" else "sam"  # its rho would be taken for SAM's
    small = {"weight_decay": 1e-3, "decay": "all", **SAME, "lr": 3e-3, "limit_train": 48}
    run = Run.of(method, METHODS[method], base=base, base_arguments=given, **momentum, **small)
    trainer, _ = trained(run)
    (cls,) = (cls for name, cls in vars(torch.optim).items() if name.lower() == base and isinstance(cls, type))
    model, _, _ = hand_written(run, lambda params: cls(params, lr=3e-3, **named))
    assert distance(trainer.network.state_dict(), model.state_dict()) < 1e-6
