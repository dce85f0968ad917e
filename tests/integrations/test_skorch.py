"""The nets of bsam.integrations.skorch against plain loops, and what they refuse."""

from __future__ import annotations

import copy
import importlib
import sys
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bsam
from helpers import alike, assert_close, detached, distance
from integrations.conftest import import_framework
from lightning_training import BSAM, Batches, compare, network, plain


@pytest.fixture(scope="module")
def nets() -> ModuleType:
    import_framework("skorch.callbacks")
    return import_framework("bsam.integrations.skorch")


def settings(data: Batches, **changes) -> dict:
    same = {"lr": 0.2, "max_epochs": 2, "verbose": 0, "train_split": None}
    return {**same, "iterator_train": lambda dataset, batch_size: data, **changes}


def arrays(data: Batches) -> list[torch.Tensor]:
    return [torch.cat(part) for part in zip(*data.all, strict=True)]


def test_classifier(nets):
    """With callbacks that clip and schedule; the history has the losses of the first pass."""
    from skorch.callbacks import GradientNormClipping, LRScheduler

    module, data = network(), Batches()
    schedule = LRScheduler("StepLR", step_size=3, gamma=0.5, step_every="batch")
    method = {"optimizer": bsam.BSAM, "optimizer__rho_max": 0.2, "optimizer__rho_min": 0.15}
    base = {"optimizer__momentum": 0.9, "optimizer__weight_decay": 1e-3}
    net = nets.SharpnessAwareClassifier(
        partial(copy.deepcopy, module), criterion=nn.CrossEntropyLoss,
        **settings(data, **method, **base, callbacks=[GradientNormClipping(0.3), schedule]),
    )  # fmt: skip
    net.initialize()
    torch.manual_seed(0)
    net.partial_fit(*arrays(data))
    clip = partial(nn.utils.clip_grad_norm_, max_norm=0.3)
    losses, _ = plain(
        module, data, method=BSAM, clip=clip, scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.5)
    )
    compare(net.module_, module)
    logged = [loss for epoch in net.history[:, "batches", :, "train_loss"] for loss in epoch]
    assert logged == pytest.approx(losses, abs=1e-12)


@pytest.mark.parametrize("name", ["SharpnessAwareRegressor", "Net"])
def test_regression_with_another_base(nets, name):
    """SAM on Adam, written out with autograd; ``Net`` is a NeuralNet with the mixin."""
    from skorch import NeuralNet

    class Net(nets.SharpnessAwareMixin, NeuralNet):
        pass

    cls = Net if name == "Net" else getattr(nets, name)
    data = Batches()
    data.all = [(x, x[:, :3].tanh()) for x, _ in data.all]
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    start = copy.deepcopy(module)
    method = {"optimizer": bsam.SAM, "optimizer__rho": 0.1, "optimizer__base": torch.optim.Adam}
    net = cls(partial(copy.deepcopy, module), criterion=nn.MSELoss, **settings(data, **method, lr=0.01))
    net.fit(*arrays(data))

    w, base = list(module.parameters()), torch.optim.Adam(module.parameters(), lr=0.01)
    for x, y in 2 * data.all:
        g = torch.autograd.grad(F.mse_loss(module(x), y), w)
        before, length = [p.detach().clone() for p in w], torch.cat([t.flatten() for t in g]).norm()
        with torch.no_grad():
            torch._foreach_add_(w, [0.1 * t / length for t in g])
        g = torch.autograd.grad(F.mse_loss(module(x), y), w)
        for p, old, t in zip(w, before, g, strict=True):
            p.data.copy_(old)
            p.grad = t
        base.step()
    assert_close(net.module_.parameters(), w, atol=1e-12)
    assert distance(detached(start.parameters()), detached(w)) > 0.05


def test_the_example(nets, example):
    _, search, _ = example("skorch_classifier")
    best = search.best_estimator_
    assert best.optimizer_.param_groups[0]["rho_max"] == search.best_params_["optimizer__rho_max"]
    assert best.optimizer_.t == int(best.module_[2].num_batches_tracked) == 4 * 16  # a fifth is for validation


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, bsam.SAF])
def test_the_optimizer_must_be_a_method(nets, optimizer):
    with pytest.raises(bsam.BsamError, match=rf"bsam\.SAM, got {optimizer.__name__}: .*optimizer__base"):
        nets.SharpnessAwareClassifier(nn.Linear, module__in_features=2, module__out_features=2, optimizer=optimizer,
                                      verbose=0).initialize()  # fmt: skip


@pytest.mark.parametrize(("framework", "extra"), [("skorch", "integrations"), ("timm", "timm")])
def test_a_missing_framework(framework, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, framework, None)
    monkeypatch.delitem(sys.modules, f"bsam.integrations.{framework}", raising=False)
    with pytest.raises(bsam.BsamError, match=rf"needs {framework}, .*pip install .*\[{extra}\]"):
        importlib.import_module(f"bsam.integrations.{framework}")


@pytest.mark.parametrize("clip", [None, "callback", "method"])
def test_without_the_mixin(nets, clip):
    """skorch's own loop is that of a plain one, unless callbacks change the gradient of every pass."""
    from skorch import NeuralNetClassifier
    from skorch.callbacks import GradientNormClipping

    class Net(NeuralNetClassifier):
        def initialize_optimizer(self):
            base = torch.optim.SGD(self.module_.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-3)
            self.optimizer_ = BSAM(base, self.module_)
            return self

    class Clipping(Net):
        def on_grad_computed(self, net, named_parameters, **options):
            torch.nn.utils.clip_grad_norm_(self.module_.parameters(), 0.3)

    module, data = network(), Batches()
    callbacks = [GradientNormClipping(0.3)] if clip == "callback" else []
    kind = Clipping if clip == "method" else Net
    net = kind(partial(copy.deepcopy, module), criterion=nn.CrossEntropyLoss, **settings(data, callbacks=callbacks))
    net.initialize()
    torch.manual_seed(0)
    if clip:
        with pytest.raises(bsam.BsamError, match="SharpnessAwareMixin"):
            net.partial_fit(*arrays(data))
        assert alike(net.module_.state_dict(), module.state_dict())
    else:
        net.partial_fit(*arrays(data))
        plain(module, data, method=BSAM)
        compare(net.module_, module)
