"""Hessian products of one batch, cut in two: what depends on the vector, and what is the same for every vector."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.func import functional_call, grad, grad_and_value, jvp
from torch.fx.experimental.proxy_tensor import make_fx

from ..core.refusal import Refusal
from .dataset_loss import DatasetLoss
from .in_place import reuse_memory

Inputs: TypeAlias = tuple[list[Tensor], dict[str, Tensor], Any, Any]  # the weights, all other tensors of the model, x and y
BatchProduct: TypeAlias = Callable[[list[Tensor]], list[Tensor]]

TAKES = "this network (or loss) takes sizes from the data: leave keep_bytes 0"


def no_forward_derivative(error: RuntimeError) -> bool:
    """Whether an operation of the network has no forward derivative, or one that fails on what does not vary (mse_loss)."""
    return isinstance(error, NotImplementedError) or "ZeroTensor" in str(error)


class Linearizer:
    """Makes ``v -> H v`` of a batch, with everything that does not depend on ``v`` computed once and kept.

    The gradient, differentiated along ``v``, is recorded as a graph of operations, once for each shape of a batch. What ``v`` does not reach is run once
    for each batch; what is left, six convolutions for the gradient's three, is run for each ``v``.

    Args:
        loss: the network and its loss.
        names: of the weights, in the order of the vectors.
    """

    def __init__(self, loss: DatasetLoss, names: Sequence[str]) -> None:
        self.loss, self.names = loss, list(names)
        self._cuts: dict[Any, tuple[fx.GraphModule, fx.GraphModule]] = {}
        self._constants: list[tuple[Tensor, Tensor]] = []  # and what they were

    def linearized(self, inputs: Inputs) -> tuple[BatchProduct, int]:
        """The product for a batch, and the bytes that it keeps."""
        leaves = torch.utils._pytree.tree_leaves(inputs)
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            raise Refusal("keep_bytes needs batches whose inputs and targets are tensors (or lists and dicts of them): leave it 0 for these")
        shape = tuple((t.shape, t.stride(), t.dtype) for t in leaves)
        if shape not in self._cuts:
            self._cuts[shape] = self._cut(inputs)
        before, after = self._cuts[shape]
        kept, value = before(*leaves)
        self._check(value, *inputs[2:])
        owned = {t.untyped_storage().data_ptr() for t in leaves}
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept if isinstance(t, Tensor)}
        return lambda v: after(*kept, *v), sum(size for place, size in sizes.items() if place not in owned)

    @torch.no_grad()
    def _check(self, value: Tensor, x: Any, y: Any) -> None:
        """What Python read from the batch that was recorded (``tolist``, ``numpy``) is part of the graph: then the loss of another batch comes out wrong."""
        with self.loss.measuring():
            plain = self.loss.of(self.loss.model(x), y)
        near = torch.finfo(plain.dtype).eps ** 0.4  # 2e-3 in float32: convolutions in TF32 may go another way each time
        if not torch.allclose(value, plain, rtol=near, atol=near, equal_nan=True):
            raise Refusal(f"{TAKES}. Recorded on one batch, it gives a loss of {float(value):.6g} on another one, where it is {float(plain):.6g}")

    def unchanged(self) -> bool:
        """Whether tensors that are neither weights nor buffers of the network nor of the batches (weights of classes) are what they were."""
        return all(torch.equal(t, before) for t, before in self._constants)

    def _note_constants(self, tensors: Iterable[Tensor]) -> None:
        found = [t for t in tensors if not t._is_zerotensor()]
        own = {t.untyped_storage().data_ptr() for t in (*self.loss.model.parameters(), *self.loss.model.buffers())}
        if any(t.untyped_storage().data_ptr() in own for t in found):
            raise Refusal("the loss takes weights from the network by itself (a penalty?), not by its outputs: leave keep_bytes 0")
        self._constants += [(t.detach(), t.detach().clone()) for t in found]

    def _cut(self, inputs: Inputs) -> tuple[fx.GraphModule, fx.GraphModule]:
        self._plainly(*inputs[2:])
        v = [torch.zeros_like(w) for w in inputs[0]]
        product: Callable[..., tuple[list[Tensor], Tensor]] = self._forward_over_reverse
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # at the first use torch loads formulas in its own outdated way
            try:
                try:
                    product(*inputs, v)  # where it raises, recording it may crash
                except RuntimeError as error:
                    if not no_forward_derivative(error):
                        raise
                    product = self._reverse_over_reverse
                graph = make_fx(lambda given, v: product(*given, v))(inputs, v)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if "KeyboardInterrupt" in str(error):  # which torch's formulas pass on as an error
                    raise KeyboardInterrupt from error
                raise Refusal(f"this network (or loss) cannot be recorded as a graph, which keep_bytes needs: leave it 0. It said: {error}") from error
        if any(map(_depends_on_data, graph.graph.nodes)):  # dead code, too: a size may be all that is used of it
            raise Refusal(TAKES)
        self._note_constants(getattr(graph, str(node.target)) for node in graph.graph.nodes if node.op == "get_attr")
        if any(_draws(node) for node in graph.graph.nodes):
            raise Refusal("the network or the loss draws random numbers: leave keep_bytes 0")
        graph.graph.eliminate_dead_code()
        return _halves(graph, len(v))

    @torch.enable_grad()
    def _plainly(self, x: Any, y: Any) -> None:
        """A product without any recording, so that what the network does not bear in itself is raised as it is."""
        with self.loss.measuring():
            gradient = self.loss.gradient(self.loss.of(self.loss.model(x), y), create_graph=True)
            curved = [g.sum() for g in gradient if g is not None and g.requires_grad]
            if curved:
                torch.autograd.grad(curved, self.loss.weights.params, allow_unused=True)

    def _value(self, weights: Sequence[Tensor], others: dict[str, Tensor], x: Any, y: Any) -> Tensor:
        return self.loss.of(functional_call(self.loss.model, {**dict(zip(self.names, weights, strict=True)), **others}, (x,)), y)

    def _forward_over_reverse(self, weights: list[Tensor], others: dict[str, Tensor], x: Any, y: Any, v: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        differentiated: Any = jvp(lambda *at: grad_and_value(self._value)(at, others, x, y), tuple(weights), tuple(v), has_aux=True)
        return differentiated[1:]

    def _reverse_over_reverse(self, weights: list[Tensor], others: dict[str, Tensor], x: Any, y: Any, v: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        def slope(at: list[Tensor]) -> tuple[Tensor, Tensor]:
            gradient, value = grad_and_value(self._value)(at, others, x, y)
            return sum(map(torch.sum, map(operator.mul, gradient, v)), torch.zeros(())), value

        product, value = grad(slope, has_aux=True)(weights)
        return product, value


def _depends_on_data(node: fx.Node) -> bool:
    """Whether the shape of what an operation gives, or what Python makes of it, follows from the values that it is given."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target is torch.ops.aten.index.Tensor:  # by numbers it is not, by a mask it is
        places = node.args[1]
        assert isinstance(places, (list, tuple))
        return any(isinstance(place, fx.Node) and place.meta["val"].dtype in (torch.bool, torch.uint8) for place in places)
    return bool({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(node.target.tags))


def _draws(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _halves(whole: fx.GraphModule, size: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The part of a graph that its last ``size`` inputs do not reach, and the part that they do, which takes what the first one gives in front of them.

    The graph gives a product and the loss, which no ``v`` reaches: the first part gives it, too.
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
    handed = [node for node in nodes if node not in reached and (node in product or any(user in reached for user in node.users))]

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
    reuse_memory(after)
    return fx.GraphModule(whole, before), fx.GraphModule(whole, after)
