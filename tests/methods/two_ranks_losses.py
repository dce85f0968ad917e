"""One rank of a two-process run on gloo with SAF and MESA, which test_losses.py compares with one process.

python two_ranks_losses.py RANK FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import bsam
from bsam.methods.saf import Indexed
from processes import group_of_two

SAMPLES, EPOCHS, PER_RANK = 24, 7, 4
SAF = {"samples": SAMPLES, "classes": 3, "lam": 0.9, "tau": 2.0, "start_epoch": 1, "epochs_back": 2}
MESA = {"decay": 0.9, "lam": 0.9, "tau": 2.0, "start_epoch": 1}


def network() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batches(rank: int, epoch: int, *, reshuffle: bool) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the batches of a rank in an epoch; without reshuffling they are the same in every epoch."""
    generator = torch.Generator().manual_seed(5)
    x, y = (
        torch.randn(SAMPLES, 6, dtype=torch.float64, generator=generator),
        torch.randint(0, 3, (SAMPLES,), generator=generator),
    )
    dataset = Indexed(TensorDataset(x, y))
    sampler = DistributedSampler(dataset, num_replicas=2, rank=rank, shuffle=reshuffle)
    sampler.set_epoch(epoch)
    yield from DataLoader(dataset, batch_size=PER_RANK, sampler=sampler)


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    base = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-2)
    return base if name == "sgd" else bsam.BSAM(base, model, rho_max=0.1, rho_min=0.08)


def step(optimizer, loss_of) -> None:
    def closure():
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    optimizer.step(closure)


def saf(rank: int, name: str, *, reshuffle: bool) -> dict:
    model = DistributedDataParallel(network())
    optimizer, loss = optimizer_of(name, model), bsam.SAF(**SAF)
    for epoch in range(EPOCHS):
        loss.set_epoch(epoch)
        for x, y, index in batches(rank, epoch, reshuffle=reshuffle):
            step(optimizer, lambda: loss(model(x), y, indices=index))
    return {"weights": [p.detach() for p in model.parameters()], "table": loss.table, "stamp": loss.stamp}


def mesa(rank: int, name: str) -> dict:
    model = DistributedDataParallel(network())
    optimizer = optimizer_of(name, model)
    loss = bsam.MESA(model, optimizer, **MESA)
    for epoch in range(EPOCHS):
        loss.set_epoch(epoch)
        for x, y, _ in batches(rank, epoch, reshuffle=True):
            step(optimizer, lambda: loss(model(x), y, inputs=x))
    return {"weights": [p.detach() for p in model.parameters()], "average": loss.average.state_dict()}


CASES = {
    "saf-sgd": lambda rank: saf(rank, "sgd", reshuffle=False),
    "saf-bsam": lambda rank: saf(rank, "bsam", reshuffle=False),
    "saf-sgd-reshuffled": lambda rank: saf(rank, "sgd", reshuffle=True),
    "mesa-sgd": lambda rank: mesa(rank, "sgd"),
    "mesa-bsam": lambda rank: mesa(rank, "bsam"),
}

if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    with group_of_two(rank, folder):
        torch.save({case: run(rank) for case, run in CASES.items()}, folder / f"{rank}.pt")
