"""Lightning with the mixin against plain loops."""

from __future__ import annotations

import copy
import logging
from collections import UserDict
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

import bsam
from bsam.integrations.lightning import SharpnessAwareMixin, _check
from helpers import alike, assert_close
from integrations.test_frameworks import digits_network, train_on_digits
from lightning_training import BSAM, EPOCHS, Batches, compare, network, plain, sgd
from methods.toy_method import AlternatingSAM

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated"),
]


@pytest.fixture(scope="module")
def pl(lightning):
    """Lightning, a module with the mixin, and a function that fits it without output."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Net(SharpnessAwareMixin, lightning.LightningModule):
        def __init__(self, net, method=BSAM, *, skip=(), scheduler=None):
            super().__init__()
            self.net, self.method, self.skip, self.scheduler = net, method, skip, scheduler
            self.passes, self.losses, self.seen = 0, [], []

        def training_step(self, batch, batch_idx):
            if batch_idx in self.skip:
                return None
            self.passes += 1
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.log("loss", loss, on_step=False, on_epoch=True)
            return loss

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.losses += [outputs["loss"].item()] if outputs else []

        def on_before_optimizer_step(self, optimizer):
            self.seen.append((type(optimizer), sum(p.grad is not None for p in self.parameters())))

        def configure_optimizers(self):
            optimizer = self.method(sgd(self.parameters()), self)
            if self.scheduler is None:
                return optimizer
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": self.scheduler(optimizer), "interval": "step"},
            }

    def fit(module, data, *, epochs=EPOCHS, ckpt_path=None, **options):
        quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
        trainer = lightning.Trainer(accelerator="cpu", max_epochs=epochs, **{**quiet, **options})
        torch.manual_seed(0)
        trainer.fit(module, data, ckpt_path=ckpt_path)
        return trainer

    return SimpleNamespace(L=lightning, Net=Net, fit=fit)


@pytest.mark.parametrize(
    ("method", "passes"),
    [(BSAM, 30), (partial(bsam.GAM, form="paper"), 40), (partial(BSAM, same_draws=False), 30),
     (partial(BSAM, start_from_min=True), 30), (partial(AlternatingSAM, rho=0.2), 19)],
)  # fmt: skip
def test_weights_and_the_number_of_passes(pl, method, passes):
    net, data = network(), Batches()
    module = pl.Net(copy.deepcopy(net), method)
    trainer = pl.fit(module, data)
    losses, optimizer = plain(net, data, method=method)
    compare(module.net, net)
    assert module.losses == pytest.approx(losses, abs=1e-12)
    assert trainer.global_step == optimizer.t == trainer.optimizers[0].t == 10
    assert module.passes == passes
    assert module.seen == [(type(optimizer), 6)] * 10
    assert module._first_pass is None  # no batch is kept


def clip(params):
    nn.utils.clip_grad_norm_(params, 0.3)


@pytest.mark.parametrize(
    ("accumulate", "skip", "steps"), [(1, (0, 3), 6), (2, (), 6), (2, (0, 4), 4), (2, (1,), 6), (2, (2, 3), 4)]
)
def test_clipping_accumulation_and_skipped_batches(pl, accumulate, skip, steps):
    """Five batches in pairs; without the batches 2 and 3, or 4, there is nothing to step with."""
    net, data = network(), Batches()
    module = pl.Net(copy.deepcopy(net), skip=skip)
    pl.fit(module, data, accumulate_grad_batches=accumulate, gradient_clip_val=0.3)
    losses, optimizer = plain(net, data, accumulate=accumulate, skip=skip, clip=clip)
    compare(module.net, net)
    assert module.passes == 3 * len(losses)
    assert optimizer.t == module.trainer.optimizers[0].t == steps


def test_logs_and_metrics_are_of_the_first_pass(pl):
    """Also metrics whose states a collection shares, and those that keep lists."""
    import torchmetrics
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassRecall

    class Measured(pl.Net):
        def __init__(self, net):
            super().__init__(net)
            self.metrics = torchmetrics.MetricCollection(
                [MulticlassAccuracy(3), MulticlassRecall(3), MulticlassAUROC(3)]
            )
            self.updated = self.metrics.clone()  # by `update` two of them share their states
            self.mean, self.once = torchmetrics.MeanMetric(), 0

        def training_step(self, batch, batch_idx):
            logits = self.net(batch[0])
            loss = F.cross_entropy(logits, batch[1])
            self.mean.update(loss.detach())
            self.updated.update(logits, batch[1])
            self.log_dict(self.metrics(logits, batch[1]), on_step=True, on_epoch=False)
            self.log_dict({"loss": loss, "twice": 2 * loss}, on_step=False, on_epoch=True)
            self.log("mean", self.mean, on_step=False, on_epoch=True)
            self.once += not self.extra_pass
            return {"loss": loss, "logits": logits.detach()}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.seen.append((outputs["logits"], batch[1]))

        def on_train_epoch_end(self):
            self.last = [metrics.compute() for metrics in (self.metrics, self.updated)]
            self.metrics.reset()
            self.updated.reset()

    net, data = network(), Batches()
    module = Measured(copy.deepcopy(net))
    module.seen = []
    module.on_before_optimizer_step = lambda optimizer: None
    trainer = pl.fit(module, data)
    losses, _ = plain(net, data)
    compare(module.net, net)
    mean = sum(losses[5:]) / 5
    assert {name: trainer.callback_metrics[name].item() for name in ("loss", "twice", "mean")} == pytest.approx(
        {"loss": mean, "twice": 2 * mean, "mean": mean}, abs=1e-6
    )
    expected = torchmetrics.MetricCollection([MulticlassAccuracy(3), MulticlassRecall(3), MulticlassAUROC(3)])
    for logits, y in module.seen[5:]:
        expected.update(logits, y)
    for values in module.last:
        torch.testing.assert_close(values, expected.compute(), rtol=0, atol=1e-7)
    assert module.once == 10


@pytest.mark.parametrize(("init_scale", "accumulate"), [(3000.0, 2), (2.0**21, 1)])
def test_grad_scaler(pl, init_scale, accumulate):
    """With the larger scale the first steps overflow float16 and are skipped."""
    from lightning.pytorch.plugins import MixedPrecision

    net, data = network(torch.float32), Batches(torch.float32)
    ours, theirs = (torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=100) for _ in range(2))
    module = pl.Net(copy.deepcopy(net))
    plugin = MixedPrecision("16-mixed", "cpu", scaler=ours)
    trainer = pl.fit(
        module, data, epochs=4, plugins=[plugin], gradient_clip_val=0.3, accumulate_grad_batches=accumulate
    )
    autocast = partial(torch.autocast, "cpu", dtype=torch.float16)
    _, optimizer = plain(net, data, epochs=4, scaler=theirs, accumulate=accumulate, autocast=autocast, clip=clip)
    compare(module.net, net, atol=1e-7)
    assert ours.get_scale() == theirs.get_scale()
    taken = trainer.optimizers[0].t
    assert taken == optimizer.t
    assert (taken < trainer.global_step) == (init_scale == 2.0**21)
    assert taken > 5


def test_schedulers_and_radii_that_follow_them(pl):
    net, data = network(), Batches()
    scheduler = partial(OneCycleLR, max_lr=0.3, total_steps=10)
    method = partial(bsam.BSAM, rho_max=0.2, rho_min=0.2, rho_min_floor=0.01)
    module = pl.Net(copy.deepcopy(net), method, scheduler=scheduler)
    pl.fit(module, data)
    plain(net, data, method=method, scheduler=scheduler)
    compare(module.net, net)


def test_resuming_from_a_checkpoint(pl, tmp_path):
    """Bit for bit, with LookSAM's memory and in the middle of its period."""
    net, data = network(dropout=0.0), Batches()
    options = {"scheduler": partial(CosineAnnealingLR, T_max=20)}
    method = partial(bsam.LookSAM, k=4, rho=0.2)
    whole, first, second = (pl.Net(copy.deepcopy(net), method, **options) for _ in range(3))
    pl.fit(whole, data, epochs=4)
    pl.fit(first, data, epochs=2).save_checkpoint(tmp_path / "half.ckpt")
    trainer = pl.fit(second, data, epochs=4, ckpt_path=tmp_path / "half.ckpt")
    assert alike(dict(second.net.state_dict()), dict(whole.net.state_dict()))
    assert trainer.global_step == trainer.optimizers[0].t == 20
    assert (len(first.losses), len(second.losses)) == (10, 10)
    losses, _ = plain(net, data, method=method, epochs=4, **options)
    compare(whole.net, net)
    assert first.losses + second.losses == pytest.approx(losses, abs=1e-12)


