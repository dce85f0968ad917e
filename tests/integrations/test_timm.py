"""A loop as that of timm's training script, with the scaler of the example, against plain bsam training."""

from __future__ import annotations

import copy
import math
import re
import runpy
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import bsam
from docs_guides import definition
from helpers import assert_close, detached, distance
from integrations.conftest import ROOT
from lightning_training import BSAM, EPOCHS, Batches, compare, network, plain, sgd

HUGE = {"init_scale": 2.0**127, "backoff_factor": 2.0**-100, "growth_interval": 2}  # the first step overflows


@pytest.fixture
def closure_scaler(timm):
    """A function that makes the scaler of the example, around a GradScaler with these settings."""

    def make(**settings):
        scaler = runpy.run_path(str(ROOT / "examples/timm_loop.py"))["ClosureScaler"]("cpu")
        scaler._scaler = torch.amp.GradScaler("cpu", **settings)
        return scaler

    return make


def train_one_epoch(net, data, optimizer, loss_scaler, accum_steps=1, clip_grad=None, clip_mode="norm",
                    mixup=None, after_update=lambda: None):  # fmt: skip
    losses = []
    for i, (x, y) in enumerate(data):
        if mixup is not None:
            x, y = mixup(x.clone(), y)

        def forward():
            return F.cross_entropy(net(x), y.to(x.dtype) if mixup else y) / accum_steps

        need_update = (i + 1) % accum_steps == 0 or i + 1 == len(data)
        clip = {"clip_grad": clip_grad, "clip_mode": clip_mode, "parameters": net.parameters()}
        losses.append(loss_scaler(forward, optimizer, **clip, need_update=need_update).item() * accum_steps)
        if need_update:
            optimizer.zero_grad()
            after_update()
    return losses


def test_the_scaler_of_timm_is_refused(timm):
    net, (x, y) = network(), Batches().all[0]
    optimizer, before = BSAM(sgd(net.parameters()), net), copy.deepcopy(net.state_dict())
    with pytest.raises(bsam.BsamError, match="step"):
        timm.utils.NativeScaler("cpu")(F.cross_entropy(net(x), y), optimizer)
    assert all(torch.equal(before[name], p) for name, p in net.named_parameters())


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("value", "mode"), [(None, "norm"), (0.3, "norm"), (0.05, "value"), (0.1, "agc")])
def test_clipping_and_accumulation(timm, closure_scaler, value, mode, accumulate):
    net, data, calls = network(), Batches(), []
    ours, clipped = copy.deepcopy(net), []
    ours.register_forward_pre_hook(lambda *_: calls.append(1))
    optimizer, scaler = BSAM(sgd(ours.parameters()), ours), closure_scaler()
    torch.manual_seed(0)
    losses = []
    for _ in range(EPOCHS):
        losses += train_one_epoch(ours, data, optimizer, scaler, accumulate, value, mode)

    def clip(params):
        params = list(params)
        before = [p.grad.clone() for p in params]
        timm.utils.dispatch_clip_grad(params, value, mode=mode)
        clipped.append(distance(before, [p.grad for p in params]) > 1e-3)

    expected, _ = plain(net, data, accumulate=accumulate, clip=clip if value else None)
    assert losses == pytest.approx(expected, abs=1e-12)  # of the first pass, not divided
    compare(ours, net)
    assert len(calls) == 3 * len(data) * EPOCHS
    assert any(clipped) or value is None


def test_an_overflow_and_a_checkpoint(timm, closure_scaler, tmp_path):
    """The second epoch starts from timm's checkpoint, with new objects and in the middle of LookSAM's period."""
    method, net, data = partial(bsam.LookSAM, k=3, rho=0.2), network(torch.float32, 0.0), Batches(torch.float32)
    for epoch in range(EPOCHS):
        ours = copy.deepcopy(net)
        optimizer, scaler = method(sgd(ours.parameters()), ours), closure_scaler(**HUGE)
        if epoch > 0:
            path = str(tmp_path / "last.pth.tar")
            assert timm.models.resume_checkpoint(ours, path, optimizer, scaler, log_info=False) == epoch
        train_one_epoch(ours, data, optimizer, scaler, clip_grad=0.3)
        saver = timm.utils.CheckpointSaver(ours, optimizer, amp_scaler=scaler, checkpoint_dir=str(tmp_path))
        saver.save_checkpoint(epoch)
    expected = torch.amp.GradScaler("cpu", **HUGE)
    _, other = plain(net, data, method=method, clip=partial(torch.nn.utils.clip_grad_norm_, max_norm=0.3),
                     scaler=expected)  # fmt: skip
    compare(ours, net, atol=1e-7)
    assert optimizer.t == other.t == 9
    assert scaler.state_dict() == expected.state_dict()


def test_mixup_a_schedule_and_averaged_weights(timm, closure_scaler):
    net, data = network(), Batches()
    mixup = timm.data.Mixup(mixup_alpha=1.0, num_classes=3)
    np.random.seed(0)
    mixed = [(x, y.double()) for x, y in (mixup(x.clone(), y) for x, y in [*data] * EPOCHS)]
    ours = copy.deepcopy(net)
    optimizer, scaler = BSAM(sgd(ours.parameters()), ours), closure_scaler()
    scheduler = timm.scheduler.CosineLRScheduler(
        optimizer, t_initial=10, warmup_t=2, warmup_lr_init=0.1, t_in_epochs=False
    )
    ema = timm.utils.ModelEmaV3(ours, decay=0.7)

    def after_update():
        ema.update(ours, step=optimizer.t)
        scheduler.step_update(optimizer.t)

    np.random.seed(0)
    torch.manual_seed(0)
    losses = []
    for _ in range(EPOCHS):
        losses += train_one_epoch(ours, data, optimizer, scaler, mixup=mixup, after_update=after_update)

    average = copy.deepcopy(net.state_dict())

    def written_out(other):
        def set_lr(t):
            lr = 0.1 + 0.1 * t / 2 if t < 2 else 0.1 + 0.1 * math.cos(math.pi * t / 10)
            for group in other.param_groups:
                group["lr"] = lr

        def step():
            decay = 0.7 if other.t > 1 else 0.0  # timm's average begins with the first step
            for name, value in net.state_dict().items():
                average[name] = decay * average[name] + (1 - decay) * value if value.is_floating_point() else value
            set_lr(other.t)

        other.param_groups[0]["initial_lr"] = 0.2  # where the radius of BSAM is largest
        set_lr(0)
        return SimpleNamespace(step=step)

    expected, _ = plain(net, mixed, epochs=1, scheduler=written_out)
    assert losses == pytest.approx(expected, abs=1e-12)
    compare(ours, net)
    assert_close(list(ema.module.state_dict().values()), list(average.values()))


def test_the_example(timm, example):
    _, (model, ema, optimizer), out = example("timm_loop")
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss of the last batch (\d\.\d{4})\n", out)]
    assert losses == sorted(losses, reverse=True)
    assert (len(losses), optimizer.t, int(model.bn1.num_batches_tracked)) == (2, 10, 20)
    assert 0.001 < distance(detached(model.parameters()), detached(ema.module.parameters())) < 1.0
    text, page = ((ROOT / name).read_text("utf-8") for name in ("examples/timm_loop.py", "docs/guides/timm.md"))
    assert definition(text, "ClosureScaler") == definition(page, "ClosureScaler")


def test_the_guide(timm, guide):
    names = guide("timm")
    assert (names["optimizer"].t, int(names["model"].bn1.num_batches_tracked)) == (2, 4)
