"""Small networks, their dense Hessians, matrices with a given spectrum, and a check that a model is unchanged."""

from __future__ import annotations

import contextlib
import copy
import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from bsam.flatness import HessianOperator


def mlp(dtype=torch.float64):
    layers = nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 5)
    return nn.Sequential(*layers).to(dtype)  # 445 parameters


def with_batch_norm(dtype=torch.float64):
    first = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.5)
    second = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.AvgPool2d(2)
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(4, 5)).to(dtype)  # 181 parameters


INPUTS = {mlp: (10,), with_batch_norm: (1, 6, 6)}


def made(build, sizes=(7, 2, 15), dtype=torch.float64, train=0):
    """A seeded network and its batches of uneven sizes, after ``train`` steps of SGD on them."""
    torch.manual_seed(3)
    model = build(dtype)
    data = [(torch.randn(n, *INPUTS[build], dtype=dtype), torch.randint(0, 5, (n,))) for n in sizes]
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    for _ in range(3):
        model(x)  # changes the running statistics
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for _ in range(train):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.zero_grad()
    return model, data


def exact_hessian(model, loss_fn, data, mode="eval"):
    """The dense Hessian of the mean over samples, computed by torch in float64 on a copy."""
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
        losses = [loss_fn(functional_call(model, weights, (x,)), y) * len(y) for x, y in data]
        return sum(losses) / sum(len(y) for _, y in data)

    flat = torch.cat([p.detach().reshape(-1) for _, p in named])
    return torch.autograd.functional.hessian(loss, flat, vectorize=True)


@functools.cache
def reference(build, mode):
    """A network, its batches and its dense Hessian, computed once for all tests: do not change them."""
    model, data = made(build, sizes=(7, 2, 7))
    return model, data, exact_hessian(model, F.cross_entropy, data, mode)


class Quadratic(nn.Module):
    """Its loss is ``w A w / 2``, and its Hessian the input ``A``."""

    def __init__(self, n, dtype=torch.float64):
        super().__init__()
        self.w = nn.Parameter(torch.ones(n, dtype=dtype))

    def forward(self, A):
        return (A @ self.w) @ self.w / 2


def with_dense_products(H, matrix):
    """The operator with products by the dense matrix, which are faster than the real ones."""

    def times(v):
        H.products += 1
        return matrix @ v

    H.times = times
    return H


def with_spectrum(eigenvalues, dtype=torch.float64):
    """A Hessian with these eigenvalues in random directions, and the matrix."""
    generator = torch.Generator().manual_seed(11)
    Q = torch.linalg.qr(torch.randn(len(eigenvalues), len(eigenvalues), dtype=torch.float64, generator=generator)).Q
    A = (Q * torch.as_tensor(np.asarray(eigenvalues, dtype=float))) @ Q.T
    A = ((A + A.T) / 2).to(dtype)
    H = HessianOperator(Quadratic(len(A), dtype), lambda out, y: out, [(A, torch.zeros(1))])
    return with_dense_products(H, A) if dtype == torch.float64 else H, A.double()


class Stop(Exception):
    """Raised by losses and data on purpose."""


class Passes:
    """Data that changes from pass to pass, and raises Stop after ``limit`` batches in total."""

    def __init__(self, *passes, limit=10**9):
        self.passes, self.number, self.left = passes, 0, limit

    def __iter__(self):
        self.number += 1
        for batch in self.passes[min(self.number, len(self.passes)) - 1]:
            self.left -= 1
            if self.left < 0:
                raise Stop
            yield batch


def stopping(loss_fn, after):
    """A loss that raises Stop after so many calls, and the list of its calls."""
    calls = []

    def wrapped(out, y):
        calls.append(1)
        if len(calls) > after:
            raise Stop
        return loss_fn(out, y)

    return wrapped, calls


@contextlib.contextmanager
def unchanged(model):
    """Check that the model and the random state are the same bit for bit afterwards."""

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


def shared(value, name):
    return pytest.fixture(scope="session", name=name)(lambda: value)


nets = shared(
    {
        "made": made,
        "mlp": mlp,
        "batch norm": with_batch_norm,
        "exact": exact_hessian,
        "reference": reference,
        "with dense products": with_dense_products,
    },
    "nets",
)
spectra = shared(with_spectrum, "with_spectrum")
unchanged_model = shared(unchanged, "unchanged")
passes = shared(Passes, "Passes")
stop = shared((Stop, stopping), "stop")


@pytest.fixture(scope="session")
def trained():
    """A trained network, its batches and its dense Hessian, with a few large eigenvalues."""
    model, data = made(mlp, train=150)
    return model, data, exact_hessian(model, F.cross_entropy, data)


@pytest.fixture(scope="session")
def untrained():
    model, data = made(mlp)
    return model, data, exact_hessian(model, F.cross_entropy, data)


@pytest.fixture
def operator(untrained):
    """The Hessian of the untrained network, and the dense matrix."""
    model, data, exact = untrained
    return HessianOperator(model, F.cross_entropy, data), exact


@pytest.fixture(params=["untrained"])
def dense(request):
    """The same with products by the dense matrix; tests can choose another network as a parameter."""
    model, data, exact = request.getfixturevalue(request.param)
    return with_dense_products(HessianOperator(model, F.cross_entropy, data), exact), exact


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(6, 3)


@pytest.fixture
def samples():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(10, 6, generator=generator), torch.randint(0, 3, (10,), generator=generator)


@pytest.fixture
def data(samples):
    x, y = samples
    return [(x[:7], y[:7]), (x[7:], y[7:])]