def test_stochastic_weight_averaging(pl):
    """Weights at the start of the epochs 1 to 3 are averaged; an epoch without steps updates the statistics."""

    class Rated(pl.Net):
        def on_before_optimizer_step(self, optimizer):
            self.seen.append(optimizer.param_groups[0]["lr"])

    net, data = network(), Batches()
    module = Rated(copy.deepcopy(net))
    swa = pl.L.pytorch.callbacks.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=1)
    pl.fit(module, data, epochs=4, callbacks=[swa])
    rates, weights = module.seen[:20:5], []
    assert module.seen[:20] == [rate for rate in rates for _ in range(5)]
    assert rates[0] == 0.2
    assert rates[-1] == 0.05

    def before_epoch(epoch, optimizer):
        optimizer.param_groups[0]["lr"] = rates[epoch]
        weights.append([p.detach().clone() for p in net.parameters()])

    plain(net, data, epochs=4, before_epoch=before_epoch)
    with torch.no_grad():
        for p, *values in zip(net.parameters(), *weights[1:], strict=True):
            p.copy_(sum(values) / 3)
        net[1].reset_running_stats()
        net[1].momentum = None
        for x, _ in data:
            net(x)
    compare(module.net, net)
    assert module.passes == 3 * 20 + 5
    assert module.trainer.optimizers[0].t == 20


