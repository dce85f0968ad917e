import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from bsam.flatness.in_place import reuse_memory


def both(function, *inputs):
    """What a function gives, what its graph gives with memory reused, how often it is, and whether the inputs are as they were."""
    graph = make_fx(function)(*inputs)
    count = reuse_memory(graph.graph)
    graph.recompile()
    before = [t.clone() for t in inputs]
    found = graph(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    assert torch.equal(graph(*inputs), found)
    assert torch.equal(function(*inputs), found)
    return count


A, B, ROW = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)), torch.ones(4, 5) * 3, torch.arange(5.0)


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda a, b, r: a * b + b, 1),
        (lambda a, b, r: b + a * b, 1),  # the second term gives way
        (lambda a, b, r: (a + b) * r + a * r, 2),
        (lambda a, b, r: a + b, 0),  # inputs stay
        (lambda a, b, r: (a * b) * (a * b + r) + r, 3),
        (lambda a, b, r: r * 2 + a, 0),  # a smaller term has no room
        (lambda a, b, r: torch.add(a * b, b, alpha=2), 1),
        (lambda a, b, r: torch.add(b, a * b, alpha=2), 0),  # alpha is the second term's
        (lambda a, b, r: (s := a * b) + (s + r), 1),  # the first sum must not destroy what the second one reads
        (lambda a, b, r: (s := a * b) + s.t().t(), 0),  # a view shares its memory
        (lambda a, b, r: ((s := a * b) + r) * s.expand(2, 4, 5)[1], 1),
        (lambda a, b, r: (s := a * b) * s, 0),
    ],
)
def test_terms_that_nobody_reads_again_are_overwritten_and_no_others(function, count):
    assert both(function, A, B, ROW) == count


def test_what_a_graph_gives_is_not_overwritten():
    graph = make_fx(lambda a, b: ((s := a * b), s + b))(A, B)
    assert reuse_memory(graph.graph) == 0


def test_of_which_nothing_is_known_is_left_alone():
    graph = fx.Graph()
    a = graph.placeholder("a")
    product = graph.call_function(torch.ops.aten.mul.Tensor, (a, a))
    graph.output(graph.call_function(torch.ops.aten.add.Tensor, (product, a)))
    assert reuse_memory(graph) == 0
