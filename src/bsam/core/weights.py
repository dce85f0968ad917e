"""The trained parameters: their values, which passes move and restore, and their gradients."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ..common.errors import BsamRuntimeError
from .passes import PassPart
from .ranks import Ranks
from .step_state import Results
from .tensors import BucketedTensors, Layout, clear_weight_caches, local, use_other_memory
from .undo import Undo
from .vector import BY_KEEP, BY_RESTART, Term, Vector, store

IN_BACKWARD = (
    "hooks of the parameters change them during backward, as an optimizer in backward does "
    "(register_post_accumulate_grad_hook): remove the hooks, and let base step on all parameters"
)


class Weights(PassPart):
    """The trainable parameters of an optimizer, moved in place and restored bit for bit from a backup.

    The backup is there only while the weights are away from ``w``; on the CPU, where allocating memory costs more than
    copying, it is kept between steps.
    """

    def __init__(self) -> None:
        self.params: list[Tensor] = []
        self.layout = Layout([])
        self.gradient_memory: list[BucketedTensors] = []  # kept between steps; see Gradients
        self.moved = False  # whether the parameters are away from w
        self._hooked: list[Tensor] = []  # parameters with hooks that run in backward and might step
        self._at_begin: list[Tensor] = []  # copies of these from the beginning of a pass
        self._saved = False  # whether w is in the backup
        self._signature: list[Any] = []
        self._tensors: BucketedTensors = []
        self._backup: BucketedTensors = []

    def refresh(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Read the parameter groups again: between steps, parameters may be added, frozen, moved or cast."""
        if self.moved or self._saved:  # if the last step was interrupted
            self.restore()
        trained = [(i, p) for i, group in enumerate(param_groups) for p in group["params"] if p.requires_grad]
        self.params = [p for _, p in trained]
        try:
            signature = [(i, type(p), p.device, p.dtype, p.shape, p.stride()) for i, p in trained]
        except (RuntimeError, ValueError) as error:
            if not any(is_lazy(p) for p in self.params):
                raise
            raise BsamRuntimeError(
                "base has lazy parameters, which get their shapes in the first forward pass: run the network once "
                "before training, as in `with torch.no_grad(): model(x)`"
            ) from error
        if signature != self._signature:
            self.layout = Layout(self.params, [i for i, _ in trained])
            self.gradient_memory = []
            self._backup = []
            self._signature = signature
        self._tensors = self.layout.split(self.params)
        if any("_in_backward_optimizers" in p.__dict__ for p in self.params):  # of torch.distributed.optim
            raise BsamRuntimeError(IN_BACKWARD)
        self._hooked = [p for p in self.params if p._post_accumulate_grad_hooks and self.layout.mesh is None]

    @property
    def on_one_gpu(self) -> bool:
        """Whether all parameters are real tensors on one GPU, and not sharded."""
        return self.layout.plain and [device.type for device in self.layout.devices] == ["cuda"]

    def cuda_generators(self) -> list[torch.Generator]:
        """Return torch's default generators of the parameters' CUDA devices."""
        devices = (device for device in self.layout.devices if device.type == "cuda")
        return [torch.cuda.default_generators[device.index] for device in devices]

    def allocate(self) -> BucketedTensors:
        """Return uninitialized memory with the sizes and the layout of the parameters."""
        return self.layout.split([torch.empty_like(p, requires_grad=False) for p in self.params])

    def move(self, to: Vector) -> None:
        """Move the parameters to ``w + to``, from any position."""
        self.begin_pass(0, to)

    def restore(self) -> None:
        """Copy ``w`` from the backup to the parameters if they have moved; the next move saves a new backup."""
        self.end_step(failed=False)

    @torch.no_grad()
    def begin_pass(self, number: int, at: Vector | None) -> None:
        """Move the parameters to ``w + at``, from any position; None restores ``w``."""
        if self.layout.mesh is not None:  # FSDP2 may replace the memory in the first forward pass
            self._tensors = self.layout.split(self.params)
        if self.moved:
            for tensors, backup in zip(self._tensors, self._backup, strict=True):
                torch._foreach_copy_(tensors, backup)
        elif (at is not None or self._hooked) and not self._saved:
            self._backup = self._backup or self.allocate()
            for tensors, backup in zip(self._tensors, self._backup, strict=True):  # all before the first moves:
                torch._foreach_copy_(backup, tensors)  # they may share memory
            self._saved = True
        self.moved = at is not None
        if at is not None:
            for k in range(len(self._tensors)):
                at.add_to(self._tensors, k)
        self._at_begin = [p.detach().clone() for p in self._hooked]
        clear_weight_caches()

    def check_unchanged(self) -> None:
        """Raise if hooks have changed the parameters in this pass."""
        pairs = zip(self._hooked, self._at_begin, strict=True)
        if not all(torch.allclose(p, begin, rtol=0, atol=0, equal_nan=True) for p, begin in pairs):
            self.moved = True
            raise BsamRuntimeError(IN_BACKWARD)

    def end_step(self, failed: bool) -> None:
        """Restore the parameters; the next move saves a new backup."""
        self.begin_pass(0, None)
        self._drop_backup()

    def commit(self) -> None:
        """Keep the current values as ``w``: the next move saves a new backup."""
        clear_weight_caches()
        self.moved = False
        self._drop_backup()

    def _drop_backup(self) -> None:
        self._saved = False
        if not self.layout.on_cpu:
            self._backup = []

    def go_elsewhere(self, undo: Undo, *, in_backup: bool = False) -> None:
        """Let the parameters use other memory until ``undo``, so that moving them leaves ``w`` in place.

        Only for parameters :attr:`on_one_gpu`, which are at ``w``. With ``in_backup`` they use the backup's memory.
        """
        w = [[t.data for t in bucket] for bucket in self._tensors]
        if in_backup:
            self._backup = self._backup or self.allocate()
        use_other_memory(undo, self.params, self.layout.join(self._backup) if in_backup else None)
        undo.callback(self._come_back, self._backup)
        self._backup = w
        self.moved = True

    def _come_back(self, backup: BucketedTensors) -> None:
        self._backup = backup
        self.commit()


