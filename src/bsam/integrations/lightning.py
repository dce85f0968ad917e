"""Lightning: sharpness-aware optimizers in automatic optimization."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.errors import BsamRuntimeError, BsamTypeError
from ..core.method_info import Need
from ..core.optimizer import SharpnessAware
from ..core.ranks import find_ddp
from ..methods.msam import MSAM

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule as _Base
else:  # neither Lightning nor pytorch_lightning is imported here: the mixin goes with both
    _Base = object

STRATEGIES = {"SingleDeviceStrategy", "DDPStrategy"}  # these and what derives from them


@dataclass
class _FirstPass:
    """A call of ``training_step``, and the random generators with their states before it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    states: list[tuple[torch.Generator, Tensor]]
    running: bool = True


class SharpnessAwareMixin(_Base):
    """Make a LightningModule train exactly with a sharpness-aware optimizer in automatic optimization.

    Name it before the LightningModule, return the optimizer from ``configure_optimizers`` with ``self`` as its model,
    and leave the rest as it is. The first pass of a step is the ``training_step`` that Lightning runs; the later ones
    run it again at perturbed weights, with the same batch and the same random draws. What the Trainer does with the
    gradient, such as ``gradient_clip_val``, ``accumulate_grad_batches`` and loss scaling, it does with the direction.
    In later passes ``self.log`` does nothing, torchmetrics that are attributes of the module keep their state, and
    :attr:`extra_pass` is True, for what else ``training_step`` does once per batch.

    With other optimizers, and with ``automatic_optimization = False``, the mixin changes nothing. Refused are MSAM,
    whose only pass is not at ``w``, ESAM and K-SAM, which choose samples, ``m_sharpness``, ``dataloader_iter``, and
    strategies other than a single device and DDP.

    Example::

        class Net(SharpnessAwareMixin, L.LightningModule):
            def training_step(self, batch, batch_idx):
                x, y = batch
                loss = F.cross_entropy(self.net(x), y)
                self.log("loss", loss)
                return loss

            def configure_optimizers(self):
                return bsam.BSAM(torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9), self)
    """

    #: Whether ``training_step`` runs for a later pass of a step.
    extra_pass: bool = False
    _first_pass: _FirstPass | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        names = [each.__name__ for each in cls.__mro__]
        if "LightningModule" in names[: cls.__mro__.index(SharpnessAwareMixin)]:
            raise BsamTypeError(
                f"{cls.__name__} names SharpnessAwareMixin after LightningModule, whose methods then come first: write "
                f"`class {cls.__name__}(SharpnessAwareMixin, LightningModule)`"
            )
        owner = next((each for each in cls.__mro__ if "training_step" in vars(each)), None)
        if owner is not None and owner.__name__ != "LightningModule":
            step = vars(owner)["training_step"]
            if not hasattr(step, "_notes_first_pass"):
                cls.training_step = _noting_first_pass(step)  # type: ignore[method-assign]

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log as usual; in later passes do nothing."""
        if not self.extra_pass:
            super().log(*args, **kwargs)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Add the direction to ``p.grad``; ``loss`` is that of the first pass."""
        by_trainer = self._fabric is None and self.automatic_optimization
        optimizer = self.trainer.optimizers[0] if by_trainer else None
        if not isinstance(optimizer, SharpnessAware):
            super().backward(loss, *args, **kwargs)
            return
        trainer, first = self.trainer, self._first_pass
        _check(self, optimizer)
        assert first is not None
        self._first_pass = None  # which holds the batch
        ddp = find_ddp(trainer.strategy.model)
        if ddp is not None:
            optimizer._ranks.use(ddp)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        ready = [loss]
        after = [(generator, generator.get_state()) for generator, _ in first.states]

        def closure() -> Tensor:
            if ready:
                _set(after)
                return ready.pop() if scaler is None else _backward_unscaled(ready.pop(), scaler)
            with self._extra_pass():
                output = trainer.strategy.training_step(*first.args, **first.kwargs)
            loss = output["loss"] if isinstance(output, Mapping) else output
            if loss is None:
                raise BsamRuntimeError(
                    "training_step returned a loss in the first pass of a step and None in a later one: decide by the "
                    "batch, not by the weights, whether to skip it"
                )
            return loss / trainer.accumulate_grad_batches

        _set(first.states)  # `optimizer` saves the states before the first pass, for later ones, and those after it
        try:
            optimizer.backward(closure, scaler)
        finally:
            if ready:
                _set(after)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Take the step on what the closure prepared; none if ``training_step`` returned None."""
        inner = getattr(optimizer, "optimizer", optimizer)
        with _closure_first(inner) if isinstance(inner, SharpnessAware) else contextlib.nullcontext():
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    @contextlib.contextmanager
    def _extra_pass(self) -> Iterator[None]:
        torchmetrics = sys.modules.get("torchmetrics")  # where it is not imported, there are no metrics
        metrics = [] if torchmetrics is None else [m for m in self.modules() if isinstance(m, torchmetrics.Metric)]
        before = [{name: _copied(value) for name, value in vars(metric).items()} for metric in metrics]
        self.extra_pass = True
        try:
            yield
        finally:
            self.extra_pass = False
            for metric, attributes in zip(metrics, before, strict=True):
                vars(metric).update(attributes)


def _noting_first_pass(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a ``training_step`` so that it can be run again; the outermost call counts where one calls its parent's."""

    @functools.wraps(step)
    def training_step(self: SharpnessAwareMixin, *args: Any, **kwargs: Any) -> Any:
        outer = self._first_pass
        if self.extra_pass or not self.automatic_optimization or (outer is not None and outer.running):
            return step(self, *args, **kwargs)
        generators = [torch.default_generator]
        if self.device.type == "cuda":
            generators.append(torch.cuda.default_generators[self.device.index])
        first = self._first_pass = _FirstPass(args, kwargs, [(g, g.get_state()) for g in generators])
        try:
            return step(self, *args, **kwargs)
        finally:
            first.running = False

    training_step._notes_first_pass = True  # type: ignore[attr-defined]
    return training_step


