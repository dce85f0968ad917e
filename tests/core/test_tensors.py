"""Tensors that use other memory for a while."""

from __future__ import annotations

import pytest
import torch

from bsam.core.tensors import use_other_memory
from bsam.core.undo import Undo


def test_other_memory_is_given_back_even_after_an_error():
    p, b = torch.nn.Parameter(torch.ones(3)), torch.arange(4)
    before = p.data_ptr(), b.data_ptr()

    def use(undo):
        use_other_memory(undo, [p, b])
        assert {p.data_ptr(), b.data_ptr()}.isdisjoint(before)
        b.fill_(7)
        (2 * p).sum().backward()
        raise KeyError

    with pytest.raises(KeyError), Undo() as undo, undo:
        use(undo)
    assert (p.data_ptr(), b.data_ptr()) == before
    assert p.tolist() == [1, 1, 1]
    assert b.tolist() == [0, 1, 2, 3]
    assert p.grad.tolist() == [2, 2, 2]
