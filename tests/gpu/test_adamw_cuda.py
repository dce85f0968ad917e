"""Captured AdamW, also with SAM and clipping: the steps are those of a hand-written loop in float64."""

import pytest
import torch

from adamw_reference import RUNS, apart, by_hand, by_the_laboratory
from bsam.lab.training.graphs import CapturedSteps

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _double():
    torch.set_default_dtype(torch.float64)  # also of the learning rate and of AdamW's count of steps
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_captured_steps_are_those_of_a_hand_written_loop(run):
    expected, _ = by_hand(run, "cuda")
    eager, _ = by_the_laboratory(run, "cuda")
    captured, take = by_the_laboratory(run, "cuda", captured=True)
    assert isinstance(take, CapturedSteps)
    assert take._graphs
    assert apart(eager, expected) < 1e-12
    assert apart(captured, expected) < 1e-12
