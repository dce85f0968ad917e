"""Nets of skorch with the class of the example, against plain bsam training."""

from __future__ import annotations

import copy
import runpy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bsam
from docs_guides import definition
from helpers import detached, distance
from integrations.conftest import ROOT, import_framework
from lightning_training import BSAM, EPOCHS, Batches, compare, network, plain, sgd

CLIP = partial(nn.utils.clip_grad_norm_, max_norm=0.3)
OURS = {"optimizer": bsam.BSAM, "optimizer__rho_max": 0.2, "optimizer__rho_min": 0.15}


@pytest.fixture(scope="module")
def skorch():
    import_framework("skorch.callbacks")
    return import_framework("skorch")


@pytest.fixture
def classifier(skorch):
    return runpy.run_path(str(ROOT / "examples/skorch_classifier.py"))["SharpnessAwareClassifier"]


def net_of(cls, module, data, method=OURS, **own):
    """An initialized net that trains a copy of ``module`` on these batches; a DataLoader would draw random numbers."""
    own = {**method, "optimizer__momentum": 0.9, "optimizer__weight_decay": 1e-3, **own}
    batches = {"iterator_train": lambda dataset, batch_size: data, "train_split": None}
    module, criterion = partial(copy.deepcopy, module), nn.CrossEntropyLoss
    net = cls(module, criterion=criterion, lr=0.2, max_epochs=EPOCHS, verbose=0, **batches, **own).initialize()
    torch.manual_seed(0)
    return net


def fit(net, data, epochs=EPOCHS):
    x, y = (torch.cat(part) for part in zip(*data.all, strict=True))
    return net.partial_fit(x, y, epochs=epochs)


def batch_losses(net):
    return [loss for epoch in net.history[:, "batches", :, "train_loss"] for loss in epoch]


def test_step_of_skorch_clips_each_pass(skorch, classifier):
    """Why ``train_step`` is there: without it the direction is another one, as soon as there is clipping."""

    class StepOfSkorch(classifier):
        train_step = skorch.NeuralNetClassifier.train_step

    module, data = network(), Batches()
    net = fit(net_of(StepOfSkorch, module, data), data)
    plain(reference := copy.deepcopy(module), data)
    compare(net.module_, reference)
    net = fit(net_of(StepOfSkorch, module, data, callbacks=[skorch.callbacks.GradientNormClipping(0.3)]), data)
    plain(module, data, clip=CLIP)
    assert distance(detached(net.module_.parameters()), detached(module.parameters())) > 0.01


@pytest.mark.parametrize("clipping", [False, True])
def test_clipping_a_schedule_and_scores(skorch, classifier, clipping):
    module, data, seen, calls = network(), Batches(), [], []

    class Count(skorch.callbacks.Callback):
        def on_grad_computed(self, net, named_parameters, training, **kwargs):
            assert training
            calls.append([name for name, _ in named_parameters])

    callbacks = [
        skorch.callbacks.GradientNormClipping(0.3 if clipping else None),
        skorch.callbacks.LRScheduler("StepLR", step_size=3, gamma=0.5, step_every="batch"),
        skorch.callbacks.EpochScoring("accuracy", lower_is_better=False, on_train=True, name="train_acc"),
        Count(),
    ]
    net = fit(net_of(classifier, module, data, callbacks=callbacks), data)
    assert calls == [[name for name, _ in module.named_parameters()]] * 10

    module.register_forward_hook(lambda module, args, output: seen.append(output.argmax(1)))
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.5)
    losses, _ = plain(module, data, clip=CLIP if clipping else None, scheduler=schedule)
    compare(net.module_, module)
    assert batch_losses(net) == pytest.approx(losses, abs=1e-12)  # of the first pass
    right = [(guess == y).double().mean().item() for guess, (_, y) in zip(seen[::3], data.all * EPOCHS, strict=True)]
    assert net.history[:, "train_acc"] == pytest.approx([sum(right[:5]) / 5, sum(right[5:]) / 5])


def test_accumulation(skorch, guide):
    """The class of the page. Windows are those of skorch's recipe: the fifth batch goes on in the next epoch."""
    module, data = network(), Batches()
    callbacks = [skorch.callbacks.GradientNormClipping(0.3)]
    net = fit(net_of(guide("skorch")["Accumulating"], module, data, acc_steps=2, callbacks=callbacks), data)
    optimizer, losses = BSAM(sgd(module.parameters()), module), []
    torch.manual_seed(0)
    for epoch in range(EPOCHS):
        for i, (x, y) in enumerate(data):
            losses.append(2 * optimizer.backward(lambda: F.cross_entropy(module(x), y) / 2).item())
            if (epoch, i) in [(0, 1), (0, 3), (1, 1), (1, 3)]:
                CLIP(module.parameters())
                optimizer.step()
                optimizer.zero_grad()
    compare(net.module_, module)
    assert batch_losses(net) == pytest.approx(losses, abs=1e-12)
    assert net.optimizer_.t == 4


