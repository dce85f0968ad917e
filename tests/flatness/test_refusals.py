"""Arguments that cannot be right: what is called, and a word of the error."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bsam
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

DATA = [(torch.ones(4, 3), torch.zeros(4).long())]


def operator(**options):
    return HessianOperator(**{"model": nn.Linear(3, 2), "loss_fn": F.cross_entropy, "data": DATA, **options})


def of_model(measure, **options):
    return measure(**{"model": nn.Linear(3, 2), "loss_fn": F.cross_entropy, "data": DATA, **options})


REFUSED = {
    "data is iterated more than once": lambda: operator(data=iter(DATA)),
    "this is an iterator: pass a list or a DataLoader": lambda: operator(data=iter(DATA), dtype=torch.float64),
    '"eval".*or "train".*got \'test\'': lambda: of_model(sharpness, mode="test"),
    "leave it out, and make the batches": lambda: operator(micro_batch=4, mode="train"),
    "micro_batch must be a whole number of at least 1": lambda: of_model(landscape, micro_batch=0),
    r"no trainable parameter.*frozen\?": lambda: of_model(sharpness, model=nn.Linear(3, 2).requires_grad_(False)),
    "differentiation must be": lambda: operator(differentiation="backward"),
    "one dtype on one device": lambda: operator(model=nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).double())),
    "must be real tensors": lambda: operator(model=nn.Linear(3, 2, dtype=torch.complex64)),
    "one tensor for each trainable parameter": lambda: operator() @ Vector([torch.ones(8)]),
    r"takes a bsam\.Vector, got Tensor": lambda: operator() @ torch.ones(8),
    "max_bytes must be": lambda: operator().linearized(-1).__enter__(),
    "which must be one of 'largest', 'magnitude', 'both ends'": lambda: top_eigenvalues(operator(), which="smallest"),
    "k must be a whole number": lambda: top_eigenvalues(operator(), k=2.5),
    "tol must be": lambda: top_eigenvalues(operator(), tol=-1.0),
    "seed must be": lambda: top_eigenvalues(operator(), seed=-1),
    '"hutch\\+\\+" or "hutchinson", got \'exact\'': lambda: trace(operator(), method="exact"),
    "samples must be a whole number of at least 6": lambda: trace(operator(), samples=5),
    "samples must be a whole number of at least 2": lambda: trace(operator(), samples=1, method="hutchinson"),
    "steps must be": lambda: spectral_density(operator(), steps=0),
    "probes must be": lambda: spectral_density(operator(), probes=0),
    "points must be": lambda: spectral_density(operator(), points=1),
    "sigma must be above 0": lambda: spectral_density(operator(), sigma=0),
    "raise points or sigma": lambda: spectral_density(operator(), steps=5, sigma=1e-6),
    "rho_min must be": lambda: of_model(sharpness, rho_min=-1.0),
    "rho_max must be": lambda: of_model(sharpness, rho_max=float("nan")),
    "random_directions must be": lambda: of_model(sharpness, random_directions=-1),
    "points must be odd, so that the model is at the centre": lambda: of_model(landscape, points=20),
    "dims must be 1 or 2, got 3": lambda: of_model(landscape, dims=3),
    "span must be above 0": lambda: of_model(landscape, span=0),
    '"filter", "hessian" or a list of vectors': lambda: of_model(landscape, directions="random"),
    "directions must be 2 vectors": lambda: of_model(landscape, directions=[Vector([torch.ones(3)])] * 2),
    "at least two models": lambda: plane_through([nn.Linear(2, 2)]),
    "same trainable parameters": lambda: plane_through([nn.Linear(2, 2), nn.Linear(2, 3)]),
    "every must be a whole number": lambda: Probe(every=0),
    "rho_min must be a finite number that is not negative": lambda: Probe(rho_min=-0.1),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refusals(words):
    with pytest.raises(bsam.BsamError, match=words):
        REFUSED[words]()
