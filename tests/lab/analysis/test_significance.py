"""One criterion: paired t-tests over shared seeds, Holm's correction, verdicts and the seeds that would decide."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from bsam.common.errors import BsamValueError
from bsam.lab.analysis.runs_table import COLUMNS
from bsam.lab.analysis.sentences import evidence
from bsam.lab.analysis.significance import (
    baseline_row,
    check_baseline,
    compare_pairs,
    compare_rows,
    holm,
    paired_difference,
    seeds_needed,
)

SGD = [90.0, 91.0, 92.0]


def table(experiment="E", states=None, failures=None, **scores):
    """A table of runs with these scores, one per seed; None is a run that diverged."""
    rows = []
    for place, (name, values) in enumerate(scores.items()):
        for seed, score in enumerate(values):
            state = "diverged" if score is None else "finished"
            known = {"experiment": experiment, "row": name, "seed": seed, "place": place, "state": state}
            score = math.nan if score is None else score
            failure = (failures or {}).get(name, "")
            rows.append({**COLUMNS, **known, "score": score, "unit": "test accuracy in %", "failure": failure})
    return pd.DataFrame(rows)


def by_row(compared):
    return {row["row"]: row for row in compared.to_dict("records")}


def test_a_difference_is_that_of_the_seeds_that_both_have():
    ours, theirs = {0: 3.0, 2: 5.5, 3: 1.0, 7: 9.0}, {0: 1.0, 3: 2.0, 2: 2.0, 9: 50.0}
    found = paired_difference(ours, theirs)
    gaps = np.array([2.0, 3.5, -1.0])
    half = stats.t.ppf(0.975, 2) * gaps.std(ddof=1) / math.sqrt(3)
    assert found["shared"] == 3
    assert found["difference"] == pytest.approx(gaps.mean())
    assert (found["low"], found["high"]) == pytest.approx((gaps.mean() - half, gaps.mean() + half))
    assert found["p"] == pytest.approx(2 * stats.t.sf(gaps.mean() / (gaps.std(ddof=1) / math.sqrt(3)), 2))


@pytest.mark.parametrize(("gaps", "shared"), [([], 0), ([0.5], 1), ([0.1, 0.1, 0.1], 3)])
def test_without_a_spread_there_is_no_p_value(gaps, shared):
    theirs = dict(enumerate(SGD[: len(gaps)]))
    found = paired_difference({seed: theirs[seed] + gap for seed, gap in enumerate(gaps)}, theirs)
    assert found["shared"] == shared
    assert all(math.isnan(found[name]) for name in ("low", "high", "p"))


def test_equal_differences_have_no_interval_that_contradicts_their_verdict():
    row = by_row(compare_rows(table(SGD=[*SGD, 90.0, 91.0], same=[score + 5 for score in [*SGD, 90.0, 91.0]])))["same"]
    assert (row["verdict"], row["difference"], row["shared"]) == ("no difference shown", 5, 5)
    assert all(math.isnan(row[name]) for name in ("low", "high", "more_seeds"))
    assert "spread" in evidence(row)
    assert "95 %" not in evidence(row)


def test_holm_by_hand():
    p = [0.01, math.nan, 0.04, 0.03, 0.02]
    np.testing.assert_allclose(holm(p), [0.04, math.nan, 0.06, 0.06, 0.06])


def test_verdicts_and_their_correction():
    better = [s + d for s, d in zip(SGD, (1.0, 1.1, 0.9), strict=True)]
    runs = table(
        SGD=SGD,
        better=better,
        worse=[s - d for s, d in zip(SGD, (1.0, 1.1, 0.9), strict=True)],
        close=[s + d for s, d in zip(SGD, (0.2, -0.1, 0.1), strict=True)],
        short=better[:2],
        lost=[None, None, None],
        bad=better,
        failures={"bad": "The network is no better than chance."},
    )
    found = by_row(compare_rows(runs))
    verdicts = {row: values["verdict"] for row, values in found.items()}
    assert verdicts == {
        "SGD": "",
        "better": "better",
        "worse": "worse",
        "close": "no difference shown",
        "short": "too few seeds",
        "lost": "worse",
        "bad": "did not learn",
    }
    raw = [stats.ttest_rel(runs[runs.row == row].score, SGD).pvalue for row in ("better", "worse", "close")]
    assert found["better"]["p_holm"] == pytest.approx(min(1, 3 * min(raw[:2])))
    assert {values["tests"] for values in found.values()} == {3}
    assert by_row(compare_rows(runs, "lost"))["better"]["verdict"] == "better"
    assert found["SGD"]["mean"] == pytest.approx(91.0)
    assert found["close"]["their_mean"] == pytest.approx(91.0)


def test_a_method_that_diverged_with_some_seeds_is_judged_by_the_others():
    runs = table(SGD=[90.0] * 8, some=[None, None, None, 91.0, 91.2, 90.9, 91.1, 91.05])
    found = by_row(compare_rows(runs))["some"]
    assert (found["verdict"], found["diverged"], found["shared"]) == ("better", 3, 5)


def test_one_significant_method_among_many_is_corrected_away():
    barely = [s + d for s, d in zip(SGD, (1.0, 1.3, 0.8), strict=True)]
    alone = by_row(compare_rows(table(SGD=SGD, a=barely)))["a"]
    noise = {f"n{i}": [s + d for s, d in zip(SGD, (0.2, -0.1, 0.1 * i), strict=True)] for i in range(4)}
    among = by_row(compare_rows(table(SGD=SGD, a=barely, **noise)))["a"]
    assert (alone["verdict"], among["verdict"]) == ("better", "no difference shown")


def test_the_seeds_that_would_decide_do_decide():
    gaps = np.array([0.4, -0.2, 0.5, 0.1])
    theirs = dict(enumerate(np.linspace(90, 91, 4)))
    ours = {seed: theirs[seed] + gap for seed, gap in enumerate(gaps)}
    found = paired_difference(ours, theirs) | {"pooled": math.nan}
    more = seeds_needed(found, tests=1)

    def excludes_zero(n):
        return stats.t.ppf(0.975, n - 1) * gaps.std(ddof=1) / math.sqrt(n) < gaps.mean()

    assert excludes_zero(4 + more)
    assert not excludes_zero(4 + more - 1)
    assert seeds_needed(found, tests=5) > more
    single = paired_difference({0: ours[0]}, {0: theirs[0]}) | {"pooled": 0.3}
    spread = math.sqrt(2) * 0.3  # of the difference of two runs
    enough = [n for n in range(3, 100) if stats.t.ppf(0.975, n - 1) * spread / math.sqrt(n) < 0.4]
    assert seeds_needed(single, tests=1) == enough[0] - 1


def test_all_pairs_are_compared_once_and_corrected_together():
    runs = table(A=SGD, B=[91.0, 92.2, 92.9], C=[89.0, 90.2, 91.3])
    pairs = compare_pairs(runs)
    assert [(row.row, row.against) for row in pairs.itertuples()] == [("B", "A"), ("C", "A"), ("C", "B")]
    assert set(pairs["tests"]) == {3}
    np.testing.assert_allclose(pairs["p_holm"], holm(pairs["p"]))


def test_the_baseline_is_named_as_users_name_it():
    rows = ["SGD", "SAM, rho 0.1", "BSAM (Algorithm 1)", "BSAM (2 passes), rho_max 0.1", "BSAM (2 passes), rho_max 0.2"]
    named = {"sgd": "SGD", "sam": "SAM, rho 0.1", "bsam": "BSAM (Algorithm 1)", "bsam-2": None, "adam": None}
    assert {name: baseline_row(rows, name) for name in named} == named
    runs = pd.concat([table(A=SGD, B=SGD), table("F", C=SGD, B=SGD)], ignore_index=True)
    compared = compare_rows(runs, "B")
    assert set(compared["against"]) == {"B"}
    assert set(compare_rows(runs, "A")["against"]) == {"A", "C"}  # the first row where there is no A
    check_baseline(runs, "c")
    for refuse in (check_baseline, compare_rows):
        with pytest.raises(BsamValueError, match="'X'"):
            refuse(runs, "X")
