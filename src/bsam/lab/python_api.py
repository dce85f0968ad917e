"""What Python calls like a command: ``compare``, with the output of ``bsam compare``, and ``write_report``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ..common.extras import require_packages
from .analysis.sentences import ComparisonResult
from .cli import report
from .cli.run import show_study
from .common.names import find_name, name_of
from .config import Method, settings_by_heading
from .recipes.compare import (
    COMPARE,
    DEFAULT_METHODS,
    LEFT_OUT,
    SEEDS,
    comparison_folder,
    plan_comparison,
)
from .recipes.start import check_start, complete_settings
from .study_run import STUDY_NEEDS, refuse_torchrun
from .tasks import Task, named_task
from .training.machine import Machine


def compare(
    data: str | None = None,
    model: str | Callable[..., nn.Module] | None = None,
    methods: Sequence[str | Method] = DEFAULT_METHODS,
    *,
    seeds: int = SEEDS,
    task: str | type[Task] | None = None,
    tune: bool = False,
    tune_base: bool = False,
    tune_seeds: int = 1,
    tune_full: bool = False,
    out: str | Path | None = None,
    baseline: str | None = None,
    machine: Machine = Machine(),
    **settings: Any,
) -> ComparisonResult:
    """Train a network with several methods and seeds, and compare them, as ``bsam compare`` does.

    Finished runs in ``out`` are not trained again, and interrupted ones continue.

    Args:
        data: a data set from ``bsam list data``, ``folder:PATH`` or ``MODULE:FUNCTION``; None is digits, or the first
            data set of the task.
        model: a network from ``bsam list models``, ``timm:NAME``, ``MODULE:FUNCTION`` or a function that returns a
            network; None takes that of the weights or the data set.
        methods: at least two of ``"base"``, the names in ``bsam.lab.recipes.variants()``, ``MODULE:CLASS`` and classes
            of your own; a name may be followed by arguments: ``"sam:rho=0.1"``.
        seeds: the number of seeds.
        task: a task of your own, a class or ``MODULE:CLASS``; None is that of the data set.
        tune: whether to choose each method's radius first, on validation samples or held-out training samples.
        tune_base: whether to choose learning rate and weight decay before that, for the base optimizer alone; all
            methods then use them.
        tune_seeds: the number of seeds of each candidate.
        tune_full: whether to train every candidate to the end; by default, only the better half goes on after a third
            of the epochs, and training stops when one is left.
        out: the folder for the results; None is ``runs/compare-MODEL-DATA``, followed by ``-tuned`` if ``tune`` and by
            ``-base`` if ``tune_base``.
        baseline: the method that the others are compared with; None takes the first one.
        machine: where to train. Without ``jobs``, one run at a time is trained; if it is above 1, other processes
            train them, so a script needs ``if __name__ == "__main__":`` around its code, as for ``multiprocessing``.
        settings: further settings of :class:`bsam.lab.training.Run` for all runs.

    Raises:
        bsam.BsamError: at the end, if any run failed. Runs that diverged are counted in the result instead.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as out:
        ...     result = compare(
        ...         "digits",
        ...         methods=["sgd", "sam"],
        ...         seeds=2,
        ...         out=out,
        ...         epochs=1,
        ...         limit_train=128,
        ...     )  # doctest: +ELLIPSIS
        SGD and SAM: DigitsNet, Digits. 4 runs: 0 finished, ...
        >>> result.table[["row", "n", "passes"]].values.tolist()
        [['SGD', 2, 1], ['SAM', 2, 2]]
    """
    require_packages(STUDY_NEEDS)
    own = None if task is None else named_task(task)
    by_heading = settings_by_heading(own)
    names = [item.name for listed in by_heading.values() for item in listed]
    known = [name for name in names if name not in LEFT_OUT]
    for name in settings:
        find_name("setting", name, known)
    refuse_torchrun(COMPARE)
    given = {**settings, "data": data, "task": own}
    given = {name: value for name, value in given.items() if value is not None or name not in ("data", "task")}
    if model is not None:
        given["model"] = model if isinstance(model, str) else name_of(model, "model")
    if machine.jobs is None and machine.ray is None:
        machine = replace(machine, jobs=1)
    data_dir = machine.folders.get("data_dir")
    study = plan_comparison(
        methods,
        complete_settings(given, data_dir),
        seeds=seeds,
        baseline=baseline,
        tune=tune,
        tune_base=tune_base,
        tune_seeds=tune_seeds,
        tune_full=tune_full,
        data_dir=data_dir,
    )
    check_start(study.plans[0].run, data_dir)
    result = show_study(study, comparison_folder(study) if out is None else Path(out), machine)
    if result.failure is not None and not all(state.ended for state in result.states):
        raise result.failure
    assert result.comparison is not None  # the runs have a baseline
    return result.comparison


def write_report(
    runs: str | Path | Sequence[str | Path],
    out: str | Path = "report.html",
    *,
    baseline: str | None = None,
    title: str | None = None,
) -> Path:
    """Write one HTML page with the tables, figures and verdicts of any runs, as ``bsam report`` does; return its path.

    Args:
        runs: run directories, folders with run directories at any depth, or CSV files with other results.
        out: the file to write.
        baseline: the method that the others are compared with; None takes the base optimizer.
        title: the title of the page.
    """
    require_packages(report.REPORT_NEEDS)
    from .report.page import page

    paths = [Path(path) for path in ([runs] if isinstance(runs, str | Path) else runs)]
    report.check_paths(paths, Path(out))
    page.write_report(paths, Path(out), baseline, title)
    return Path(out)