def test_manual_optimization(pl):
    """The optimizer of Lightning counts the steps, and the scaler scales."""
    from lightning.pytorch.plugins import MixedPrecision

    class Manual(pl.Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer, scaler = self.optimizers(), getattr(self.trainer.precision_plugin, "scaler", None)

            def closure():
                loss = F.cross_entropy(self.net(batch[0]), batch[1])
                self.manual_backward(loss)
                return loss

            optimizer.zero_grad()
            loss = optimizer.backward(closure, scaler)
            if scaler is None and not hasattr(self, "clipped"):
                self.clip_gradients(optimizer, gradient_clip_val=0.3)
            optimizer.step()
            return loss

    class InHook(Manual):
        clipped = 0

        def on_before_optimizer_step(self, optimizer):
            self.clipped += 1
            self.clip_gradients(optimizer, gradient_clip_val=0.3)

    start, data = network(), Batches()
    for kind in (Manual, InHook):
        net = copy.deepcopy(start)
        module = kind(copy.deepcopy(start))
        trainer = pl.fit(module, data)
        losses, optimizer = plain(net, data, clip=clip)
        compare(module.net, net)
        assert trainer.global_step == optimizer.t == 10
        assert module.losses == pytest.approx(losses, abs=1e-12)
        assert module._first_pass is None  # no batch is kept
    assert module.clipped == 10

    class Unprepared(Manual):
        def training_step(self, batch, batch_idx):
            self.optimizers().step()

    with pytest.raises(bsam.BsamError, match="step"):
        pl.fit(Unprepared(network()), data)

    class WithClosure(Manual):
        def training_step(self, batch, batch_idx):
            return self.optimizers().step(lambda: F.cross_entropy(self.net(batch[0]), batch[1]))

    module, net = WithClosure(copy.deepcopy(start)), copy.deepcopy(start)
    pl.fit(module, data)
    plain(net, data)
    compare(module.net, net)

    net, data = network(torch.float32), Batches(torch.float32)
    module = Manual(copy.deepcopy(net))
    ours, theirs = (torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2))
    trainer = pl.fit(module, data, plugins=[MixedPrecision("16-mixed", "cpu", scaler=ours)])
    plain(net, data, scaler=theirs, autocast=partial(torch.autocast, "cpu", dtype=torch.float16))
    compare(module.net, net, atol=1e-7)
    assert trainer.global_step == 10


