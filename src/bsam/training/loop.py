"""One run, from the first step to the last epoch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn

from ..core.errors import BsamError, BsamRuntimeError, BsamValueError
from ..flatness.hessian import HessianOperator
from ..flatness.landscape import landscape
from ..flatness.spectrum import top_eigenvalues
from .classification import Classification
from .compiler import compiler_trouble
from .config import Run
from .files import write_json
from .folder import RunDir
from .result import LossSurface, Result, result_of
from .steps import side_stream
from .task import Task
from .team import team
from .training import Training

TASKS: dict[str, type[Task]] = {"classification": Classification}
CURVATURE_SAMPLES = 256  # of the training data, from all classes: Hessian products take their time


class Diverged(BsamRuntimeError):
    """A loss was no number at last."""


def fit(
    run: Run,
    folder: str | Path | None = None,
    *,
    data_dir: str | Path | None = None,
    device: str | None = None,
    task: type[Task] | None = None,
    at_start: Callable[[Training, int], None] | None = None,
    each_epoch: Callable[[int, Mapping[str, float]], None] | None = None,
    tell: Callable[[str], None] = print,
) -> Result:
    """Train one network.

    With a folder, every epoch is kept there: called again, an interrupted run goes on after the last epoch that it
        finished and ends as it would have ended,
    on a CPU bit for bit; a loss that is no number ends it. Without a folder such a run goes on to its end, and says so
    in its numbers. Started by ``torchrun``, the processes share each batch. Batch norm then takes its statistics from
    each process' share, and methods that choose samples (esam, ksam) choose among it: two processes end where one does
    only in networks without batch norm, and by the other methods.

    Args:
        run: the settings.
        folder: for settings, numbers, checkpoints and the trained network; None keeps nothing.
        data_dir: where the data is, if it is read from files.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``; None takes a GPU if there is one.
        task: what is learned; None takes the run's, from :data:`TASKS`.
        at_start: called with the training and the number of epochs done before, when all is ready for the next one.
        each_epoch: called with the number of epochs done and the metrics of the last one; what it raises ends the run.
        tell: called with a sentence that a user should know.

    Example:
        >>> result = fit(Run("bsam", {"rho_max": 0.02, "rho_min": 0.02}, lr=0.1, batch=64, epochs=1, eval_split="validation"))
        >>> result.score > 0.5
        True
    """
    if task is None and run.task not in TASKS:
        raise BsamValueError(f"task must be one of {', '.join(TASKS)}; got {run.task!r}")
    with team(device) as processes, side_stream(processes.device), contextlib.ExitStack() as stack:
        run_dir = None if folder is None else RunDir(folder, run, tell)
        if run_dir is not None and processes.writes:
            stack.enter_context(run_dir)
        work = (task or TASKS[run.task])(run, processes.device, None if data_dir is None else Path(data_dir))
        training = Training(run, work, processes)
        if run.compile and not training.compiled and processes.writes:
            tell(f"torch.compile does not work here ({compiler_trouble(processes.device)}): the run goes on without.")
        if training.emulated and processes.writes:
            tell("This CPU has no instructions for bf16: it is many times slower here than fp32, which is the default.")
        processes.wait()
        epochs: list[dict[str, Any]] = []
        readings: list[dict[str, Any]] = []
        state = None if run_dir is None else run_dir.last(processes.device)
        if state is not None:
            try:
                training.load_state_dict(state)
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                raise BsamRuntimeError(
                    f"the checkpoint in {folder} is not of this run: remove the folder, or choose another one. "
                    f"({error})"
                ) from error
            epochs, readings = state["epochs"], state["readings"]
        if run_dir is not None and processes.writes:
            run_dir.begin(training, epochs, readings)
        if at_start is not None and processes.writes:
            at_start(training, len(epochs))
        for number in range(len(epochs), run.epochs):
            metrics: dict[str, Any] = {"epoch": number + 1, **training.epoch(number)}
            if processes.writes:
                metrics |= training.evaluate()
            lost = processes.agreed(
                [
                    (name, value)
                    for name, value in metrics.items()
                    if name.endswith("_loss") and not math.isfinite(value)
                ]
            )
            if (
                run_dir is not None and lost
            ):  # the test loss tells of a last step that went too far; the first process knows it
                name, value = lost[0]
                reason = (
                    f"the {name.replace('train_', 'training_').replace('_', ' ')} is {value} in epoch {number + 1}: a "
                    "smaller lr "
                    f"(now {run.lr:g}) or radius may help. "
                    f"{f'The checkpoint of epoch {number} is kept in {folder}' if number else 'No epoch was finished'}"
                )
                if processes.writes:
                    write_json(run_dir.path / "diverged.json", {"reason": reason})
                raise Diverged(reason)
            if processes.writes and run.radius is not None:
                metrics["sharpness"] = asdict(training.sharpness(run.radius))
            epochs.append(metrics)
            readings += training.readings()
            if run_dir is not None and processes.writes:
                run_dir.keep(training.state_dict(), epochs, readings)
            processes.wait()
            if each_epoch is not None and processes.writes:
                each_epoch(number + 1, metrics)
        some = work.examples(CURVATURE_SAMPLES) if run.curvature or run.relief is not None else []
        top = _top_eigenvalue(training.network, work, some) if run.curvature else None
        relief = _relief(training.network, work, some, run.relief) if run.relief is not None else None
        if run_dir is not None and processes.writes:
            found = {"top_eigenvalue": top, "relief": None if relief is None else asdict(relief)}
            run_dir.finish(training.network, found if some else None)
        return replace(result_of(run, epochs, training.steps, work.measure.name), top_eigenvalue=top, relief=relief)


def _top_eigenvalue(network: nn.Module, task: Task, some: Any) -> float:
    try:
        found = top_eigenvalues(HessianOperator(network, task.loss, some), k=1, tol=1e-3)
    except BsamError:  # a product was not finite: a run that diverged is a result, too
        return math.nan
    return float(found.values[0]) if found.converged else math.nan


def _relief(network: nn.Module, task: Task, some: Any, points: int) -> LossSurface:
    found = landscape(network, task.loss, some, points=points)
    return LossSurface(tuple(found.axes[0].tolist()), tuple(map(tuple, found.loss.tolist())))
