"""Operations whose second derivative in torch is wrong, missing or slow: replaced by others, or refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from ..common.errors import BsamRuntimeError

_BATCH_NORM = inspect.signature(F.batch_norm)
_ONCE = once_differentiable(print).__code__  # of every backward that is marked so


class Substitutes(TorchFunctionMode):
    """Context manager that computes three operations from others whose derivatives torch gets right.

    - Batch norm with running statistics is one multiplication and one addition per entry. Torch's own derivatives take
      twice as many passes over memory.
    - Weight normalization: the second derivative of ``torch._weight_norm`` is wrong (it fails gradgradcheck).
    - ``hardsigmoid`` has no second derivative in torch.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            bound = _BATCH_NORM.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            if not given["training"] and given["input"].dtype == given["running_var"].dtype:
                return _batch_norm(**given)
        elif func is torch._weight_norm:
            func = _weight_norm
        elif func is F.hardsigmoid:
            func = _hardsigmoid
        return func(*args, **kwargs)


def _batch_norm(
    input: Tensor, running_mean: Tensor, running_var: Tensor, weight: Any, bias: Any, eps: float, **_: Any
) -> Tensor:
    scale = (running_var + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    shift = (0 if bias is None else bias) - running_mean * scale
    shape = (-1, *(1,) * (input.dim() - 2))
    return torch.addcmul(shift.view(shape), input, scale.view(shape))


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    return (input / 6 + 0.5).clamp(0, 1)


def check_graph(loss: Tensor, twice: bool) -> None:
    """Raise if the graph holds what torch would silently leave out of a derivative.

    These are reentrant checkpoints and, if ``twice``, functions marked with ``@once_differentiable`` and tensors that a
    function names by index in ``no_second_derivative``, which have no second derivative.
    """
    seen, nodes = set[Any](), [loss.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        function: Any = getattr(type(node), "_forward_cls", None)
        if function is CheckpointFunction:
            raise BsamRuntimeError(
                "the network uses reentrant checkpoints, whose weights torch.autograd.grad does not reach: "
                "call torch.utils.checkpoint.checkpoint with use_reentrant=False"
            )
        if twice and function is not None and _once_differentiable(function.backward):
            raise BsamRuntimeError(
                f"{function.__name__} is marked with @once_differentiable, so that it has no second derivative: "
                "write its backward in operations that torch can differentiate, and remove the mark"
            )
        for index, what in getattr(function, "no_second_derivative", {}).items() if twice else ():
            if node.next_functions[index][0] is not None:
                raise BsamRuntimeError(f"among the trainable parameters are {what}")
        nodes += [following for following, _ in node.next_functions]


def _once_differentiable(function: Any) -> bool:
    """Return whether a function, or one that it wraps, has this mark."""
    while function is not None:
        if getattr(function, "__code__", None) is _ONCE:
            return True
        function = getattr(function, "__wrapped__", None)
    return False
