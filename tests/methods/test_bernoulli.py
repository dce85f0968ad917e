"""Random decisions that depend only on the seed and the step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bsam.methods.rst import bernoulli


def test_they_depend_only_on_the_seed_and_the_step():
    draws = {}
    for seed_of_others in (1, 2):
        torch.manual_seed(seed_of_others)
        np.random.seed(seed_of_others)
        draws[seed_of_others] = {(seed, t): bernoulli(seed, t, 20, 0.5) for seed in range(5) for t in range(40)}
    assert draws[1] == draws[2]
    assert len({tuple(row) for row in draws[1].values()}) == 200  # all seeds and steps differ


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_the_share_is_near_p(p):
    over_steps = [bernoulli(3, t, 1, p)[0] for t in range(4000)]
    assert sum(over_steps) / 4000 == pytest.approx(p, abs=0.02)
    assert sum(bernoulli(3, 7, 4000, p)) / 4000 == pytest.approx(p, abs=0.02)
