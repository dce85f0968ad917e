"""Arguments that raise an error: the call, the class of the error, and a word of its message."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bsam.common.errors import BsamRuntimeError, BsamTypeError, BsamValueError
from bsam.core.vector import Vector
from bsam.flatness import (
    HessianOperator,
    Probe,
    landscape,
    plane_through,
    sharpness,
    spectral_density,
    top_eigenvalues,
    trace,
)

X, Y = torch.ones(4, 3), torch.zeros(4).long()
DATA = [(X, Y)]


def of_model(measure, **options):
    return measure(**{"model": nn.Linear(3, 2), "loss_fn": F.cross_entropy, "data": DATA, **options})


def operator(**options):
    return of_model(HessianOperator, **options)


def infinite(out, y):
    return (out * float("inf")).mean() ** 2


REFUSED = [
    (lambda: operator(data=iter(DATA)), BsamTypeError, "data"),
    (lambda: operator(data=iter(DATA), dtype=torch.float64), BsamTypeError, "data"),
    (lambda: of_model(sharpness, data=[]), BsamValueError, "empty"),
    (lambda: of_model(sharpness, data=(X, Y)), BsamValueError, "pair"),
    (lambda: of_model(sharpness, data=[(X, Y, Y)]), BsamValueError, "tuple of 3"),
    (lambda: of_model(sharpness, data=[{"x": X, "y": Y}]), BsamValueError, "dict"),
    (lambda: operator(data=[(X, Y, Y)]).linearized(1 << 30).__enter__(), BsamValueError, "tuple of 3"),
    (lambda: operator(data=[(X, Y, Y)], dtype=torch.float64).times(torch.ones(8)), BsamValueError, "tuple of 3"),
    (lambda: of_model(sharpness, mode="test"), BsamValueError, "mode"),
    (lambda: operator(micro_batch=4, mode="train"), BsamValueError, "micro_batch"),
    (lambda: of_model(landscape, micro_batch=0), BsamValueError, "micro_batch"),
    (lambda: of_model(sharpness, data=[(X, Y[:2])], micro_batch=2), BsamValueError, "micro_batch"),
    (lambda: of_model(sharpness, data=[(X, Y.tolist())], micro_batch=2), BsamValueError, "micro_batch"),
    (lambda: of_model(sharpness, batch_weight=lambda x, y: 0), BsamValueError, "batch_weight"),
    (lambda: of_model(sharpness, batch_weight=lambda x, y: float("nan")), BsamValueError, "batch_weight"),
    (lambda: of_model(sharpness, loss_fn=lambda out, y: out.mean(1)), BsamTypeError, r"shape \(4,\)"),
    (lambda: of_model(sharpness, loss_fn=lambda out, y: 1.0), BsamTypeError, "float"),
    (lambda: of_model(sharpness, loss_fn=lambda out, y: out.mean() * 1j), BsamTypeError, "complex"),
    (lambda: of_model(sharpness, loss_fn=lambda out, y: out.detach().mean()), BsamRuntimeError, "depend"),
    (lambda: of_model(sharpness, model=nn.Linear(3, 2).requires_grad_(False)), BsamValueError, "trainable"),
    (lambda: operator(differentiation="backward"), BsamValueError, "differentiation"),
    (lambda: operator(model=nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).double())), BsamValueError, "dtype"),
    (lambda: operator(model=nn.Linear(3, 2, dtype=torch.complex64)), BsamValueError, "real"),
    (lambda: operator() @ Vector([torch.ones(8)]), BsamValueError, "shape"),
    (lambda: operator() @ torch.ones(8), BsamTypeError, "Vector"),
    (lambda: operator().linearized(-1).__enter__(), BsamValueError, "max_bytes"),
    (lambda: top_eigenvalues(operator(), which="smallest"), BsamValueError, "which"),
    (lambda: top_eigenvalues(operator(), k=2.5), BsamValueError, "k must"),
    (lambda: top_eigenvalues(operator(), tol=-1.0), BsamValueError, "tol"),
    (lambda: top_eigenvalues(operator(), seed=-1), BsamValueError, "seed"),
    (lambda: top_eigenvalues(operator(loss_fn=infinite)), BsamRuntimeError, "finite"),
    (lambda: trace(operator(), method="exact"), BsamValueError, "method"),
    (lambda: trace(operator(), samples=5), BsamValueError, "samples"),
    (lambda: trace(operator(), samples=1, method="hutchinson"), BsamValueError, "samples"),
    (lambda: trace(operator(loss_fn=infinite)), BsamRuntimeError, "finite"),
    (lambda: spectral_density(operator(), steps=0), BsamValueError, "steps"),
    (lambda: spectral_density(operator(), probes=0), BsamValueError, "probes"),
    (lambda: spectral_density(operator(), points=1), BsamValueError, "points"),
    (lambda: spectral_density(operator(), sigma=0), BsamValueError, "sigma"),
    (lambda: spectral_density(operator(), steps=5, sigma=1e-6), BsamValueError, "sigma"),
    (lambda: spectral_density(operator(loss_fn=infinite)), BsamRuntimeError, "finite"),
    (lambda: of_model(sharpness, rho_min=-1.0), BsamValueError, "rho_min"),
    (lambda: of_model(sharpness, rho_max=float("nan")), BsamValueError, "rho_max"),
    (lambda: of_model(sharpness, random_directions=-1), BsamValueError, "random_directions"),
    (lambda: of_model(landscape, points=20), BsamValueError, "points"),
    (lambda: of_model(landscape, dims=3), BsamValueError, "dims"),
    (lambda: of_model(landscape, span=0), BsamValueError, "span"),
    (lambda: of_model(landscape, directions="random"), BsamValueError, "directions"),
    (lambda: of_model(landscape, directions=[Vector([torch.ones(3)])] * 2), BsamValueError, "directions"),
    (lambda: of_model(landscape, model=nn.LayerNorm(3)), BsamValueError, "directions"),
    (lambda: plane_through([nn.Linear(2, 2)]), BsamValueError, "models"),
    (lambda: plane_through([nn.Linear(2, 2), nn.Linear(2, 3)]), BsamValueError, "models"),
    (lambda: Probe(every=0), BsamValueError, "every"),
    (lambda: Probe(rho_min=-0.1), BsamValueError, "rho_min"),
]


@pytest.mark.parametrize(("call", "error", "word"), REFUSED)
def test_refusals(call, error, word):
    with pytest.raises(error, match=word):
        call()
