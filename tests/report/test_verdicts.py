"""Verdicts: on the runs in results/, which docs/results.md describes in words, and on made-up ones."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from bsam.common.errors import BsamValueError
from bsam.recipes.paper import CLASSIFICATION, LABEL_NOISE
from bsam.report.records import Record, Records, read_records
from bsam.report.verdicts import baseline_row, baseline_verdicts, paper_verdicts
from bsam.training.config import Run

ROOT = Path(__file__).parents[2]
OTHER = "40 % of labels drawn from other classes: 40.0 % wrong"
CLEAN, NOISE, HUNDRED = (f"ResNet-18, {name}, 200 epochs" for name in ("CIFAR-10", f"CIFAR-10, {OTHER}", "CIFAR-100"))
NOISY = "cifar10-resnet18-noise40"
PAPER, MATCHED, TUNED = "at the paper's radii", "at matched radii", "at tuned radii"
OURS = "at our radii"


@pytest.fixture(scope="module")
def verdicts():
    """The verdicts on results/, by claim and radii."""
    found = paper_verdicts(read_records([ROOT / "results"]))
    by_claim = {(verdict.claim, verdict.at): verdict for verdict in found}
    assert len(by_claim) == len(found)
    return by_claim


def last(folder, name, seeds=(0, 1)):
    """The last scores in % in the files of a folder, by seed."""
    files = [ROOT / "results" / folder / f"{name}-seed{seed}.jsonl" for seed in seeds]
    return [100 * json.loads(file.read_text().splitlines()[-1])["test_accuracy"] for file in files]


@pytest.mark.parametrize(
    ("claim", "at", "folder", "ours", "theirs", "outcome"),
    [  # as in docs/results.md
        (f"SAM better than SGD: {CLEAN}", PAPER, "cifar10-resnet18", "sam", "sgd", "confirmed"),
        (f"BSAM better than SAM: {CLEAN}", PAPER, "cifar10-resnet18", "bsam", "sam", "open"),
        (f"SAM better than SGD: {NOISE}", PAPER, NOISY, "sam", "sgd", "confirmed"),
        (f"BSAM better than SAM: {NOISE}", PAPER, NOISY, "bsam", "sam", "confirmed"),
        (
            f"BSAM better than SAM (sum): {NOISE}",
            MATCHED,
            NOISY,
            "bsam",
            "sam-rho0.1",
            "not confirmed",
        ),
        (
            f"BSAM better than SAM (follow): {NOISE}",
            MATCHED,
            NOISY,
            "bsam",
            "sam-follow",
            "confirmed",
        ),
    ],
)
def test_verdicts_and_intervals_of_our_runs(claim, at, folder, ours, theirs, outcome, verdicts):
    verdict = verdicts[claim, at]
    a, b = last(folder, ours), last(folder, theirs)
    test = stats.ttest_rel(a, b)
    low, high = test.confidence_interval(0.95)
    assert verdict.outcome == outcome
    shown = re.search(r"(\S+) points \[95 % interval (\S+), (\S+)\], 2 shared seeds\.", verdict.evidence)
    expected = [np.mean(np.subtract(a, b)), low, high]
    np.testing.assert_allclose([float(number) for number in shown.groups()], expected, rtol=0, atol=0.0051)
    assert f"{np.mean(a):.2f} ± {np.std(a, ddof=1):.2f} (2)" in verdict.evidence
    assert (verdict.more_seeds is not None) == (outcome == "open")


def test_published_differences_are_the_papers(verdicts):
    numbers, noise = CLASSIFICATION.numbers, LABEL_NOISE.numbers
    gap = numbers["resnet18", "cifar10", "bsam"].mean - numbers["resnet18", "cifar10", "sam"].mean
    assert f"Published: {gap:+.2f}." in verdicts[f"BSAM better than SAM: {CLEAN}", PAPER].evidence
    gap = noise["cifar10", "bsam", 0.4, "all"].mean - noise["cifar10", "sam", 0.4, "all"].mean
    assert f"Published: {gap:+.2f}." in verdicts[f"BSAM better than SAM: {NOISE}", PAPER].evidence
    assert "Published" not in verdicts[f"BSAM better than SAM (sum): {NOISE}", MATCHED].evidence


@pytest.mark.parametrize("other", ["SAM (sum)", "SAM (follow)"])
def test_one_seed_leaves_claims_open(other, verdicts):
    for title in (CLEAN, HUNDRED):
        verdict = verdicts[f"BSAM better than {other}: {title}", MATCHED]
        assert verdict.outcome == "open"
        assert verdict.more_seeds > 0
        assert "With one seed, only a difference of more than" in verdict.evidence
    assert verdicts[f"BSAM better than SAM: {HUNDRED}", PAPER].outcome == "open"


def test_flatness_of_our_networks(verdicts):
    """One seed on CIFAR-100, measured with `bsam flatness`; three with 4 bits, measured after training."""
    files = (ROOT / "results" / "cifar100-resnet18").glob("flatness*.json")
    measured = [entry for file in files for entry in json.loads(file.read_text())["models"]]
    bsam, sam = (
        next(
            e["eigenvalues"]["maximum"]
            for e in measured
            if e["run"]["method"] == method
            and "passes" not in e["run"]["arguments"]
            and e["run"]["arguments"].get("rho", 0.1) == 0.1
        )
        for method in ("bsam", "sam")
    )
    words = "(largest eigenvalue of the Hessian)"
    verdict = verdicts[f"BSAM flatter than SAM {words}: {HUNDRED}", PAPER]
    assert verdict.outcome == "open"
    assert f"BSAM {bsam:.1f} (1), SAM {sam:.1f} (1): {bsam - sam:+.1f}, 1 shared seed." in verdict.evidence
    assert "1,000 training samples" in verdict.evidence
    runs = json.loads((ROOT / "results" / "quantization" / "results.json").read_text())["runs"]
    values = {
        name: [
            r["top_eigenvalue"]
            for r in runs
            if r["title"] == name and "mobilenet" in r["folder"] and r["settings"]["weight_bits"]
        ]
        for name in ("BSAM (Algorithm 1)", "SGD")
    }
    low, high = stats.ttest_rel(*values.values()).confidence_interval(0.95)
    verdict = verdicts[f"BSAM flatter than SGD {words}: MobileNetV1, CIFAR-10, 4 bits, 12 epochs", PAPER]
    assert f"[95 % interval {low:+.1f}, {high:+.1f}], 3 shared seeds." in verdict.evidence
    assert (verdict.outcome, high < 0) == ("confirmed", True)


def test_transfer_and_pose_of_our_runs(verdicts):
    pet = "Oxford-IIIT Pet, pretrained, 30 epochs"
    lite = verdicts[f"BSAM better than SAM: tf_efficientnet_lite0, {pet}", PAPER]
    assert lite.outcome == "not confirmed"
    assert "Published for EfficientNet-B0" in lite.evidence
    assert verdicts[f"SAM better than SGD: tf_efficientnet_lite0, {pet}", PAPER].outcome == "confirmed"
    assert verdicts[f"SAM better than BSAM: ResNet-50, {pet}", PAPER].outcome == "confirmed"  # as the paper's numbers
    pose = "SimCC, ResNet-50, LSP Extended, pretrained, 30 epochs"
    assert "The paper uses MPII" in verdicts[f"BSAM better than SAM: {pose}", OURS].evidence
    assert not [claim for claim, at in verdicts if at == PAPER and pose in claim]  # the paper does not state them
    assert verdicts[f"BSAM better than SAM: {pose}", MATCHED].outcome == "open"
    assert verdicts["SAM better than SGD: ResNet-18, CIFAR-10, 4 bits, 12 epochs", PAPER].outcome == "not confirmed"


def test_other_protocols_are_no_claims_of_the_paper(verdicts):
    assert not [claim for claim, _ in verdicts if "60 epochs" in claim or "Digits" in claim or "90 epochs" in claim]


def record(method, seed, score, *, experiment="E", state="finished", unit="accuracy in %", higher=True, **more):
    return Record("run", Path("out"), experiment, method, seed, state, None, score, unit, higher, **more)


def made(higher=True, experiment="E", **scores):
    """A record for each score; names have _ for a space."""
    return [
        record(name.replace("_", " "), seed, score, higher=higher, experiment=experiment)
        for name, values in scores.items()
        for seed, score in enumerate(values)
    ]


def verdicts_on(runs, baseline="A"):
    return baseline_verdicts(Records(tuple(runs), ()), baseline)


A = [90.0, 91.0, 92.0]


@pytest.mark.parametrize(
    ("scores", "outcome"),
    [([92.0, 93.1, 93.9], "confirmed"), ([88.0, 89.1, 89.9], "not confirmed"), ([91.0, 90.0, 92.5], "open")],
)
def test_a_baseline(scores, outcome):
    (verdict,) = verdicts_on(made(A=A, B=scores))
    test = stats.ttest_rel(scores, A)
    low, high = test.confidence_interval(0.95)
    assert verdict.outcome == outcome == ("open" if low < 0 < high else "confirmed" if low > 0 else "not confirmed")
    assert (
        f"{np.mean(scores) - 91:+.2f} points [95 % interval {low:+.2f}, {high:+.2f}], 3 shared seeds."
        in verdict.evidence
    )
    assert (verdict.claim, verdict.at) == ("B better than A: E", "")
    assert (verdict.more_seeds is None) == (outcome != "open")


def test_a_lower_score_can_be_better():
    scores = [92.0, 93.1, 93.9]
    assert verdicts_on(made(higher=False, A=A, B=scores))[0].outcome == "not confirmed"
    assert verdicts_on(made(higher=False, A=scores, B=A))[0].outcome == "confirmed"


def test_seeds_that_are_not_shared():
    runs = [*made(A=A), record("B", 7, 95.0)]
    (verdict,) = verdicts_on(runs)
    assert (verdict.outcome, verdict.more_seeds) == ("open", None)
    assert "no shared seeds" in verdict.evidence


def one_seed_limit(*samples):
    """Twice the 95 % range of the difference of two runs."""
    df = sum(len(values) - 1 for values in samples)
    variance = sum((len(values) - 1) * np.var(values, ddof=1) for values in samples) / df
    return 2 * stats.t.ppf(0.975, df) * math.sqrt(2 * variance)


C = [80.0, 80.3, 80.1, 80.2]


@pytest.mark.parametrize("sign", [1, -1])
def test_one_seed_decides_only_above_what_other_rows_allow(sign):
    limit = one_seed_limit(A, C)
    for factor, outcome in ((1.01, {1: "confirmed", -1: "not confirmed"}[sign]), (0.99, "open")):
        (verdict, *_) = verdicts_on([*made(A=A, C=C), record("B", 0, 90 + sign * factor * limit)])[::-1]
        assert (verdict.claim, verdict.outcome) == ("B better than A: E", outcome)
        assert (
            f"more than {limit:.2f} points (twice the 95 % range of seed noise, estimated from 2 rows)"
            in verdict.evidence
        )
        assert (verdict.more_seeds is None) == (outcome != "open")


def test_one_seed_uses_other_experiments_if_its_own_has_too_few_seeds():
    ours, other = made(A=[90.0, 91.0], B=[92.0]), made(experiment="F", C=C)
    network = {"settings": {"model": "resnet18"}}
    same = [replace(run, **network) for run in [*ours, *other]]
    (verdict,) = verdicts_on(same)
    limit = f"{one_seed_limit([90.0, 91.0], C):.2f} points (twice the 95 % range of seed noise, estimated from"
    assert f"{limit} 2 rows of this and other ResNet-18 experiments)" in verdict.evidence
    far = [record("D", seed, 100.0 * seed, experiment="G", unit="bits", **network) for seed in range(3)]
    assert verdicts_on([*same, *far])[0] == verdict
    (verdict,) = verdicts_on([replace(run, **network) for run in [*made(A=[90.0], B=[92.0]), *other]])
    assert f"{one_seed_limit(C):.2f} points" in verdict.evidence
    assert "estimated from 1 row of other ResNet-18 experiments)" in verdict.evidence


def test_one_seed_does_not_use_experiments_with_other_networks():
    ours = [replace(run, settings={"model": "resnet18"}) for run in made(A=[90.0, 91.0], B=[92.0])]
    others = made(experiment="F", C=C)  # from a CSV file, which does not say the network
    others += [replace(run, experiment="G", settings={"model": "resnet50"}) for run in others]
    (verdict,) = verdicts_on([*ours, *others])
    assert f"{one_seed_limit([90.0, 91.0]):.2f} points" in verdict.evidence
    assert "estimated from 1 row)" in verdict.evidence
    theirs = [replace(run, settings={}) for run in ours]  # two rows of CSV files do not share a network, either
    assert verdicts_on([*theirs, *others])[0].evidence == verdict.evidence
    (verdict,) = verdicts_on([*made(A=[90.0], B=[92.0]), *others])
    assert (verdict.outcome, verdict.more_seeds) == ("open", None)


def test_one_seed_alone_decides_nothing():
    (verdict,) = verdicts_on(made(A=[10.0], B=[90.0]))
    assert (verdict.outcome, verdict.more_seeds) == ("open", None)
    assert "no comparable row has several" in verdict.evidence


def test_equal_differences_have_an_unknown_spread():
    (verdict,) = verdicts_on(made(A=[90.0, 91.0], B=[92.0, 93.0]))
    assert (verdict.outcome, verdict.more_seeds) == ("open", None)
    assert "their spread is unknown" in verdict.evidence
    scores = [30.7, 60.2, 90.3]
    rounded = verdicts_on(made(A=scores, B=[score + 0.1 for score in scores]))[0]  # they differ in the last bits
    assert (rounded.outcome, rounded.more_seeds) == ("open", None)
    assert "their spread is unknown" in rounded.evidence


def test_diverged_runs_are_told():
    failed = [record("B", seed, None, state="diverged") for seed in (3, 4)]
    (verdict,) = verdicts_on([*made(A=A, B=[92.0, 93.1, 93.9]), *failed])
    assert verdict.outcome == "confirmed"
    assert "B diverged with 2 of 5 seeds." in verdict.evidence
    (verdict,) = verdicts_on([*made(A=A), *failed])
    assert (verdict.outcome, verdict.evidence) == ("not confirmed", "B diverged with 2 of 2 seeds.")
    (verdict,) = verdicts_on([*made(A=A), *failed], "B")
    assert (verdict.outcome, verdict.evidence) == ("open", "B diverged with 2 of 2 seeds.")
    unfinished = record("B", 0, None, state="unfinished")
    assert verdicts_on([*made(A=A), unfinished]) == []
    (verdict,) = verdicts_on([*made(A=A), record("A", 3, None, state="diverged"), unfinished])
    assert (verdict.outcome, verdict.evidence) == ("open", "A diverged with 1 of 4 seeds.")


def test_every_row_of_every_experiment_with_the_baseline():
    runs = [*made(A=A, B=A, C=A), *made(experiment="F", A=A, D=A), *made(experiment="G", B=A, C=A)]
    claims = [verdict.claim for verdict in verdicts_on(runs)]
    assert claims == ["B better than A: E", "C better than A: E", "D better than A: F"]


def test_names_of_the_baseline():
    listed = [
        "SGD",
        "SAM, rho 0.1",
        "BSAM (Algorithm 1)",
        "BSAM (2 passes), rho_max 0.1",
        "BSAM (2 passes), rho_max 0.2",
    ]
    assert baseline_row(listed, "sgd") == "SGD"
    assert baseline_row(listed, "sam") == "SAM, rho 0.1"
    assert baseline_row(listed, "SAM, rho 0.1") == "SAM, rho 0.1"
    assert baseline_row(listed, "bsam") == "BSAM (Algorithm 1)"
    assert baseline_row(listed, "bsam-2") is None  # two
    assert baseline_row(listed, "adam") is None
    with pytest.raises(BsamValueError, match=re.escape("(A, B); got 'X'")):
        verdicts_on(made(A=A, B=A), "X")


def paper_runs(scores, chosen="", title=CLEAN, **more):
    """Records of runs on CIFAR-10; scores are by method and radius."""
    runs = []
    for (method, *radii), values in scores.items():
        names = ("rho_max", "rho_min") if method == "bsam" else ("rho",)
        run = Run(method, dict(zip(names, radii, strict=False)), model="resnet18", data="cifar10", **more)
        for seed, score in enumerate(values):
            settings = {**run.settings(), "seed": seed}
            runs.append(record(method, seed, score, experiment=title, settings=settings, chosen=chosen))
    return runs


def outcomes(runs):
    return {(v.claim.partition(":")[0], v.at): v.outcome for v in paper_verdicts(Records(tuple(runs), ()))}


def test_tuned_runs_are_a_claim_of_their_own():
    untuned = paper_runs({("base",): [96.0, 96.1], ("sam",): [96.5, 96.62], ("bsam",): [97.0, 97.13]})
    best = paper_runs({("sam", 0.2): [97.5, 97.61], ("bsam", 0.1, 0.1): [97.0, 97.12]}, "tuned on held-out samples")
    assert outcomes(untuned + best) == {
        ("SAM better than SGD", PAPER): "confirmed",
        ("SAM better than SGD", TUNED): "confirmed",
        ("BSAM better than SAM", PAPER): "confirmed",
        ("BSAM better than SAM", TUNED): "not confirmed",
    }
    assert outcomes(untuned)["BSAM better than SAM", MATCHED] == "open"  # not run


@pytest.mark.parametrize("data", ["mpii", "lspet"])
def test_poses_are_at_our_radii(data):
    """The paper does not state its own."""
    runs = []
    for method, score in (("base", 88.0), ("sam", 88.5), ("bsam", 89.0)):
        run = Run(method, model="simcc_resnet50", data=data, task="pose", base="adam")
        for seed in (0, 1):
            settings = {**run.settings(), "seed": seed}
            measured = {"score": score + 0.11 * seed * score / 88, "top_eigenvalue": 9 - score / 100 + seed}
            runs.append(replace(record(method, seed, 0.0, settings=settings), **measured))
    verdicts = paper_verdicts(Records(tuple(runs), ()))
    assert {verdict.at for verdict in verdicts} == {OURS, MATCHED}
    assert len([verdict for verdict in verdicts if verdict.at == OURS]) == 4


def test_other_radii_are_not_the_papers():
    runs = paper_runs({("base",): [96.0, 96.1], ("sam", 0.2): [96.5, 96.6], ("bsam", 0.1, 0.1): [97.0, 97.1]})
    assert outcomes(runs) == {}


def test_a_narrow_interval_around_zero_does_not_confirm_a_large_published_gap():
    gap = (
        CLASSIFICATION.numbers["resnet18", "cifar10", "sam"].mean
        - CLASSIFICATION.numbers["resnet18", "cifar10", "sgd"].mean
    )
    for width, outcome in ((0.49, "not confirmed"), (0.51, "open")):
        half = stats.t.ppf(0.975, 2) / math.sqrt(3)  # of the interval, for differences -1, 0 and 1
        step = width * gap / half
        scores = [96 - step, 96, 96 + step]
        assert outcomes(paper_runs({("base",): [96.0] * 3, ("sam",): scores}))["SAM better than SGD", PAPER] == outcome


def test_records_of_others_are_no_claims_of_the_paper():
    assert paper_verdicts(Records(tuple(made(experiment=CLEAN, SGD=A, SAM=A)), ())) == []
