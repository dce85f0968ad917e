"""Train one run from start to end."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ...common.checks import check_count
from ...common.errors import BsamError, BsamRuntimeError
from ...flatness.dataset_loss import num_samples
from ...flatness.hessian import HessianOperator
from ...flatness.landscape import Landscape, landscape
from ...flatness.sharpness import Sharpness
from ...flatness.spectrum import top_eigenvalues
from ..common.printing import say
from ..common.termination import Terminated, deferred_signals
from ..config import Run, imported
from ..tasks import Task, imported_task
from .captured_steps import side_stream
from .distributed import distributed_context
from .flatness_numbers import landscape_info, largest_eigenvalue, spectrum_info
from .run_dir import RunDir, initial_network
from .run_writer import CHECKPOINT_EVERY, RunWriter
from .trainer import Trainer

CURVATURE_SAMPLES = 256  # training samples; few, because Hessian products are expensive


class Diverged(BsamRuntimeError):
    """A loss became non-finite."""


@dataclass(frozen=True)
class Epoch:
    """The metrics after an epoch. ``sharpness`` is measured on the training data, with the labels used in training."""

    metrics: Mapping[str, float]
    sharpness: Sharpness | None = None


@dataclass(frozen=True)
class Result:
    """A finished run. The eigenvalue and the loss surface are computed after the last epoch, on a part of the training
    data, with the labels used in training.
    """

    run: Run
    epochs: tuple[Epoch, ...]
    seconds_per_step: float  #: the mean within an epoch, since steps may differ; the median over epochs
    top_eigenvalue: float | None = None  #: the largest eigenvalue of the Hessian; NaN if the computation failed
    surface: Landscape | None = None
    measure: str = "accuracy"  #: the name of the task's measure

    def __repr__(self) -> str:
        """Return a one-line summary."""
        run, score = self.run, f"{self.measure} {self.score:.4g}"
        return f"Result({run.method}, {run.data}, seed {run.seed}: {score} after {run.epochs} epoch(s))"

    @property
    def last(self) -> Epoch:
        """The reported epoch, which is the last one, not the best one."""
        return self.epochs[-1]

    @property
    def score(self) -> float:
        """The task's measure after the last epoch, on the evaluation split; accuracy is between 0 and 1."""
        return self.last.metrics[f"{self.run.eval_split}_{self.measure}"]


def fit(
    run: Run,
    folder: str | Path | None = None,
    *,
    data_dir: str | Path | None = None,
    cache_dir: str | Path | None = None,
    device: str | None = None,
    task: type[Task] | None = None,
    init: str | Path | None = None,
    about: Mapping[str, Any] | None = None,
    checkpoint_every: float = CHECKPOINT_EVERY,
    until: int | None = None,
    at_start: Callable[[Trainer, int], None] | None = None,
    on_epoch: Callable[[int, Mapping[str, float]], None] | None = None,
    report: Callable[[Run, Mapping[str, NDArray[Any]]], Mapping[str, bytes]] | None = None,
    on_message: Callable[[str], None] = say,
) -> Result:
    """Train one network.

    With a folder, the metrics are saved after every epoch, and the state every ``checkpoint_every`` seconds. If the run
    is interrupted, the same call continues from the last checkpoint, with the same result as an uninterrupted run (bit
    for bit on a CPU). A non-finite loss raises :class:`bsam.lab.training.loop.Diverged`, but only with a folder;
    without one, training continues with NaN metrics.

    With ``torchrun``, the processes share each batch. Batch norm then computes its statistics on each process's share,
    and methods that select samples (esam, ksam) select within it. For networks without batch norm and all other
    methods, the result is the same as with a single process. The processes also share the evaluation; the first one
    takes all other measurements.

    Args:
        run: the settings.
        folder: the run directory, for settings, metrics, checkpoints and the trained network; None writes nothing.
        data_dir: the folder with the data, if it is read from files.
        cache_dir: the folder for decoded image files; None uses ``.bsam-cache`` next to the images.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``; ``"auto"`` or None takes a GPU if there is one.
        task: the class of the task; None is that of ``run.task``.
        init: the directory of the run to start from, if it is not at the path in ``run.init``. Ignored when
            continuing a run.
        about: what the run is (experiment, row, ...), for ``run.json``: see :func:`bsam.lab.recipes.describe`.
        checkpoint_every: the minimum time between two checkpoints, in seconds; 0 writes one after every epoch.
            Checkpoints are written only at the end of an epoch, and always after the last one; ``bsam`` also writes one
            in the middle of an epoch when it receives SIGTERM or SIGUSR1.
        until: the epoch to stop after, with a checkpoint; a later call continues. None trains all epochs.
        at_start: called before the first epoch of this call, with the trainer and the number of epochs already done.
        on_epoch: called with the number of epochs done and the metrics of the last one; an exception ends the run.
        report: called after the last epoch, if there is a folder, with the run and the result of
            :meth:`Task.predictions <bsam.lab.Task.predictions>`. Returns files to write, by name; TensorBoard
            shows the PNG files.
        on_message: called with messages for the user.

    Example:
        >>> radii = {"rho_max": 0.02, "rho_min": 0.02}
        >>> result = fit(
        ...     Run("bsam", radii, lr=0.1, batch=64, epochs=1, eval_split="validation")
        ... )
        >>> result.score > 0.5
        True
    """
    run = imported(run)
    task_cls: Any = imported_task(run) if task is None else task
    with (
        distributed_context(device) as context,
        side_stream(context.device),
        RunWriter(folder, run, context, checkpoint_every, about) as out,
    ):
        folders = {"data_dir": data_dir, "cache_dir": cache_dir}
        is_new = not out.has_checkpoint()
        network = initial_network(run, None if init is None else Path(init)) if is_new else None
        work = task_cls(run, context.device, **{name: Path(path) for name, path in folders.items() if path is not None})
        trainer = Trainer(run, work, context, on_message, is_new, network)
        if not is_new and context.is_main and (warning := _other_processes(out, context.size)):
            on_message(warning)
        epochs, readings = out.resume(trainer, network)
        if at_start is not None and context.is_main:
            at_start(trainer, len(epochs))
        end = run.epochs if until is None else min(check_count("until", until), run.epochs)
        with deferred_signals() as received:
            for number in range(len(epochs), end):
                metrics: dict[str, Any] = {"epoch": number + 1}
                try:
                    metrics |= trainer.train_epoch(number, received)
                except Terminated:
                    if trainer.steps_done:
                        out.save_checkpoint(trainer, epochs, readings + trainer.take_readings())
                    raise
                metrics |= trainer.evaluate()
                if folder is not None and (loss := trainer.first_non_finite_loss(metrics)):
                    reason = context.broadcast(_divergence(run, number + 1, *loss, out.checkpoint, folder))
                    out.record_divergence(reason)
                    raise Diverged(reason)
                if run.sharpness_rho is not None and context.is_main:
                    metrics["sharpness"] = asdict(trainer.sharpness(run.sharpness_rho))
                epochs.append(metrics)
                readings += trainer.take_readings()
                out.save(trainer, epochs, readings, is_last=number + 1 == end)
                if on_epoch is not None and context.is_main:
                    on_epoch(number + 1, metrics)
        if number := received():  # it arrived after the last step
            raise Terminated(number)
        measured: tuple[dict[str, Any], float | None, Landscape | None] = {}, None, None
        if len(epochs) == run.epochs:
            measured = context.broadcast(_flatness(trainer) if context.is_main else measured)
            predictions = {} if folder is None else trainer.predictions()
            files = report(run, predictions) if report is not None and predictions else {}
            out.finish(trainer.result_network, measured[0], predictions, files)
        seconds_per_step = statistics.median(metrics["seconds"] for metrics in epochs) / trainer.steps
        return Result(run, tuple(map(_epoch, epochs)), seconds_per_step, *measured[1:], work.score.name)


