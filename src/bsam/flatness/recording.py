"""Record Hessian-vector products of batches, within a memory budget.

The product of a batch becomes two graphs: one that depends on the vector and one that does not.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.func import functional_call, grad, jvp, vjp
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.reinplace import reinplace
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from .dataset_loss import DatasetLoss, WeightedBatch

Product: TypeAlias = list[Tensor]  # one tensor per parameter
Products: TypeAlias = Generator[tuple[Product, float]]  # one per batch, with its weight in the mean
BatchProduct: TypeAlias = Callable[[list[Tensor]], Product]
PlainProducts: TypeAlias = Callable[[list[Tensor], list[WeightedBatch]], Products]  # computed without a recording
ProductsClose: TypeAlias = Callable[[Product, Product], bool]  # whether two products agree up to rounding

CPU_BYTES = 3 << 30  # a container may have less than its machine reports
MIN_WORK = 5_000_000  # samples times weights below which recording does not pay off; ignored if max_bytes is given
MAX_SHAPES = 2  # batch shapes: usually one, and another for the last batch; ignored if max_bytes is given


@dataclass(eq=False, repr=False)
class Recording:
    """The products that :meth:`bsam.flatness.HessianOperator.linearized` recorded, batch by batch."""

    budget: int  #: memory limit in bytes
    max_shapes: int | None  #: the largest number of batch shapes to record (each takes seconds); None means no limit
    batches: int = 0  #: number of (micro-)batches in the data; 0 if recording was not tried
    recorded: int = 0  #: number of recorded batches; the products of the others are computed as usual
    bytes: int = 0  #: memory used by the recorded batches
    reason: str = ""  #: why some batches were not recorded; empty if all were
    _products: list[tuple[BatchProduct, float]] = field(default_factory=list)  # with the weight of each batch

    def __repr__(self) -> str:
        reason = f"; {self.note}" if self.note else ""
        return f"Recording({self.recorded} of {self.batches} batches, {self.bytes / 1e6:.3g} MB{reason})"

    @property
    def note(self) -> str:
        """How many batches were computed without a recording, and why; empty if there were none."""
        plain = self.batches - self.recorded
        return f"{plain} of {self.batches} batches computed without a recording: {self.reason}" if plain else ""

    def record(
        self, dataset_loss: DatasetLoss, v: list[Tensor], plain: PlainProducts, products_close: ProductsClose
    ) -> None:
        """Record the batches in order, until one does not fit or its product differs from the plain one."""
        recorder = Recorder(dataset_loss, v, products_close)
        for batch in dataset_loss.weighted_batches():
            self.batches += 1
            if self.reason:
                continue
            try:
                ((expected, _),) = plain(v, [batch])
                if not all(bool(t.isfinite().all()) for t in expected):
                    raise CannotRecord("the product is not finite")
                product, size = self._record_batch(recorder, batch, expected)
                if self.bytes + size > self.budget:
                    raise CannotRecord(f"max_bytes={self.budget} is not enough for all batches")
            except CannotRecord as error:
                self.reason = str(error)
            except torch.OutOfMemoryError:
                self.drop("out of memory")
            else:
                self._products.append((product, batch[2]))
                self.recorded += 1
                self.bytes += size

    def _record_batch(self, recorder: Recorder, batch: WeightedBatch, expected: Product) -> tuple[BatchProduct, int]:
        """Return the product function of a batch and the bytes it stores; raise if it differs from the plain product.

        They can differ if Python code uses values computed from the batch (such as ``.item()`` or sizes, or branches on
        them), because the graph treats these as constants.
        """
        x, y, _ = batch
        shape = recorder.shape(x, y)
        is_new, reason = shape not in recorder.graphs, ""
        if is_new and len(recorder.graphs) == self.max_shapes:
            raise CannotRecord(f"more than {self.max_shapes} batch shapes")
        for forward in (True, False) if is_new else (True,):
            try:
                if is_new:
                    recorder.record(x, y, forward=forward)
                product, size = recorder.linearize(x, y)
                if recorder.products_close(product(recorder.v), expected):
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
        self.reason = reason
        self.recorded = 0
        self.bytes = 0


def default_budget(device: torch.device) -> int:
    """Return the default budget: a quarter of the GPU's memory, at most half of what is free; 3 GB on a CPU."""
    if device.type != "cuda":
        return CPU_BYTES
    free, total = torch.cuda.mem_get_info(device)
    return min(total // 4, free // 2)


class CannotRecord(Exception):
    """The product of a batch cannot be recorded; the message says why."""


@dataclass(eq=False)
class Recorder:
    """Makes functions ``v -> H v`` for batches, with everything that does not depend on ``v`` computed once and stored.

    The derivative of the gradient along ``v`` is traced as a graph, once for each batch shape. The part that does not
    depend on ``v`` is run once for each batch; the rest is run for each ``v``, with six convolutions per convolutional
    layer (a gradient takes three). ``torch.func.linearize`` does the same, but traces again for each batch.
    """

    dataset_loss: DatasetLoss
    v: list[Tensor]  # the vector with which recorded products are compared
    products_close: ProductsClose
    graphs: dict[Any, tuple[fx.GraphModule, fx.GraphModule]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = list(self.dataset_loss.model.named_parameters())
        self._names = [name for name, p in named if p.requires_grad]  # in the order of the vectors
        self._constants = {name: t.detach() for name, t in (*named, *self.dataset_loss.model.named_buffers())}
        self._weights = [self._constants.pop(name) for name in self._names]
        self._model_storages = _storages((*self._weights, *self._constants.values()))

    def shape(self, x: Any, y: Any) -> Any:
        """Return the key under which the graphs of a batch are stored; raise unless it has only dense tensors."""
        leaves, structure = tree_flatten((x, y))
        if not all(isinstance(leaf, Tensor) and leaf.layout == torch.strided for leaf in leaves):
            raise CannotRecord("inputs and targets must be dense tensors, or lists and dicts of them")
        return structure, tuple((t.shape, t.stride(), t.dtype) for t in leaves)

    def linearize(self, x: Any, y: Any) -> tuple[BatchProduct, int]:
        """Return the product function of a batch whose shape was recorded, and the bytes it stores."""
        constant, linear = self.graphs[self.shape(x, y)]
        stored = constant(*tree_leaves(self._inputs(x, y)))
        sizes = [size for address, size in _storages(stored).items() if address not in self._model_storages]
        return lambda v: list(linear(*stored, *v)), sum(sizes)

    def record(self, x: Any, y: Any, forward: bool) -> None:
        """Record the graphs for the shape of a batch, in forward-over-reverse or reverse-over-reverse mode."""

        def product(weights: list[Tensor], constants: dict[str, Tensor], x: Any, y: Any, v: list[Tensor]) -> Any:
            def value(at: list[Tensor]) -> Tensor:
                named = {**dict(zip(self._names, at, strict=True)), **constants}
                out = functional_call(self.dataset_loss.model, named, *self.dataset_loss.arguments(x))
                return self.dataset_loss.batch_loss(out, y)

            return jvp(grad(value), (weights,), (v,))[1] if forward else vjp(grad(value), weights)[1](v)[0]

        inputs = self._inputs(x, y)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # raised when torch loads its derivative formulas
                product(*inputs, self.v)  # raises an error in cases where tracing may crash
                graph = make_fx(product)(*inputs, self.v)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # any type: model and loss run on tensors they were not written for
            if "KeyboardInterrupt" in str(error):  # torch may turn it into another error
                raise KeyboardInterrupt from error
            raise CannotRecord(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
        self._check_constants(graph)
        graph.graph.eliminate_dead_code()
        constant, linear = _partition(graph, len(self.v))
        stored = constant(*tree_leaves(inputs))
        self.graphs[self.shape(x, y)] = constant, self._run_in_place(linear, [*stored, *self.v])

    def _run_in_place(self, graph: fx.GraphModule, inputs: list[Tensor]) -> fx.GraphModule:
        """Replace operations by in-place ones with torch's ``reinplace``, unless that changes the product."""
        expected = graph(*inputs)
        try:
            rewritten = reinplace(copy.deepcopy(graph), *inputs)
            rewritten(*inputs)
            actual = rewritten(*inputs)  # the second run shows whether the first overwrote inputs
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, AttributeError, AssertionError, LookupError, TypeError, ValueError):
            return graph
        return rewritten if self.products_close(actual, expected) else graph

    def _inputs(self, x: Any, y: Any) -> tuple[list[Tensor], dict[str, Tensor], Any, Any]:
        """Return everything the loss depends on: trained weights, other weights and buffers, inputs, targets."""
        return self._weights, self._constants, *tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, (x, y))

    def _check_constants(self, graph: fx.GraphModule) -> None:
        constants = [getattr(graph, str(node.target)) for node in graph.graph.nodes if node.op == "get_attr"]
        if any(not t._is_zerotensor() and t.untyped_storage().data_ptr() in self._model_storages for t in constants):
            raise CannotRecord(
                "the loss reads the model's weights (a penalty?), or the network reads them through references other "
                "than its parameters"
            )


def _storages(values: Any) -> dict[int, int]:
    """Return the address and size in bytes of each tensor's storage."""
    storages = [t.untyped_storage() for t in values if isinstance(t, Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _partition(whole: fx.GraphModule, size: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a graph into the part that does not depend on its last ``size`` inputs, and the part that does.

    The outputs of the first part are the leading inputs of the second.
    """
    *nodes, output = whole.graph.nodes
    v = [node for node in nodes if node.op == "placeholder"][-size:]
    reached = set(v)
    for node in nodes:
        if any(source in reached for source in node.all_input_nodes):
            reached.add(node)
    product = output.args[0]
    stored = [n for n in nodes if n not in reached and (n in product or any(user in reached for user in n.users))]

    def extract(inputs: list[fx.Node], operations: list[fx.Node], outputs: list[fx.Node]) -> fx.GraphModule:
        graph = fx.Graph()
        copies = {node: graph.placeholder(node.name) for node in inputs}
        for node in operations:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output([copies[node] for node in outputs])
        graph.eliminate_dead_code()
        return fx.GraphModule(whole, graph)

    constant = extract([], [node for node in nodes if node not in reached], stored)
    return constant, extract([*stored, *v], [node for node in nodes if node in reached and node not in v], product)
