"""Lightning: sharpness-aware optimizers in automatic optimization."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..common.errors import BsamRuntimeError, BsamTypeError
from ..common.method_info import Need
from ..core.optimizer import SharpnessAware
from ..core.ranks import find_ddp
from ..core.undo import Undo
from ..methods.msam import MSAM
from .batch import check_unchanged, new_containers, tensor_versions

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule as _Base
else:  # imports neither lightning nor pytorch_lightning: the mixin works with both
    _Base = object

STRATEGIES = {"SingleDeviceStrategy", "DDPStrategy"}  # and classes that users derive from them


@dataclass
class _FirstPass:
    """A call of ``training_step`` and its arguments."""

    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    versions: list[tuple[Tensor, int]]
    running: bool = True


class SharpnessAwareMixin(_Base):
    """Train a LightningModule with a sharpness-aware optimizer in automatic optimization.

    Put it before LightningModule among the base classes, return the optimizer from ``configure_optimizers`` with
    ``self`` as its model, and leave the rest as it is. The first pass of a step is the ``training_step`` that Lightning
    runs; the later passes run it again at perturbed weights, with the same batch and the same random draws.
    ``gradient_clip_val``, ``accumulate_grad_batches`` and loss scaling act on the direction instead of the gradient.
    In later passes ``self.log`` does nothing, torchmetrics that are attributes of the module keep their state, and
    :attr:`extra_pass` is True: check it if ``training_step`` does something else once per batch. Each pass gets fresh
    copies of the batch's lists, tuples and dicts, with the same objects in them; changing a tensor of the batch in
    place raises an error.

    With ``automatic_optimization = False``, the only effect of the mixin is that ``self.optimizers().step()`` steps on
    the direction that ``backward`` prepared; with other optimizers, it has no effect. In automatic optimization, it
    raises an error for methods whose first pass is not at ``w`` (MSAM) or which choose samples (ESAM, K-SAM), for
    ``m_sharpness``, and for strategies other than a single device and DDP.

    Example::

        class Net(SharpnessAwareMixin, L.LightningModule):
            def training_step(self, batch, batch_idx):
                x, y = batch
                loss = F.cross_entropy(self.net(x), y)
                self.log("loss", loss)
                return loss

            def configure_optimizers(self):
                return bsam.BSAM(
                    torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9), self
                )
    """

    #: Whether ``training_step`` runs for a later pass of a step.
    extra_pass = False
    if TYPE_CHECKING:
        _first_pass: _FirstPass | None
    _first_pass = None  # without annotations, which TorchScript cannot read

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        names = [base.__name__ for base in cls.__mro__]
        if "LightningModule" in names[: cls.__mro__.index(SharpnessAwareMixin)]:
            raise BsamTypeError(
                f"{cls.__name__} has SharpnessAwareMixin after LightningModule, whose methods would take precedence: "
                f"write `class {cls.__name__}(SharpnessAwareMixin, LightningModule)`"
            )
        owner = next((base for base in cls.__mro__ if "training_step" in vars(base)), None)
        if owner is not None and owner.__name__ != "LightningModule":
            cls.training_step = _record_first_pass(vars(owner)["training_step"])  # type: ignore[method-assign]

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log as usual in the first pass, and nothing in later ones."""
        if not self.extra_pass:
            super().log(*args, **kwargs)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Add the direction to ``p.grad``; ``loss`` is the loss of the first pass."""
        optimizer = self._sharpness_aware()
        if optimizer is None:
            super().backward(loss, *args, **kwargs)
            return
        trainer, first = self.trainer, self._first_pass
        _check(self, optimizer)
        assert first is not None
        check_unchanged(first.versions, "training_step")
        self._first_pass = None  # frees the batch
        ddp = find_ddp(trainer.strategy.model)
        if ddp is not None:
            optimizer.ranks.use(ddp)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        ready = [loss]

        def closure() -> Tensor | None:
            if ready:
                if optimizer.is_perturbed:
                    raise BsamRuntimeError(_first_pass_problem(optimizer))
                return ready.pop() if scaler is None else _backward_unscaled(ready.pop(), scaler)
            args, kwargs = new_containers(first.arguments)
            with Undo() as undo, undo:
                self._begin_extra_pass(undo)
                output = trainer.strategy.training_step(*args, **kwargs)
            loss = output["loss"] if isinstance(output, Mapping) else output
            return loss if loss is None else loss / trainer.accumulate_grad_batches

        optimizer.backward(closure, scaler)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Step on the direction that the closure prepared; do nothing if ``training_step`` returned None."""
        inner = getattr(optimizer, "optimizer", optimizer)
        skips = getattr(self.trainer.fit_loop, "_skip_backward", False)  # in the extra epoch of weight averaging
        with Undo() as undo, undo:
            if isinstance(inner, SharpnessAware):
                _call_closure_first(undo, inner, skips)
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizers; ``step()`` of a sharpness-aware one steps on the direction ``backward`` prepared."""
        optimizers = super().optimizers(use_pl_optimizer)
        if use_pl_optimizer and self._fabric is None:
            for wrapper in optimizers if isinstance(optimizers, list) else [optimizers]:
                if isinstance(wrapper, SharpnessAware):
                    wrapper.step = functools.partial(_manual_step, wrapper)  # type: ignore[method-assign]
        return optimizers

    def _sharpness_aware(self) -> SharpnessAware | None:
        """Return the optimizer of automatic optimization if it is sharpness-aware, else None."""
        by_trainer = self._fabric is None and self._trainer is not None and self.automatic_optimization
        optimizers = self.trainer.optimizers if by_trainer else []
        return optimizers[0] if optimizers and isinstance(optimizers[0], SharpnessAware) else None

    def _begin_extra_pass(self, undo: Undo) -> None:
        torchmetrics = sys.modules.get("torchmetrics")  # there are no metrics unless it was imported
        metrics = [] if torchmetrics is None else [m for m in self.modules() if isinstance(m, torchmetrics.Metric)]
        for metric in metrics:
            undo.callback(vars(metric).update, {name: _copy(value) for name, value in vars(metric).items()})
        undo.set_attributes([(self, "extra_pass", True)])


def _record_first_pass(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a ``training_step`` so that it can be run again. If it calls its parent's, the outermost call counts."""

    @functools.wraps(step)
    def training_step(self: SharpnessAwareMixin, *args: Any, **kwargs: Any) -> Any:
        outer = self._first_pass
        optimizer = self._sharpness_aware()
        if self.extra_pass or (outer is not None and outer.running) or optimizer is None:
            return step(self, *args, **kwargs)
        optimizer.begin_first_pass()
        arguments = (args, kwargs)
        first = self._first_pass = _FirstPass(new_containers(arguments), tensor_versions(arguments))
        try:
            return step(self, *args, **kwargs)
        finally:
            first.running = False

    return training_step


