"""Replace or reject operations whose second derivative in torch is wrong, missing or slow."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils.checkpoint import CheckpointFunction

from ..common.errors import BsamRuntimeError
from ..core.undo import Undo

_BATCH_NORM = inspect.signature(F.batch_norm)
_ONCE = once_differentiable(print).__code__  # shared by all functions with this decorator


class Substitutes(TorchFunctionMode):
    """Context manager that replaces four operations with equivalent ones that have correct, fast derivatives.

    - Batch norm with running statistics becomes one multiplication and one addition per entry. Torch's derivatives take
      twice as many passes over memory.
    - Weight normalization: the second derivative of ``torch._weight_norm`` is wrong (it fails gradgradcheck).
    - ``hardsigmoid`` has no second derivative in torch.
    - ``ldexp`` ends the process with a segmentation fault when ``make_fx`` traces a second derivative of it.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            bound = _BATCH_NORM.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = bound.arguments
            if not arguments["training"] and arguments["input"].dtype == arguments["running_var"].dtype:
                return _batch_norm(**arguments)
        func = _SUBSTITUTES.get(func, func)
        return func(*args, **kwargs)


def substitute(undo: Undo) -> None:
    """Use :class:`Substitutes` until ``undo``, which may be interrupted, unlike its ``with`` block."""
    undo.callback(_set_function_modes, _get_current_function_mode_stack())
    _push_mode(Substitutes())


def _set_function_modes(modes: Sequence[TorchFunctionMode]) -> None:
    for _ in _get_current_function_mode_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


def _batch_norm(
    input: Tensor, running_mean: Tensor, running_var: Tensor, weight: Any, bias: Any, eps: float, **_: Any
) -> Tensor:
    scale = (running_var + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    shift = (0 if bias is None else bias) - running_mean * scale
    shape = (-1, *(1,) * (input.dim() - 2))
    return torch.addcmul(shift.view(shape), input, scale.view(shape))


_SUBSTITUTES: dict[Callable[..., Any], Callable[..., Any]] = {
    torch._weight_norm: lambda v, g, dim=0: v * (g / torch.norm_except_dim(v, 2, dim)),
    F.hardsigmoid: lambda input, inplace=False: (input / 6 + 0.5).clamp(0, 1),
    torch.ldexp: lambda input, other: input * torch.pow(2.0, other),
    Tensor.ldexp: lambda input, other: input * torch.pow(2.0, other),
    Tensor.ldexp_: lambda input, other: input.mul_(torch.pow(2.0, other)),
}


def check_graph(loss: Tensor, twice: bool) -> None:
    """Raise if torch would silently leave part of the graph out of a derivative.

    This concerns reentrant checkpoints and, if ``twice``, functions marked with ``@once_differentiable`` and the inputs
    that a function lists in ``no_second_derivative``.
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
                "the network uses reentrant checkpoints, which torch.autograd.grad does not support: call "
                "torch.utils.checkpoint.checkpoint with use_reentrant=False"
            )
        if twice and function is not None and _is_once_differentiable(function.backward):
            raise BsamRuntimeError(
                f"{function.__name__} is marked with @once_differentiable, so it has no second derivative: write its "
                "backward with differentiable operations and remove the decorator"
            )
        for index, message in getattr(function, "no_second_derivative", {}).items() if twice else ():
            if node.next_functions[index][0] is not None:
                raise BsamRuntimeError(message)
        nodes += [following for following, _ in node.next_functions]


def _is_once_differentiable(function: Any) -> bool:
    """Return whether a function, or one that it wraps, has this decorator."""

    def has_decorator(function: Any) -> bool:
        return getattr(function, "__code__", None) is _ONCE

    return has_decorator(inspect.unwrap(function, stop=has_decorator))
