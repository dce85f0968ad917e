"""Warnings about runs that seem to learn nothing, and what to try."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from ...methods import METHODS
from ..config import Run
from ..tasks import task_of
from ..training.run_dir import RunDir

# To first order |g_max - g| = rho |H g| / |g|. Above a ratio |g_max| / |g| of 2 the change of the gradient is longer
# than the gradient, and the point uphill says nothing about the loss around w. On digits the ratio is 1.1 at the
# defaults of SAM and BSAM, 1.7 at radii of 0.4, where BSAM begins to fail, and 2.8 at 1.0.
MAX_GRADIENT_RATIO = 2.0


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
    """Return a sentence if a finished run did not learn, as its task judges it, and what to try; otherwise None.

    Args:
        run: the settings of the run.
        run_dir: its directory.
        epochs: the metrics of its epochs; None reads them from the directory.
    """
    epochs = run_dir.metrics() if epochs is None else epochs
    found = task_of(run).failure(run, epochs, run_dir.note)
    return None if found is None else f"{found.text} {_advice(run, found.diverged)}"


def _begins_at_random(run: Run) -> bool:
    return run.init is None and run.weights is None


def comparison_advice(runs: Sequence[Run], diverged: bool) -> str:
    """Return what to try after a comparison in which no network learned.

    Args:
        runs: the settings of its runs.
        diverged: whether all of them diverged.

    Example:
        >>> comparison_advice([Run("sgd"), Run("sam")], diverged=True)
        'Try a smaller --lr (now 0.05) or smaller radii (--methods sam:rho=0.025), and check the data and its labels.'
    """
    run = runs[0]
    smaller = (f"{each.method}:{_radii_text(each, 0.5, ',')}" for each in runs if _radii_text(each))
    lr = "a smaller --lr" if diverged else "a smaller or a larger --lr"
    tries = [f"{lr} (now {run.lr:g})", *([] if diverged else [f"more --epochs (now {run.epochs})"])]
    tries += [f"smaller radii (--methods {example})" for example in list(smaller)[:1]]
    return f"Try {_either(tries)}, and check the data and its labels."


def _radii_text(run: Run, factor: float = 1.0, separator: str = " ") -> str:
    """Return the radii of a run's method that are not 0, as arguments; empty if there are none."""
    parameters = inspect.signature(METHODS[run.method]).parameters if run.method in METHODS else {}
    values = {**{name: parameters[name].default for name in parameters}, **run.arguments}
    radii = {name: value for name, value in values.items() if name.startswith("rho")}
    return separator.join(f"{name}={factor * value:g}" for name, value in radii.items() if value)


def _advice(run: Run, diverged: bool) -> str:
    lr = f"Try {'a smaller' if diverged else 'another'} --lr (now {run.lr:g})"
    now = _radii_text(run)
    tries = [lr, *([f"a smaller radius (now --set {now})"] if now else []), *([] if diverged else ["more epochs"])]
    tries += [f"--rho-warmup {run.epochs / 4:g}"] if now and not (run.rho_warmup or run.rho_start) else []
    return f"{_either(tries)}."


def _either(tries: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(tries[:-1]), tries[-1])))


def score_title(run: Run) -> str:
    """Return the split and the measure that a table shows."""
    return f"{run.eval_split} {task_of(run).score.title}"
