"""Record Hessian-vector products of batches, within a memory budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from .dataset_loss import DatasetLoss, WeightedBatch
from .hvp import Product, Products
from .linearized import BatchProduct, CannotRecord, ProductsClose, Recorder

PlainProduct: TypeAlias = Callable[[list[Tensor], WeightedBatch], Product]  # computed without a recording

CPU_BYTES = 3 << 30  # a container may have less than its machine reports
MIN_WORK = 5_000_000  # samples times weights below which recording does not pay off; ignored if max_bytes is given
MAX_SHAPES = 2  # batch shapes: usually one, and another for the last batch; ignored if max_bytes is given


class Recording:
    """The products that :meth:`bsam.flatness.HessianOperator.linearized` recorded, batch by batch.

    Args:
        budget: memory limit in bytes.
        max_shapes: the largest number of batch shapes to record (each takes seconds); None means no limit.

    Attributes:
        batches: number of (micro-)batches in the data; 0 if recording was not tried.
        recorded: number of recorded batches; the products of the others are computed as usual.
        bytes: memory used by the recorded batches.
        reason: why some batches were not recorded; empty if all were.
    """

    def __init__(self, budget: int, max_shapes: int | None) -> None:
        self.batches = self.recorded = self.bytes = 0
        self.reason = ""
        self._budget, self._max_shapes = budget, max_shapes
        self._products: list[tuple[BatchProduct, float]] = []  # with the weight of each batch

    def __repr__(self) -> str:
        reason = f"; {self.note}" if self.note else ""
        return f"Recording({self.recorded} of {self.batches} batches, {self.bytes / 1e6:.3g} MB{reason})"

    @property
    def note(self) -> str:
        """How many batches were computed without a recording, and why; empty if there were none."""
        plain = self.batches - self.recorded
        return f"{plain} of {self.batches} batches computed without a recording: {self.reason}" if plain else ""

    def record(
        self, dataset_loss: DatasetLoss, v: list[Tensor], plain: PlainProduct, products_close: ProductsClose
    ) -> None:
        """Record the batches in order, until one does not fit or its product differs from the plain one."""
        recorder = Recorder(dataset_loss)
        for batch in dataset_loss.weighted_batches():
            self.batches += 1
            if self.reason:
                continue
            try:
                expected = plain(v, batch)
                if not all(bool(t.isfinite().all()) for t in expected):
                    raise CannotRecord("the product is not finite")
                product, size = self._recorded(recorder, v, batch, expected, products_close)
                if self.bytes + size > self._budget:
                    raise CannotRecord(f"max_bytes={self._budget} is not enough for all batches")
            except CannotRecord as error:
                self.reason = str(error)
            except torch.OutOfMemoryError:
                self.drop("out of memory")
            else:
                self._products.append((product, batch[2]))
                self.recorded, self.bytes = self.recorded + 1, self.bytes + size

    def _recorded(
        self,
        recorder: Recorder,
        v: list[Tensor],
        batch: WeightedBatch,
        expected: Product,
        products_close: ProductsClose,
    ) -> tuple[BatchProduct, int]:
        """Return the product function of a batch and the bytes it stores; raise if it differs from the plain product.

        They can differ if Python code uses values computed from the batch (such as ``.item()`` or sizes, or branches on
        them), because the graph treats these as constants.
        """
        x, y, _ = batch
        shape = recorder.shape(x, y)
        is_new, reason = shape not in recorder.graphs, ""
        if is_new and len(recorder.graphs) == self._max_shapes:
            raise CannotRecord(f"more than {self._max_shapes} batch shapes")
        for forward in (True, False) if is_new else (True,):
            try:
                if is_new:
                    recorder.record(x, y, v, products_close, forward=forward)
                product, size = recorder.linearized(x, y)
                if products_close(product(v), expected):
                    return product, size
                reason = (
                    "a recorded product differs from one computed without a recording (does the network or the loss "
                    "use random numbers, or Python values computed from the data, such as .item() or sizes?)"
                )
            except torch.OutOfMemoryError:
                raise
            except (CannotRecord, RuntimeError) as error:
                reason = str(error).partition("\n")[0]
        recorder.graphs.pop(shape, None)
        raise CannotRecord(reason)

    def products(self, v: list[Tensor]) -> Products:
        """Yield the recorded products with ``v``, each with its weight in the mean."""
        for product, weight in self._products:
            yield product(v), weight

    def free(self) -> None:
        """Free the memory, but keep the counts for :attr:`note`."""
        self._products.clear()

    def drop(self, reason: str) -> None:
        """Give up the recording because of ``reason``: free the memory and compute all batches as usual."""
        self.free()
        self.reason, self.recorded, self.bytes = reason, 0, 0


def default_budget(device: torch.device) -> int:
    """Return the default budget: a quarter of the GPU's memory, at most half of what is free; 3 GB on a CPU."""
    if device.type != "cuda":
        return CPU_BYTES
    free, total = torch.cuda.mem_get_info(device)
    return min(total // 4, free // 2)
