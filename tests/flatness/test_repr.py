"""What a result shows of itself: one line of what matters."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bsam
from bsam import flatness
from bsam.flatness import (
    Density,
    Eigenvalues,
    HessianOperator,
    Landscape,
    Probe,
    Reading,
    Sharpness,
    Trace,
    landscape,
    plane_through,
    sharpness,
    spectral_density,
    top_eigenvalues,
    trace,
)

GRID = np.array([-0.5, 0.0, 0.5])
SHOWN = {
    "Eigenvalues(3 from 9.123 to -1, not converged, 12 products; 1 of 2 batches)": Eigenvalues(
        np.array([9.12345, 2.0, -1.0]), np.zeros(3), np.bool_(False), 12, note="1 of 2 batches"
    ),
    "Eigenvalues(1 from 2 to 2, converged, 4 products)": Eigenvalues(np.array([2.0]), np.zeros(1), np.bool_(True), 4),
    "Trace(44 ± 13 (95 %), 30 products)": Trace(43.8, 5.6, (31.1, 56.5), 30),
    "Density(eigenvalues from -1 to 4, 3 points, sigma 0.05, 8 products)": Density(
        GRID, GRID, np.array([4.0, -1.0]), np.ones(2), 0.05, 8
    ),
    "Sharpness(loss 0.5, MaxS 0.02, MinS 0.01, BilS 0.03, cosine 0.9)": Sharpness(0.5, 0.02, 0.01, 0.03, 0.9),
    "Sharpness(loss 0.5, MaxS 0.02, MinS 0.01, BilS 0.03, cosine 0.9, average 0.001)": Sharpness(
        0.5, 0.02, 0.01, 0.03, 0.9, 0.001, 0.0002
    ),
    "Landscape(3 x 3 points, span 0.5, loss 4 at the centre, 0 to 8)": Landscape(
        (GRID, GRID), np.arange(9.0).reshape(3, 3)
    ),
    "Landscape(3 points, span 0.5, loss 1 at the centre, 0 to 2)": Landscape((GRID,), np.arange(3.0)),
    "Reading(step 5, loss 1, MaxS 0.2, MinS 0.1, BilS 0.3, cosine 0.5)": Reading(
        5, 1.0, 0.2, 0.1, 0.3, 1.0, 1.5, 0.5, 0.5, 0.05, 0.05, 0
    ),
}


@pytest.mark.parametrize("text", SHOWN)
def test_a_result_shows_one_line_of_what_matters(text):
    assert repr(SHOWN[text]) == text


def test_everything_that_instruments_return_is_one_short_line():
    torch.manual_seed(0)
    model, data = nn.Linear(6, 3), [(torch.randn(20, 6), torch.randint(0, 3, (20,)))]
    H = HessianOperator(model, F.cross_entropy, data)
    with H.linearized(1 << 30) as recording:
        found = [H, recording, top_eigenvalues(H, k=4, vectors=True), trace(H), spectral_density(H, steps=5, probes=1)]
    optimizer = bsam.BSAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
    probe = Probe().attach(optimizer)
    optimizer.step(lambda: F.cross_entropy(model(data[0][0]), data[0][1]))
    found += [probe, *probe.readings, sharpness(model, F.cross_entropy, data, random_directions=2)]
    found += [
        landscape(model, F.cross_entropy, data, points=3),
        plane_through([model, nn.Linear(6, 3), nn.Linear(6, 3)]),
    ]
    for value in found:
        assert repr(value).startswith(f"{type(value).__name__}(")
        assert len(repr(value).splitlines()) == 1
        assert len(repr(value)) < 120
    public = {value for name in dir(flatness) if isinstance(value := getattr(flatness, name), type)}
    assert public <= {type(value) for value in found}