def test_other_optimizers_and_inherited_steps(pl):
    """With SGD the mixin changes nothing; a ``training_step`` that calls its parent's is run again as a whole."""

    class Child(pl.Net):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return super().training_step((x + 0.1 * torch.randn_like(x), y), batch_idx)

    class Noise(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net(x + 0.1 * torch.randn_like(x))

    net, data = network(), Batches()
    module = Child(copy.deepcopy(net))
    pl.fit(module, data)
    plain(Noise(net), data)
    compare(module.net, net)

    net = network()
    module = pl.Net(copy.deepcopy(net), lambda base, model: base)
    pl.fit(module, data)
    base = sgd(net.parameters())
    torch.manual_seed(0)
    for x, y in [*data, *data]:
        base.zero_grad()
        F.cross_entropy(net(x), y).backward()
        base.step()
    compare(module.net, net)
    assert module.passes == 10
    assert module._first_pass is None  # no batch is kept


def with_m_sharpness(base, model):
    optimizer = BSAM(base, model)
    optimizer.m_sharpness = True
    return optimizer


class ElsewhereFirst(bsam.SAM):
    """A method whose first pass is not at ``w``."""

    def direction(self, L):
        return L.grad(at=self.vector(0.1 * p.detach() for p in self.params))


def test_refusals(pl):
    class Stepping(pl.Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer.step(closure=optimizer_closure)

    class Undecided(pl.Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if self.extra_pass else loss

    class Halving(pl.Net):
        def training_step(self, batch, batch_idx):
            batch[0].mul_(0.5)
            return super().training_step(batch, batch_idx)

    class NotOurs(pl.Net):
        def backward(self, loss, *args, **kwargs):
            loss.backward(*args, **kwargs)

    def replaced(net):
        module = pl.Net(net)
        module.training_step = lambda batch, batch_idx: F.cross_entropy(module.net(batch[0]), batch[1])
        return module

    for build, word in (
        (partial(pl.Net, method=bsam.MSAM), "MSAM"),
        (partial(pl.Net, method=bsam.ESAM), "ESAM"),
        (partial(pl.Net, method=bsam.FunctionalSAM), "FunctionalSAM"),
        (partial(pl.Net, method=partial(bsam.SAM, ascent=0.5)), "SAM"),
        (partial(pl.Net, method=ElsewhereFirst), "ElsewhereFirst"),
        (partial(pl.Net, method=with_m_sharpness), "m_sharpness"),
        (Stepping, "optimizer_step"),
        (Undecided, "None"),
        (Halving, "in place"),
        (NotOurs, "step"),
        (replaced, "training_step"),
    ):
        module = build(network())
        with pytest.raises(bsam.BsamError, match=word):
            pl.fit(module, Batches())
        assert alike(dict(module.net.named_parameters()), dict(network().named_parameters()))
    for kind in (Halving, NotOurs):  # allowed with SGD
        pl.fit(kind(network(), lambda base, model: base), Batches(), epochs=1)
    with pytest.raises(bsam.BsamError, match="Wrong"):
        type("Wrong", (pl.L.LightningModule, SharpnessAwareMixin), {})


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 4}, {"gradient_clip_val": 0.1}])
def test_without_the_mixin(pl, options):
    """Accumulated gradients would be lost, and passes clipped."""

    class Plain(pl.L.LightningModule):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return BSAM(sgd(self.parameters()), self)

    class Manual(Plain):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.optimizers().step(partial(super().training_step, batch, batch_idx))

    class Wrapped(Plain):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            optimizer.step(closure=lambda: optimizer_closure())

    for kind in (Plain, Wrapped):
        module = kind(network())
        with pytest.raises(bsam.BsamError, match="SharpnessAwareMixin"):
            pl.fit(module, Batches(), **options)
        assert alike(dict(module.net.named_parameters()), dict(network().named_parameters()))
    if not options:
        module, twin = Manual(network()), network()
        pl.fit(module, Batches())
        plain(twin, Batches())
        compare(module.net, twin)


