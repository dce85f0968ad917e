"""Lightning and Fabric with DDP: two processes against one on whole batches, and against DDP in a plain loop."""

from __future__ import annotations

import pytest
import torch

import framework_ranks
from helpers import assert_close, distance, same
from lightning_training import Batches
from processes import Process


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The weights of both ranks by case; all cases run in the same two processes."""
    folder = tmp_path_factory.mktemp("lightning")
    assert Process(framework_ranks.both_ranks, folder).wait(120) == 0
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def one_process():
    return framework_ranks.plain("bsam", framework_ranks.network(), Batches())


@pytest.mark.parametrize("case", ["bsam", "unused", "manual", "fabric"])
def test_two_ranks_equal_one_process_on_whole_batches(ranks, case):
    expected = one_process()
    for rank in ranks:
        assert_close(rank[case], expected, atol=1e-12)
    assert distance(expected, [p.detach() for p in framework_ranks.network().parameters()]) > 0.1


@pytest.mark.parametrize("method", framework_ranks.METHODS)
def test_accumulation(ranks, method):
    for rank in ranks:
        assert_close(rank[f"{method} accumulating"], rank[f"{method} accumulating, plain"], atol=1e-12)
    assert same(ranks[0][f"{method} accumulating"], ranks[1][f"{method} accumulating"])


def test_accumulation_with_fabric(ranks):
    for rank in ranks:
        assert_close(rank["fabric accumulating"], rank["bsam accumulating, plain"], atol=1e-12)
    assert distance(ranks[0]["fabric accumulating"], one_process()) > 1e-3
