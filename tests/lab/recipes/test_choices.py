"""What tuning chooses from the scores of its runs, and when it says that the choice may be noise."""

import json
import math
import statistics

import pytest

from bsam.lab.analysis.choice_texts import tuned_on
from bsam.lab.recipes.candidates import base_candidates, radius_candidates
from bsam.lab.recipes.choices import Choice
from bsam.lab.training.config import Run
from bsam.lab.training.run_dir import RunState

RUN = Run("sam", {"rho": 0.1})


def choice(scores, folder=None, split="holdout", samples=None, candidates=None):
    """A choice with these scores in %: one or several seeds for each candidate; None diverged."""
    run = Run(RUN.method, RUN.arguments, eval_split=split)
    if samples is not None:
        (folder / "identity.json").write_text(json.dumps({"eval_samples": samples}))

    def state(score):
        if score is None:
            return RunState(run, folder, diverged="the loss is nan")
        return RunState(run, folder, ({f"{split}_accuracy": score / 100},), finished=True)

    trials = [[state(score) for score in (seeds if isinstance(seeds, tuple) else (seeds,))] for seeds in scores]
    return Choice(RUN, radius_candidates(RUN) if candidates is None else candidates, trials)


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ((80, 81, 82, 79), 2),
        (
            (-40, -30, None, -50),
            1,
        ),  # negative scores, as of a loss with another sign: a run that diverged is not better
        ((None, -200, None, None), 1),
        ((None, None, None, None), 0),
        ((90, 90, 90, 90), 1),  # ties: towards the middle, then the smaller one
        ((90, 80, 90, 90), 2),
        ((90, 80, 80, 90), 0),
        ((80, 80, 90, 90), 2),
        ((80, 0.1 + 0.2, 0.3, 0.3), 0),
        ((50, 0.1 + 0.2 + 80, 80.3, 0.3), 1),  # equal except for rounding
        (((90, 80), (84, 87), (85, 85), (88, None)), 1),  # means of two seeds; the last one diverged with one of them
        (((90, None), (None, None), (85, None), (None, None)), 0),
    ],
)
def test_the_best_candidate(scores, best, tmp_path):
    assert choice(scores, tmp_path).best() == best


def test_nothing_is_chosen_before_all_runs_have_ended(tmp_path):
    waiting = choice((80, 81, 82, 83), tmp_path)
    waiting = Choice(RUN, waiting.candidates, [*waiting.trials[:3], [RunState(RUN, tmp_path)]])
    assert (waiting.best(), waiting.settings, waiting.noise, waiting.rivals) == (None, None, None, 0)
    assert (Choice(RUN, (), ()).best(), Choice(RUN, (), ()).settings) == (None, {})


def test_the_noise_of_one_seed_is_the_error_of_a_share(tmp_path):
    """The standard error of 90 % of 64 samples is 4 points: three of these four scores are equally good."""
    found = choice((86.5, 90, 88.5, 80), tmp_path, samples=64)
    share = (0.9 * 64 + 2) / 68
    assert found.noise == pytest.approx(100 * math.sqrt(share * (1 - share) / 68))
    assert found.noise == pytest.approx(3.99, abs=0.01)
    assert found.rivals == 2
    assert tuned_on(found) == "tuned on 64 held-out samples, 1 seed; within the noise"
    many = choice((86.5, 90, 88.5, 80), tmp_path, samples=10_000)
    assert (many.noise, many.rivals) == (pytest.approx(0.3, abs=0.01), 0)
    assert tuned_on(many) == "tuned on 10,000 held-out samples, 1 seed"
    perfect = choice((99.75, 99.5, 99, 100), tmp_path, samples=400)  # one wrong sample of 400 is no difference
    assert perfect.rivals == 1
    assert tuned_on(perfect) == "tuned on 400 held-out samples, 1 seed; within the noise, at the edge of the grid"


