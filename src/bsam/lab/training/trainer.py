"""Train and evaluate a network, one epoch at a time."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...common.errors import BsamTypeError, BsamValueError
from ...core.optimizer import SharpnessAware
from ...flatness.probe import Probe
from ...flatness.sharpness import Sharpness, sharpness
from ..common.termination import Terminated
from ..config import BASE, CAPTURABLE, Run, method_class
from ..tasks.splits import Shares
from ..tasks.task import Task
from .captured_steps import CapturedSteps
from .distributed import DistributedContext, Vote
from .environment import emulated_bf16, is_bf16_emulated, why_compile_fails
from .train_step import autocast, build_run_step, check_method

T = TypeVar("T")
# Optimizer settings that depend on this machine and are not loaded from a checkpoint. lr is a tensor if steps are
# captured; the schedule sets its value.
_MACHINE_SETTINGS = ("lr", "fused", "foreach", "capturable")
_SHUFFLE_STREAM, _TORCH_STREAM = 0x0DE, 0x4E57  # independent random numbers from the same (seed, epoch)


class Trainer:
    """A network with its optimizer and data.

    Args:
        run: the settings.
        task: the task.
        context: the processes that share the work.
        on_message: called with messages for the user.
        is_new: initialise the network; not needed if a checkpoint is loaded later.
        init: the file with the network to start from.
    """

    def __init__(
        self,
        run: Run,
        task: Task,
        context: DistributedContext,
        on_message: Callable[[str], None] = lambda sentence: None,
        is_new: bool = True,
        init: Path | None = None,
    ) -> None:
        parts = context.size * run.accumulate
        if run.batch % parts:
            times = f" times accumulate ({run.accumulate})" if run.accumulate > 1 else ""
            raise BsamValueError(
                f"batch must be a multiple of the number of processes ({context.size}){times}, got {run.batch}"
            )
        self.steps = task.samples // run.batch
        if not self.steps:
            raise BsamValueError(
                f"batch must be at most {task.samples}, the number of training samples; got {run.batch}"
            )
        check_method(run, task, context.size)
        self.run = run
        self.task = task
        self.context = context
        task.shares = Shares(context.rank, context.size, context.gather)
        self.network = task.network()
        say = on_message if context.is_main else lambda sentence: None
        for sentence in task.initialise(self.network, init) if is_new else ():
            say(sentence)
        self.average = None if run.ema is None else WeightAverage(self.network, run.ema)
        capturable = run.method == BASE or method_class(run.method).capturable
        capturable = capturable and run.base in CAPTURABLE and run.precision != "fp16"  # a scaler waits for the device
        self.captured = run.capture and capturable and context.device.type == "cuda" and context.size == 1
        failure = why_compile_fails(context.device) if run.compile else None
        self.compiled = run.compile and failure is None
        if failure is not None:
            say(f"torch.compile does not work on this machine ({failure}): continuing without it.")
        self._emulated = run.precision == "bf16" and is_bf16_emulated(context.device)
        if self._emulated:
            say("This CPU has no bf16 instructions: bf16 will be many times slower than fp32 (the default).")
        wrapped = context.wrap(self.network)
        model: nn.Module = torch.compile(wrapped) if self.compiled else wrapped  # type: ignore[assignment]
        total = self.steps * run.epochs
        self.train_step = build_run_step(run, task, model, total, self.captured, context.size, self.network)
        self.optimizer = self.train_step.optimizer
        self.probe: Probe | None = None
        if run.probe is not None and isinstance(self.optimizer, SharpnessAware):
            self.probe = Probe(run.probe).attach(self.optimizer)
        due = (lambda t: False) if self.probe is None else self.probe.due
        self.take_step = CapturedSteps(self.train_step, due, on_message) if self.captured else self.train_step.step
        self._begun: dict[str, Any] | None = None  # the state of an epoch that a signal interrupted

    def train_epoch(self, number: int, received: Callable[[], int] = lambda: 0) -> dict[str, Any]:
        """Train for an epoch, counted from 0, or for the rest of one that was interrupted.

        Args:
            number: the number of the epoch.
            received: returns the number of a signal, or 0. After a signal, all processes take the same number of
                steps and raise :class:`Terminated`; :meth:`state_dict` then includes the progress of the epoch, unless
                its loss is not finite.

        Returns:
            the mean of the steps' losses, each at the weights before the step; the learning rate of the last step,
            and its radii if they change during training; and the duration in seconds.
        """
        run, device = self.run, self.context.device
        begun, self._begun = self._begun or {}, None
        start, first = time.perf_counter() - begun.get("seconds", 0.0), begun.get("steps", 0)
        self.task.set_train_mode(self.network)
        self.task.begin_epoch(number)
        self.train_step.begin_epoch(number)
        order = np.random.default_rng((run.seed, number, _SHUFFLE_STREAM)).permutation(self.task.samples)
        indices = torch.from_numpy(order[: self.steps * run.batch]).to(device).view(self.steps, run.batch)
        total, lr = torch.zeros((), device=device), begun.get("lr", 0.0)
        radii: dict[str, float] = begun.get("radii", {})
        done, stop = first, 0
        vote = Vote(self.context)
        with self._seeded(number), emulated_bf16(self._emulated):
            if begun:
                total += self._restore_share(begun)
            for i, batch in enumerate(self.task.batches(self.context.share(indices[first:])), start=first):
                lr = run.learning_rate(number * self.steps + i, self.steps)
                self._set_lr(lr)
                if i == self.steps - 1:
                    radii = self._radii()
                total += self.take_step(*batch)
                if self.average is not None:
                    self.average.update()
                done = i + 1
                if stop := vote(received()):
                    break
            if stop := max(stop, vote.result()):
                shares = self.context.gather(self._share(total))
                if all(math.isfinite(share["total"]) for share in shares):
                    progress = {"steps": done, "lr": lr, "radii": radii, "seconds": time.perf_counter() - start}
                    self._begun = {**progress, "shares": shares}
                raise Terminated(stop)
        loss = float(self.context.mean(total)) / self.steps
        return {"train_loss": loss, "lr": lr, **radii, "seconds": time.perf_counter() - start}

    def _share(self, total: Tensor) -> dict[str, Any]:
        """Return what differs between processes in the middle of an epoch: the sum of losses and the generators."""
        device = self.context.device
        share: dict[str, Any] = {"total": float(total), "cpu": torch.get_rng_state()}
        return {**share, "cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else share

    def _restore_share(self, begun: Mapping[str, Any]) -> float:
        """Restore the state of this process's generators, and return its sum of losses.

        With another number of processes, the generators keep the state that they have at the start of an epoch.
        """
        shares = begun["shares"]
        if len(shares) != self.context.size:
            return sum(share["total"] for share in shares) / len(shares)
        share = shares[self.context.rank]
        torch.set_rng_state(share["cpu"].cpu())
        if "cuda" in share and self.context.device.type == "cuda":
            torch.cuda.set_rng_state(share["cuda"].cpu(), self.context.device)
        return float(share["total"])

    @property
    def steps_done(self) -> int:
        """The number of steps taken in an interrupted epoch that can be continued; 0 between two epochs."""
        return 0 if self._begun is None else int(self._begun["steps"])

    @contextlib.contextmanager
    def _seeded(self, number: int) -> Iterator[None]:
        """Seed torch's generators with seed, epoch and rank, and restore them on exit."""
        device = self.context.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            seed = int(np.random.default_rng((self.run.seed, number, _TORCH_STREAM, self.context.rank)).integers(2**63))
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed all GPUs
            if device.type == "cuda":
                torch.cuda.manual_seed(seed)
            yield

    def _set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            scaled = lr * group.get("lr_scale", 1.0)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(scaled)
            else:
                group["lr"] = scaled

    def _radii(self) -> dict[str, float]:
        """Return the radii of the next step that change during training, by name."""
        if not isinstance(self.optimizer, SharpnessAware):
            return {}
        group, floors = self.optimizer.param_groups[0], self.optimizer.scheduled_radii
        changing = {name for name, floor in floors.items() if group[floor] is not None}
        if self.run.rho_warmup or self.run.rho_start:
            changing = {name for name in self.optimizer.settings if name.startswith("rho")} - {*floors.values()}
        return {name: float(self.optimizer.radius(group, name)) for name in sorted(changing)}

    @property
    def result_network(self) -> nn.Module:
        """The network to evaluate and to save: the trained one, or the average of its weights."""
        return self.network if self.average is None else self.average.network

    def evaluate(self) -> dict[str, float]:
        """Return the task's metrics; all processes evaluate the network of the first one."""
        self.context.copy_buffers(self.result_network)
        metrics, score = self._in_eval_mode(self.task.evaluate), f"{self.run.eval_split}_{self.task.score.name}"
        if not isinstance(metrics, Mapping) or score not in metrics:
            got = ", ".join(metrics) if isinstance(metrics, Mapping) else type(metrics).__name__
            raise BsamValueError(f"the task's evaluate must return a dictionary with {score!r}, got {got}")
        if tensors := [name for name, value in metrics.items() if isinstance(value, Tensor)]:
            raise BsamTypeError(f"the task's evaluate must return numbers, got a tensor for {tensors[0]!r}")
        return metrics

    def predictions(self) -> Mapping[str, NDArray[Any]]:
        """Return the task's predictions for some samples; empty except in the first process."""
        return self._in_eval_mode(self.task.predictions) if self.context.is_main else {}

    def _in_eval_mode(self, function: Callable[[nn.Module], T]) -> T:
        network = self.result_network.eval()
        with autocast(self.run, self.context.device), emulated_bf16(self._emulated):
            return function(network)

    def first_non_finite_loss(self, metrics: Mapping[str, Any]) -> tuple[str, float] | None:
        """Return the name and value of the first non-finite loss, the same in all processes; None if all are finite."""
        losses = ((name, value) for name, value in metrics.items() if name.endswith("_loss"))
        return self.context.broadcast(next(((name, value) for name, value in losses if not math.isfinite(value)), None))

    def measured_network(self) -> nn.Module:
        """Return the network for flatness measurements."""
        return self.task.measured_network(self.result_network)

    def sharpness(self, radius: float) -> Sharpness:
        """Return the sharpness on the whole training set at a radius, uphill and downhill."""
        return sharpness(self.measured_network(), self.task.loss, self.task.examples(), rho_max=radius, rho_min=radius)

    def take_readings(self) -> list[dict[str, Any]]:
        """Return the probe's readings since the last call, and clear them."""
        if self.probe is None:
            return []
        readings = [asdict(reading) for reading in self.probe.readings]
        self.probe.readings.clear()
        return readings

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next epoch depends on, or the rest of an interrupted one."""
        return {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loss": None,
            **{name: part.state_dict() for name, part in self._optional_parts().items()},
            **({} if self._begun is None else {"begun": self._begun}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from :meth:`state_dict`."""
        self.network.load_state_dict(state["network"])
        groups = self.optimizer.param_groups
        machine_settings = [{name: group[name] for name in _MACHINE_SETTINGS if name in group} for group in groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, settings in zip(self.optimizer.param_groups, machine_settings, strict=True):
            group.update(settings)
        for name, part in self._optional_parts().items():
            part.load_state_dict(state[name])
        self._begun = state.get("begun")

    def _optional_parts(self) -> dict[str, Any]:
        parts = {"loss": self.train_step.loss, "scaler": self.train_step.scaler, "ema": self.average}
        return {name: part for name, part in parts.items() if part is not None}


class WeightAverage:
    r"""A copy of a network that holds the average of its weights after all steps so far.

    After step :math:`t`, the average is :math:`\sum_i \beta^{t-i} w_i / \sum_i \beta^{t-i}` with :math:`i = 1 \dots t`,
    so the initial weights have no part in it. Floating-point buffers, such as the statistics of batch norm, are
    averaged in the same way; other buffers are copied.

    Args:
        network: the network that is trained.
        decay: the factor :math:`\beta`, between 0 and 1.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> average = WeightAverage(layer, decay=0.5)
        >>> for value in (3.0, 6.0):
        ...     _ = nn.init.constant_(layer.weight, value)
        ...     average.update()
        >>> average.network.weight.item()  # (0.5 * 3 + 6) / 1.5
        5.0
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.network = copy.deepcopy(network)
        self._source = network
        self._decay = decay
        self._steps = 0

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after a step. This does not wait for the device."""
        self._steps += 1
        pairs = list(zip(_tensors(self.network), _tensors(self._source), strict=True))
        # the first step is copied: lerp gives NaN if a range still starts at infinity
        averaged = [(mean, new) for mean, new in pairs if self._steps > 1 and new.dtype.is_floating_point]
        copied = [(mean, new) for mean, new in pairs if self._steps == 1 or not new.dtype.is_floating_point]
        if averaged:
            weight = (1 - self._decay) / (1 - self._decay**self._steps)
            torch._foreach_lerp_([mean for mean, _ in averaged], [new for _, new in averaged], weight)
        for mean, new in copied:
            mean.copy_(new)

    def state_dict(self) -> dict[str, Any]:
        """Return the average and the number of steps."""
        return {"network": self.network.state_dict(), "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from :meth:`state_dict`."""
        self.network.load_state_dict(state["network"])
        self._steps = state["steps"]


def _tensors(network: nn.Module) -> list[Tensor]:
    return [*network.parameters(), *network.buffers()]