def test_a_checkpoint(skorch, classifier, tmp_path):
    """The second epoch starts from the checkpoint, with a new net and in the middle of LookSAM's period."""
    module, data = network(dropout=0.0), Batches()
    method = {"optimizer": bsam.LookSAM, "optimizer__rho": 0.2, "optimizer__k": 3}
    for epoch in range(EPOCHS):
        saver = skorch.callbacks.Checkpoint(monitor=None, dirname=tmp_path)
        callbacks = [saver, skorch.callbacks.LRScheduler("StepLR", step_size=1, gamma=0.5)]
        net = net_of(classifier, module, data, method, callbacks=callbacks)
        if epoch > 0:
            net.load_params(checkpoint=saver)
        fit(net, data, epochs=1)

    def schedule(optimizer):
        halve = lambda: optimizer.param_groups[0].update(lr=0.2 if optimizer.t < 5 else 0.1)  # noqa: E731
        return SimpleNamespace(step=halve)

    losses, other = plain(module, data, method=partial(bsam.LookSAM, rho=0.2, k=3), scheduler=schedule)
    compare(net.module_, module, atol=0)
    assert batch_losses(net) == losses
    assert net.optimizer_.t == other.t == 10


def test_settings(classifier):
    """They reach the method, its base or a group, also when they are set later; unknown names are refused."""
    net = net_of(
        classifier, network(), Batches(), {"optimizer": bsam.SAM, "optimizer__rho": 0.3},
        optimizer__base=partial(torch.optim.SGD, nesterov=True), optimizer__param_groups=[("4.*", {"rho": 0.0})],
    )  # fmt: skip
    optimizer = net.optimizer_
    assert (type(optimizer), type(optimizer.base), optimizer.model) == (bsam.SAM, torch.optim.SGD, net.module_)
    found = [[group[name] for name in ("rho", "lr", "momentum", "nesterov")] for group in optimizer.param_groups]
    assert found == [[0.0, 0.2, 0.9, True], [0.3, 0.2, 0.9, True]]
    net.set_params(lr=0.1, optimizer__rho=0.4)
    assert [(group["lr"], group["rho"]) for group in optimizer.param_groups] == [(0.1, 0.4)] * 2
    with pytest.raises(TypeError, match="unexpected keyword argument 'rho_max'"):
        net_of(classifier, network(), Batches(), {"optimizer": bsam.SAM, "optimizer__rho_max": 0.3})


@pytest.mark.parametrize("method", [{"optimizer": bsam.ESAM}, {"optimizer": bsam.KSAM, "optimizer__k": 4}])
def test_methods_that_choose_samples_are_refused(classifier, method):
    with pytest.raises(bsam.BsamError, match=r"this method (first evaluates|selects samples)"):
        fit(net_of(classifier, network(), Batches(), method), Batches())


def test_a_grid_search(classifier):
    """Clones train with the settings of the grid, and the net that is searched stays as it was."""
    from sklearn.model_selection import GridSearchCV

    module, data = network(dropout=0.0), Batches()
    x, y = (torch.cat(part).numpy() for part in zip(*data.all, strict=True))
    net = net_of(classifier, module, data, optimizer__rho_max=0.0)
    search = GridSearchCV(net, {"optimizer__rho_max": [0.2], "lr": [0.2]}, cv=2).fit(x, y)
    plain(module, data)
    compare(search.best_estimator_.module_, module)
    assert (net.optimizer_.t, net.optimizer_.param_groups[0]["rho_max"]) == (0, 0.0)


def test_the_example(skorch, example):
    _, search, out = example("skorch_classifier")
    assert set(search.cv_results_["param_optimizer__rho_max"]) == {0.0, 0.05}
    best = search.best_estimator_
    assert best.optimizer_.param_groups[0]["rho_max"] == search.best_params_["optimizer__rho_max"]
    assert best.optimizer_.t == int(best.module_[2].num_batches_tracked) == 4 * 16  # a fifth is for validation
    assert float(out.split()[-1]) > 0.85
    text, page = (
        (ROOT / name).read_text("utf-8") for name in ("examples/skorch_classifier.py", "docs/guides/skorch.md")
    )
    assert definition(text, "SharpnessAwareClassifier") == definition(page, "SharpnessAwareClassifier")


def test_the_guide(skorch, guide):
    names = guide("skorch")
    assert names["net"].optimizer_.t == 2 * 5
    assert names["accumulating"].optimizer_.t == 2 * 3
