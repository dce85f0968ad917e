"""Random decisions that depend only on the seed and the step, and so agree on all ranks and after a resume."""

from __future__ import annotations

import numpy as np


def bernoulli(seed: int, t: int, n: int, p: float) -> list[bool]:
    """Draw ``n`` Bernoulli variables for step ``t``, each True with probability ``p``.

    Example:
        >>> bernoulli(0, 3, 4, p=0.5) == bernoulli(0, 3, 4, p=0.5)
        True
        >>> sum(bernoulli(0, t, 1, p=0.25)[0] for t in range(1000))
        243
    """
    return [bool(number < p) for number in np.random.default_rng((seed, t)).random(n)]
