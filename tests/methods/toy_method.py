"""A method whose steps differ in their number of passes, written as docs/guides/own-method.md says."""

from __future__ import annotations

import bsam


class AlternatingSAM(bsam.SharpnessAware):
    """SAM whose ascent makes 0, 1 and 2 steps in turn, so that a step takes one, two or three passes."""

    title, reference, purpose = "Toy SAM", "Nobody, 2026", "To be found."
    passes = 2
    memory = 3

    def __init__(self, base, model, *, rho: float = 0.05, **options):
        super().__init__(base, model, {"rho": rho}, **options)

    def direction(self, L):
        g, e = L.grad(), None
        for _ in range(self.t % 3):
            step = self.epsilon(g, "rho")
            e = step if e is None else e + step
            g = L.grad(at=e)
        return g