class Gradients(PassPart):
    """``p.grad`` in one step: takes the gradient of each pass, and writes the direction at the end of the step.

    :meth:`take` turns ``p.grad`` into a vector without a copy, unless DDP or the CUDA graphs of ``torch.compile`` may
    write to its memory again, or its strides differ from the parameter's. On the CPU, allocating costs more than
    copying: before the next pass, the gradient is copied to memory that is kept between steps and its tensors are
    freed, so that the allocator gives them to the next pass. The direction overwrites the last gradient on the CPU, and
    the first one elsewhere; ``results`` are evaluated before, in the memory of other gradients if possible.
    """

    def __init__(self, weights: Weights, ranks: Ranks | None, results: Results | None = None) -> None:
        self.direction: Vector | None = None  # what to add to ``p.grad``
        self.results = results or Results()
        self.has_grad = [False] * len(weights.params)  # whether a parameter got a gradient in some pass
        self._weights = weights
        self._ranks = ranks
        self._earlier = [p.grad for p in weights.params]  # from before the first pass
        self._unused = [*weights.gradient_memory]  # kept memory that holds no gradient
        self._latest: Term | None = None  # the gradient of the latest pass
        self._terms: list[ref[Term]] = []  # the gradients of this step

    def begin_pass(self, number: int, at: Vector | None) -> None:
        """Clear ``p.grad`` before the first pass; before later ones, on the CPU, free the previous gradient."""
        if number == 0:
            for p in self._weights.params:
                p.grad = None
        if self._latest is not None and not self._latest.is_given_up and self._weights.layout.on_cpu:
            if not self._unused:
                self._unused = [self._weights.allocate()]
                self._weights.gradient_memory += self._unused
            memory = self._unused.pop(0)
            for source, target in zip(self._latest.buckets, memory, strict=True):
                torch._foreach_copy_(target, source)
            self._latest.buckets = memory
            self._latest.reused = True
        self._latest = None

    def restart(self) -> None:
        """Forget the gradients of the passes so far: their memory is used again."""
        super().restart()
        self.has_grad = [False] * len(self.has_grad)
        self._latest = None
        self._give_up(self._alive(), self.results.vectors, BY_RESTART)
        for v in self.results.vectors:
            if any(term.reused for term in v.terms):
                v.store_(None)
        self._unused = [*self._weights.gradient_memory]

    def leave_in_place(self) -> None:
        """Do not move the latest gradient: the passes that follow belong to observers."""
        self._latest = None

    def add(self, params: Sequence[Tensor], grads: list[Tensor | None]) -> None:
        """Add gradients to ``p.grad``, as ``backward`` does; ``grads`` is emptied, to free their memory."""
        for p in params:
            g = grads.pop(0)
            if g is not None:
                p.grad = g.clone() if p.grad is None else p.grad + g

    def take(self, wrt: Sequence[bool] | None = None) -> Vector:
        """Return ``p.grad`` as a vector, copied only if necessary, and set ``p.grad`` to None; None counts as zero."""
        params = self._weights.params
        grads = [p.grad if wrt is None or wrt[i] else None for i, p in enumerate(params)]
        for p in params:
            p.grad = None
        self.has_grad = [had or g is not None for had, g in zip(self.has_grad, grads, strict=True)]
        device = params[0].device
        copy = device.type == "cuda" and _written_by_cuda_graphs(device)
        tensors = (_unshared(g, p, copy) for g, p in zip(grads, params, strict=True))
        gradient = Vector(tensors, self._weights.layout, scratch=True)
        (self._latest,) = gradient.terms
        self._terms.append(ref(self._latest))
        return gradient

    def _alive(self) -> list[Term]:
        """Return the gradients of this step that something still refers to."""
        return [term for term in (reference() for reference in self._terms) if term is not None]

    def free(self, needed: Collection[Vector], reason: str) -> None:
        """Free the gradients that none of these vectors needs."""
        self._give_up(self._alive(), needed, reason)

    def keep_only(self, wanted: Collection[Vector], at: Vector | None) -> None:
        """Free everything but these vectors, also what only the perturbation ``at`` needs. Sums become one vector."""
        if not self._weights.layout.on_cpu:  # there, the sum would be one pass over the memory more
            self.store(wanted)
        self._give_up([*self._alive(), *([] if at is None else at.terms)], wanted, BY_KEEP)

    def store(self, wanted: Collection[Vector]) -> None:
        """Evaluate the sums among these vectors, in the memory of gradients that no other one of them needs."""
        store([v for v in wanted if len(v.terms) > 1], wanted, over_reused=True)
        self._terms += [ref(term) for v in wanted for term in v.terms if term.scratch]

    def _give_up(self, terms: Iterable[Term], needed: Collection[Vector], reason: str) -> None:
        kept = {term for v in needed for term in v.terms}
        for term in terms:
            if term in kept or not term.scratch or term.observed or term.is_given_up:
                continue
            if term.reused:
                self._unused.append(term.buckets)
            term.give_up(reason)

    def end_step(self, failed: bool) -> None:
        """Set ``p.grad`` to its earlier value plus the direction; to its earlier value if a pass failed."""
        grads = self._earlier if failed or self.direction is None else self._sums(self.direction)
        for p, g in zip(self._weights.params, grads, strict=True):
            p.grad = g

    def _sums(self, direction: Vector) -> list[Tensor | None]:
        """Return the earlier gradients plus the direction, in the memory of this step's gradients."""
        if not any(self.has_grad):
            raise BsamRuntimeError(
                "the loss does not depend on any parameter of base: does the closure call the model that base was "
                "built on?"
            )
        results = self.results.vectors
        store(results, [direction])  # the next line overwrites gradients
        buckets = direction.materialize_()
        entries = direction.layout.join(buckets)
        both = [(t, local(g)) for t, g in zip(entries, self._earlier, strict=True) if g is not None]
        has_grad = self.has_grad
        if self._ranks is not None:
            has_grad = self._ranks.has_grad_on_any_rank(has_grad)
            self._ranks.sync([g for _, g in both], entries)
        if both:
            torch._foreach_add_([t for t, _ in both], [g for _, g in both])
        sums = direction.layout.join(buckets, self._weights.params)
        return [t if has or g is not None else None for t, g, has in zip(sums, self._earlier, has_grad, strict=True)]


def _written_by_cuda_graphs(device: torch.device) -> bool:
    """Whether CUDA graphs of ``torch.compile`` may write the next gradients into the current ones' memory."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    return trees is not None and trees.get_manager(device.index, create_if_none_exists=False) is not None


def _unshared(g: Tensor | None, p: Tensor, copy: bool) -> Tensor:
    """Return a gradient that later passes do not overwrite, with its parameter's strides; copy it only if necessary.

    A view may belong to DDP's buckets. Foreach operations are fast if all strides agree.
    """
    if g is None:
        return torch.zeros_like(p, requires_grad=False)
    if g.layout != torch.strided:
        raise BsamRuntimeError(
            "sharpness-aware methods do not support sparse gradients: build nn.Embedding with sparse=False"
        )
    if copy or g._is_view() or g.is_conj() or g.is_neg() or g.stride() != p.stride():
        return torch.empty_like(p, requires_grad=False).copy_(g)
    return g