def _check(module: SharpnessAwareMixin, optimizer: SharpnessAware) -> None:
    """Raise an error for settings under which training would not be exact."""
    strategy, problem = type(module.trainer.strategy), None
    lightnings = ("lightning.", "pytorch_lightning.")
    if optimizer.m_sharpness:
        problem = "m_sharpness=True needs the gradient of each rank, but Lightning averages over ranks: leave it out"
    elif isinstance(optimizer, MSAM) or {Need.PER_SAMPLE_LOSSES, Need.OUTPUTS} & {*optimizer.needs}:
        problem = _first_pass_problem(optimizer)
    elif next(kind.__name__ for kind in strategy.__mro__ if kind.__module__.startswith(lightnings)) not in STRATEGIES:
        problem = f"the strategy {strategy.__name__} is not supported: use a single device or DDP"
    elif module._first_pass is None:
        problem = "training_step was replaced after the class was created and cannot be run again: override it instead"
    if problem is not None:
        raise BsamRuntimeError(problem)


def _first_pass_problem(optimizer: SharpnessAware) -> str:
    return (
        f"the first pass of {optimizer.method()} is not just the mean loss at w, which Lightning computes: "
        "set automatic_optimization = False and call `optimizer.backward(closure)` and `optimizer.step()` in "
        "training_step"
    )


def _call_closure_first(undo: Undo, optimizer: SharpnessAware, skips: bool) -> None:
    """Let ``optimizer.step(closure)`` call the closure, which calls ``backward``, and then step, until ``undo``.

    If nothing was prepared, the step raises an error, unless ``skips`` is True or ``training_step`` returned None.
    This replaces only the object's ``step``, as schedulers do: the Trainer's hooks and scaler see the optimizer itself.
    """
    step = optimizer.step

    def closure_first(closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        if optimizer.is_ready or not (skips or (closure is not None and loss is None)):
            step()
        return loss

    undo.set_attributes([(optimizer, "step", closure_first)])


def _manual_step(wrapper: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
    """Take a step in manual optimization. If there is no closure, Lightning passes one that only calls its hooks."""
    method = wrapper.optimizer
    if closure is None and not method.is_ready:
        return method.step()  # raises
    with Undo() as undo, undo:
        if closure is None:
            _call_closure_first(undo, method, skips=False)
        return type(wrapper).step(wrapper, closure, **kwargs)


def _backward_unscaled(loss: Tensor, scaler: torch.amp.GradScaler) -> Tensor:
    """Run backward on a loss that Lightning has already scaled, and return the unscaled loss."""
    if torch.is_grad_enabled():
        loss.backward()
    return loss.detach() / scaler.scale(torch.ones_like(loss))


def _copy(value: Any) -> Any:
    """Copy a value that a metric may update in place: a tensor, or a list of tensors."""
    return value.clone() if isinstance(value, Tensor) else list(value) if isinstance(value, list) else value
