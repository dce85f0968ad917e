"""The one-line ``repr`` of results."""

import numpy as np
import pytest

from bsam.flatness import Density, Eigenvalues, Landscape, Reading, Sharpness, Trace

GRID = np.array([-0.5, 0.0, 0.5])
SHOWN = {
    "Eigenvalues(3 from 9.123 to -1, not converged, 12 products; 1 of 2 batches)": Eigenvalues(
        np.array([9.12345, 2.0, -1.0]), np.zeros(3), np.bool_(False), 12, note="1 of 2 batches"
    ),
    "Trace(44 ± 13 (95 %), 30 products)": Trace(43.8, 5.6, (31.1, 56.5), 30),
    "Density(eigenvalues from -1 to 4, 3 points, sigma 0.05, 8 products)": Density(
        GRID, GRID, np.array([4.0, -1.0]), np.ones(2), 0.05, 8
    ),
    "Sharpness(loss 0.5, MaxS 0.02, MinS 0.01, BilS 0.03, cosine 0.9, average 0.001)": Sharpness(
        0.5, 0.02, 0.01, 0.03, 0.9, 0.001, 0.0002
    ),
    "Landscape(3 x 3 points, span 0.5, loss 4 at the centre, 0 to 8)": Landscape(
        (GRID, GRID), np.arange(9.0).reshape(3, 3)
    ),
    "Reading(step 5, loss 1, MaxS 0.2, MinS 0.1, BilS 0.3, cosine 0.5)": Reading(
        5, 1.0, 0.2, 0.1, 0.3, 1.0, 1.5, 0.5, 0.5, 0.05, 0.05, 0
    ),
}


@pytest.mark.parametrize("text", SHOWN)
def test_repr(text):
    assert repr(SHOWN[text]) == text
