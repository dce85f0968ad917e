"""The demo: SGD, SAM, BSAM and two-pass BSAM, or whichever methods one asks for, on digits, with clean labels and with
40 % of the training labels flipped.

Every method gets the same number of tuning runs for each noise rate. A tuning run trains on the training set, labels
flipped at that rate, and is judged by its accuracy on the validation set after the last epoch. The labels of the
validation set are clean, also where those of the training set are not: this favours nobody, but it is more than one has
when all labels are noisy. The test set is seen by the final runs only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..core.errors import BsamValueError
from ..methods import METHODS
from ..training.config import Run
from ..training.record import Record
from ..training.result import Result
from ..training.workers import Workers
from .variants import variants

NOISE_RATES = (0.0, 0.4)
BATCH = 64
WEIGHT_DECAYS = (
    5e-4,
    5e-2,
)  # for all methods alike: against flipped labels a large one helps each of them, and SGD most
LEARNING_RATES = (0.03, 0.1)
SGD_LEARNING_RATES = (0.03, 0.1, 0.3, 0.6)  # nothing else to tune: as many runs go to the learning rate
SHARPNESS_RADIUS = 0.05  # of what is measured, the same for all methods
RELIEF_POINTS = 13  # along each axis of the landscapes, which the first seed's networks get
MOST_SEEDS = 1000
TUNING_SEED = 10_000  # added to the seed: a tuning run shares its random numbers with no final run


DEFAULT = ("sgd", "sam", "bsam", "bsam-2")


def titles() -> dict[str, str]:
    """Return the titles of the methods that the demo can run, by name."""
    return {"sgd": "SGD", **{name: m.title for name, m in METHODS.items()}, "bsam-2": variants()["bsam-2"].title}


def _choices(name: str) -> list[Mapping[str, Any]]:
    """Return the arguments that a method may choose from; the others keep their defaults."""
    variant = variants()[name]
    tuning = METHODS[variant.method].cls.tuning if variant.method in METHODS else ({},)
    return [{**choice, **variant.arguments} for choice in tuning]


@dataclass(frozen=True)
class Candidate:
    """A method as it stands in the table: by name, by title, and with the settings that it may choose from."""

    name: str
    title: str
    candidates: tuple[Run, ...]


def candidates_of(names: Iterable[str] = DEFAULT) -> tuple[Candidate, ...]:
    """The methods of these names, each once, with as many candidates each.

    Example:
        >>> [(c.title, len(c.candidates)) for c in candidates_of()]
        [('SGD', 8), ('SAM', 8), ('BSAM', 8), ('BSAM (2 passes)', 8)]
        >>> candidates_of(["sma"])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        bsam.core.errors.BsamValueError: there is no method 'sma': choose from sgd, sam, ..., bsam, bsam-2
    """
    return tuple(_contender(name) for name in dict.fromkeys(names))


def _contender(name: str) -> Candidate:
    if name not in titles():
        raise BsamValueError(f"there is no method {name!r}: choose from {', '.join(titles())}")
    rates = SGD_LEARNING_RATES if name == "sgd" else LEARNING_RATES
    grid = itertools.product(WEIGHT_DECAYS, rates, _choices(name))
    return Candidate(
        name,
        titles()[name],
        tuple(
            Run(name.removesuffix("-2"), own, lr=lr, weight_decay=decay, batch=BATCH, label_smoothing=0.0)
            for decay, lr, own in grid
        ),
    )


@dataclass(frozen=True)
class Plan:
    """What is asked for on the command line."""

    seed: int = 0
    seeds: int = 5
    epochs: int = 10
    candidates_of: tuple[Candidate, ...] = field(default_factory=candidates_of)

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**31 or self.seeds < 1 or self.epochs < 1:
            raise BsamValueError(
                f"seed must be 0 or more, seeds and epochs 1 or more; got {self.seed}, {self.seeds} and {self.epochs}"
            )
        if self.seeds > MOST_SEEDS:
            why = "all runs are listed before the first begins"
            raise BsamValueError(f"seeds must be at most {MOST_SEEDS}, as {why}; got {self.seeds}")
        if not self.candidates_of:
            raise BsamValueError("candidates_of must hold at least one method, got none")

    def settings(self) -> dict[str, Any]:
        """What must agree before finished runs are used again. Not the methods: a folder may gather theirs one after
        the other.
        """
        return {"seed": self.seed, "seeds": self.seeds, "epochs": self.epochs}

    def tuning_runs(self, candidate: Candidate, noise: float) -> list[Run]:
        """The candidates of a method, to be judged on the validation set."""
        return [
            replace(
                candidate,
                epochs=self.epochs,
                label_noise=noise,
                seed=self.seed + TUNING_SEED,
                eval_split="validation",
                radius=None,
            )
            for candidate in candidate.candidates
        ]

    def final_runs(self, choice: Run) -> list[Run]:
        """The chosen settings over all seeds, to be judged on the test set."""
        seeds = range(self.seed, self.seed + self.seeds)
        final = replace(choice, eval_split="test", radius=SHARPNESS_RADIUS, curvature=True)
        return [replace(final, seed=seed, relief=RELIEF_POINTS if seed == self.seed else None) for seed in seeds]

    @property
    def total(self) -> tuple[int, int]:
        """How many tuning runs and how many final runs there are."""
        return len(NOISE_RATES) * sum(len(c.candidates) for c in self.candidates_of), len(NOISE_RATES) * len(
            self.candidates_of
        ) * self.seeds


@dataclass(frozen=True)
class Cell:
    """All that is known of one method at one noise rate."""

    candidate: Candidate
    label_noise: float
    tuning: tuple[Result, ...]
    results: tuple[Result, ...]  # by seed

    @property
    def choice(self) -> Result:
        """The tuning run that won."""
        return best(self.tuning)


def best(tuning: tuple[Result, ...]) -> Result:
    """The highest validation accuracy after the last epoch; of equals the first in the grid."""
    return max(tuning, key=lambda result: result.score)


def demo(plan: Plan, record: Record, finished: Callable[[str, int], None]) -> list[Cell]:
    """Tune, then train. Runs that ``record`` holds already are not run again.

    Args:
        plan: what to do.
        record: where finished runs are kept.
        finished: called with ``"tuning"`` or ``"training"`` and the number of runs that were finished just now.
    """
    places = [(candidate, noise) for noise in NOISE_RATES for candidate in plan.candidates_of]
    with Workers() as workers:

        def complete(stage: str, runs: list[Run]) -> None:
            def keep(result: Result) -> None:
                record.add(result)
                finished(stage, 1)

            missing = [run for run in runs if run not in record]
            finished(stage, len(runs) - len(missing))
            workers.fit_all(missing, keep)

        trials = [plan.tuning_runs(candidate, noise) for candidate, noise in places]
        complete("tuning", [run for runs in trials for run in runs])
        tuning = [tuple(record[run] for run in runs) for runs in trials]
        finals = [plan.final_runs(best(results).run) for results in tuning]
        complete(
            "training", [run for runs in zip(*finals, strict=True) for run in runs]
        )  # seed by seed: what disturbs the machine disturbs all methods
    return [
        Cell(candidate, noise, tried, tuple(record[run] for run in runs))
        for (candidate, noise), tried, runs in zip(places, tuning, finals, strict=True)
    ]
