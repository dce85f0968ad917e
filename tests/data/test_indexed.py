from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import bsam
from bsam.data.indexed import Indexed

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
    assert list(itertools.islice(Indexed(Counted()), 5)) == [(0, 0, 0), (10, 1, 1), (20, 0, 2), (30, 1, 3)]


def test_a_negative_index_counts_from_the_end_and_is_reported_from_the_start():
    indexed = Indexed(PAIRS)
    for i in (-1, -10, torch.tensor(-3)):
        x, _, index = indexed[i]
        assert index == 10 + int(i)
        assert type(index) is int
        assert torch.equal(x, X[int(i)])


@pytest.mark.parametrize("index", [10, -11, 1000])
def test_an_index_out_of_range_raises(index):
    with pytest.raises(IndexError):
        Indexed(PAIRS)[index]
    with pytest.raises(IndexError):
        Indexed(Counted())[index]


def test_through_a_shuffling_loader():
    loader = DataLoader(
        Indexed(PAIRS), batch_size=4, shuffle=True, num_workers=0, generator=torch.Generator().manual_seed(1)
    )
    epochs = [[index for *_, index in loader] for _ in range(2)]
    for x, y, index in loader:
        assert index.dtype == torch.long
        assert torch.equal(x, X[index])
        assert torch.equal(y, Y[index])
    for epoch in epochs:
        assert sorted(torch.cat(epoch).tolist()) == list(range(10))
    assert not torch.equal(torch.cat(epochs[0]), torch.cat(epochs[1]))


def test_a_subset_inside_is_counted_from_0_and_one_outside_keeps_the_numbers():
    part = [7, 2, 9]
    inside, outside = Indexed(Subset(PAIRS, part)), Subset(Indexed(PAIRS), part)
    assert len(inside) == 3
    assert [inside[i][2] for i in range(3)] == [0, 1, 2]
    assert [outside[i][2] for i in range(3)] == part
    for i in range(3):
        assert torch.equal(inside[i][0], X[part[i]])
        assert torch.equal(outside[i][0], X[part[i]])
    with pytest.raises(IndexError):
        inside[3]


def test_with_saf_from_end_to_end():
    """Each sample is held near its own logits of the epoch before, whatever the order."""
    torch.manual_seed(2)
    model = torch.nn.Linear(4, 3)
    optimizer, loss = (
        torch.optim.SGD(model.parameters(), lr=0.5),
        bsam.SAF(len(PAIRS), 3, lam=1.0, tau=1.0, start_epoch=0, epochs_back=1, reduction="none"),
    )
    loader = DataLoader(Indexed(PAIRS), batch_size=4, shuffle=True)
    before: dict[int, torch.Tensor] = {}
    for epoch in range(3):
        loss.set_epoch(epoch)
        now = {}
        for x, y, index in loader:
            z = model(x)
            losses = loss(z, y, indices=index)
            for row, i in enumerate(index.tolist()):
                now[i] = z[row].detach().half().float()
                expected = F.cross_entropy(z[row], Y[i])
                if epoch:
                    expected = (
                        expected + (before[i].softmax(0) * (before[i].log_softmax(0) - z[row].log_softmax(0))).sum()
                    )
                torch.testing.assert_close(losses[row], expected)
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
        assert now.keys() == set(range(10))
        before = now


def test_samples_that_are_no_tuples_are_refused():
    for sample in ({"image": 1, "label": 2}, torch.zeros(3, 2)):
        with pytest.raises(bsam.BsamError, match="tuples"):
            Indexed([sample])[0]