def test_strategies(pl):
    """XLA's derives from DDP's; a user's strategy counts as the one it derives from."""
    from lightning.pytorch import strategies

    class Mine(strategies.SingleDeviceStrategy):
        pass

    module, optimizer = pl.Net(network()), BSAM(sgd(network().parameters()), None)
    for kind in (strategies.FSDPStrategy, strategies.XLAStrategy, strategies.DDPStrategy, Mine):
        module._trainer = SimpleNamespace(strategy=kind.__new__(kind))
        known = kind in (strategies.DDPStrategy, Mine)
        with pytest.raises(bsam.BsamError, match="training_step" if known else kind.__name__):  # it never ran
            _check(module, optimizer)


def test_a_step_that_takes_its_batch_apart(pl):
    """Every pass gets the whole batch; the result is a mapping other than a dict."""

    class Popping(pl.Net):
        def training_step(self, batch, batch_idx):
            (inner,) = batch
            y = inner.pop("y")
            return UserDict(loss=F.cross_entropy(self.net(inner.pop("x")), y))

    net, data = network(), Batches()
    module = Popping(copy.deepcopy(net))
    pl.fit(module, Loader([[{"x": x, "y": y}] for x, y in data]), epochs=1)
    plain(net, data, epochs=1)
    compare(module.net, net)


class Loader(Batches):
    def __init__(self, batches):
        self.all = batches


def test_a_backward_that_calls_the_mixins(pl):
    class Same(pl.Net):
        def backward(self, loss, *args, **kwargs):
            super().backward(loss, *args, retain_graph=True, **kwargs)

    net, data = network(), Batches()
    module = Same(copy.deepcopy(net))
    pl.fit(module, data, epochs=1)
    plain(net, data, epochs=1)
    compare(module.net, net)


@pytest.mark.parametrize("after_a_trainer", [False, True])
def test_a_module_in_fabric(pl, after_a_trainer):
    """Fabric has no Trainer, so the mixin changes nothing."""
    net, data = network(), Batches()
    module = pl.Net(copy.deepcopy(net))
    module.log = lambda *_, **__: None
    if after_a_trainer:
        pl.fit(module, data, epochs=1)
        module.net.load_state_dict(net.state_dict())
    fabric = pl.L.Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(module, BSAM(sgd(module.parameters()), module))
    torch.manual_seed(0)
    for batch in data:

        def closure():
            loss = model.training_step(batch, 0)
            model.backward(loss)
            return loss

        optimizer.step(closure)
    plain(net, data, epochs=1)
    compare(module.net, net)


def test_after_an_exception_the_module_is_as_before(pl):
    """The pass, metrics and random numbers, for exceptions in the first pass, in the second, and between them."""
    import torchmetrics

    class Failing(pl.Net):
        def __init__(self, net, fails):
            super().__init__(net)
            self.fails, self.mean = fails, torchmetrics.MeanMetric()

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.mean.update(loss.detach())
            if self.passes == self.fails:
                self.fails = None
                raise ZeroDivisionError
            return loss

    for fails in (4, 5):  # of the second batch
        net = network()
        module = Failing(copy.deepcopy(net), fails)
        with pytest.raises(ZeroDivisionError):
            pl.fit(module, Batches())
        assert not module.extra_pass
        assert module.trainer.optimizers[0].step.__name__ == "step"  # restored
        assert module.mean.update_count == 2
        module.net.load_state_dict(net.state_dict())
        pl.fit(module, Batches())
        plain(net, Batches())
        compare(module.net, net)

    class Frozen(pl.Net):
        def on_before_backward(self, loss):
            self.requires_grad_(False)
            self.state = torch.get_rng_state()

    module = Frozen(network())
    with pytest.raises(bsam.BsamError, match="gradient"):
        pl.fit(module, Batches())
    assert torch.equal(torch.get_rng_state(), module.state)