def _check(module: SharpnessAwareMixin, optimizer: SharpnessAware) -> None:
    """Raise an error for what would not be exact."""
    strategy, first = module.trainer.strategy, module._first_pass
    problem = None
    if optimizer.m_sharpness:
        problem = "m_sharpness=True needs a first pass without DDP's reduction, and Lightning's has it: leave it out"
    elif isinstance(optimizer, MSAM) or Need.PER_SAMPLE_LOSSES in optimizer.needs:
        problem = (
            f"the first pass of {optimizer.method()} is not the loss of the whole batch at w, which Lightning computes:"
            " set automatic_optimization = False and call `optimizer.backward(closure)` and `optimizer.step()` in "
            "training_step"
        )
    elif not STRATEGIES & {each.__name__ for each in type(strategy).__mro__}:
        problem = f"the strategy {type(strategy).__name__} is not supported: take a single device or DDP"
    elif optimizer._step_state.phase == "in_backward":
        problem = (
            f"{type(module).__name__}.optimizer_step calls optimizer.step: call super().optimizer_step(epoch, "
            "batch_idx, optimizer, optimizer_closure) instead"
        )
    elif first is None:
        problem = "training_step was replaced after the class was made, so that it cannot be run again: override it"
    elif any(isinstance(argument, Iterator) for argument in (*first.args, *first.kwargs.values())):
        problem = "training_step takes dataloader_iter, so that each pass would see another batch: take batch instead"
    if problem is not None:
        raise BsamRuntimeError(problem)


@contextlib.contextmanager
def _closure_first(optimizer: SharpnessAware) -> Iterator[None]:
    """Let ``optimizer.step(closure)`` call the closure, which calls ``backward``, and then take the step.

    ``step`` is replaced on the object, as schedulers do: the Trainer's hooks and its scaler see the optimizer itself.
    """
    attributes, step = vars(optimizer), optimizer.step
    replaced = attributes.get("step")

    def closure_first(closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        if optimizer._step_state.phase == "ready":
            step()
        return loss

    attributes["step"] = closure_first
    try:
        yield
    finally:
        del attributes["step"]
        if replaced is not None:
            attributes["step"] = replaced


def _backward_unscaled(loss: Tensor, scaler: torch.amp.GradScaler) -> Tensor:
    """Run backward on a loss that Lightning has scaled already, and return the loss without the scale."""
    if torch.is_grad_enabled():
        loss.backward()
    return loss.detach() / scaler.scale(torch.ones_like(loss))


def _set(states: list[tuple[torch.Generator, Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)


def _copied(value: Any) -> Any:
    """Copy what a metric updates in place: a tensor, or a list of tensors."""
    return value.clone() if isinstance(value, Tensor) else list(value) if isinstance(value, list) else value
