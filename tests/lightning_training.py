"""A network, batches and a plain loop, with which the tests of Lightning and other frameworks are compared."""

from __future__ import annotations

import contextlib
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

import bsam
from helpers import assert_close, distance

EPOCHS = 2
BSAM = partial(bsam.BSAM, rho_max=0.2, rho_min=0.15)


def network(dtype=torch.float64, dropout=0.3):
    """With batch norm, whose statistics move once a step, and dropout, whose draws all passes of a step share."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(dropout), nn.Linear(12, 3)).to(
        dtype
    )


class Batches:
    """Five batches of eight samples, or a rank's halves of them.

    Not a DataLoader, which draws random numbers, nor a list, whose entries Lightning takes for loaders.
    """

    def __init__(self, dtype=torch.float64, rank=None):
        generator = torch.Generator().manual_seed(5)
        x, y = torch.randn(40, 6, generator=generator).to(dtype), torch.randint(0, 3, (40,), generator=generator)
        whole = zip(x.split(8), y.split(8), strict=True)
        self.all = [batch if rank is None else tuple(t.chunk(2)[rank] for t in batch) for batch in whole]

    def __iter__(self):
        return iter(self.all)

    def __len__(self):
        return len(self.all)


def sgd(params):
    return torch.optim.SGD(params, lr=0.2, momentum=0.9, weight_decay=1e-3)


def plain(net, data, *, method=BSAM, epochs=EPOCHS, accumulate=1, skip=(), clip=None, scheduler=None, scaler=None,
          autocast=contextlib.nullcontext, before_epoch=None):  # fmt: skip
    """Train in a plain loop. Return the losses of all batches and the optimizer."""
    optimizer, losses = method(sgd(net.parameters()), net), []
    scheduler = scheduler and scheduler(optimizer)
    torch.manual_seed(0)
    for epoch in range(epochs):
        if before_epoch is not None:
            before_epoch(epoch, optimizer)
        for i, (x, y) in enumerate(data):

            def loss():
                with autocast():
                    return F.cross_entropy(net(x), y) / accumulate

            if i % accumulate == 0:
                optimizer.zero_grad()
                prepared = False
            if i not in skip:
                losses.append(optimizer.backward(loss, scaler).item() * accumulate)
                prepared = True
            if not prepared or ((i + 1) % accumulate and i + 1 < len(data)):
                continue
            if scaler is not None:
                scaler.unscale_(optimizer)
            if clip is not None:
                clip(net.parameters())
            optimizer.step() if scaler is None else scaler.step(optimizer)
            if scaler is not None:
                scaler.update()
            if scheduler is not None:
                scheduler.step()
    return losses, optimizer


def compare(ours, net, atol=1e-12):
    """Compare weights and running statistics, and check that the weights have moved."""
    expected = list(net.state_dict().values())
    assert_close(list(ours.state_dict().values()), expected, atol=atol)
    start = network(next(net.parameters()).dtype)
    assert distance([p.detach() for p in start.parameters()], [p.detach() for p in net.parameters()]) > 0.05
