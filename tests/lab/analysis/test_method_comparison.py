"""The paragraph of a comparison, and its numbers, from run directories with invented scores."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from bsam.lab.recipes.compare_recipe import compared_runs
from scipy import stats

from bsam.lab.analysis.method_comparison import compare_states
from bsam.lab.recipes.columns import states_of
from bsam.lab.recipes.experiments import with_seed
from bsam.lab.recipes.variants import passes_of
from bsam.lab.training.run_dir import run_dir_name
from fake_fit import FakeFit

SCORES = {  # in %, a score per seed
    "sgd": (90.0, 91.0, 89.0),
    "sam": (91.0, 92.2, 90.1),
    "bsam": (90.5, 90.9, 89.8),
    "asam": (89.0, 89.9, 88.2),
}


@pytest.fixture
def states(tmp_path):
    """A function that returns the states of runs with these scores; None does not begin, and text diverges.

    Each run begins some minutes after the last one; an epoch takes a second per pass.
    """

    def make(scores, minutes=1):
        runs = compared_runs(list(scores), {"epochs": 2})
        made = []
        for name, run in runs.items():
            for seed, score in enumerate(scores[name]):
                (seeded,) = with_seed([run], seed)
                made.append(seeded)
                folder = tmp_path / run_dir_name(seeded)
                if isinstance(score, float):
                    FakeFit(lambda run, score=score: score / 100)(seeded, folder)
                    date = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=minutes * len(made))
                    machines = [{"date": date.isoformat(), "device": "cpu"}]
                    (folder / "environment.json").write_text(json.dumps(machines))
                    metrics = (folder / "metrics.jsonl").read_text()
                    seconds = f'"seconds": {float(passes_of(run))}'
                    (folder / "metrics.jsonl").write_text(metrics.replace('"seconds": 1.0', seconds))
                elif score is not None:
                    folder.mkdir()
                    (folder / "config.json").write_text(json.dumps(seeded.settings()))
                    (folder / "diverged.json").write_text(json.dumps({"reason": score}))
        return states_of(made, tmp_path)

    return make


def test_the_numbers(states):
    comparison, p = compare_states(states(SCORES), "SGD"), []
    assert [row.method for row in comparison.methods] == ["SGD", "SAM", "BSAM (Algorithm 1)", "ASAM"]
    assert comparison.unit == "test accuracy in %"
    for row, scores in zip(comparison.methods, SCORES.values(), strict=True):
        assert (row.n, row.mean, row.std) == (3, pytest.approx(sum(scores) / 3), pytest.approx(stats.tstd(scores)))
        assert row.scores == pytest.approx(dict(enumerate(scores)))
        if row.method == "SGD":
            assert (row.difference, row.decision) == (None, None)
            continue
        test = stats.ttest_rel(scores, SCORES["sgd"])
        low, high = test.confidence_interval()
        d = row.difference
        assert (d.low, d.high, d.p) == (pytest.approx(low), pytest.approx(high), pytest.approx(test.pvalue))
        assert d.mean == pytest.approx(row.mean - 90)
        p.append(test.pvalue)
    assert p[0] < p[2] < p[1]  # SAM, ASAM, BSAM
    by_hand = [3 * p[0], p[1], 2 * p[2]]  # Holm; they stay in this order
    assert by_hand[0] < by_hand[2] < by_hand[1]
    assert [row.decision.p for row in comparison.methods[1:]] == pytest.approx(by_hand)
    assert [row.decision.tests for row in comparison.methods[1:]] == [3] * 3
    assert [row.is_decided for row in comparison.methods] == [False, *(value < 0.05 for value in by_hand)]
    assert [row.passes for row in comparison.methods] == [1, 2, 3, 2]
    assert [row.radius for row in comparison.methods] == [None, 0.05, 0.1, 0.5]
    assert [row.is_better for row in comparison.methods] == [False, True, False, False]


HOLM = " after Holm's correction for 3 comparisons"


def test_the_paragraph(states):
    given = states(SCORES)
    assert str(compare_states(given, "SGD")) == (
        "SAM is better than SGD, by more than chance. SGD: test accuracy in % 90.00 ± 1.00, 3 seeds. "
        "SAM at total radius 0.05 (not tuned) is better by 1.10 points (95 % interval +0.85 to +1.35, 3 seeds; "
        f"p = 0.00823{HOLM}), more than chance, at 2 passes per step instead of 1 and 2 s per epoch instead of 1 s. "
        "BSAM (Algorithm 1) at total radius 0.1 (not tuned) is better by 0.40 points (95 % interval -0.74 to +1.54, "
        f"3 seeds; p = 0.27{HOLM}), which may be chance (about 8 more seeds would decide), at 3 passes per step "
        "instead of 1 and 3 s per epoch instead of 1 s. "
        "ASAM at total radius 0.5 (not tuned) is worse by 0.97 points (95 % interval -1.35 to -0.59, 3 seeds; "
        f"p = 0.0164{HOLM}), more than chance, at 2 passes per step instead of 1 and 2 s per epoch instead of 1 s."
    )
    tuned = str(compare_states(given, "ASAM"))
    assert tuned.startswith("SAM, BSAM (Algorithm 1) and SGD are better than ASAM, by more than chance. ASAM: ")
    assert (
        f" SGD is better by 0.97 points (95 % interval +0.59 to +1.35, 3 seeds; p = 0.0164{HOLM}), more than chance, "
        "at 1 pass per step instead of 2 and 1 s per epoch instead of 2 s. "
    ) in tuned
    assert "at the same 2 passes per step and 2 s" in tuned


TOO_FEW = "Too few seeds: telling whether a method is better than SGD needs at least 3."


@pytest.mark.parametrize(
    ("scores", "answer"),
    [
        ({"sgd": SCORES["sgd"], "asam": SCORES["asam"]}, "No method is better than SGD."),
        ({"sgd": SCORES["sgd"], "sam": SCORES["sgd"]}, "No method is better than SGD."),
        ({"sgd": (70.1, 90.2, 80.0), "sam": (90.2, 70.1, 80.0)}, "No method is better than SGD."),
        ({"sgd": SCORES["sgd"], "bsam": SCORES["bsam"]}, "No method is better than SGD by more than chance."),
        ({"sgd": (90.0,), "bsam": (95.0,)}, TOO_FEW),
        ({"sgd": (90.0, 91.0), "bsam": (95.0, 96.01)}, TOO_FEW),
        ({"sgd": (90.0, 91.0), "bsam": (85.0, 85.99)}, TOO_FEW),
        ({"sgd": (90.0, None), "bsam": (None, 85.0)}, "No method is better than SGD."),
        ({"sgd": (None, "nan"), "bsam": (80.0, 85.0)}, "SGD has no finished run (1 diverged, 1 not finished)"),
    ],
)
def test_the_answer_comes_first(states, scores, answer):
    assert str(compare_states(states(scores), "SGD")).startswith(answer)


def test_one_seed_and_equal_scores(states):
    scores = {"sgd": (90.0,), "sam": (90.0,), "bsam": (95.0,)}
    text = str(compare_states(states(scores), "SGD"))
    assert "SGD: test accuracy in % 90.00, 1 seed." in text
    needed = "which may be chance (at least 2 more seeds needed to decide)"
    assert f"SAM at total radius 0.05 (not tuned) is equal (one seed), {needed}, at 2 passes" in text
    assert f"is better by 5.00 points (one seed), {needed}, at 3 passes" in text


def test_two_seeds_decide_nothing(states):
    """Even if their interval excludes 0."""
    scores = {"sgd": (80.0, 81.0), "sam": (85.0, 86.01), "asam": (81.0, 84.0)}
    _, sam, asam = (comparison := compare_states(states(scores), "SGD")).methods
    assert sam.difference.low > 0
    assert (sam.is_decided, sam.decision.p, sam.decision.more_seeds) == (False, None, 1)
    assert "2 seeds), which may be chance (at least 1 more seed needed to decide), at 2" in str(comparison)
    # differences 1 and 3, two comparisons: Student's t for 97.5 % times the spread over the root of n is 2.21 with 5
    # seeds and 1.83 with 6
    assert asam.decision.more_seeds == 4
    assert "2 seeds), which may be chance (about 4 more seeds would decide), at 2" in str(comparison)


def test_a_method_that_is_better_alone_may_not_be_among_several(states):
    gains = (1.5, 2.0, 2.8)
    gained = tuple(score + gain for score, gain in zip(SCORES["sgd"], gains, strict=True))
    alone = compare_states(states({"sgd": SCORES["sgd"], "sam": gained}), "SGD").methods[1]
    p = stats.ttest_1samp(gains, 0).pvalue
    assert 0.025 < p < 0.05
    assert alone.is_better
    several = compare_states(states({"sgd": SCORES["sgd"], "sam": gained, "asam": SCORES["bsam"]}), "SGD")
    assert not several.methods[1].is_better
    assert several.methods[1].decision.more_seeds == 1
    assert f"3 seeds; p = {2 * p:.3g} after Holm's correction for 2 comparisons), which may be chance" in str(several)


def test_runs_that_diverged_or_are_not_finished(states):
    """They are counted, and the seeds that both methods have are compared."""
    scores = {**SCORES, "sam": (91.0, 92.2, "the loss is nan"), "bsam": ("nan", "nan", None), "asam": (None,) * 3}
    comparison = compare_states(states(scores), "SGD")
    rows = {row.method: row for row in comparison.methods}
    assert (rows["SAM"].n, rows["SAM"].diverged, rows["SAM"].difference.n) == (2, 1, 2)
    assert rows["SAM"].difference.mean == pytest.approx(1.1)
    assert (rows["ASAM"].unfinished, rows["ASAM"].mean, rows["ASAM"].difference) == (3, None, None)
    text = str(comparison)
    assert "2 s per epoch instead of 1 s (1 diverged)." in text
    assert "has no finished run to compare (2 diverged, 1 not finished)." in text
    assert "ASAM has no finished run to compare (3 not finished)." in text


def test_equal_differences_are_not_more_than_chance(states):
    """Accuracies are multiples of one sample: all seeds may differ by the same number of samples."""
    scores = {"sgd": (90.1, 91.3, 90.5), "sam": (92.2, 93.4, 92.6)}
    row = (comparison := compare_states(states(scores), "SGD")).methods[1]
    assert (row.is_decided, row.is_better) == (False, False)
    text = str(comparison)
    assert text.startswith("No method is better than SGD by more than chance.")
    assert "is better by 2.10 points (equal differences with all 3 seeds, so their spread is unknown), which" in text


def test_rounding_errors_are_not_more_than_chance(states):
    scores = {"sgd": (30.7, 60.2, 90.3), "sam": (30.8, 60.3, 90.4)}
    row = compare_states(states(scores), "SGD").methods[1]
    assert (row.is_decided, row.decision.more_seeds, row.difference.p) == (False, None, None)
    assert row.difference.half_width > 0


def test_seconds_are_left_out_if_runs_were_trained_at_the_same_time(states):
    scores = {"sgd": (90.0, 91.0), "sam": (91.0, 92.0)}
    comparison = compare_states(states(scores, minutes=0), "SGD")
    assert [row.seconds for row in comparison.methods] == [None, None]
    assert str(comparison).endswith(", at 2 passes per step instead of 1.")


def test_an_unfinished_run_has_no_score(states):
    given = states({"sgd": (90.0, 91.0), "sam": (91.0, 92.0)})
    given[-1] = replace(given[-1], finished=False, epochs=given[-1].epochs[:1])
    row = compare_states(given, "SGD").methods[1]
    assert (row.scores, row.unfinished) == ({0: pytest.approx(91)}, 1)


CHANCE = {"train_loss": 2.31, "test_loss": 2.32}  # ln(10) is 2.303


def at_chance(states, method, seeds):
    """The same states, where these seeds of a method have the losses of guessing."""
    return [
        replace(state, epochs=tuple({**epoch, **CHANCE} for epoch in state.epochs))
        if (state.run.method, state.run.seed) in {(method, seed) for seed in seeds}
        else state
        for state in states
    ]


def test_a_method_that_is_no_better_than_chance_gets_no_verdict(states):
    """Its difference is neither tested nor counted, however many seeds did not learn."""
    given = states({**SCORES, "bsam": (10.1, 9.8, 90.0)})
    comparison = compare_states(at_chance(given, "bsam", (0, 1)), "SGD")
    row = comparison.methods[2]
    assert (row.difference, row.is_decided, sorted(row.failures)) == (None, False, [0, 1])
    assert {other.decision.tests for other in comparison.methods[1:2]} == {2}
    assert (
        " No verdict on BSAM (Algorithm 1) at total radius 0.1 (not tuned). BSAM (Algorithm 1) did not learn with 2 of "
        "3 seeds. Seed 0: The network is no better than chance: accuracy 0.1010, 10 classes, loss 2.31 (2.303 by "
        "guessing). Try another --lr (now 0.05), a smaller radius (now rho_max=0.05 rho_min=0.05) or more "
        "epochs. "
    ) in str(comparison)
    assert str(comparison).startswith("SAM is better than SGD, by more than chance. ")


def test_nothing_is_compared_with_a_baseline_that_is_no_better_than_chance(states):
    given = at_chance(states({"sgd": (10.0, 9.9, 10.2), "sam": SCORES["sam"]}), "base", (0, 1, 2))
    comparison = compare_states(given, "SGD")
    assert comparison.methods[1].difference is None
    assert str(comparison).startswith(
        "Nothing can be compared with SGD, which did not learn. SGD did not learn with 3 of 3 seeds. Seed 0: The "
        "network is no better than chance: accuracy 0.1000, 10 classes, "
    )


def test_no_method_learned(states):
    alone = at_chance(states({"sgd": SCORES["sgd"], "sam": (10.0, 9.9, 10.2)}), "sam", (0, 1, 2))
    answer = "No method can be compared with SGD: none of them learned. SGD: test accuracy in % 90.00"
    assert str(compare_states(alone, "SGD")).startswith(answer)