def test_the_noise_of_several_seeds(tmp_path):
    """Each seed holds out other samples; validation samples stay the same. Scattered seeds are noise, too."""
    calm = ((90, 90), (91, 91), (85, 85), (85, 85))
    share = (0.91 * 2000 + 2) / 2004
    assert choice(calm, tmp_path, samples=1000).noise == pytest.approx(100 * math.sqrt(share * (1 - share) / 2004))
    share = (0.91 * 1000 + 2) / 1004
    validated = choice(calm, tmp_path, "validation", 1000)
    assert validated.noise == pytest.approx(100 * math.sqrt(share * (1 - share) / 1004))
    assert tuned_on(validated) == "tuned on 1,000 validation samples, 2 seeds"
    wild = ((80, 90), (85, 97), (70, 84), (75, 89))
    spread = statistics.stdev((85, 97)) / math.sqrt(2)
    assert choice(wild, tmp_path, samples=1000).noise == pytest.approx(spread)
    assert choice(wild, tmp_path, samples=1000).rivals == 1
    one_wild = (
        (90, 89.75),
        (80, 80.5),
        (63.5, 87.5),
        (10, 10),
    )  # a candidate that hardly trains is no noise of the best
    assert choice(one_wild, tmp_path, samples=1000).noise < 1
    assert choice(one_wild, tmp_path, samples=1000).rivals == 0
    (tmp_path / "identity.json").unlink()  # a run of an older version
    assert choice(wild, tmp_path).noise == pytest.approx(spread)
    assert tuned_on(choice(wild, tmp_path)) == "tuned on held-out samples, 2 seeds; within the noise"


def test_equal_scores_are_within_the_noise_even_if_that_is_unknown(tmp_path):
    assert choice((-1, -2, -1, -3), tmp_path).rivals == 1
    assert choice((-1, -2, -1.5, -3), tmp_path).rivals == 0


def test_the_grid_of_the_base_optimizer(tmp_path):
    run = Run("sgd", lr=0.1, weight_decay=1e-3)
    candidates = base_candidates(run)
    pairs = [(candidate["lr"], candidate["weight_decay"]) for candidate in candidates]
    assert pairs == [(lr, decay) for lr in (0.03, 0.1, 0.3) for decay in (1e-4, 1e-3, 1e-2, 1e-1)]
    tied = choice([90] * 12, tmp_path, candidates=candidates)
    assert pairs[tied.best()] == (0.1, 1e-3)  # the settings without tuning
    edges = {pair: choice([0] * 12, tmp_path, candidates=candidates).edges(n) for n, pair in enumerate(pairs)}
    assert (edges[0.1, 1e-3], edges[0.1, 1e-2]) == ([], [])
    assert (edges[0.3, 1e-2], edges[0.1, 1e-4], edges[0.03, 0.1]) == (["lr"], ["weight_decay"], ["lr", "weight_decay"])
    scores = [50.0] * 12
    scores[pairs.index((0.3, 1e-2))] = 90.0
    at_edge = choice(scores, tmp_path, candidates=candidates)
    assert tuned_on(at_edge) == "tuned on held-out samples, 1 seed; lr at the edge of the grid"
    without = base_candidates(Run("base", base="adam", weight_decay=0.0))
    assert [candidate["weight_decay"] for candidate in without[:3]] == [0, 1e-3, 1e-2]
    adam = choice([0] * 9, tmp_path, candidates=without)
    assert (adam.edges(3), adam.edges(5)) == ([], ["weight_decay"])  # nothing lies below 0


def test_settings_without_an_order_have_no_edge(tmp_path):
    schedules = [{"schedule": "cosine"}, {"schedule": "constant"}, {"schedule": "cosine", "warmup": 1}]
    schedules = [{"warmup": 0, **schedule} for schedule in schedules]
    found = choice((80, 90, 80), tmp_path, candidates=schedules)
    assert found.best() == 1
    assert found.names == ["schedule", "warmup"]
    assert found.edges(1) == []
