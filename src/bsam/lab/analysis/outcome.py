"""Warnings about runs that seem to learn nothing, and what to try."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...methods import METHODS
from ..config import Run
from ..data import dataset_entry
from ..tasks import task_class
from ..training.run_dir import RunDir

# To first order |g_max - g| = rho |H g| / |g|. Above a ratio |g_max| / |g| of 2 the change of the gradient is longer
# than the gradient, and the point uphill says nothing about the loss around w. On digits the ratio is 1.1 at the
# defaults of SAM and BSAM, 1.7 at radii of 0.4, where BSAM begins to fail, and 2.8 at 1.0.
MAX_GRADIENT_RATIO = 2.0
# relative to the loss of guessing, ln(classes): below the first the run learned something, above the second it diverged
GUESSING, DIVERGED = 0.99, 1.05


def radius_warning(run: Run, readings: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a sentence if the first reading of a probe, at random weights, shows that the radius is too large.

    Later readings and pretrained networks are not judged: |g| falls as a network fits its data, so the ratio rises at
    any radius.

    Args:
        run: the settings of the run.
        readings: the rows of :meth:`bsam.lab.training.run_dir.RunDir.probe`.
    """
    if not readings:  # the method starts later
        return None
    first = readings[0]
    # two extra passes: the method did not visit the probe's point uphill (ASAM's rho, for example, is no distance)
    if not _begins_at_random(run) or first["extra_passes"] > 1 or not first["g_norm"] or first["g_max_norm"] is None:
        return None
    ratio = first["g_max_norm"] / first["g_norm"]
    if ratio <= MAX_GRADIENT_RATIO:
        return None
    return (
        f"The radius is too large: at step {first['step']} the gradient is {ratio:.1f} times as long at distance "
        f"{first['rho_max']:.2g} uphill as at the weights (more than {MAX_GRADIENT_RATIO:g}). Try a smaller radius."
    )


def failure(run: Run, run_dir: RunDir, epochs: Sequence[Mapping[str, Any]] | None = None) -> str | None:
    """Return a sentence if a finished run is no better than chance or its loss has not fallen; otherwise None.

    A classifier is at chance if neither its training nor its evaluation loss is below the loss of guessing, and its
    accuracy is at most twice the accuracy of guessing. A pose network is compared with its baseline. If it began with
    random weights, its last training loss is compared with that of the first epoch.

    Args:
        run: the settings of the run.
        run_dir: its directory.
        epochs: the metrics of its epochs; None reads them from the directory.
    """
    epochs = run_dir.metrics() if epochs is None else epochs
    last = epochs[-1]
    if run.task.is_own:
        return _own_failure(run, run_dir, epochs)
    accuracy, loss = (last.get(f"{run.eval_split}_{name}") for name in ("accuracy", "loss"))
    losses = [value for value in (last.get("train_loss"), loss) if value is not None]
    if accuracy is not None:
        accuracy = last.get(f"{run.eval_split}_clean_accuracy", accuracy)  # on the true labels
        classes = dataset_entry(run.data).classes or len(run_dir.note("inputs").get("class_names", ()))
        if not classes or not losses:  # old results, which do not have them
            return None
        lowest, guessing = min(losses), math.log(classes)
        if lowest < GUESSING * guessing or accuracy > 2 / classes:
            return None
        return (
            f"The network is no better than chance: accuracy {accuracy:.4f}, {classes} classes, loss {lowest:.4g} "
            f"({guessing:.4g} by guessing). {_advice(run, diverged=lowest > DIVERGED * guessing)}"
        )
    baseline = run_dir.note("baseline")
    if baseline.get("scores"):
        name, value = next(iter(baseline["scores"].items()))  # the mean over the joints
        score = last[f"{run.eval_split}_{name}"]
        if score <= value:
            return (
                f"The network is no better than the baseline ({baseline['title']}): {name} {score:.4g} and "
                f"{value:.4g}. {_advice(run, diverged=False)}"
            )
    return _loss_failure(run, epochs)


def _own_failure(run: Run, run_dir: RunDir, epochs: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a sentence if a task of the user knows the score of a constant answer, and the run is no better."""
    score, chance = task_class(run.task.name).score, run_dir.note("task").get("chance")
    if chance is not None:
        reached = epochs[-1][score.metric(run.eval_split)]
        if reached is None or (reached <= chance if score.higher else reached >= chance):
            numbers = " and ".join(f"{score.factor * number:.4g}" for number in (reached or math.nan, chance))
            return (
                f"The network is no better than the best constant answer: {score.title} {numbers}. "
                f"{_advice(run, diverged=False)}"
            )
    return _loss_failure(run, epochs)


def _loss_failure(run: Run, epochs: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a sentence if the last training loss of a run is not below that of the first epoch."""
    last = epochs[-1]
    if "train_loss" not in last:
        return None
    if _begins_at_random(run) and len(epochs) > 1 and last["train_loss"] >= epochs[0]["train_loss"]:
        return (
            f"The training loss, {last['train_loss']:.4g}, is not below that of the first epoch, "
            f"{epochs[0]['train_loss']:.4g}. {_advice(run, diverged=True)}"
        )
    return None


def _begins_at_random(run: Run) -> bool:
    return run.init is None and run.weights is None


def _advice(run: Run, diverged: bool) -> str:
    lr = f"Try {'a smaller' if diverged else 'another'} --lr (now {run.lr:g})"
    parameters = inspect.signature(METHODS[run.method]).parameters if run.method in METHODS else {}
    values = {**{name: parameters[name].default for name in parameters}, **run.arguments}
    radii = {name: value for name, value in values.items() if name.startswith("rho")}
    now = " ".join(f"{name}={value:g}" for name, value in radii.items() if value)
    tries = [lr, *([f"a smaller radius (now --set {now})"] if now else []), *([] if diverged else ["more epochs"])]
    tries += [f"--rho-warmup {run.epochs / 4:g}"] if now and not (run.rho_warmup or run.rho_start) else []
    return f"{', '.join(tries[:-1])} or {tries[-1]}." if len(tries) > 1 else f"{lr}."


def score_title(run: Run) -> str:
    """Return the split and the measure that a table shows."""
    return f"{run.eval_split} {task_class(run.task.name).score.title}"
