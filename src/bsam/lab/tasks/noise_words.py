"""The label noise of a run, in words."""

from __future__ import annotations

from ...common.errors import BsamValueError
from ..config import ClassificationSettings, Run
from ..data import dataset_entry
from ..data.arrays import wrong_share


def wrong_labels(run: Run) -> float | None:
    """Return the fraction of the training labels that are wrong; None for a user's own data, whose number of classes is
    not known before the data is read, and for other tasks.
    """
    if not isinstance(run.task, ClassificationSettings):
        return None
    try:
        classes = dataset_entry(run.data).classes
    except BsamValueError:  # a data set that this version does not have
        return None
    return None if classes is None else round(wrong_share(run.task.label_noise, run.task.noise_labels, classes), 6)


def noise_text(run: Run, wrong: float | None = None) -> str:
    """Describe the label noise; empty if there is none.

    Args:
        run: the settings.
        wrong: the fraction of the training labels that are wrong, if it is known; None computes it.

    Example:
        >>> noise_text(Run.of("sam", data="cifar10", label_noise=0.4))
        '40 % of labels drawn from all classes: 36.0 % wrong'
    """
    if not isinstance(run.task, ClassificationSettings) or not run.task.label_noise:
        return ""
    wrong = wrong_labels(run) if wrong is None else wrong
    text = f"{100 * run.task.label_noise:g} % of labels drawn from {run.task.noise_labels} classes"
    return text if wrong is None else f"{text}: {100 * wrong:.1f} % wrong"
