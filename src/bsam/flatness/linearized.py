"""Hessian products of a batch, recorded as a graph: what depends on the vector, and what does not."""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.func import functional_call, grad, grad_and_value, jvp
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.reinplace import reinplace
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from .dataset_loss import DatasetLoss

Product: TypeAlias = list[Tensor | None]  # one tensor per parameter, None for those that the batch does not depend on
Inputs: TypeAlias = tuple[
    list[Tensor], dict[str, Tensor], Any, Any
]  # the weights, all other tensors of the model, x and y
BatchProduct: TypeAlias = Callable[[list[Tensor]], Product]
Agree: TypeAlias = Callable[[Product, Product], bool]  # whether two products are equal up to rounding


class CannotRecord(Exception):
    """The product of a batch cannot be recorded; the message says why."""


class Recorder:
    """Makes ``v -> H v`` of a batch, with everything that does not depend on ``v`` computed once and stored.

    The gradient, differentiated along ``v``, is recorded as a graph of operations once for each shape of a batch. What
    ``v`` does not reach is run once for each batch; what is left, six convolutions for the gradient's three, is run for
    each ``v``. ``torch.func.linearize`` does the same for one batch, and records again for each: in one run on two CPU
    cores it took 3.2 to 4.3 s for each batch of 128 images in a ResNet-8, and this 5.0 and 5.3 s for one of them (two
    tries) and 7.0 s for four, comparisons included.

    Args:
        loss: the network and its loss.
    """

    def __init__(self, loss: DatasetLoss) -> None:
        self.loss = loss
        self.names = [
            name for name, p in loss.model.named_parameters() if p.requires_grad
        ]  # in the order of the vectors
        state = {name: t.detach() for name, t in (*loss.model.named_parameters(), *loss.model.named_buffers())}
        self._weights = [state.pop(name) for name in self.names]
        self._others = state
        self.graphs: dict[Any, tuple[fx.GraphModule, fx.GraphModule]] = {}

    def inputs(self, x: Any, y: Any) -> Inputs:
        """All tensors that the loss of a batch depends on."""
        x, y = tree_map(_detached, (x, y))
        return self._weights, self._others, x, y

    def shape(self, x: Any, y: Any) -> Any:
        """What a graph is recorded for; raises for batches that hold more than tensors."""
        leaves, structure = tree_flatten((x, y))
        if not all(isinstance(leaf, Tensor) and leaf.layout == torch.strided for leaf in leaves):
            raise CannotRecord("inputs and targets are not dense tensors (or lists and dicts of them)")
        return structure, tuple((t.shape, t.stride(), t.dtype) for t in leaves)

    def linearized(self, x: Any, y: Any) -> tuple[BatchProduct, int]:
        """The product of a batch whose shape was recorded, and the bytes that it stores."""
        inputs = self.inputs(x, y)
        before, after = self.graphs[self.shape(x, y)]
        stored, _ = before(*tree_leaves(inputs))
        owned = {t.untyped_storage().data_ptr() for t in tree_leaves(inputs[:2])}
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in stored if isinstance(t, Tensor)}
        size = sum(size for place, size in sizes.items() if place not in owned)
        return lambda v: list(after(*stored, *v)), size

    def record(self, x: Any, y: Any, v: list[Tensor], agree: Agree, forward: bool) -> None:
        """Record the graph for the shape of a batch, forward over reverse or reverse over reverse."""
        product: Callable[..., Any] = self._forward_over_reverse if forward else self._reverse_over_reverse
        inputs = self.inputs(x, y)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, when it loads its formulas
                product(*inputs, v)  # where this raises, recording it may crash
                graph = make_fx(lambda given, v: product(*given, v))(inputs, v)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if "KeyboardInterrupt" in str(error):  # which torch's formulas pass on as an error
                raise KeyboardInterrupt from error
            said = str(error).partition("\n")[0]
            raise CannotRecord(f"{type(error).__name__}: {said}") from error
        self._check_graph(graph)
        graph.graph.eliminate_dead_code()
        before, after = _halves(graph, len(v))
        stored, _ = before(*tree_leaves(inputs))
        self.graphs[self.shape(x, y)] = before, _in_place(after, [*stored, *v], agree)

    def _check_graph(self, graph: fx.GraphModule) -> None:
        constants = [getattr(graph, str(node.target)) for node in graph.graph.nodes if node.op == "get_attr"]
        own = {t.untyped_storage().data_ptr() for t in (*self._weights, *self._others.values())}
        if any(not t._is_zerotensor() and t.untyped_storage().data_ptr() in own for t in constants):
            raise CannotRecord("the loss or the network takes weights from elsewhere than its parameters (a penalty?)")

    def _value(self, weights: Sequence[Tensor], others: dict[str, Tensor], x: Any, y: Any) -> Tensor:
        named = {**dict(zip(self.names, weights, strict=True)), **others}
        return self.loss.of(functional_call(self.loss.model, named, (x,)), y)

    def _forward_over_reverse(
        self, weights: list[Tensor], others: dict[str, Tensor], x: Any, y: Any, v: list[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        gradient = grad_and_value(self._value)
        differentiated: Any = jvp(lambda *at: gradient(at, others, x, y), tuple(weights), tuple(v), has_aux=True)
        return differentiated[1:]

    def _reverse_over_reverse(
        self, weights: list[Tensor], others: dict[str, Tensor], x: Any, y: Any, v: list[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        def slope(at: list[Tensor]) -> tuple[Tensor, Tensor]:
            gradient, value = grad_and_value(self._value)(at, others, x, y)
            return sum(map(torch.sum, map(operator.mul, gradient, v)), torch.zeros(())), value

        product, value = grad(slope, has_aux=True)(weights)
        return product, value


def _in_place(graph: fx.GraphModule, inputs: list[Tensor], agree: Agree) -> fx.GraphModule:
    """A graph whose results overwrite what is not read again, if torch's pass for that gets it right; else as it is."""
    expected = graph(*inputs)
    try:
        rewritten = reinplace(copy.deepcopy(graph), *inputs)
        rewritten(*inputs)
        found = rewritten(*inputs)  # the second time, to see whether inputs were overwritten
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AttributeError, AssertionError, LookupError, TypeError, ValueError):
        return graph
    return rewritten if agree(found, expected) else graph


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _halves(whole: fx.GraphModule, size: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The part of a graph that its last ``size`` inputs do not reach, and the part that they do.

    The first part gives what the second one takes in front of those inputs, and the loss.
    """
    nodes = list(whole.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    v, reached = inputs[-size:], set(inputs[-size:])
    for node in nodes:
        if any(source in reached for source in node.all_input_nodes):
            reached.add(node)
    (output,) = (node for node in nodes if node.op == "output")
    *product, value = output.args[0]
    reached.discard(output)
    handed = [
        node
        for node in nodes
        if node not in reached and (node in product or any(user in reached for user in node.users))
    ]

    before, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in nodes:
        if node not in reached and node is not output:
            copies[node] = before.node_copy(node, copies.__getitem__)
    before.output(([copies[node] for node in handed], copies[value]))
    before.eliminate_dead_code()

    after = fx.Graph()
    copies = {node: after.placeholder(node.name) for node in [*handed, *v]}
    for node in nodes:
        if node in reached and node not in v:
            copies[node] = after.node_copy(node, copies.__getitem__)
    after.output([copies[node] for node in product])
    return fx.GraphModule(whole, before), fx.GraphModule(whole, after)