def test_finetuning_is_resumed(pl, tmp_path):
    """BaseFinetuning assigns the groups of its checkpoint to the optimizer."""

    class Thaw(pl.L.pytorch.callbacks.BaseFinetuning):
        def freeze_before_training(self, module):
            self.freeze(module.net[0])

        def finetune_function(self, module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.net[0], optimizer, lr=0.1)
            elif epoch == 2:
                self.make_trainable(module.net[0])  # after a resume it is frozen, with any optimizer

    class Partly(pl.Net):
        def configure_optimizers(self):
            return BSAM(sgd([p for p in self.parameters() if p.requires_grad]), self)

    net = network(dropout=0.0)
    whole, first, second = (Partly(copy.deepcopy(net)) for _ in range(3))
    pl.fit(whole, Batches(), epochs=3, callbacks=[Thaw()])
    pl.fit(first, Batches(), epochs=2, callbacks=[Thaw()]).save_checkpoint(tmp_path / "half.ckpt")
    trainer = pl.fit(second, Batches(), epochs=3, ckpt_path=tmp_path / "half.ckpt", callbacks=[Thaw()])
    assert alike(dict(second.net.state_dict()), dict(whole.net.state_dict()))
    assert [len(group["params"]) for group in trainer.optimizers[0].param_groups] == [4, 2]


def test_losses_that_observers_read_are_not_scaled(pl):
    """Lightning scales the first pass. A method may also ask for the loss first and for a gradient elsewhere."""
    from lightning.pytorch.plugins import MixedPrecision

    class Valued(bsam.SAM):
        def direction(self, L):
            L.value()
            return L.grad(at=self.vector(0.1 * p.detach() for p in self.params))

    class Observer:
        def due(self, step):
            return True

        def observe(self, optimizer, L):
            seen.append(L.loss.item())

    def observed(method, base, model):
        optimizer = method(base, model, rho=0.2)
        optimizer.observers.append(Observer())
        return optimizer

    for method in (bsam.SAM, Valued):
        seen, net = [], network(torch.float32)
        module = pl.Net(copy.deepcopy(net), partial(observed, method))
        ours, theirs = (torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2))
        pl.fit(module, Batches(torch.float32), epochs=1, plugins=[MixedPrecision("16-mixed", "cpu", scaler=ours)])
        losses, _ = plain(
            net, Batches(torch.float32), method=partial(method, rho=0.2), epochs=1, scaler=theirs,
            autocast=partial(torch.autocast, "cpu", dtype=torch.float16),
        )  # fmt: skip
        compare(module.net, net, atol=1e-7)
        assert seen == pytest.approx(losses, rel=1e-3)


@pytest.mark.filterwarnings("ignore:.*[Tt]o_?[Tt]orch[Ss]cript", "ignore:.*torch.jit")
def test_torchscript_after_training(pl):
    class Forward(pl.Net):
        def forward(self, x):
            return self.net(x)

        def configure_optimizers(self):
            return self.method(sgd(self.parameters()), self.net)

    module = Forward(network(torch.float32))
    pl.fit(module, Batches(torch.float32), epochs=1)
    x = Batches(torch.float32).all[0][0]
    assert torch.equal(module.to_torchscript()(x), module.eval()(x))


def test_the_example(pl, example):
    _, (module, loss, accuracy), out = example("lightning_module", epochs=2)
    model = digits_network()
    losses = train_on_digits(model, 2)
    assert_close(module.net.state_dict().values(), model.state_dict().values(), atol=1e-6)
    assert loss == pytest.approx(sum(losses[-20:]) / 20, abs=1e-6)
    assert out == f"BSAM.check: nothing found\n20 steps, 40 batches: loss {loss:.4f}, test accuracy {accuracy:.3f}\n"
    assert accuracy > 0.85
