"""What a result shows of itself: one line of what matters."""

import numpy as np
import pytest

from bsam.flatness import (
    Density,
    Eigenvalues,
    Landscape,
    Trace,
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
    "Landscape(3 x 3 points, span 0.5, loss 4 at the centre, 0 to 8)": Landscape(
        (GRID, GRID), np.arange(9.0).reshape(3, 3)
    ),
    "Landscape(3 points, span 0.5, loss 1 at the centre, 0 to 2)": Landscape((GRID,), np.arange(3.0)),
}


@pytest.mark.parametrize("text", SHOWN)
def test_a_result_shows_one_line_of_what_matters(text):
    assert repr(SHOWN[text]) == text
