"""A dataset that yields the index of each sample."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from ...common.errors import BsamTypeError


class Indexed(Dataset[Any]):
    """Wrap a dataset of ``(x, y)`` so that it yields ``(x, y, index)``, as :class:`bsam.SAF` needs.

    Args:
        dataset: has ``__len__`` and ``__getitem__``; its samples are tuples or lists.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> pairs = Indexed(TensorDataset(torch.arange(6.0), torch.arange(6) % 2))
        >>> x, y, index = next(iter(DataLoader(pairs, batch_size=3)))
        >>> index
        tensor([0, 1, 2])
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        index = range(len(self))[index]  # negative indices count from the end; also checks the range
        sample = self.dataset[index]
        if not isinstance(sample, (tuple, list)):
            raise BsamTypeError(
                f"Indexed needs samples that are tuples (x, y), got {type(sample).__name__}: convert them to tuples"
            )
        return (*sample, index)
