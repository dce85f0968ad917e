"""The mean loss over a data set, as a function of the weights, that leaves the model as it was."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils._pytree import tree_leaves, tree_map

from ..core.checks import check_count
from ..core.errors import BsamRuntimeError, BsamTypeError, BsamValueError
from ..core.vector import Vector
from ..core.weights import Weights
from .batches import halves, has_rows, joined, pair, size_of, split
from .checksum import agree, checksum
from .second_derivatives import check_graph

Batches: TypeAlias = Iterable[tuple[Any, Any]]
Piece: TypeAlias = tuple[Any, Any, float]  # inputs, targets, and their weight in the mean
LossFunction: TypeAlias = Callable[[Any, Any], Tensor]
BatchWeight: TypeAlias = Callable[[Any, Any], Any]

ROUNDING = 16.0  # machine epsilons, times the size of losses and outputs: how close two ways to one loss can be


class DatasetLoss:
    """``loss_fn(model(x), y)``, averaged over all samples of ``data``, whatever the sizes of its batches.

    Args:
        model: the network; its trainable parameters are the variables.
        loss_fn: the mean loss of a batch. Where there are several batches, a loss that is not a mean over samples (a
            sum, ``ignore_index``, class weights) is refused: the result would depend on how the data is cut into
            batches.
        data: the batches ``(x, y)``; iterated anew for every evaluation, so no generator. Data that gives other samples
            in a later pass is refused.
        micro_batch: the most samples to hold a graph for at a time; None takes batches as they come.
        mode: ``"eval"``: batch norm uses its running statistics. ``"train"``: it uses those of each batch, and updates
            nothing. Dropout is off in both. A tracked instance norm is treated alike.
        batch_weight: ``batch_weight(x, y)`` is the weight of a (micro-)batch in the mean, such as the number of labels
            that are not ignored; batches of weight 0 are left out. None: the number of samples, and the loss is
            checked.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        data: Batches,
        micro_batch: int | None = None,
        mode: str = "eval",
        batch_weight: BatchWeight | None = None,
    ) -> None:
        if mode not in ("eval", "train"):
            raise BsamValueError(
                f'mode must be "eval" (running statistics of batch norm) or "train" (those of the batch), got {mode!r}'
            )
        if batch_weight is not None and not callable(batch_weight):
            raise BsamTypeError(
                f"batch_weight must be a function of inputs and targets, got {type(batch_weight).__name__}"
            )
        if isinstance(data, Iterator):
            raise BsamRuntimeError(
                "data is iterated more than once, and this is an iterator: pass a list or a DataLoader"
            )
        if micro_batch is not None and mode == "train":
            raise BsamValueError(
                'micro_batch would change the batches whose statistics mode="train" uses: leave one of them out, or '
                "make the batches of data smaller"
            )
        if micro_batch is not None and any(
            isinstance(m, _BatchNorm) and m.running_mean is None for m in model.modules()
        ):
            raise BsamRuntimeError(
                "micro_batch would change the batches whose statistics a batch norm without running statistics uses: "
                "leave it out, and make the batches of data smaller"
            )
        self.model, self.loss_fn, self.data, self.mode, self.batch_weight = model, loss_fn, data, mode, batch_weight
        self.micro_batch = None if micro_batch is None else check_count("micro_batch", micro_batch)
        self.weights = Weights()
        self.weights.refresh([{"params": list(model.parameters())}])
        if not self.weights.params:
            raise BsamRuntimeError(
                "model has no trainable parameter: there is nothing to differentiate by. Are they all frozen?"
            )
        self.samples: int | None = None  # of the first pass
        self.checked = batch_weight is not None  # whether the loss is a mean over samples
        self.foreign: list[Tensor] = []  # parameters that the loss must not depend on
        self._first_pass: tuple[Tensor, bool] | None = (
            None  # its checksums, and whether other passes can be compared with it
        )

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Set the mode asked for; afterwards weights, flags, buffers and random numbers are as before, also if this
        raises.

        Compiled parts run eagerly, and recurrent networks without cuDNN: neither has a second derivative, nor cuDNN's
        recurrent networks a first one in eval mode.
        """
        self._check_parameters()
        modules = list(self.model.modules())
        modes = [module.training for module in modules]
        norms = [m for m in modules if isinstance(m, _NormBase)] if self.mode == "train" else []
        tracking = [norm.track_running_stats for norm in norms]
        buffers = [(m, name, t, t.clone()) for m in modules for name, t in m._buffers.items() if t is not None]
        embeddings = [m for m in modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.max_norm is not None]
        rescaled = [(m.weight, m.weight.detach().clone()) for m in embeddings]
        noise = torch.random.get_rng_state()  # a DataLoader draws from it in each pass
        cudnn = torch.backends.cudnn.enabled
        dynamo = "torch._dynamo" in sys.modules  # nothing can be compiled before this is imported
        with torch.compiler.set_stance("force_eager") if dynamo else contextlib.nullcontext():
            try:
                self.model.eval()
                for norm in norms:
                    norm.training, norm.track_running_stats = True, False
                    held = [name for name in ("running_mean", "running_var") if name in norm._buffers]
                    norm._buffers.update(dict.fromkeys(held))  # instance norm would update them
                if any(isinstance(m, nn.RNNBase) for m in modules):
                    torch.backends.cudnn.enabled = False
                yield
            finally:
                torch.backends.cudnn.enabled = cudnn
                torch.random.set_rng_state(noise)
                self.weights.restore()
                for module, mode in zip(modules, modes, strict=True):
                    module.training = mode
                for norm, tracked in zip(norms, tracking, strict=True):
                    norm.track_running_stats = tracked
                for module, name, buffer, _ in buffers:
                    module._buffers[name] = buffer
                _restore([*((t, before) for _, _, t, before in buffers), *rescaled])

    def _check_parameters(self) -> None:
        named = list(self.model.named_parameters())
        now, params = [p for _, p in named if p.requires_grad], self.weights.params
        if len(now) == len(params) and all(p is own for p, own in zip(now, params, strict=True)):
            return
        frozen = [name for name, p in named if not p.requires_grad and any(p is own for own in params)]
        if frozen:
            raise BsamRuntimeError(
                f"parameters were frozen after this was built for them: {', '.join(frozen)}. Build it anew, or "
                "unfreeze them"
            )
        raise BsamRuntimeError(
            "the model has other trainable parameters than when this was built (a layer was replaced, added or "
            "unfrozen): build it anew"
        )

    def pieces(self) -> Iterator[Piece]:
        """Inputs, targets and weight of each (micro-)batch that has a sample. Each pass must give the samples of the
        first.
        """
        count, sums, shapes = 0, list[Tensor](), set[Any]()
        for batch in self.data:
            x, y = pair(batch)
            n = size_of(x, y)
            if n == 0:
                continue
            sums.append(checksum(x, y, n))
            shapes.add(tuple(t.shape[t.shape[:1] == (n,) :] for t in tree_leaves((x, y)) if isinstance(t, Tensor)))
            count += n
            for piece in [(x, y, n)] if self.micro_batch is None else split(x, y, self.micro_batch):
                weight = piece[2] if self.batch_weight is None else _number(self.batch_weight(*piece[:2]))
                if weight > 0:
                    yield *piece[:2], weight
        if count == 0 and self.samples is None:
            raise BsamRuntimeError("data is empty: there is no loss to measure")
        if self.samples not in (None, count):
            raise BsamRuntimeError(
                f"data gave {self.samples} samples in the first pass and {count or 'nothing'} in a later one: "
                "pass a list or a DataLoader that gives the same each time"
            )
        self._compare(torch.stack(sums).cpu(), len(shapes) == 1)
        self.samples = count

    def has_samples(self, n: float) -> bool:
        """Whether there are ``n`` samples or more."""
        if self.samples is not None:
            return self.samples >= n
        with self.measuring():
            counts = itertools.accumulate(size_of(*pair(batch)) for batch in self.data)
            return any(count >= n for count in counts)

    def _compare(self, sums: Tensor, alike: bool) -> None:
        """Refuse a pass that is not like the first one. Batches must be the same in train mode, samples in eval mode.

        Where the shapes of samples differ, padding may depend on who is in a batch, and only the batches can be
        compared.
        """
        batches = self.mode == "train"
        sums, comparable = (sums, True) if batches else (sums.sum(0), alike)
        if self._first_pass is None:
            self._first_pass = sums, comparable
        elif comparable and self._first_pass[1] and not agree(sums, self._first_pass[0]):
            raise BsamRuntimeError(
                f"data gives other {'batches' if batches else 'samples'} in each pass: take shuffle=False, "
                "drop_last=False "
                "and no random augmentation. Or does the model change its inputs in place?"
            )

    def of(self, out: Any, y: Any) -> Tensor:
        """The loss of outputs, which must be one number."""
        loss = self.loss_fn(out, y)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            shape = f"the shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"the type {type(loss).__name__}"
            raise BsamRuntimeError(f"loss_fn must return the mean loss of a batch, a 0-dim tensor; it gave {shape}")
        if loss.is_complex():
            raise BsamRuntimeError(
                "loss_fn returned a complex number: a loss is real. Take its real part or its absolute value"
            )
        return loss

    def batches(self, pieces: Iterable[Piece] | None = None) -> Iterator[tuple[Tensor, tuple[Any, Any], float]]:
        """The loss of each (micro-)batch, its outputs and targets, and its weight. ``pieces`` replaces a pass over the
        data.
        """
        check, before = pieces is None and not self.checked, None
        for x, y, weight in self.pieces() if pieces is None else pieces:
            out = self.model(x)
            yield self.of(out, y), (out, y), weight
            if check:
                now = x, *tree_map(_detached, (out, y)), int(weight)
                if before is not None:
                    self._check_mean(before, now)
                before = now
        self.checked |= check

    @torch.no_grad()
    def _check_mean(self, *batches: tuple[Any, Any, Any, int]) -> None:
        """Refuse a loss that is not a mean over samples, seen from two batches together and apart.

        Batches whose outputs cannot be joined are halved; where outputs are not by sample, their inputs are. What
        allows neither is not checked.
        """
        outputs = [((out, y), n) for _, out, y, n in batches]
        rows = all(has_rows(t, n) for _, out, _, n in batches for t in tree_leaves(out))
        both = joined(outputs) if rows else None
        cases: list[tuple[Any, Sequence[Any]]] = [] if both is None else [(both, outputs)]
        if rows and both is None:
            cases = [(batch, halves(batch)) for batch in outputs]
        elif not rows and self.mode == "eval":
            inputs = [halves(((x, y), n)) for x, _, y, n in batches]
            cases = [
                (whole, [((self.model(x), y), n) for (x, y), n in parts])
                for whole, parts in zip(outputs, inputs, strict=True)
            ]
        for (whole, n), parts in cases:
            if not parts:
                continue
            try:
                together = self.of(*whole)
                apart = _mean([(float(self.of(*part)), size) for part, size in parts])
            except (RuntimeError, ValueError, IndexError, TypeError):
                continue  # the loss needs a batch as it comes
            floats = [t for t in (together, *tree_leaves(whole[0])) if isinstance(t, Tensor) and t.is_floating_point()]
            size = max(float(t.float().abs().nan_to_num(0.0, 0.0).mean()) for t in floats)
            eps = torch.finfo(together.dtype).eps
            allowed = size * (ROUNDING * eps if rows else eps**0.5)  # the model's own rounding, if it runs again
            close = math.isclose(apart, float(together), abs_tol=allowed)
            if not close and not (math.isnan(apart) and math.isnan(float(together))):
                raise BsamRuntimeError(
                    f"loss_fn is not a mean over samples: {n} samples have the loss {float(together):.6g}, and "
                    f"{apart:.6g} on "
                    "average over two parts (reduction='sum'? class weights? ignore_index?). The result would depend "
                    "on the "
                    "batches: take a mean, or one batch, or give batch_weight, such as lambda x, y: (y != -100).sum()"
                )

    def gradient(self, loss: Tensor, create_graph: bool = False) -> tuple[Tensor | None, ...]:
        """The derivative of a batch's loss by each parameter, None for those it does not depend on."""
        check_graph(loss, twice=create_graph, foreign=self.foreign)
        params = self.weights.params
        found: tuple[Tensor | None, ...] = ()
        if loss.requires_grad:
            found = torch.autograd.grad(loss, params, create_graph=create_graph, allow_unused=True)
        if all(g is None for g in found):
            raise BsamRuntimeError(
                "loss_fn(model(x), y) reaches no trainable parameter of the model: is it computed from the model's "
                "outputs? "
                "Was it detached, or computed under torch.no_grad or torch.inference_mode?"
            )
        return found

    @torch.no_grad()
    def value(self, score: Callable[[Any, Any], Tensor] | None = None) -> tuple[float, float | None]:
        """The mean loss at the current weights, and the mean of the entries of ``score(outputs, y)`` if asked for."""
        losses, scored, scores = list[tuple[float, float]](), 0.0, 0
        for loss, (out, y), weight in self.batches():
            losses.append((float(loss), weight))
            if score is not None:
                found = score(out, y)
                scored, scores = scored + float(found.sum()), scores + found.numel()
        return _mean(losses), scored / scores if score is not None else None

    @torch.enable_grad()
    def value_and_grad(self) -> tuple[float, Vector]:
        """The mean loss and its gradient at the current weights; ``p.grad`` is not touched."""
        sums = [torch.zeros_like(p, requires_grad=False) for p in self.weights.params]
        losses = list[tuple[float, float]]()
        for loss, _, weight in self.batches():
            for s, g in zip(sums, self.gradient(loss), strict=True):
                if g is not None:
                    s.add_(g, alpha=weight)
            losses.append((float(loss.detach()), weight))
        return _mean(losses), Vector(sums, self.weights.layout) / sum(weight for _, weight in losses)


@torch.no_grad()
def _restore(tensors: list[tuple[Tensor, Tensor]]) -> None:
    """Undo what modules write to buffers and embeddings in eval mode, too."""
    for t, before in tensors:
        if not torch.equal(t, before):  # or a graph of the user's that needs it would count it as changed
            t.copy_(before)


def _number(weight: Any) -> float:
    """The weight of a batch, checked."""
    try:
        number = float(weight)
    except (TypeError, ValueError) as error:
        raise BsamTypeError(f"batch_weight must return one number, got {type(weight).__name__}") from error
    if not (number >= 0 and math.isfinite(number)):
        raise BsamValueError(f"batch_weight must return a finite number that is not negative, got {number!r}")
    return number


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _mean(losses: Sequence[tuple[float, float]]) -> float:
    """Of losses of batches, each with its weight; of one batch its loss to the last bit, which ``loss * n / n`` is not."""
    total = sum(weight for _, weight in losses)
    if total == 0:
        raise BsamRuntimeError("batch_weight is 0 for every batch: there is no loss to measure")
    return sum(loss * (weight / total) for loss, weight in losses)
