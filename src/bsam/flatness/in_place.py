"""Sums and products of a graph, written where one of their terms was that nobody reads again: new memory costs more than the arithmetic."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
_IN_PLACE: dict[Any, Any] = {_aten.add.Tensor: _aten.add_.Tensor, _aten.mul.Tensor: _aten.mul_.Tensor}
_NEW = {*_IN_PLACE, *_IN_PLACE.values(), _aten.sub.Tensor, _aten.convolution.default, _aten.threshold_backward.default}  # their results share no memory
_READERS = {*_NEW, _aten.convolution_backward.default, _aten.sum.dim_IntList, _aten.mm.default}  # whose results share none with what they read


def reuse_memory(graph: fx.Graph) -> int:
    """Let additions and multiplications overwrite a term of their own shape, if it was made in this graph, this is its last use, and nothing else shares its
    memory. Inputs of the graph are never overwritten.

    Returns:
        how many do.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    count = 0
    for node in graph.nodes:
        for term in _terms(node):
            if _spare(term, node, place):
                other = node.args[1] if term is node.args[0] else node.args[0]
                node.target, node.args = _IN_PLACE[node.target], (term, other)
                count += 1
                break
    return count


def _terms(node: fx.Node) -> list[Any]:
    """What a node may overwrite: the first term, and the second where the two may change places."""
    if node.target not in _IN_PLACE or node.args[0] is node.args[1]:
        return []
    return [node.args[0]] if node.kwargs else list(node.args)


def _spare(term: Any, node: fx.Node, place: dict[fx.Node, int]) -> bool:
    if not isinstance(term, fx.Node) or not _new(term):
        return False
    last = max(place[user] for user in term.users) == place[node]
    return last and all(user.target in _READERS for user in term.users) and _kind(term) == _kind(node)


def _new(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and source.target is _aten.convolution_backward.default
    return node.target in _NEW


def _kind(node: fx.Node) -> Any:
    found = node.meta.get("tensor_meta")
    return object() if found is None else (found.shape, found.stride, found.dtype)  # of which nothing is known is like nothing
