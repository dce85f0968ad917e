"""Loops with Fabric, by a plain ``fabric.setup``, against the same training in a plain loop."""

from __future__ import annotations

import copy
import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bsam
from bsam.integrations.lightning import SharpnessAwareMixin
from helpers import alike
from lightning_training import BSAM, EPOCHS, Batches, compare, network, plain, sgd

pytestmark = pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated")


@pytest.fixture(scope="module")
def fabric_of(lightning):
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    return partial(lightning.Fabric, accelerator="cpu", devices=1)


def set_up(fabric, net, method=BSAM):
    """As the page says: the optimizer is built on the plain network, and both are set up."""
    return fabric.setup(net, method(sgd(net.parameters()), net))


def clip(params):
    nn.utils.clip_grad_norm_(params, 0.3)


def test_step_with_a_closure(fabric_of):
    net, data = network(), Batches()
    ours = copy.deepcopy(net)
    model, optimizer = set_up(fabric_of(), ours)
    torch.manual_seed(0)
    losses = [
        optimizer.step(lambda: F.cross_entropy(model(x), y)).item() for _ in range(EPOCHS) for x, y in data
    ]  # fmt: skip
    assert losses == pytest.approx(plain(net, data)[0], abs=1e-12)
    compare(ours, net)
    assert isinstance(optimizer, bsam.BSAM)
    assert optimizer.t == 10


class Halving(bsam.BSAM):
    """A method of the user's, whose ``backward`` must run once, on whatever object it is called."""

    def backward(self, closure, scaler=None):
        return super().backward(lambda: 0.5 * closure(), scaler)


def test_what_was_set_counts_where_the_class_has_another_value(fabric_of):
    """``passes`` is 3 in the class, in which Fabric's object looks first."""
    net, data = network(), Batches()
    ours, calls, method = copy.deepcopy(net), [], partial(Halving, rho_max=0.2, rho_min=0.15, passes=2)
    model, optimizer = set_up(fabric_of(), ours, method)
    ours.register_forward_pre_hook(lambda *_: calls.append(1))
    torch.manual_seed(0)
    for x, y in data:
        optimizer.zero_grad()
        optimizer.backward(lambda: F.cross_entropy(model(x), y))
        optimizer.step()
    plain(net, data, method=method, epochs=1)
    compare(ours, net)
    assert len(calls) == 10


def test_clipping_accumulation_and_a_checkpoint(fabric_of, tmp_path):
    """A second loop goes on from the first one's checkpoint, in the middle of LookSAM's period."""
    method = partial(bsam.LookSAM, k=4, rho=0.2)
    net, data = network(dropout=0.0), Batches()
    fabric, finished = fabric_of(), []
    for epoch in range(EPOCHS):
        ours = copy.deepcopy(net)
        model, optimizer = set_up(fabric, ours, method)
        if epoch > 0:
            fabric.load(tmp_path / f"{epoch}.ckpt", {"model": model, "optimizer": optimizer})
            assert alike(dict(ours.state_dict()), finished[-1])
        for i, (x, y) in enumerate(data):
            last = i % 2 == 1 or i + 1 == len(data)
            with fabric.no_backward_sync(model, enabled=not last):
                optimizer.backward(lambda: F.cross_entropy(model(x), y) / 2)
            if last:
                fabric.clip_gradients(model, optimizer, max_norm=0.3)
                optimizer.step()
                optimizer.zero_grad()
        fabric.save(tmp_path / f"{epoch + 1}.ckpt", {"model": model, "optimizer": optimizer})
        finished.append(copy.deepcopy(dict(ours.state_dict())))
    plain(net, data, method=method, accumulate=2, clip=clip)
    compare(ours, net)
    assert optimizer.t == 6


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision(fabric_of, lightning, precision):
    """The closure calls ``fabric.backward``, which Fabric asks for; 16-mixed needs its scaler, too."""
    from lightning.fabric.plugins import MixedPrecision

    dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float16
    ours_scaler, scaler = (
        torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=2) if precision == "16-mixed" else None
        for _ in range(2)
    )
    fabric = fabric_of(plugins=[MixedPrecision(precision, "cpu", scaler=ours_scaler)])
    method = partial(bsam.FriendlySAM, rho=0.2)  # remembers a gradient while the scale changes
    net, data = network(torch.float32), Batches(torch.float32)
    ours = copy.deepcopy(net)
    model, optimizer = set_up(fabric, ours, method)
    torch.manual_seed(0)
    for _ in range(EPOCHS):
        for x, y in data:

            def closure():
                loss = F.cross_entropy(model(x), y)
                fabric.backward(loss)
                return loss

            optimizer.zero_grad()
            optimizer.backward(closure, scaler=getattr(fabric.strategy.precision, "scaler", None))
            fabric.clip_gradients(model, optimizer, max_norm=0.3, error_if_nonfinite=False)
            optimizer.step()
    inputs = Batches(torch.float32)
    inputs.all = [(x.to(dtype), y) for x, y in inputs.all]

    def cast(module, args, output):
        return output.float()

    with net.register_forward_hook(cast):
        _, other = plain(
            net, inputs, method=method, scaler=scaler, clip=clip, autocast=partial(torch.autocast, "cpu", dtype=dtype)
        )
    compare(ours, net, atol=1e-7)
    assert optimizer.t == other.t
    if scaler is not None:
        assert ours_scaler.get_scale() == scaler.get_scale() > 2.0**9
    with pytest.raises(RuntimeError, match="requires you to call `fabric"):
        optimizer.backward(lambda: F.cross_entropy(model(x), y))


@pytest.mark.parametrize("after_a_trainer", [False, True])
def test_a_module_with_the_mixin(fabric_of, lightning, after_a_trainer):
    """Fabric has no Trainer, so that the mixin changes nothing."""

    class Net(SharpnessAwareMixin, lightning.LightningModule):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return BSAM(sgd(self.parameters()), self)

    net, data = network(), Batches()
    module = Net(copy.deepcopy(net))
    if after_a_trainer:
        quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
        lightning.Trainer(accelerator="cpu", max_steps=1, **quiet).fit(module, data)
        module.net.load_state_dict(net.state_dict())
    fabric = fabric_of()
    model, optimizer = set_up(fabric, module)
    torch.manual_seed(0)
    for _ in range(EPOCHS):
        for batch in data:

            def closure():
                loss = model.training_step(batch, 0)
                model.backward(loss)
                return loss

            optimizer.step(closure)
    plain(net, data)
    compare(module.net, net)
