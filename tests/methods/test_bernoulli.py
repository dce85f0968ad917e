"""Random decisions that depend only on the seed and the step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bsam.methods.bernoulli import bernoulli


def test_they_depend_on_the_seed_and_the_step_alone():
    draws = {}
    for noise in (1, 2):
        torch.manual_seed(noise)
        np.random.seed(noise)
        state = torch.get_rng_state(), np.random.get_state()[1].copy()
        draws[noise] = {(seed, t): bernoulli(seed, t, 20, 0.5) for seed in range(5) for t in range(40)}
        assert torch.equal(torch.get_rng_state(), state[0])
        assert (np.random.get_state()[1] == state[1]).all()
    assert draws[1] == draws[2]
    assert len({tuple(row) for row in draws[1].values()}) == 200  # another step or another seed is another draw


@pytest.mark.parametrize("p", [0.0, 0.3, 0.5, 1.0])
def test_the_share_is_near_p(p):
    over_steps = [bernoulli(3, t, 1, p)[0] for t in range(4000)]
    assert sum(over_steps) / 4000 == pytest.approx(p, abs=0.02)
    assert sum(bernoulli(3, 7, 4000, p)) / 4000 == pytest.approx(p, abs=0.02)
