"""The mean loss over a data set, as a function of the weights, that leaves the model as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..core.checks import check_count
from ..core.refusal import Refusal
from ..core.vector import Vector
from ..core.weights import Weights

Batches: TypeAlias = Iterable[tuple[Any, Any]]
Piece: TypeAlias = tuple[Any, Any, int]  # inputs, targets, and how many
LossFunction: TypeAlias = Callable[[Any, Any], Tensor]


class DatasetLoss:
    """``loss_fn(model(x), y)``, averaged over all samples of ``data``, whatever the sizes of its batches.

    Args:
        model: the network; its trainable parameters are the variables.
        loss_fn: the mean loss of a batch.
        data: the batches ``(x, y)``; walked anew for every evaluation, so no generator.
        micro_batch: the most samples to hold a graph for at a time; None takes batches as they come.
        mode: ``"eval"``: batch norm uses its running statistics. ``"train"``: it uses those of each batch, and moves nothing. Dropout is off in both.
            A tracked instance norm is treated alike.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction, data: Batches, micro_batch: int | None = None, mode: str = "eval") -> None:
        if mode not in ("eval", "train"):
            raise Refusal(f'mode must be "eval" (running statistics of batch norm) or "train" (those of the batch), got {mode!r}')
        if isinstance(data, Iterator):
            raise Refusal("data is walked more than once, and an iterator can be walked once only: pass a list or a DataLoader")
        if micro_batch is not None and mode == "train":
            raise Refusal('micro_batch would change the batches whose statistics mode="train" uses: leave one of them out, or make the batches of data smaller')
        self.model, self.loss_fn, self.data, self.mode = model, loss_fn, data, mode
        self.micro_batch = None if micro_batch is None else check_count("micro_batch", micro_batch)
        self.weights = Weights()
        self.weights.survey([{"params": list(model.parameters())}])
        if not self.weights.params:
            raise Refusal("model has no trainable parameter: there is nothing to differentiate by. Are they all frozen?")
        self.samples: int | None = None  # of the first walk

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """The model in the mode asked for; afterwards weights, flags and buffers are as they were, also if this raises."""
        modules = list(self.model.modules())
        modes = [module.training for module in modules]
        norms = [m for m in modules if isinstance(m, _NormBase)] if self.mode == "train" else []
        tracking = [norm.track_running_stats for norm in norms]
        buffers = [(m, name, t, t.clone()) for m in modules for name, t in m._buffers.items() if t is not None]
        try:
            self.model.eval()
            for norm in norms:
                norm.training, norm.track_running_stats = True, False
                norm._buffers.update({name: None for name in ("running_mean", "running_var") if name in norm._buffers})  # instance norm would move them
            yield
        finally:
            self.weights.restore()
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode
            for norm, tracked in zip(norms, tracking, strict=True):
                norm.track_running_stats = tracked
            self._bring_back(buffers)

    @torch.no_grad()
    def _bring_back(self, buffers: list[tuple[nn.Module, str, Tensor, Tensor]]) -> None:
        """Some modules move or replace their buffers in eval mode, too."""
        for module, name, buffer, before in buffers:
            module._buffers[name] = buffer
            if not torch.equal(buffer, before):  # or a graph of the user's that needs the buffer would count it as changed
                buffer.copy_(before)

    def pieces(self) -> Iterator[Piece]:
        """Inputs, targets and size of each (micro-)batch that has a sample; each walk must give as many samples as the first one did."""
        count = 0
        for x, y in self.data:
            for a, b in [(x, y)] if self.micro_batch is None else _split(x, y, self.micro_batch):
                if len(b):
                    count += len(b)
                    yield a, b, len(b)
        if count == 0:
            if self.samples is None:
                raise Refusal("data is empty: there is no loss to measure")
            raise Refusal(f"data gave {self.samples} samples on the first walk and nothing on a later one: pass a list or a DataLoader, not a spent generator")
        if self.samples not in (None, count):
            raise Refusal(
                f"data gave {self.samples} samples on the first walk and {count} on a later one: pass a list or a DataLoader that gives the same each time"
            )
        self.samples = count

    def of(self, out: Any, y: Any) -> Tensor:
        """The loss of outputs, which must be one number."""
        loss = self.loss_fn(out, y)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            shape = f"the shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"the type {type(loss).__name__}"
            raise Refusal(f"loss_fn must return the mean loss of a batch, a 0-dim tensor; it gave {shape}")
        return loss

    def batches(self, network: Callable[[Any], Any] | None = None, pieces: Iterable[Piece] | None = None) -> Iterator[tuple[Tensor, tuple[Any, Any], int]]:
        """The loss of each (micro-)batch, its outputs and targets, and its size. ``network`` stands in for the model, ``pieces`` for a walk, if given."""
        network = network or self.model
        for x, y, n in self.pieces() if pieces is None else pieces:
            out = network(x)
            yield self.of(out, y), (out, y), n

    def gradient(self, loss: Tensor, create_graph: bool = False) -> tuple[Tensor | None, ...]:
        """The derivative of a batch's loss by each parameter, None for those it does not depend on."""
        found = torch.autograd.grad(loss, self.weights.params, create_graph=create_graph, allow_unused=True) if loss.requires_grad else ()
        if all(g is None for g in found):
            raise Refusal(
                "loss_fn(model(x), y) reaches no trainable parameter of the model: is it computed from the model's outputs? "
                "Was it detached, or computed under torch.no_grad or torch.inference_mode?"
            )
        return found

    @torch.no_grad()
    def value(self, score: Callable[[Any, Any], Tensor] | None = None) -> tuple[float, float | None]:
        """The mean loss where the weights are, and the mean of ``score(outputs, y)`` if asked for (a sum over the batch, such as the number of hits)."""
        mean, scored, count = 0.0, 0.0, 0
        for loss, (out, y), n in self.batches():
            count += n
            mean += (float(loss) - mean) * (n / count)  # of one batch its loss to the last bit, which `loss * n / n` is not
            scored += float(score(out, y)) if score is not None else 0.0
        return mean, scored / count if score is not None else None

    @torch.enable_grad()
    def value_and_grad(self) -> tuple[float, Vector]:
        """The mean loss and its gradient where the weights are; ``p.grad`` is not touched."""
        sums = [torch.zeros_like(p, requires_grad=False) for p in self.weights.params]
        mean, count = 0.0, 0
        for loss, _, n in self.batches():
            for s, g in zip(sums, self.gradient(loss), strict=True):
                if g is not None:
                    s.add_(g, alpha=n)
            count += n
            mean += (float(loss.detach()) - mean) * (n / count)
        return mean, Vector(sums, self.weights.cut) / count


def _split(x: Any, y: Any, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    for name, value in (("inputs", x), ("targets", y)):
        if not isinstance(value, Tensor):
            raise Refusal(
                f"micro_batch splits tensors, and the {name} of a batch are a {type(value).__name__}: leave it out, and make the batches of data smaller"
            )
    return zip(x.split(size), y.split(size), strict=True)
