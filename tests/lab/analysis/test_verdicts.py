"""Verdicts: on the runs in results/, which docs/results.md describes in words, and on made-up ones."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bsam.lab.report.page.html_page import page_data
from scipy import stats

from bsam.common.errors import BsamValueError
from bsam.lab.analysis.read_runs import read_records
from bsam.lab.analysis.row_comparison import Verdict
from bsam.lab.analysis.run_record import Record, Records
from bsam.lab.analysis.verdicts import baseline_row, baseline_verdicts, check_baseline, paper_verdicts
from bsam.lab.recipes.paper import CLASSIFICATION, LABEL_NOISE
from bsam.lab.training.config import Run

ROOT = Path(__file__).parents[3]
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
    ("claim", "at", "folder", "ours", "theirs"),
    [
        (f"SAM better than SGD: {CLEAN}", PAPER, "cifar10-resnet18", "sam", "sgd"),
        (f"BSAM better than SAM: {CLEAN}", PAPER, "cifar10-resnet18", "bsam", "sam"),
        (f"SAM better than SGD: {NOISE}", PAPER, NOISY, "sam", "sgd"),
        (f"BSAM better than SAM: {NOISE}", PAPER, NOISY, "bsam", "sam"),
        (f"BSAM better than SAM (sum): {NOISE}", MATCHED, NOISY, "bsam", "sam-rho0.1"),
        (f"BSAM better than SAM (follow): {NOISE}", MATCHED, NOISY, "bsam", "sam-follow"),
    ],
)
def test_intervals_of_our_runs(claim, at, folder, ours, theirs, verdicts):
    """Two seeds have an interval, but no verdict."""
    verdict = verdicts[claim, at]
    a, b = last(folder, ours), last(folder, theirs)
    test = stats.ttest_rel(a, b)
    low, high = test.confidence_interval(0.95)
    assert (verdict.outcome, verdict.more_seeds) == ("too few seeds", 1)
    shown = re.search(r"(\S+) points \[95 % interval (\S+), (\S+)\], 2 shared seeds\.", verdict.evidence)
    expected = [np.mean(np.subtract(a, b)), low, high]
    np.testing.assert_allclose([float(number) for number in shown.groups()], expected, rtol=0, atol=0.0051)
    assert f"{np.mean(a):.2f} ± {np.std(a, ddof=1):.2f} (2)" in verdict.evidence


def test_decided_claims_have_three_seeds():
    """All verdicts on results/, on claims of the paper and against the baselines of the page."""
    shown = page_data(read_records([ROOT / "results"]))["verdicts"]
    words = {
        "paper": {"confirmed", "contradicted", "not confirmed", "open", "too few seeds"},
        "baseline": {"better", "worse", "open", "too few seeds"},
    }
    not_learned = [verdict for verdict in shown if verdict["outcome"] == "did not learn"]
    rows = {verdict["claim"].partition(" against SGD")[0] for verdict in not_learned}
    at = "rho_max {0}, rho_min {0}".format
    large = {f"BSAM (Algorithm 1), {at(0.2)}", f"BSAM (Algorithm 1), {at(0.3)}", f"BSAM (2 passes), {at(0.3)}"}
    assert rows == {*large, "BSAM (Algorithm 1)"}  # the last one with 80 % wrong labels
    for verdict in shown:
        if verdict in not_learned:
            assert "no better than chance" in verdict["evidence"]
            continue
        assert verdict["outcome"] in words[verdict["group"]]
        seeds = re.search(r"(\d+) shared seed", verdict["evidence"])
        assert (verdict["outcome"] == "too few seeds") == (seeds is None or int(seeds[1]) < 3)
        assert (verdict["outcome"] in ("open", "too few seeds")) == (verdict["more_seeds"] is not None)
    found = {verdict["outcome"] for verdict in shown} - {"did not learn"}
    assert found == (words["paper"] | words["baseline"]) - {"worse"}


def test_published_differences_are_the_papers(verdicts):
    numbers, noise = CLASSIFICATION.numbers, LABEL_NOISE.numbers
    gap = numbers["resnet18", "cifar10", "bsam"].mean - numbers["resnet18", "cifar10", "sam"].mean
    assert f"Published: {gap:+.2f}." in verdicts[f"BSAM better than SAM: {CLEAN}", PAPER].evidence
    gap = noise["cifar10", "bsam", 0.4, "all"].mean - noise["cifar10", "sam", 0.4, "all"].mean
    assert f"Published: {gap:+.2f}." in verdicts[f"BSAM better than SAM: {NOISE}", PAPER].evidence
    assert "Published" not in verdicts[f"BSAM better than SAM (sum): {NOISE}", MATCHED].evidence


@pytest.mark.parametrize("other", ["SAM (sum)", "SAM (follow)"])
def test_one_seed_is_too_few(other, verdicts):
    for title in (CLEAN, HUNDRED):
        verdict = verdicts[f"BSAM better than {other}: {title}", MATCHED]
        assert verdict.outcome == "too few seeds"
        assert verdict.more_seeds >= 2
        assert "1 shared seed." in verdict.evidence
    assert verdicts[f"BSAM better than SAM: {HUNDRED}", PAPER].outcome == "too few seeds"


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
    verdict = verdicts[f"BSAM flatter than SAM (λmax, cross-entropy, 1,000 training samples): {HUNDRED}", PAPER]
    assert verdict.outcome == "too few seeds"
    assert f"BSAM {bsam:.1f} (1), SAM {sam:.1f} (1): {bsam - sam:+.1f}, 1 shared seed." in verdict.evidence
    runs = json.loads((ROOT / "results" / "quantization" / "results.json").read_text())["runs"]
    values = {
        name: [
            r["top_eigenvalue"]
            for r in runs
            if r["title"] == name and "mobilenet" in r["folder"] and r["settings"]["weight_bits"]
        ]
        for name in ("BSAM (Algorithm 1)", "SGD", "SAM")
    }
    tests = {name: stats.ttest_rel(values["BSAM (Algorithm 1)"], values[name]) for name in ("SGD", "SAM")}
    assert 2 * tests["SGD"].pvalue < 0.05 < tests["SAM"].pvalue  # Holm: the smaller one counts twice
    title = "MobileNetV1, CIFAR-10, 4 bits, 12 epochs"
    for name, outcome, p in (
        ("SGD", "confirmed", 2 * tests["SGD"].pvalue),
        ("SAM", "open", tests["SAM"].pvalue),
    ):
        verdict = verdicts[
            f"BSAM flatter than {name} (λmax, cross-entropy, at most 256 training samples): {title}", PAPER
        ]
        low, high = tests[name].confidence_interval(0.95)
        assert f"[95 % interval {low:+.1f}, {high:+.1f}], 3 shared seeds." in verdict.evidence
        assert f" p = {p:.3g} after Holm's correction for 2 comparisons; the interval is not" in verdict.evidence
        assert verdict.outcome == outcome


def test_transfer_and_pose_of_our_runs(verdicts):
    pet = "Oxford-IIIT Pet, pretrained, 30 epochs"
    lite = verdicts[f"BSAM better than SAM: tf_efficientnet_lite0, {pet}", PAPER]
    assert lite.outcome == "contradicted"
    assert "Published for EfficientNet-B0" in lite.evidence
    assert verdicts[f"SAM better than SGD: tf_efficientnet_lite0, {pet}", PAPER].outcome == "confirmed"
    assert verdicts[f"SAM better than BSAM: ResNet-50, {pet}", PAPER].outcome == "confirmed"  # as the paper's numbers
    pose = "SimCC, ResNet-50, LSP Extended, pretrained, 30 epochs"
    assert "The paper uses MPII" in verdicts[f"BSAM better than SAM: {pose}", OURS].evidence
    assert not [claim for claim, at in verdicts if at == PAPER and pose in claim]  # the paper does not state them
    not_run = verdicts[f"BSAM better than SAM: {pose}", MATCHED]
    assert (not_run.outcome, not_run.more_seeds) == ("too few seeds", 3)
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
    [([92.0, 93.1, 93.9], "better"), ([88.0, 89.1, 89.9], "worse"), ([91.0, 90.0, 92.5], "open")],
)
def test_a_baseline(scores, outcome):
    (verdict,) = verdicts_on(made(A=A, B=scores))
    test = stats.ttest_rel(scores, A)
    low, high = test.confidence_interval(0.95)
    assert verdict.outcome == outcome == ("open" if low < 0 < high else "better" if low > 0 else "worse")
    assert (
        f"{np.mean(scores) - 91:+.2f} points [95 % interval {low:+.2f}, {high:+.2f}], 3 shared seeds."
        in verdict.evidence
    )
    assert (verdict.claim, verdict.at) == ("B against A: E", "")
    assert (verdict.more_seeds is None) == (outcome != "open")
    assert "Holm" not in verdict.evidence  # one comparison


def test_several_methods_are_corrected_for_each_other():
    """A gain that is decided alone is open among three; rows with two seeds do not count."""
    gains = {"B": [1.5, 2.0, 2.8], "C": [0.4, -0.3, 0.1], "D": [-2.0, -2.1, -2.2], "E": [5.0, 5.1]}
    rows = {name: np.add(A[: len(values)], values).tolist() for name, values in gains.items()}
    p = {name: stats.ttest_1samp(values, 0).pvalue for name, values in gains.items()}
    assert 3 * p["D"] < 0.05 < 2 * p["B"] < 0.1
    assert [verdict.outcome for verdict in verdicts_on(made(A=A, B=rows["B"], E=rows["E"]))] == [
        "better",
        "too few seeds",
    ]
    b, c, d, e = verdicts_on(made(A=A, **rows))
    assert [verdict.outcome for verdict in (b, c, d, e)] == ["open", "open", "worse", "too few seeds"]
    for verdict, corrected in ((b, 2 * p["B"]), (c, p["C"]), (d, 3 * p["D"])):
        sentence = f"p = {corrected:.3g} after Holm's correction for 3 comparisons; the interval is not corrected."
        assert sentence in verdict.evidence
    assert "Holm" not in e.evidence
    assert "[95 % interval +0." in b.evidence  # which excludes 0
    assert b.more_seeds == 1
    other = made(experiment="F", A=A, B=rows["B"])
    assert verdicts_on([*made(A=A, **rows), *other])[4].outcome == "better"  # each experiment on its own


def test_a_lower_score_can_be_better():
    scores = [92.0, 93.1, 93.9]
    assert verdicts_on(made(higher=False, A=A, B=scores))[0].outcome == "worse"
    assert verdicts_on(made(higher=False, A=scores, B=A))[0].outcome == "better"


def test_seeds_that_are_not_shared():
    runs = [*made(A=A), record("B", 7, 95.0)]
    (verdict,) = verdicts_on(runs)
    assert (verdict.outcome, verdict.more_seeds) == ("too few seeds", 3)
    assert "no shared seeds" in verdict.evidence


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("gain", [50.0, -50.0, 0.1])
def test_fewer_than_three_shared_seeds_decide_nothing(n, gain):
    """However large the difference is."""
    scores = [score + gain + 0.001 * seed for seed, score in enumerate(A[:n])]
    (verdict,) = verdicts_on([*made(A=A, B=scores), record("B", 7, 0.0)])
    assert verdict.outcome == "too few seeds"
    assert f"{n} shared seed" in verdict.evidence
    assert verdict.more_seeds >= 3 - n
    assert "confirmed" not in verdict.evidence


def seeds_after_one(gain, *samples):
    """How many more seeds a difference needs whose spread is that of two runs, with scipy."""
    df = sum(len(values) - 1 for values in samples)
    variance = sum((len(values) - 1) * np.var(values, ddof=1) for values in samples) / df
    total = 3
    while stats.t.ppf(0.975, total - 1) * math.sqrt(2 * variance / total) >= abs(gain):
        total += 1
    return total - 1


C = [80.0, 80.3, 80.1, 80.2]


def test_the_seeds_that_one_seed_needs_follow_from_the_spread_of_other_rows():
    ours, other = made(A=[90.0], B=[90.2]), made(experiment="F", C=C)
    (verdict,) = verdicts_on(ours)
    assert verdict.more_seeds == 2  # no spread is known
    own = made(A=[90.0, 90.4], B=[90.2])
    (verdict,) = verdicts_on(own)
    assert verdict.more_seeds == seeds_after_one(0.2, [90.0, 90.4]) > 2
    network = {"settings": {"model": "resnet18"}}
    (same,) = verdicts_on([replace(run, **network) for run in [*own, *other]])
    assert same == verdict  # its own experiment is enough
    (verdict,) = verdicts_on([replace(run, **network) for run in [*ours, *other]])
    assert verdict.more_seeds == seeds_after_one(0.2, C)
    far = [record("D", seed, 100.0 * seed, experiment="G", unit="bits", **network) for seed in range(3)]
    assert verdicts_on([replace(run, **network) for run in [*ours, *other]] + far) == [verdict]


def test_other_networks_say_nothing_about_the_spread():
    ours = [replace(run, settings={"model": "resnet18"}) for run in made(A=[90.0], B=[90.2])]
    others = made(experiment="F", C=C)  # from a CSV file, which does not say the network
    others += [replace(run, experiment="G", settings={"model": "resnet50"}) for run in others]
    for runs in (ours, made(A=[90.0], B=[90.2])):  # two rows of CSV files do not share a network, either
        assert verdicts_on([*runs, *others])[0].more_seeds == 2


def test_equal_differences_have_an_unknown_spread():
    (verdict,) = verdicts_on(made(A=[90.0, 91.0, 91.5], B=[92.0, 93.0, 93.5]))
    assert (verdict.outcome, verdict.more_seeds) == ("open", None)
    assert "their spread is unknown" in verdict.evidence
    (verdict,) = verdicts_on(made(A=[90.0, 91.0], B=[92.0, 93.0]))
    assert (verdict.outcome, verdict.more_seeds) == ("too few seeds", 1)
    scores = [30.7, 60.2, 90.3]
    rounded = verdicts_on(made(A=scores, B=[score + 0.1 for score in scores]))[0]  # they differ in the last bits
    assert (rounded.outcome, rounded.more_seeds) == ("open", None)
    assert "their spread is unknown" in rounded.evidence


def diverged(name, *seeds):
    return [record(name, seed, None, state="diverged") for seed in seeds]


def test_diverged_runs_are_told():
    (verdict,) = verdicts_on([*made(A=A, B=[92.0, 93.1, 93.9]), *diverged("B", 3, 4)])
    assert verdict.outcome == "better"
    assert "B diverged with 2 of 5 seeds." in verdict.evidence


@pytest.mark.parametrize(
    ("seeds", "outcome", "more"),
    [((0, 1, 2), "worse", None), ((0, 1), "too few seeds", 1), ((3, 4, 5), "too few seeds", 3)],
)
def test_a_method_that_always_diverges_is_worse_with_three_seeds(seeds, outcome, more):
    """With three that the other one finished."""
    (verdict,) = verdicts_on([*made(A=A), *diverged("B", *seeds)])
    told = f"B diverged with {len(seeds)} of {len(seeds)} seeds."
    assert verdict == Verdict("B against A: E", "", outcome, told, more)
    (verdict,) = verdicts_on([*made(A=A), *diverged("B", *seeds)], "B")  # A, too, may have been lucky
    assert (verdict.outcome, verdict.more_seeds) == ("open" if more is None else "too few seeds", more)


def test_unfinished_runs_have_no_verdict():
    unfinished = record("B", 0, None, state="unfinished")
    assert verdicts_on([*made(A=A), unfinished]) == []
    (verdict,) = verdicts_on([*made(A=A), *diverged("A", 3), unfinished])
    assert verdict.outcome == "too few seeds"
    assert (verdict.evidence, verdict.more_seeds) == ("A diverged with 1 of 4 seeds.", 3)
    (verdict,) = verdicts_on([*diverged("A", 0, 1, 2), *diverged("B", 0, 1, 2)])
    assert verdict.outcome == "open"
    (verdict,) = verdicts_on([*made(A=A[:2]), *diverged("A", 2), *diverged("B", 0, 1, 2)])
    assert verdict.outcome == "open"  # worse with two seeds only


def test_every_row_of_every_experiment_with_the_baseline():
    runs = [*made(A=A, B=A, C=A), *made(experiment="F", A=A, D=A), *made(experiment="G", B=A, C=A)]
    claims = [verdict.claim for verdict in verdicts_on(runs)]
    assert claims == ["B against A: E", "C against A: E", "D against A: F"]


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
    runs = Records(tuple(made(A=A, B=A)), ())
    check_baseline(runs, "B")
    with pytest.raises(BsamValueError, match=re.escape("(A; B), got 'X'")):
        check_baseline(runs, "X")


def paper_runs(scores, chosen="", title=CLEAN, **more):
    """Records of runs on CIFAR-10; scores are by method and radius."""
    runs = []
    for (method, *radii), values in scores.items():
        names = ("rho_max", "rho_min") if method == "bsam" else ("rho", "rho_floor")
        run = Run(method, dict(zip(names, radii, strict=False)), model="resnet18", data="cifar10", **more)
        for seed, score in enumerate(values):
            settings = {**run.settings(), "seed": seed}
            how = {"chosen": chosen, "tuned": "tuned" in chosen}
            runs.append(record(method, seed, score, experiment=title, settings=settings, **how))
    return runs


def outcomes(runs):
    return {(v.claim.partition(":")[0], v.at): v.outcome for v in paper_verdicts(Records(tuple(runs), ()))}


def test_tuned_runs_are_a_claim_of_their_own():
    untuned = paper_runs({("base",): [96.0, 96.1, 96.2], ("sam",): [96.5, 96.62, 96.7], ("bsam",): [97.0, 97.13, 97.2]})
    tuned = {("sam", 0.2): [97.5, 97.61, 97.7], ("bsam", 0.1, 0.1): [97.0, 97.12, 97.2]}
    best = paper_runs(tuned, "tuned on held-out samples")
    assert outcomes(untuned + best) == {
        ("SAM better than SGD", PAPER): "confirmed",
        ("SAM better than SGD", TUNED): "confirmed",
        ("BSAM better than SAM", PAPER): "confirmed",
        ("BSAM better than SAM", TUNED): "contradicted",
    }
    assert outcomes(untuned)["BSAM better than SAM", MATCHED] == "too few seeds"  # not run


def test_matched_radii_are_corrected_for_each_other_and_the_papers_orders_are_not():
    """BSAM is above SAM with p between 0.025 and 0.05 in three comparisons; only one of them is a claim of its own."""
    sam, gains = [96.5, 96.6, 96.7], [0.15, 0.2, 0.28]
    assert 0.025 < stats.ttest_1samp(gains, 0).pvalue < 0.05
    bsam = np.add(sam, gains).tolist()
    base = np.subtract(sam, gains).tolist()
    rows = {("base",): base, ("sam",): sam, ("sam", 0.1): sam, ("sam", 0.1, 0.05): sam, ("bsam",): bsam}
    assert outcomes(paper_runs(rows)) == {
        ("SAM better than SGD", PAPER): "confirmed",
        ("BSAM better than SAM", PAPER): "confirmed",
        ("BSAM better than SAM (sum)", MATCHED): "open",
        ("BSAM better than SAM (follow)", MATCHED): "open",
    }
    del rows["sam", 0.1, 0.05]
    assert outcomes(paper_runs(rows))["BSAM better than SAM (sum)", MATCHED] == "confirmed"


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


def test_networks_that_did_not_learn_have_no_verdict():
    """A clear difference is none if a network is at chance; the others are corrected as if the row were not there."""
    sentence = "The network is no better than chance: accuracy 0.1000."
    rows = {"B": np.add(A, [1.5, 2.0, 2.8]).tolist(), "C": np.add(A, [-80.0, -80.1, -80.3]).tolist()}
    runs = [replace(run, failure=sentence) if (run.method, run.seed) == ("C", 1) else run for run in made(A=A, **rows)]
    b, c = verdicts_on(runs)
    assert (b.outcome, c.outcome, c.more_seeds) == ("better", "did not learn", None)
    assert "Holm" not in b.evidence
    assert c.evidence == f"No verdict. C did not learn with 1 of 3 seeds. Seed 1: {sentence}"
    (row,) = (row for row in page_data(Records(tuple(runs), ()))["experiments"][0]["rows"] if row["method"] == "C")
    assert (row["difference"], row["not_learned"]) == (None, 1)
    runs = [replace(run, failure=sentence) if run.method == "A" else run for run in made(A=A, **rows)]
    assert [verdict.outcome for verdict in verdicts_on(runs)] == ["did not learn", "did not learn"]


def test_the_tuning_of_both_rows_is_part_of_the_evidence():
    runs = [replace(run, chosen="tuned on 64 held-out samples; within the noise") for run in made(B=[92.0, 93.1, 94])]
    (verdict,) = verdicts_on([*made(A=A), *runs])
    assert verdict.evidence.endswith(" B: tuned on 64 held-out samples; within the noise.")
