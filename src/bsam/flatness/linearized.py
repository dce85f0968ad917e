"""Record the Hessian product of a batch as two graphs: one that depends on the vector and one that does not."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.func import functional_call, grad, jvp, vjp
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.reinplace import reinplace
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from .dataset_loss import DatasetLoss
from .hvp import Product

BatchProduct: TypeAlias = Callable[[list[Tensor]], Product]
ProductsClose: TypeAlias = Callable[[Product, Product], bool]  # whether two products agree up to rounding


class CannotRecord(Exception):
    """The product of a batch cannot be recorded; the message says why."""


class Recorder:
    """Makes functions ``v -> H v`` for batches, with everything that does not depend on ``v`` computed once and stored.

    The derivative of the gradient along ``v`` is traced as a graph, once for each batch shape. The part that does not
    depend on ``v`` is run once for each batch; the rest is run for each ``v``, with six convolutions per convolutional
    layer (a gradient takes three). ``torch.func.linearize`` does the same, but traces again for each batch. With
    a ResNet-8, batches of 128 images and two CPU cores, it took 3.2 to 4.3 s per batch in one run. This class took 5.0
    and 5.3 s for one batch in two runs, and 7.0 s for four batches, including the comparisons with plain products.

    Args:
        dataset_loss: the network and its loss.
    """

    def __init__(self, dataset_loss: DatasetLoss) -> None:
        self.dataset_loss, self.graphs = dataset_loss, dict[Any, tuple[fx.GraphModule, fx.GraphModule]]()
        named = list(dataset_loss.model.named_parameters())
        self._names = [name for name, p in named if p.requires_grad]  # in the order of the vectors
        self._constants = {name: t.detach() for name, t in (*named, *dataset_loss.model.named_buffers())}
        self._weights = [self._constants.pop(name) for name in self._names]

    def shape(self, x: Any, y: Any) -> Any:
        """Return the key under which the graphs of a batch are stored; raise unless it has only dense tensors."""
        leaves, structure = tree_flatten((x, y))
        if not all(isinstance(leaf, Tensor) and leaf.layout == torch.strided for leaf in leaves):
            raise CannotRecord("inputs and targets must be dense tensors, or lists and dicts of them")
        return structure, tuple((t.shape, t.stride(), t.dtype) for t in leaves)

    def linearized(self, x: Any, y: Any) -> tuple[BatchProduct, int]:
        """Return the product function of a batch whose shape was recorded, and the bytes it stores."""
        constant, linear = self.graphs[self.shape(x, y)]
        stored = constant(*tree_leaves(self._inputs(x, y)))
        model_storages = self._storages((*self._weights, *self._constants.values()))
        sizes = {address: size for address, size in self._storages(stored).items() if address not in model_storages}
        return lambda v: list(linear(*stored, *v)), sum(sizes.values())

    def record(self, x: Any, y: Any, v: list[Tensor], products_close: ProductsClose, forward: bool) -> None:
        """Record the graphs for the shape of a batch, in forward-over-reverse or reverse-over-reverse mode."""

        def product(weights: list[Tensor], constants: dict[str, Tensor], x: Any, y: Any, v: list[Tensor]) -> Any:
            def value(at: list[Tensor]) -> Tensor:
                named = {**dict(zip(self._names, at, strict=True)), **constants}
                return self.dataset_loss.batch_loss(functional_call(self.dataset_loss.model, named, (x,)), y)

            return jvp(grad(value), (weights,), (v,))[1] if forward else vjp(grad(value), weights)[1](v)[0]

        inputs = self._inputs(x, y)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # raised when torch loads its derivative formulas
                product(*inputs, v)  # raises an error in cases where tracing may crash
                graph = make_fx(product)(*inputs, v)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # any type: model and loss run on tensors they were not written for
            if "KeyboardInterrupt" in str(error):  # torch may turn it into another error
                raise KeyboardInterrupt from error
            raise CannotRecord(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
        self._check_constants(graph)
        graph.graph.eliminate_dead_code()
        constant, linear = _partition(graph, len(v))
        stored = constant(*tree_leaves(inputs))
        self.graphs[self.shape(x, y)] = constant, _in_place(linear, [*stored, *v], products_close)

    def _inputs(self, x: Any, y: Any) -> tuple[list[Tensor], dict[str, Tensor], Any, Any]:
        """Return everything the loss depends on: trained weights, other weights and buffers, inputs, targets."""
        return self._weights, self._constants, *tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, (x, y))

    def _check_constants(self, graph: fx.GraphModule) -> None:
        constants = [getattr(graph, str(node.target)) for node in graph.graph.nodes if node.op == "get_attr"]
        model_storages = self._storages((*self._weights, *self._constants.values()))
        if any(not t._is_zerotensor() and t.untyped_storage().data_ptr() in model_storages for t in constants):
            raise CannotRecord(
                "the loss reads the model's weights (a penalty?), or the network reads them through references other "
                "than its parameters"
            )

    @staticmethod
    def _storages(values: Any) -> dict[int, int]:
        """Return the address and size in bytes of each tensor's storage."""
        storages = [t.untyped_storage() for t in values if isinstance(t, Tensor)]
        return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _in_place(graph: fx.GraphModule, inputs: list[Tensor], products_close: ProductsClose) -> fx.GraphModule:
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
    return rewritten if products_close(actual, expected) else graph


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

    constant, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in nodes:
        if node not in reached:
            copies[node] = constant.node_copy(node, copies.__getitem__)
    constant.output([copies[node] for node in stored])
    constant.eliminate_dead_code()

    linear = fx.Graph()
    copies = {node: linear.placeholder(node.name) for node in [*stored, *v]}
    for node in nodes:
        if node in reached and node not in v:
            copies[node] = linear.node_copy(node, copies.__getitem__)
    linear.output([copies[node] for node in product])
    return fx.GraphModule(whole, constant), fx.GraphModule(whole, linear)
