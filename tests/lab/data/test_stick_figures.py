from __future__ import annotations

import pytest
import torch

from bsam.common.errors import BsamValueError
from bsam.lab.data.persons import LSP
from bsam.lab.data.stick_figures import stick_figures


def colours(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The pixels (n, k, 3) nearest to the places (n, k, 2)."""
    column, row = places.round().long().unbind(dim=2)
    return x.permute(0, 2, 3, 1)[torch.arange(len(x))[:, None], row, column].float()


def test_limbs_are_drawn_between_their_joints_in_the_colour_of_their_side():
    data = stick_figures(24, seed=1)
    assert (len(data.train), len(data.test), data.skeleton) == (24, 6, LSP)
    for part in (data.train, data.test):
        assert part.x.dtype == torch.uint8
        assert part.x.is_contiguous(memory_format=torch.channels_last)
        assert part.y[:, :, 2].eq(1).all()
        for side, strong, weak in (("right", 0, 2), ("left", 2, 0)):
            for one, other in (("ankle", "knee"), ("wrist", "elbow")):
                ends = [LSP.joints.index(f"{side} {name}") for name in (one, other)]
                middle = colours(part.x, part.y[:, ends, :2].mean(dim=1, keepdim=True))
                assert (middle[:, 0, strong] - middle[:, 0, weak]).min() > 60, (side, one)


def test_figures_are_a_function_of_the_seed():
    first, same, other = stick_figures(4, seed=1), stick_figures(4, seed=1), stick_figures(4, seed=2)
    assert torch.equal(first.train.x, same.train.x)
    assert first.digest == same.digest != other.digest
    assert not torch.equal(first.train.y, other.train.y)
    assert stick_figures(4, side=32).train.x.shape == (4, 3, 44, 44)
    with pytest.raises(BsamValueError, match="n must"):
        stick_figures(3)