def _other_processes(run_dir: RunDir, processes: int) -> str | None:
    """Return a warning if a run continues with another number of processes, otherwise None."""
    before = run_dir.machines()[-1:]
    number = before[0].get("processes", processes) if before else processes
    if number == processes:
        return None
    return (
        f"The number of processes was {number} and is now {processes}. The result may differ from that of an "
        "uninterrupted run, because batch norm and random numbers depend on this number."
    )


def _epoch(metrics: Mapping[str, Any]) -> Epoch:
    sharpness = metrics.get("sharpness")
    numbers = {name: value for name, value in metrics.items() if name != "sharpness"}
    return Epoch(numbers, None if sharpness is None else Sharpness(**sharpness))


def _divergence(run: Run, epoch: int, name: str, value: float, saved: str, folder: str | Path) -> str:
    """Return the message for a run that diverged; ``name`` is an evaluation loss if the training loss is finite."""
    checkpoint = f"The checkpoint of {saved} is kept in {folder}" if saved else "No checkpoint was written"
    loss = name.replace("train_", "training_").replace("_", " ")
    return f"the {loss} is {value} in epoch {epoch}: a smaller lr (now {run.lr:g}) or radius may help. {checkpoint}"


def _flatness(trainer: Trainer) -> tuple[dict[str, Any], float | None, Landscape | None]:
    """Measure the largest eigenvalue and the loss surface, if the run asks for them; return the entry of
    ``flatness.json`` (empty if it asks for neither), and both.
    """
    run = trainer.run
    top, surface = None, None
    if not run.curvature and run.surface is None:
        return {}, top, surface
    network, loss = trainer.measured_network(), trainer.task.loss
    examples = trainer.task.examples(CURVATURE_SAMPLES)
    entry: dict[str, Any] = {"samples": sum(num_samples(x, y) for x, y in examples)}
    if run.curvature:
        try:
            entry["eigenvalues"] = spectrum_info(top_eigenvalues(HessianOperator(network, loss, examples), 1, tol=1e-3))
        except BsamError:  # a non-finite product: a run that diverged still has a result
            entry["eigenvalues"] = {"maximum": math.nan, "converged": False}
        top = largest_eigenvalue(entry)
    if run.surface is not None:
        surface = landscape(network, loss, examples, points=run.surface)
        entry["landscape"] = landscape_info(surface)
    return entry, top, surface
