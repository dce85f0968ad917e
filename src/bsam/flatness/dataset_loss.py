"""The mean loss over a data set, as a function of the weights, that leaves the model as it was."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils._pytree import tree_leaves, tree_map

from ..core.checks import check_count
from ..core.refusal import Refusal
from ..core.vector import Vector
from ..core.weights import Weights
from .walks import Walk, Walks

Batches: TypeAlias = Iterable[tuple[Any, Any]]
Piece: TypeAlias = tuple[Any, Any, int]  # inputs, targets, and how many
LossFunction: TypeAlias = Callable[[Any, Any], Tensor]

ROUNDING = 16.0  # machine epsilons, times the size of losses and outputs: no two ways to one loss can be asked to be closer


class DatasetLoss:
    """``loss_fn(model(x), y)``, averaged over all samples of ``data``, whatever the sizes of its batches.

    Args:
        model: the network; its trainable parameters are the variables.
        loss_fn: the mean loss of a batch.
        data: the batches ``(x, y)``; walked anew for every evaluation, so no generator. Walks that give other samples are refused.
        micro_batch: the most samples to hold a graph for at a time; None takes batches as they come. A loss that is no mean over samples is refused then.
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
        if micro_batch is not None and any(isinstance(m, _BatchNorm) and m.running_mean is None for m in model.modules()):
            raise Refusal(
                "micro_batch would change the batches whose statistics a batch norm uses that tracks none: leave it out, and make the batches of data smaller"
            )
        self.model, self.loss_fn, self.data, self.mode = model, loss_fn, data, mode
        self.micro_batch = None if micro_batch is None else check_count("micro_batch", micro_batch)
        self.weights = Weights()
        self.weights.survey([{"params": list(model.parameters())}])
        if not self.weights.params:
            raise Refusal("model has no trainable parameter: there is nothing to differentiate by. Are they all frozen?")
        self.samples: int | None = None  # of the first walk
        self._walks = Walks(by_batch=mode == "train")

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """The model in the mode asked for; afterwards weights, flags, buffers and random numbers are as they were, also if this raises."""
        modules = list(self.model.modules())
        modes = [module.training for module in modules]
        norms = [m for m in modules if isinstance(m, _NormBase)] if self.mode == "train" else []
        tracking = [norm.track_running_stats for norm in norms]
        buffers = [(m, name, t, t.clone()) for m in modules for name, t in m._buffers.items() if t is not None]
        noise = torch.random.get_rng_state()  # of which a DataLoader takes some on each walk
        try:
            self.model.eval()
            for norm in norms:
                norm.training, norm.track_running_stats = True, False
                norm._buffers.update({name: None for name in ("running_mean", "running_var") if name in norm._buffers})  # instance norm would move them
            yield
        finally:
            torch.random.set_rng_state(noise)
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
        """Inputs, targets and size of each (micro-)batch that has a sample; each walk must give the samples that the first one did."""
        count, walk = 0, Walk()
        for batch in self.data:
            x, y = _pair(batch)
            n = _size(x, y)
            if n == 0:
                continue
            self._walks.note(walk, x, y, n)
            count += n
            if self.micro_batch is None:
                yield x, y, n
            else:
                yield from self._split(x, y, self.micro_batch)
        if count == 0:
            if self.samples is None:
                raise Refusal("data is empty: there is no loss to measure")
            raise Refusal(f"data gave {self.samples} samples on the first walk and nothing on a later one: pass a list or a DataLoader, not a spent generator")
        if self.samples not in (None, count):
            raise Refusal(
                f"data gave {self.samples} samples on the first walk and {count} on a later one: pass a list or a DataLoader that gives the same each time"
            )
        self._walks.compare(walk)
        self.samples = count

    def _split(self, x: Any, y: Any, size: int) -> Iterator[Piece]:
        for name, value in (("inputs", x), ("targets", y)):
            if not isinstance(value, Tensor):
                raise Refusal(
                    f"micro_batch splits tensors, and the {name} of a batch are a {type(value).__name__}: leave it out, and make the batches of data smaller"
                )
        if x.shape[:1] != y.shape[:1] or x.dim() == 0:
            raise Refusal(
                f"micro_batch splits inputs and targets alike, and a batch has inputs of the shape {tuple(x.shape)} and targets of the shape {tuple(y.shape)}: "
                "give both a row for each sample, or leave it out"
            )
        pieces = [(a, b, len(b)) for a, b in zip(x.split(size), y.split(size), strict=True)]
        if len(pieces) > 1 and self.samples is None:  # each batch of the first walk: labels to ignore may come in any of them
            self._try_to_split(pieces[:2])
        yield from pieces

    @torch.no_grad()
    def _try_to_split(self, pieces: Sequence[Piece]) -> None:
        """Refuse a loss of two pieces that is not the mean of theirs; what the model gives for each is joined, so that its own rounding does not count."""
        outs = [self.model(x) for x, _, _ in pieces]
        leaves = [(leaf, n) for out, (_, _, n) in zip(outs, pieces, strict=True) for leaf in tree_leaves(out)]
        if not all(isinstance(leaf, Tensor) and leaf.shape[:1] == (n,) for leaf, n in leaves):
            return  # these cannot be joined
        losses = [self.of(out, y) for out, (_, y, _) in zip(outs, pieces, strict=True)]
        whole = self.of(tree_map(lambda *rows: torch.cat(rows), *outs), torch.cat([y for _, y, _ in pieces]))
        apart, together = _mean([(float(loss), n) for loss, (_, _, n) in zip(losses, pieces, strict=True)]), float(whole)
        floats = [leaf for leaf in (whole, *(leaf for leaf, _ in leaves)) if leaf.is_floating_point()]
        allowed = ROUNDING * max((torch.finfo(t.dtype).eps * max(abs(together), float(t.abs().nan_to_num(0.0, 0.0).mean())) for t in floats), default=0.0)
        if not math.isclose(apart, together, abs_tol=allowed) and not (math.isnan(apart) and math.isnan(together)):
            raise Refusal(
                f"micro_batch needs a loss_fn that is a mean over samples: of two pieces of a batch it gives {apart:.6g} on average, and {together:.6g} for "
                "both at once (weights of classes? ignore_index?). Leave micro_batch out, and make the batches of data smaller"
            )

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
        if not all(p.requires_grad for p in self.weights.params):
            frozen = [name for name, p in self.model.named_parameters() if not p.requires_grad and any(p is own for own in self.weights.params)]
            raise Refusal(f"weights were frozen after this was built for them: {', '.join(frozen)}. Build it anew, or unfreeze them")
        found = torch.autograd.grad(loss, self.weights.params, create_graph=create_graph, allow_unused=True) if loss.requires_grad else ()
        if all(g is None for g in found):
            raise Refusal(
                "loss_fn(model(x), y) reaches no trainable parameter of the model: is it computed from the model's outputs? "
                "Was it detached, or computed under torch.no_grad or torch.inference_mode?"
            )
        return found

    @torch.no_grad()
    def value(self, score: Callable[[Any, Any], Tensor] | None = None) -> tuple[float, float | None]:
        """The mean loss where the weights are, and the mean of the entries of ``score(outputs, y)`` if asked for (such as one per label: whether it is hit)."""
        losses, scored, scores = list[tuple[float, int]](), 0.0, 0
        for loss, (out, y), n in self.batches():
            losses.append((float(loss), n))
            if score is not None:
                found = score(out, y)
                scored, scores = scored + float(found.sum()), scores + found.numel()
        return _mean(losses), scored / scores if score is not None else None

    @torch.enable_grad()
    def value_and_grad(self) -> tuple[float, Vector]:
        """The mean loss and its gradient where the weights are; ``p.grad`` is not touched."""
        sums = [torch.zeros_like(p, requires_grad=False) for p in self.weights.params]
        losses = list[tuple[float, int]]()
        for loss, _, n in self.batches():
            for s, g in zip(sums, self.gradient(loss), strict=True):
                if g is not None:
                    s.add_(g, alpha=n)
            losses.append((float(loss.detach()), n))
        return _mean(losses), Vector(sums, self.weights.cut) / sum(n for _, n in losses)


def _mean(losses: Sequence[tuple[float, int]]) -> float:
    """Of losses of batches, each with its size; of one batch its loss to the last bit, which ``loss * n / n`` is not."""
    count = sum(n for _, n in losses)
    return sum(loss * (n / count) for loss, n in losses)


def _pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        what = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, (tuple, list)) else type(batch).__name__
        raise Refusal(f"each batch of data must be a pair (inputs, targets), and one is a {what}: pass [(x, y), ...] or a DataLoader")
    x, y = batch
    return x, y


def _size(x: Any, y: Any) -> int:
    """How many samples a batch has: a row of the targets or else of the inputs is one, or an entry of a list of targets, each with tensors of its own."""
    for value in (y, x):
        if isinstance(value, Tensor) and value.dim():
            return len(value)
    if isinstance(y, (list, tuple)) and y and all(isinstance(target, Mapping) for target in y):
        return len(y)  # as for detection; that an image with three channels has three boxes means nothing
    sizes = {len(leaf) for leaf in tree_leaves((x, y)) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(sizes) == 1:
        return sizes.pop()
    if isinstance(y, (list, tuple)):
        return len(y)
    raise Refusal("a batch of data does not say how many samples it has: give its inputs or its targets as tensors with a row for each sample")
