from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from bsam.common.errors import BsamTypeError
from bsam.methods.saf import Indexed

X, Y = torch.randn(10, 4, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 3
PAIRS = TensorDataset(X, Y)


class Counted:
    """Not a torch data set, and one whose pairs are lists."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> list[int]:
        return [10 * index, index % 2]


def test_yields_the_index_after_what_the_data_set_yields():
    indexed = Indexed(PAIRS)
    assert isinstance(indexed, Dataset)
    assert len(indexed) == 10
    for i in range(10):
        x, y, index = indexed[i]
        assert torch.equal(x, X[i])
        assert (int(y), index) == (i % 3, i)
    for x, y, index in DataLoader(indexed, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1)):
        assert index.dtype == torch.long
        assert torch.equal(x, X[index])
        assert torch.equal(y, Y[index])
    assert list(itertools.islice(Indexed(Counted()), 5)) == [(0, 0, 0), (10, 1, 1), (20, 0, 2), (30, 1, 3)]


def test_a_negative_index_counts_from_the_end_and_is_reported_from_the_start():
    indexed = Indexed(PAIRS)
    for i in (-1, -10, torch.tensor(-3)):
        x, _, index = indexed[i]
        assert index == 10 + int(i)
        assert type(index) is int
        assert torch.equal(x, X[int(i)])


def test_samples_and_indices_that_do_not_fit():
    with pytest.raises(BsamTypeError, match="dict"):
        Indexed([{"image": 1}])[0]
    with pytest.raises(IndexError):
        Indexed([(1, 2)])[1]
