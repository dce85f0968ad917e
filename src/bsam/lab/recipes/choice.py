"""The choice between candidates by the scores of their tuning runs, which may stop early."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ...common.errors import BsamRuntimeError
from ..common.grouping import count_text
from ..config import Run, Split
from ..tasks import task_class
from ..training.run_dir import RunDir, RunState
from .planning import TUNING_SEED, Planned
from .variants import all_arguments

if TYPE_CHECKING:  # `bsam list` works without pandas
    import pandas as pd

RUNGS = (0.325, 0.375)  # shares of the epochs after the first and the last halving: results/tuning has the comparison
WINDOW = 0.05  # the share of the epochs over which the scores before the last epoch are averaged
SPLITS = {"validation": "validation", "holdout": "held-out"}


@dataclass(frozen=True)
class Tuning:
    """How settings are chosen: by the score on a split, with some seeds for each candidate.

    Args:
        split: the split that the tuning runs are evaluated on.
        seeds: the number of seeds that each candidate is trained with.
        radii: whether the candidates are multiples of radii (``--tune``).
        base: whether learning rate and weight decay are chosen first, for the base optimizer alone (``--tune-base``).
        halving: whether only the better half of the candidates goes on after a third of the epochs, and training stops
            when one is left; otherwise all candidates are trained to the end and compared after the last epoch.
    """

    split: Split = "validation"
    seeds: int = 1
    radii: bool = False
    base: bool = False
    halving: bool = False

    def trial(self, run: Run, number: int = 0, **candidate: Any) -> Run:
        """Return a tuning run, which measures nothing but its score, with the tuning seed of this number."""
        unset: dict[str, Any] = dict.fromkeys(("sharpness_rho", "surface", "probe", "limit_test"))
        unset["curvature"] = False
        return run.changed(seed=run.seed + TUNING_SEED + number, eval_split=self.split, **unset, **candidate)


def settings_text(names: Sequence[str]) -> str:
    """Return the names of settings in words."""
    return " and ".join(name.replace("weight_decay", "weight decay") for name in names)


def rungs(epochs: int, candidates: int, start: float = 0) -> list[int]:
    """Return the epochs after which the worse half of the candidates stops; after the last one, one candidate is left.

    They are shares of the epochs after ``start``, before which candidates do not differ.

    Example:
        >>> rungs(40, 4), rungs(40, 12), rungs(40, 4, start=20)
        ([13, 15], [13, 14, 15, 15], [27, 28])
    """
    count = (candidates - 1).bit_length()  # halvings, with the larger half going on
    first, last = RUNGS
    steps = [first + (last - first) * n / max(count - 1, 1) for n in range(count)]
    return [math.ceil(round(start + (epochs - start) * step, 9)) for step in steps]


def start_of(run: Run) -> float:
    """Return the number of epochs before a method has its full effect: its start, its warm-up, or its first epoch."""
    first = all_arguments(run.method, run.arguments).get("start_epoch", 0)
    return min(run.rho_start + run.rho_warmup + first, run.epochs)


@dataclass(frozen=True)
class Choice:
    """A planned run with candidates for its settings, and their tuning runs.

    Args:
        plan: the run.
        tuning: how its settings are chosen.
        states: the tuning runs as they are on disk: all seeds of the first candidate, then those of the second ...
    """

    plan: Planned
    tuning: Tuning
    states: Sequence[RunState]

    @cached_property
    def values(self) -> list[dict[str, Any]]:
        """For each candidate, the settings and arguments that differ between the candidates."""
        tried = [{**candidate, **candidate.get("arguments", {})} for candidate in self.plan.candidates]
        names = sorted({name for values in tried for name in values if values[name] != tried[0][name]} - {"arguments"})
        return [{name: values[name] for name in names} for values in tried]

    @property
    def higher(self) -> bool:
        """Whether a higher score is better."""
        return task_class(self.plan.run.task.name).score.higher

    @cached_property
    def table(self) -> pd.DataFrame:
        """The row of :meth:`scores` for each candidate after the epoch that it is trained up to."""
        import pandas as pd

        scores = {aim: self.scores(aim) for aim in {*self.aims}}
        return pd.concat([scores[aim].iloc[[number]] for number, aim in enumerate(self.aims)])

    @cached_property
    def aims(self) -> list[int]:
        """The epoch that each candidate is trained up to, as far as the scores on disk decide.

        Halving treats a candidate that has diverged as the worst in all rungs, so that another one takes its place.
        """
        epochs, candidates = self.plan.run.epochs, range(len(self.values))
        aims = [epochs for _ in candidates]
        if not self.tuning.halving or all(state.ended for state in self.states):
            return aims
        left = list(candidates)
        for rung in rungs(epochs, len(left), start_of(self.plan.run)):
            aims = [rung if candidate in left else aim for candidate, aim in zip(candidates, aims, strict=True)]
            ranked = _ranked(self.scores(rung).loc[left], self.higher)
            left = list(ranked.index[ranked["diverged"] < self.tuning.seeds][: (len(left) + 1) // 2])
            if len(left) < 2 or not all(state.ended for state in self._trials(aims)):
                break
        return aims

    def _trials(self, aims: Sequence[int]) -> list[RunState]:
        """Return the states of the tuning runs that are trained up to these epochs."""
        untils = [aim if aim < self.plan.run.epochs else None for aim in aims for _ in range(self.tuning.seeds)]
        return [replace(state, until=until) for state, until in zip(self.states, untils, strict=True)]

    @property
    def trials(self) -> list[RunState]:
        """The tuning runs, each with the epoch that it is trained up to."""
        return self._trials(self.aims)

    def scores(self, epoch: int) -> pd.DataFrame:
        """Return a row for each candidate after an epoch.

        ``score`` and ``clean`` are the mean scores over seeds, by the labels and by the true labels, ``error`` the
        standard error over seeds, ``diverged`` the number of runs that diverged; ``centre`` and ``edges`` are those of
        :attr:`grid`.
        """
        import pandas as pd

        trials = pd.DataFrame([_score(state, epoch) for state in self.states])
        groups = trials.groupby(trials.index // self.tuning.seeds)
        scores = groups[["score", "clean"]].mean()
        scores = scores.assign(epoch=epoch, error=groups["score"].sem(), diverged=groups["diverged"].sum())
        return scores.join(self.grid)

    @cached_property
    def grid(self) -> pd.DataFrame:
        """For each candidate, the distance from the middle of the grid (``centre``), and the settings that are the
        smallest (but not 0) or the largest tried (``edges``).
        """
        import pandas as pd

        values = pd.DataFrame(self.values, index=range(len(self.values))).select_dtypes("number")
        ranks = values.rank(method="dense")
        places = 2 * (ranks - 1) / (ranks.max() - 1) - 1  # -1 the smallest, 0 the middle, 1 the largest
        at_edge = (places == 1) | ((places == -1) & (values != 0))
        edges = [list(values.columns[flags]) for flags in at_edge.to_numpy(dtype=bool)]
        return pd.DataFrame({"centre": (places**2).sum(axis=1), "edges": edges})

    def best(self, score: str = "score") -> int | None:
        """Return the number of the candidate with the best score; None until the tuning runs have ended.

        On ties it is the one nearest to the middle of the grid, or the first of those. Candidates that diverged with
        fewer seeds come first. If all diverged with every seed, it is the first one, which has the smallest radii.
        """
        if not all(state.ended for state in self.trials):
            return None
        if self.table[score].isna().all():
            return 0
        return int(_ranked(self.table[self.table["epoch"] == max(self.aims)], self.higher, score).index[0])

    @cached_property
    def samples(self) -> int | None:
        """The number of samples that a tuning run is evaluated on; None before any has begun, and for old runs."""
        for state in self.states:
            with contextlib.suppress(BsamRuntimeError):  # damaged: another run may tell
                if (number := RunDir(state.path).note("identity").get("eval_samples")) is not None:
                    return int(number)
        return None

    @cached_property
    def noise(self) -> float | None:
        """The standard error of the best score, the larger of those over samples and over seeds; None if unknown.

        A share of n samples has the standard error sqrt(p (1 - p) / n), here with two more successes and failures
        (Agresti and Coull), so that it is not 0 for a score of 100 %. Each seed holds out other training samples.
        """
        if (best := self.best()) is None:
            return None
        score, factor = self.table["score"][best], task_class(self.plan.run.task.name).score.factor
        errors = [self.table["error"][best]]
        is_share = not self.plan.run.task.is_own  # which score a user's task has, is not known
        if is_share and self.samples is not None and 0 <= score <= factor:
            n = self.samples * (self.tuning.seeds if self.tuning.split == "holdout" else 1) + 4
            share = (score / factor * (n - 4) + 2) / n
            errors.append(factor * math.sqrt(share * (1 - share) / n))
        return max((float(error) for error in errors if not math.isnan(error)), default=None)

    @property
    def is_noisy(self) -> bool:
        """Whether another candidate's score is within a standard error of that of the chosen one after as many epochs,
        equal scores included.
        """
        import pandas as pd

        if (best := self.best()) is None:
            return False
        chosen = [self.scores(aim)["score"][best] for aim in self.aims]
        ahead = (pd.Series(chosen) - self.table["score"]) * (1 if self.higher else -1)
        return bool((ahead <= (self.noise or 0.0) + 1e-9).sum() > 1)

    @property
    def samples_text(self) -> str:
        """The number and the kind of the samples that scored the candidates, in words."""
        return f"{'' if self.samples is None else f'{self.samples:,} '}{SPLITS[self.tuning.split]} samples"

    @property
    def tuned_on(self) -> str:
        """Describe the tuning data and any warnings. Empty until all tuning runs have ended."""
        if (best := self.best()) is None:
            return ""
        edges = self.table["edges"][best]
        which = "" if edges == list(self.values[0]) else f"{settings_text(edges)} "
        warnings = {"within the noise": self.is_noisy, f"{which}at the edge of the grid": edges}
        given = ", ".join(text for text, is_given in warnings.items() if is_given)
        text = f"tuned on {self.samples_text}, {count_text(self.tuning.seeds, 'seed')}"
        return f"{text}; {given}" if given else text


def _ranked(scores: pd.DataFrame, higher: bool, score: str = "score") -> pd.DataFrame:
    """Return candidates from the best to the worst."""
    return scores.round(9).sort_values(["diverged", score, "centre"], ascending=[True, not higher, True])


def _score(state: RunState, epoch: int) -> dict[str, Any]:
    """Return the score of a tuning run after an epoch and that on the true labels, NaN if there is none.

    With a large learning rate, scores differ by points from one epoch to the next: before the last epoch, it is the
    mean over a few epochs.
    """
    if state.diverged is not None or len(state.epochs) < epoch:
        return {"score": math.nan, "clean": math.nan, "diverged": state.diverged is not None}
    window = 1 if epoch == state.run.epochs else max(1, round(WINDOW * state.run.epochs))
    rows, split = state.epochs[max(0, epoch - window) : epoch], state.run.eval_split
    measure = task_class(state.run.task.name).score
    score = fmean(measure.shown(row, split) for row in rows)
    clean = f"{split}_clean_accuracy"
    return {
        "score": score,
        "clean": 100 * fmean(row[clean] for row in rows) if clean in rows[-1] else score,
        "diverged": False,
    }
