"""Small networks, their exact Hessians, matrices with a spectrum of one's choice, and a witness that a model was left
as it was.
"""

from __future__ import annotations

import contextlib
import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from bsam.flatness import HessianOperator


def mlp(dtype=torch.float64):
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 5)).to(
        dtype
    )  # 445 parameters


def with_batch_norm(dtype=torch.float64):
    layers = (
        nn.Conv2d(1, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Conv2d(6, 8, 3),
        nn.BatchNorm2d(8),
        nn.Tanh(),
        nn.AvgPool2d(2),
    )
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 5)).to(dtype)  # 693 parameters


INPUTS = {mlp: (10,), with_batch_norm: (1, 8, 8)}


def made(build, sizes=(7, 2, 15), dtype=torch.float64, train=0):
    """A network, its batches of uneven sizes, all fixed; ``train`` steps of SGD on them."""
    torch.manual_seed(3)
    model = build(dtype)
    data = [(torch.randn(n, *INPUTS[build], dtype=dtype), torch.randint(0, 5, (n,))) for n in sizes]
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    for _ in range(3):
        model(x)  # running statistics that are not those of a new network
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for _ in range(train):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.zero_grad()
    return model, data


def exact_hessian(model, loss_fn, data, mode="eval"):
    """All of it, in float64: the mean over samples of each batch's mean loss, differentiated twice by torch, on a copy."""
    model = copy.deepcopy(model).double().eval()
    for module in model.modules():
        if mode == "train" and isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train()
            module.track_running_stats = False
    data = [tuple(t.double() if t.is_floating_point() else t for t in batch) for batch in data]
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]

    def loss(flat):
        pieces = flat.split([p.numel() for _, p in named])
        weights = {name: piece.view(p.shape) for (name, p), piece in zip(named, pieces, strict=True)}
        return sum(loss_fn(functional_call(model, weights, (x,)), y) * len(y) for x, y in data) / sum(
            len(y) for _, y in data
        )

    return torch.autograd.functional.hessian(
        loss, torch.cat([p.detach().reshape(-1) for _, p in named]), vectorize=True
    )


class Quadratic(nn.Module):
    """Its loss is ``w A w / 2``, and its Hessian the input ``A``."""

    def __init__(self, n, dtype=torch.float64):
        super().__init__()
        self.w = nn.Parameter(torch.ones(n, dtype=dtype))

    def forward(self, A):
        return (A @ self.w) @ self.w / 2


def with_spectrum(eigenvalues, dtype=torch.float64):
    """A Hessian with these eigenvalues in random directions, and the matrix."""
    generator = torch.Generator().manual_seed(11)
    Q = torch.linalg.qr(torch.randn(len(eigenvalues), len(eigenvalues), dtype=torch.float64, generator=generator)).Q
    A = (Q * torch.as_tensor(np.asarray(eigenvalues, dtype=float))) @ Q.T
    A = ((A + A.T) / 2).to(dtype)
    return HessianOperator(Quadratic(len(A), dtype), lambda out, y: out, [(A, torch.zeros(1))]), A.double()


@contextlib.contextmanager
def unchanged(model):
    """What a user can see of the model, and the random numbers, must be the same to the bit afterwards."""

    def state():
        tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
        flags = [(m.training, getattr(m, "track_running_stats", None)) for m in model.modules()]
        kinds = [(id(p), p.data_ptr(), p.requires_grad, p.grad is None, p.grad_fn) for p in model.parameters()]
        return [t.detach().clone() for t in (*tensors, torch.random.get_rng_state())], flags, kinds

    before = state()
    try:
        yield
    finally:
        after = state()
        assert all(torch.equal(s, t) for s, t in zip(before[0], after[0], strict=True))
        assert before[1:] == after[1:]


@pytest.fixture(scope="session")
def nets():
    return {"made": made, "mlp": mlp, "batch norm": with_batch_norm, "exact": exact_hessian}


@pytest.fixture(scope="session")
def trained():
    """A trained network, its batches and its exact Hessian: most of its eigenvalues are near zero, a few are not."""
    model, data = made(mlp, train=150)
    return model, data, exact_hessian(model, F.cross_entropy, data)


@pytest.fixture(scope="session")
def untrained():
    model, data = made(mlp)
    return model, data, exact_hessian(model, F.cross_entropy, data)


@pytest.fixture(name="with_spectrum", scope="session")
def with_spectrum_fixture():
    return with_spectrum


@pytest.fixture(name="unchanged", scope="session")
def unchanged_fixture():
    return unchanged
