"""The numbers that README and docs state are those of the metrics in results/, and the tables are made from them."""

from __future__ import annotations

import json
import math
import re
import runpy
import statistics
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import scipy.stats
import torch

from bsam.lab.analysis.runs_table import read_runs
from bsam.lab.analysis.significance import holm, paired_difference
from bsam.lab.config import Run
from bsam.lab.data.arrays import Dataset, Examples
from bsam.lab.paper import join, paper_claims
from bsam.lab.tasks.classification import Classification
from bsam.lab.training.run_dir import stored_run
from bsam.methods import METHODS
from fake_fit import FakeFit

ROOT = Path(__file__).parents[1]
CLEAN, NOISE, RADIUS, DIGITS, RERUN = (
    ROOT / "results" / name
    for name in (
        "cifar10-resnet18",
        "cifar10-resnet18-noise40",
        "cifar10-resnet18-radius",
        "digits-radius",
        "cifar10-resnet18-label-noise",
    )
)
PAGES = {
    name: " ".join((ROOT / name).read_text(encoding="utf-8").split())
    for name in ("README.md", "docs/results.md", "docs/what-bsam-does.md", "docs/guides/methods-and-radii.md")
}
COMPARE = " ".join((ROOT / "docs/guides/compare.md").read_text(encoding="utf-8").split())
TITLES = {"sam": "SAM", "follow": "SAM (follow)", "bsam": "BSAM (Algorithm 1)", "bsam-2": "BSAM (2 passes)"}


def last(name: str, folder: Path = NOISE) -> float:
    """The test accuracy of the last epoch of a run, in %."""
    return 100 * json.loads((folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[-1])["test_accuracy"]


def digits() -> dict[tuple[str, float], list[float]]:
    """The test accuracies in % of the ten seeds, by method and total radius."""
    runs = read_runs(DIGITS)
    keys = [runs["row"].str.partition(", ")[0], runs["radius"].fillna(0.0).round(6)]
    found = {key: group.sort_values("seed") for key, group in runs.groupby(keys)}
    assert all(group["seed"].tolist() == list(range(10)) for group in found.values())
    return {key: group["score"].tolist() for key, group in found.items()}


def difference(a: list[float], b: list[float]) -> str:
    found = [x - y for x, y in zip(a, b, strict=True)]
    return f"{statistics.fmean(found):+.1f} ± {statistics.stdev(found) / len(found) ** 0.5:.1f}"


def cifar() -> dict[tuple[str, float], dict[str, Any]]:
    """Mean and number of seeds by method and total radius, with 40 % wrong labels."""
    runs = read_runs(RADIUS)
    keys = [runs["row"].str.partition(", ")[0].replace("SAM (sum)", "SAM"), runs["radius"].fillna(0.0).round(6)]
    return runs.groupby(keys)["score"].agg(mean="mean", n="count").to_dict("index")


def gaps(name: str, other: str) -> list[float]:
    """The differences in points between two methods with the seeds 0 and 1; accuracies have two decimals."""
    return [round(last(f"{name}-seed{seed}") - last(f"{other}-seed{seed}"), 2) for seed in (0, 1)]


def span(name: str, other: str) -> str:
    low, high = sorted(gaps(name, other))
    return f"{low:.1f} to {high:.1f}"


def both(name: str, other: str, form: str = "+.1f") -> str:
    return " and ".join(format(gap, form) for gap in gaps(name, other))


def noise_claims() -> list[tuple[str, list[str]]]:
    """The sentences on CIFAR-10 with 40 % wrong labels, and the pages that have them."""
    cells = cifar()
    sgd, sam = cells["SGD", 0.0], cells["SAM", 0.05]
    fixed, follow, bsam = (cells[title, 0.1] for title in ("SAM", "SAM (follow)", "BSAM (Algorithm 1)"))
    wide, wide2 = (cells[title, 0.2] for title in ("BSAM (Algorithm 1)", "BSAM (2 passes)"))
    for title, best in {"SAM": fixed, "BSAM (Algorithm 1)": wide, "BSAM (2 passes)": wide2}.items():
        assert best["mean"] == max(cell["mean"] for (row, _), cell in cells.items() if row == title)
    assert [cell["n"] for cell in (sgd, sam, fixed, follow, bsam, wide, wide2)] == [2, 2, 2, 2, 2, 2, 1]
    sgd_mean, sam_mean, fixed_mean, follow_mean, bsam_mean, wide_mean, wide2_mean = (
        f"{cell['mean']:.2f}" for cell in (sgd, sam, fixed, follow, bsam, wide, wide2)
    )
    one = last("sam-rho0.1-seed1")  # the seed that two passes at the best radius have, too
    far = [last(f"{name}-seed1") - last("sam-rho0.2-seed1") for name in ("bsam-rho0.1", "bsam-2-rho0.1")]
    above, released = both("bsam", "sam", ".1f"), last("bsam-released-seed0") - last("sam-seed0")
    readme, results, page, guide = PAGES
    return [
        (f"open (2 seeds) | {sgd_mean}, {sam_mean}, {bsam_mean} |", [results]),
        (f"BSAM is {above} points above SAM", [results]),
        (f"with two passes {both('bsam-2', 'sam', '.1f')}, as released {released:.1f} (seed 0)", [results]),
        (f"minus SAM (follow) at total radius 0.1 is {both('bsam', 'sam-follow')} points", [results]),
        (f"(with two passes {both('bsam-2', 'sam-follow')})", [results]),
        (f"BSAM minus SAM is {both('bsam', 'sam-rho0.1')} ({both('bsam-2', 'sam-rho0.1')})", [results]),
        (f"At 0.2, BSAM minus SAM is {far[0]:+.1f} ({far[1]:+.1f}) with seed 1", [results]),
        (f"(2): below by {span('sam-rho0.1', 'bsam')} | {bsam_mean} and {fixed_mean} |", [results]),
        (f"(2): above by {span('bsam', 'sam-follow')} | {bsam_mean} and {follow_mean} |", [results]),
        (f"(2): below by {span('sam-rho0.1', 'bsam-rho0.1')} | {wide_mean} and {fixed_mean} |", [results]),
        (f"(1): below by {one - wide2['mean']:.1f} | {wide2_mean} and {one:.2f} (seed 1) |", [results]),
        (f"BSAM is {span('bsam', 'sam')} points above SAM", [readme, guide]),
        (f"is {span('sam-rho0.1', 'bsam')} points above BSAM", [readme, guide]),
        (f"SAM is {span('bsam', 'sam-follow')} points below BSAM (2 seeds)", [readme]),
        (f"SAM reaches {fixed_mean} and BSAM {wide_mean} (2 seeds each)", [readme]),
        (f"and BSAM with two passes {wide2_mean} (1 seed;", [readme]),
        (f"SAM at 0.1 reaches {fixed_mean}, and {follow_mean} if its radius falls to 0.05 (2 seeds each", [guide]),
        (f"From 0.05 to 0.1, SAM gains {span('sam-rho0.1', 'sam')} points", [page]),
        (f"BSAM at 0.05 / 0.05 is {span('bsam', 'sam')} points above SAM at 0.05", [page]),
        (f"above SAM at 0.05, and {span('sam-rho0.1', 'bsam')} below SAM at 0.1 (2 seeds)", [page]),
        (f"loses {span('sam-rho0.1', 'sam-follow')} points against SAM at 0.1 (2 seeds)", [page]),
        (f"BSAM is {span('bsam', 'sam-follow')} points above SAM on CIFAR-10 (2 seeds)", [page]),
        (f"SAM {fixed_mean}, BSAM {wide_mean} (2 seeds each), BSAM with two passes {wide2_mean} (1 seed)", [page]),
    ]


@pytest.mark.parametrize(("sentence", "pages"), noise_claims(), ids=lambda value: str(value)[:40])
def test_the_sentences_on_flipped_labels(sentence, pages):
    assert all(sentence in PAGES[page] for page in pages)


SMOOTHED = {  # the runs without label smoothing, their titles, and the published numbers
    "noise40-sgd": ("SGD", 70.25),
    "noise40-sam": ("SAM", 79.71),
    "noise40-sam-rho0.1": ("SAM (sum)", None),
    "noise40-bsam-released": ("BSAM (as released)", 85.58),
    "noise60-sgd": ("SGD", 48.50),
    "noise60-sam": ("SAM", 67.22),
    "noise80-sgd": ("SGD", 28.91),
}


def without_smoothing(name: str) -> Path:
    folder = f"cifar10-resnet18-{name.partition('-')[0]}-no-smoothing"
    return ROOT / "results" / folder / f"{name}-nosmooth-seed0.jsonl"


def test_the_tables_without_label_smoothing():
    """One seed of each row, without and with label smoothing, beside the published number."""
    text = PAGES["docs/results.md"]
    stored = {path.name for path in ROOT.glob("results/*-no-smoothing/*.jsonl")}
    assert stored == {without_smoothing(name).name for name in SMOOTHED}
    above, explained, gaps = {}, {}, {}
    for name, (title, paper) in SMOOTHED.items():
        files = without_smoothing(name), RERUN / f"{name}-seed0.jsonl"
        rows = [json.loads(file.read_text(encoding="utf-8").splitlines()[-1]) for file in files]
        without, smoothed = (100 * row["test_accuracy"] for row in rows)
        cells = [f"{100 * row['test_accuracy']:.2f} | {100 * row['memorised']:.1f}" for row in rows]
        assert f"| {title} | {' | '.join(cells)} | {'-' if paper is None else f'{paper:.2f}'} |" in text
        if paper is not None:
            above[name] = without - paper
            explained[name] = f"{smoothed - without:.1f}"
            gaps[name] = f"{smoothed - paper:.1f}"
    assert [name for name, gap in above.items() if gap < 0] == ["noise60-sgd", "noise80-sgd"]
    sgd, sam, released, sgd_60, sam_60, sgd_80 = (f"{abs(gap):.1f}" for gap in above.values())
    assert max(float(gap) for gap in (sgd, sam, released)) < 1  # "agree with the paper"
    assert f"SGD, SAM and BSAM as released are {sgd}, {sam} and {released} points above the published" in text
    assert f"SGD and SAM are {sgd_60} points below the published numbers and {sam_60} above." in text
    assert f"SGD is {sgd_80} points below the paper with and without" in text
    assert gaps["noise80-sgd"] == f"-{sgd_80}"
    first = f"{explained['noise40-sam']} of SAM's {gaps['noise40-sam']} points"
    second = f"{explained['noise40-bsam-released']} of the {gaps['noise40-bsam-released']} points of BSAM as released"
    assert f"It accounts for {first}, and for {second}." in text
    assert f"accounts for {explained['noise60-sam']} of SAM's {gaps['noise60-sam']} points." in text
    numbers = [f"{last(without_smoothing(name).stem, without_smoothing(name).parent):.2f}" for name in SMOOTHED]
    assert f"smoothing ({numbers[3]}, {numbers[1]} and {numbers[0]}, 1 seed each)" in PAGES["README.md"]
    changes = " ".join((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split())
    first = "SGD {}, SAM {}, SAM at 0.1 {}, BSAM as released {} (published: 70.25, 79.71, BSAM 85.58), at 60 % SGD"
    sentence = f"{first} {{}}, SAM {{}} (published: 48.50, 67.22), at 80 % SGD {{}} (published: 28.91)"
    assert sentence.format(*numbers) in changes


def test_the_best_epochs_without_label_smoothing():
    """The highest test accuracy of all epochs, and how far it is above the published numbers."""
    text, shown, above = PAGES["docs/results.md"], [], []
    for name, (title, paper) in SMOOTHED.items():
        scores = [
            100 * json.loads(line)["test_accuracy"]
            for line in without_smoothing(name).read_text(encoding="utf-8").splitlines()
        ]
        best = max(scores)
        assert scores.count(best) == 1
        shown.append((f"{best:.2f}", title, scores.index(best) + 1))
        if paper is not None:
            above.append(best - paper)
    of_40, of_60, of_80 = shown[:4], shown[4:6], shown[6:]
    (first, title, epoch), *others = of_40
    texts = [f"{score} for {name} ({number})" for score, name, number in others]
    texts[-1] = texts[-1].replace("BSAM (as released)", "BSAM as released")
    sentence = f"with 40 %, {first} for {title} (epoch {epoch}), {', '.join(texts[:-1])} and {texts[-1]}"
    texts = [f"{score} for {name} ({number})" for score, name, number in (*of_60, *of_80)]
    assert f"{sentence}; with 60 %, {texts[0]} and {texts[1]}; with 80 %, {texts[2]}." in text
    assert f"these are {min(above):.1f} to {max(above):.1f} points above it" in text


def test_the_table_of_random_crops():
    """Three seeds without and with random crops, and their paired differences."""
    folder, text = ROOT / "results/transfer-random-crops", PAGES["docs/results.md"]
    names = {"none": "none", "crops": "RandomResizedCrop and flips"}
    scores = {name: [last(f"lite0-oxford_pet-sgd-{name}-seed{seed}", folder) for seed in range(3)] for name in names}
    for name, title in names.items():
        seeds = ", ".join(f"{score:.2f}" for score in scores[name])
        mean = f"{statistics.fmean(scores[name]):.2f} ± {statistics.stdev(scores[name]):.2f} (3)"
        assert f"| {title} | {seeds} | {mean} |" in text
    gaps = [crops - none for none, crops in zip(scores["none"], scores["crops"], strict=True)]
    assert f"The difference is {statistics.fmean(gaps):.2f} ± {statistics.stdev(gaps):.2f} points" in text
    means = [f"{statistics.fmean(scores[name]):.2f}" for name in names]
    guide = (ROOT / "docs/guides/fine-tune.md").read_text(encoding="utf-8")
    assert f"from {means[0]} to {means[1]} % (3 seeds" in guide


def test_the_sentences_on_the_papers_label_noise():
    """The rerun of the paper's table, with the published numbers, and the advice on radii."""
    found = {path.stem: last(path.stem, RERUN) for path in RERUN.glob("*.jsonl")}
    rates = ("noise40", "noise80")
    sgd, sam, released = ([found[f"{rate}-{name}-seed0"] for rate in rates] for name in ("sgd", "sam", "bsam-released"))
    wide, three = ([found[f"{rate}-{name}-seed0"] for rate in rates] for name in ("sam-rho0.1", "bsam"))
    seeds = [found[f"noise40-sgd-seed{seed}"] for seed in (0, 1)]
    mean, std = statistics.fmean(seeds), statistics.stdev(seeds)
    shifted = last("noise80-sam-shifted-seed0", ROOT / "results/shift")
    text, guide = PAGES["docs/results.md"], PAGES["docs/guides/methods-and-radii.md"]
    page, readme = PAGES["docs/what-bsam-does.md"], PAGES["README.md"]
    assert f"36 and 72 % wrong | {mean:.2f} ± {std:.2f} (2) | {sgd[1]:.2f} (1) |" in text
    bsam = f"{three[0]:.2f} (1), as released {released[0]:.2f} (1) / 85.58"
    assert f"label noise | {mean:.2f} ± {std:.2f} (2) / 70.25 | {sam[0]:.2f} (1) / 79.71 | {bsam} |" in readme
    for order in ([mean, sam[0], three[0]], [mean, sam[0], released[0]], [sgd[1], sam[1], released[1]]):
        assert order == sorted(order)
        assert f"open (1 seed) | {', '.join(f'{score:.2f}' for score in order)} |" in text
    assert f"another order | {sgd[1]:.2f}, {sam[1]:.2f}, **{three[1]:.2f}** |" in text
    assert f"As released, BSAM reaches {released[1]:.2f} (paper: 78.27). Algorithm 1 reaches {three[1]:.2f}" in text
    assert f"reaches {shifted:.2f}, against {sam[1]:.2f} without it and {released[1]:.2f} for BSAM as released" in text
    assert f"and {std:.1f} there, and those with 40 % wrong" in text
    assert f"({mean:.2f} and 70.25)" in text
    above = f"{sam[0] - 79.71:.1f}, {three[0] - 85.58:.1f} and {released[0] - 85.58:.1f} points above the published"
    assert f"are {above}" in text
    assert f"Algorithm 1 is {three[0] - released[0]:.1f} points above the released code" in text
    lead, behind, gain = three[0] - sam[0], wide[0] - three[0], wide[0] - sam[0]
    assert f"BSAM is {lead:.1f} points above SAM at 0.05 and {behind:.1f} below SAM at 0.1" in text
    assert f"these differences are {gain:.1f}, {lead:.1f} and {behind:.1f} (1 seed)" in page
    assert f"(2 seeds; with 36 and 54 % wrong labels {behind:.1f} and" in guide
    assert f"(1): below by {behind:.1f} | {three[0]:.2f} and {wide[0]:.2f} |" in text
    assert f"above by {three[1] - wide[1]:.1f}, but both hardly train | {three[1]:.2f} and {wide[1]:.2f} |" in text
    assert f"SAM falls from {sam[1]:.2f} at 0.05 to {wide[1]:.2f} at 0.1" in text
    row = " | ".join(f"{score:.1f}" for score in (sgd[0], sam[0], wide[0], three[0], released[0]))
    assert f"| 36 % | 200 | {row} |" in guide
    names = ("sgd", "sam", "sam-rho0.1", "bsam", "bsam-released")
    harder = " | ".join(f"{last(name + '-seed0'):.1f}" for name in names)
    assert f"| 40 % | 200 | {harder} |" in guide
    row = " | ".join(f"{score:.1f}" for score in (sgd[1], sam[1], wide[1], three[1], released[1]))
    assert f"| 72 % | 200 | {row} |" in guide


def test_the_sentences_on_60_percent_label_noise():
    """One seed; published: SGD 48.50, SAM 67.22, BSAM 76.37."""
    names = ("sgd", "sam", "sam-rho0.1", "bsam-released", "bsam")
    assert sorted(path.stem for path in RERUN.glob("noise60-*")) == sorted(f"noise60-{name}-seed0" for name in names)
    sgd, sam, wide, released, three = (last(f"noise60-{name}-seed0", RERUN) for name in names)
    _, text, page, guide = PAGES.values()
    changelog = " ".join((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split())
    gain, lead, behind = wide - sam, released - sam, wide - released
    own_lead, own_behind = three - sam, wide - three
    for title, bsam in {"BSAM as released": released, "Algorithm 1": three}.items():
        order = [sgd, sam, bsam]
        assert order == sorted(order)
        shown = ", ".join(f"{score:.2f}" for score in order)
        assert f"60 % label noise, **{title}** | open (1 seed) | {shown} |" in text
    assert f"60 % label noise | too few seeds (1): below by {own_behind:.1f} | {three:.2f} and {wide:.2f} |" in text
    above = f"{sam - 67.22:.1f}, {three - 76.37:.1f} and {released - 76.37:.1f} points above the published"
    assert f"BSAM as released are {above}" in text
    assert f"Algorithm 1 is {three - released:.1f} points above the released code. SAM at 0.1 is" in text
    assert f"at 60 %, {own_lead:.1f} above and {own_behind:.1f} below." in text
    assert f"(1): below by {behind:.1f} | {released:.2f} and {wide:.2f} |" in text
    assert f"At 60 % (54 % wrong), SGD reaches {sgd:.2f} (1), and 48.50 in BSAM's paper" in text
    assert f"({sgd:.2f} and 48.50)" in text
    above = f"{own_behind:.1f} points above Algorithm 1, {behind:.1f} above BSAM as released and {gain:.1f} above SAM"
    assert f"SAM at 0.1 is {above} at 0.05" in text
    ends = [json.loads((RERUN / f"noise60-{name}-seed0.jsonl").read_text("utf-8").splitlines()[-1]) for name in names]
    shares = [f"{100 * end['memorised']:.1f} %" for end in ends]
    assert f"SGD predicts {shares[0]} of the wrong labels, SAM at 0.05 {shares[1]}, BSAM as" in text
    assert f"BSAM as released {shares[3]}, Algorithm 1 {shares[4]}, and SAM at 0.1 {shares[2]}." in text
    own = f"they are {gain:.1f}, {own_lead:.1f} and {own_behind:.1f}"
    assert f"{own}, and {gain:.1f}, {lead:.1f} and {behind:.1f} for BSAM as released (1 seed)" in page
    assert f"and 54 % wrong labels 3.5 and {own_behind:.1f}, 1 seed)" in guide
    assert f"| 54 % | 200 | {sgd:.1f} | {sam:.1f} | {wide:.1f} | {three:.1f} | {released:.1f} |" in guide
    assert f"twice SAM's usual radius still trains, and is {gain:.1f} points better (1 seed)" in guide
    assert f"So does Algorithm 1 of BSAM, {own_behind:.1f} points below SAM at that radius" in guide
    scores = f"SGD {sgd:.2f}, SAM {sam:.2f}, SAM at 0.1 {wide:.2f}, BSAM as released {released:.2f}, Algorithm 1"
    assert f"{scores} {three:.2f} (one seed each)" in changelog


def test_the_sentences_on_20_percent_label_noise():
    """Two seeds of SGD, one of SAM; published: SGD 85.94, SAM 90.44."""
    found = {path.stem: last(path.stem, RERUN) for path in RERUN.glob("noise20-*")}
    assert found.keys() == {"noise20-sgd-seed0", "noise20-sgd-seed1", "noise20-sam-seed0"}
    sgd = [found["noise20-sgd-seed0"], found["noise20-sgd-seed1"]]
    mean, std, sam = statistics.fmean(sgd), statistics.stdev(sgd), found["noise20-sam-seed0"]
    text = PAGES["docs/results.md"]
    changelog = " ".join((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split())
    assert f"| SAM above SGD: 20 % label noise | open (1 seed) | {sam:.2f} and {mean:.2f} |" in text
    assert f"at 20 % (18 % wrong), {mean:.2f} ± {std:.2f} (2), and 85.94 in the paper" in text
    assert f"SGD's standard deviation over two seeds is {std:.1f} and" in text
    assert f"{mean - 85.94:.1f} points ({mean:.2f} and 85.94) and {sam - 90.44:.1f} ({sam:.2f} and 90.44)" in text
    assert f"Results at 20 %: SGD {mean:.2f} (two seeds), SAM {sam:.2f} (one seed)" in changelog


def test_the_sentences_on_80_percent_wrong_labels():
    folder = ROOT / "results/cifar10-resnet18-noise80-30epochs"
    runs = json.loads((folder / "variations.json").read_text("utf-8"))["runs"]
    sam = [100 * run["last"]["test_accuracy"] for run in runs if run["method"] == "sam"]
    small, bsam, sgd = (last(f"{name}-seed0", folder) for name in ("sam-rho0.02", "bsam", "sgd"))
    text = PAGES["docs/results.md"]
    assert f"SAM at 0.05 is at {min(sam):.1f} to {max(sam):.1f} without label smoothing" in text
    assert f"SAM at 0.02 is at {small:.2f}, BSAM at {bsam:.2f}, and SGD at {sgd:.2f}" in text
    assert f"SGD was at {sgd:.1f} and SAM at 0.02 at {small:.1f}" in PAGES["docs/guides/methods-and-radii.md"]


def test_the_sentences_on_clean_labels():
    """The differences on CIFAR-10 with seed 0, and the run that is in no table."""
    found = {path.stem: last(path.stem, CLEAN) for path in CLEAN.glob("*.jsonl")}
    bsam, two, wide = (found[f"{name}-seed0"] for name in ("bsam", "bsam-2", "bsam-2-rho0.1"))
    fixed, falling = found["sam-rho0.1-seed0"], found["sam-follow-seed0"]
    results = PAGES["docs/results.md"]
    for sam in (fixed, falling):
        gaps_in_words = f"too few seeds (1): {bsam - sam:.2f} (2 passes: {two - sam:.2f})"
        assert f"{gaps_in_words} | {bsam:.2f} and {sam:.2f} (seed 0) |" in results
    assert f"BSAM with 2 passes reached {wide:.2f} (seed 0, `bsam-2-rho0.1-seed0.jsonl`" in results
    assert f"{two - wide:.2f} points less than at 0.05 / 0.05 with the same seed" in results
    assert wide < min(found[f"sgd-seed{seed}"] for seed in range(3))
    assert max(abs(sam - found["sam-seed0"]) for sam in (fixed, falling)) <= 0.1 + 1e-9
    assert "With this seed, SAM at 0.05 reaches 96.61, so all three are within 0.1 points of each other" in results
    seeds = {name: {n: found[f"{name}-seed{n}"] for n in range(3)} for name in ("sgd", "sam", "bsam")}
    words = [f"{scores[0]:.2f}, {scores[1]:.2f} and {scores[2]:.2f}" for scores in seeds.values()]
    assert "Seeds 0 to 2: SGD {}; SAM {}; BSAM {};".format(*words) in results
    sgd, sam, bsam = (statistics.fmean(scores.values()) for scores in seeds.values())
    assert f"| **confirmed**, 3 seeds | {sam:.2f} and {sgd:.2f} |" in results
    assert f"| open, 3 seeds | {bsam:.2f} and {sam:.2f};" in results
    gain, lead = paired_difference(seeds["sam"], seeds["sgd"]), paired_difference(seeds["bsam"], seeds["sam"])
    interval = f"(3 seeds; 95 % interval: {gain['low']:.2f} to {gain['high']:.2f}; the paper: {96.74 - 96.18:.2f})"
    assert f"SAM is {gain['difference']:.2f} points above SGD {interval}" in results
    assert f"SAM is {lead['difference']:.2f} ({lead['low']:.2f} to {lead['high']:.2f}), which neither" in results
    assert lead["low"] < 0 < 0.08 < lead["high"]


@pytest.mark.parametrize("folder", [CLEAN, NOISE, RADIUS, DIGITS, RERUN], ids=lambda folder: folder.name)
def test_the_tables_are_those_of_the_folders(folder):
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    tables = re.findall(r"(?:^\|.*\n)+", (folder / "table.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert tables
    assert [table for table in tables if table not in text] == []


def test_the_sentences_on_digits():
    found, text, page = digits(), PAGES["docs/results.md"], PAGES["docs/what-bsam-does.md"]
    sam, follow, bsam, two = (lambda total, title=title: found[title, total] for title in TITLES.values())
    against = [difference(bsam(total), follow(total)) for total in (0.1, 0.2)]
    assert f"{against[0]} points at total radius 0.1 and {against[1]} at 0.2" in text
    means = [text.split(" ±")[0].lstrip("+") for text in against]
    assert f"**better**, by {means[0]} and {means[1]}, 10 seeds" in text
    assert f"on digits {means[0]} at 0.1 and {means[1]} at 0.2 (10 seeds)" in page
    against = [difference(two(total), follow(total)) for total in (0.1, 0.2, 0.4)]
    assert f"with two passes {against[0]}, {against[1]}, and {against[2]} at 0.4" in text
    against = [difference(two(total), sam(total)) for total in (0.1, 0.2, 0.4)]
    assert f"minus SAM, fixed: {against[0]}, {against[1]} and {against[2]} at 0.1, 0.2 and 0.4" in text
    three, *two_passes = (difference(runs(x), found["SAM", x / 2]) for runs, x in ((bsam, 0.2), (two, 0.2), (two, 0.4)))
    assert f"{three} at total radius 0.2; with two passes {two_passes[0]}, and {two_passes[1]} at 0.4" in text
    failed = [sum(value < 20 for value in runs) for runs in (bsam(0.4), bsam(0.6), two(0.4), two(0.6))]
    assert failed == [1, 10, 0, 9]
    trained = [seed for seed, value in enumerate(bsam(0.4)) if value > 20]
    rest = difference([bsam(0.4)[seed] for seed in trained], [follow(0.4)[seed] for seed in trained])
    assert f"without that seed it is {rest} above SAM (follow)" in text
    best = {t: max((statistics.fmean(found[t, x]), x) for x in (0.1, 0.2, 0.4, 0.6)) for t in TITLES.values()}
    shown = [f"{mean:.2f} ({radius:g})" for mean, radius in best.values()]
    assert f"SAM {shown[0]}, SAM (follow) {shown[1]}, BSAM with two passes {shown[3]}, BSAM {shown[2]}" in text
    top, _, three_passes, two_best = (mean for mean, _ in best.values())
    two_text = f"(2 passes: open, by {top - two_best:.1f})"
    below = f"**worse**, by {top - three_passes:.1f} {two_text}, 10 seeds | {three_passes:.2f} and {top:.2f}"
    assert below in text
    spread = [f"{statistics.fmean(x):.2f} ± {statistics.stdev(x):.2f}" for x in (sam(0.6), two(0.4))]
    assert f"SAM {spread[0]}, BSAM with two passes {spread[1]} (10 seeds)" in page


def test_the_sentences_on_the_part_along_the_gradient():
    stored = json.loads((DIGITS / "across.json").read_text(encoding="utf-8"))["total_radius"]
    across = {float(total): [100 * value for value in values] for total, values in stored.items()}
    found, text = digits(), PAGES["docs/results.md"]
    means = [f"{statistics.fmean(across[total]):.2f}" for total in (0.1, 0.2, 0.4)]
    assert f"{means[0]}, {means[1]} and {means[2]} at 0.1, 0.2 and 0.4" in text
    above = [difference(across[total], found[TITLES["follow"], total]) for total in (0.1, 0.2, 0.4)]
    assert f"{above[0]}, {above[1]} and {above[2]} above SAM (follow)" in text
    rest = [difference(found[TITLES["bsam"], total], across[total]) for total in (0.1, 0.2)]
    assert f"another {rest[0]} and {rest[1]} above it at 0.1 and 0.2" in text
    first, second = (value.split(" ±")[0].lstrip("+") for value in above[:2])
    assert f"is {first} and {second} points above SAM at these radii" in PAGES["docs/what-bsam-does.md"]


def test_the_forms_of_bsam_on_digits():
    cells = json.loads((DIGITS / "rho_min.json").read_text(encoding="utf-8"))
    values = {
        (cell["passes"], cell["fixed"], cell["rho_max"], cell["rho_min"]): [100 * x for x in cell["test_accuracy"]]
        for cell in cells
    }
    for passes, name in ((3, "bsam"), (2, "bsam-2")):
        for total in (0.2, 0.4):
            values[passes, False, total / 2, total / 2] = digits()[TITLES[name], total]
    for passes in (3, 2):
        for fixed in (False, True):
            numbers = [values[passes, fixed, *radii] for radii in ((0.05, 0.1), (0.1, 0.1), (0.1, 0.2), (0.2, 0.2))]
            shown = [f"{statistics.fmean(each):.2f} ± {statistics.stdev(each):.2f}" for each in numbers]
            row = f"| {passes}, {'fixed' if fixed else 'falling'} | {' | '.join(shown)} |"
            assert row in PAGES["docs/results.md"]


def test_the_table_of_what_bsam_does():
    text, found = PAGES["docs/what-bsam-does.md"], digits()
    cells = cifar()

    def shown(title, total, data):
        if data == "digits":
            return f"{statistics.fmean(found[title, total]):.2f} (10)"
        cell = cells.get((title, total))
        return "-" if cell is None else f"{cell['mean']:.2f} ({cell['n']})"

    for data, totals in (("cifar", (0.05, 0.1, 0.2)), ("digits", (0.1, 0.2, 0.4, 0.6))):
        for total in totals:
            row = " | ".join(shown(title, total, data) for title in TITLES.values())
            assert f"{total:g} | {row} |" in text


SHIFT = json.loads((ROOT / "results/shift/digits.json").read_text(encoding="utf-8"))


def shift(row: str) -> list[float]:
    """The test accuracies in % of the ten seeds."""
    accuracies = SHIFT["rows"][row]["accuracy"]
    assert len(accuracies) == len(SHIFT["seeds"]) == 10
    return [100 * accuracy for accuracy in accuracies]


def spread(row: str) -> str:
    """Mean and standard deviation, and how many seeds learn nothing."""
    values = shift(row)
    failed = sum(value < 20 for value in values)
    return f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}" + (f" [{failed}]" if failed else "")


def gap(row: str, other: str) -> str:
    """The mean difference with its 95 % interval."""
    ours, theirs = (dict(enumerate(shift(name))) for name in (row, other))
    found = paired_difference(ours, theirs)
    return f"{found['difference']:.1f} ({found['low']:.1f} to {found['high']:.1f})".replace("-0.0", "0.0")


SHIFTED = [  # the sentences of the page on single differences, with pairs of rows
    ("At 0.4, the shift adds {} points to SAM", ("sam 0.4, shift 0.2", "sam 0.4")),
    ("points to SAM and {} to BSAM", ("released 0.2 + 0.2", "bsam 0.2 + 0.2")),
    ("with the shift, the difference is {}.", ("released 0.2 + 0.2", "sam 0.4, shift 0.2")),
    ("the shift costs accuracy**: {} points for SAM at 0.2", ("sam 0.2", "sam 0.2, shift 0.1")),
    ("points for SAM at 0.2 and {} for BSAM", ("bsam 0.1 + 0.1", "released 0.1 + 0.1")),
    ("BSAM's is better at 0.2 and 0.3**, by {} and", ("released 0.1 + 0.1", "sam 0.2, shift 0.1")),
    ("and {} points, but fails with some seeds", ("released 0.15 + 0.15", "sam 0.3, shift 0.15")),
    ("SAM is {} points above the released code", ("sam 0.25", "released 0.15 + 0.15")),
    ("above the released code, Algorithm 1 {}.", ("bsam 0.1 + 0.1", "released 0.15 + 0.15")),
    ("it is {} points better than throughout", ("sam 0.4, early", "sam 0.4, shift 0.2")),
    ("without any shift is {} points better", ("sam 0.4, warm-up", "sam 0.4, shift 0.2")),
    ("SAM at 0.4 is {} points better than with 0.2", ("sam 0.4, shift 0.05", "sam 0.4, shift 0.2")),
    ("It is {} above SAM at its best radius", ("sam 0.4, shift 0.05", "sam 0.25")),
    ("and {} below the warm-up", ("sam 0.4, warm-up", "sam 0.4, shift 0.05")),
]
CONTROLS = {
    "nothing": "sam 0.4",
    r"the shift, $\rho_{\min} = 0.2$": "sam 0.4, shift 0.2",
    "a shift of 0.05": "sam 0.4, shift 0.05",
    "the shift in the first 10 of 40 epochs": "sam 0.4, early",
    "$u$ as a part of the direction, with the same total length": "sam 0.4, momentum",
    "a warm-up of the learning rate over 5 epochs": "sam 0.4, warm-up",
    "a shift along $g$, not normalised": "sam 0.4, plain",
    "a shift along $d$, normalised": "sam 0.4, perturbed",
    "a shift in a random direction": "sam 0.4, random",
    "twice the learning rate": "sam 0.4, lr x 2",
}


@pytest.mark.parametrize(("sentence", "rows"), SHIFTED, ids=lambda value: str(value)[:40])
def test_the_differences_of_the_shift(sentence, rows):
    assert sentence.format(gap(*rows)) in PAGES["docs/what-bsam-does.md"]


def test_the_tables_of_the_shift():
    page = PAGES["docs/what-bsam-does.md"]
    rows = {}
    for total in (0.1, 0.2, 0.25, 0.3, 0.4, 0.6):
        half = f"{total / 2:g}"
        names = (f"sam {total}", f"sam {total}, shift {half}", f"bsam {half} + {half}", f"released {half} + {half}")
        assert f"| {total} | {' | '.join(map(spread, names))} |" in page
        for kind, name in zip(("sam", "shifted", "bsam", "released"), names, strict=True):
            rows.setdefault(kind, []).append(name)
    best = {kind: max(listed, key=lambda row: statistics.fmean(shift(row))) for kind, listed in rows.items()}
    assert (best["sam"], best["bsam"], best["released"]) == ("sam 0.25", "bsam 0.1 + 0.1", "released 0.15 + 0.15")
    reached = [spread(best[kind]) for kind in ("released", "bsam", "sam")]
    assert "it reaches {}, Algorithm 1 {} and SAM {}.".format(*reached) in page
    pairs = [("sam", "released"), ("bsam", "released"), ("sam", "bsam")]
    p_values = [paired_difference(*(dict(enumerate(shift(best[kind]))) for kind in pair))["p"] for pair in pairs]
    assert f"(smallest p {min(holm(p_values)):.2f})" in page
    assert all(f"| {label} | {spread(row)} |" in page for label, row in CONTROLS.items())
    assert f"SGD reaches {spread('sgd')}, SGD with a shift of 0.2 {spread('sgd, shift 0.2')}." in page
    mlp = [spread(row) for row in SHIFT["rows"] if row.startswith("mlp, ")]
    sentence = (
        "SGD: {}, with a shift of 0.1 {}. SAM at 0.1: {} and {}. SAM at 0.2: {} and {}. BSAM at 0.1 / 0.1: {}, as"
    )
    assert f"{sentence} released {{}}.".format(*mlp) in page


def test_the_failure_at_a_large_radius():
    """Loss and norms in the fourth epoch, and the labels that the networks predict."""
    page, epochs, rows = PAGES["docs/what-bsam-does.md"], SHIFT["epochs"], SHIFT["rows"]
    stuck, trained = (
        {name: values[3] for name, values in epochs[row].items()} for row in ("sam 0.4", "sam 0.4, shift 0.2")
    )
    assert f"the training loss stays at {stuck['train_loss']:.2f}," in page
    assert f"with $|g| = {stuck['norm_g']:.2f}$. There, $\\eta |d|$ is {0.05 * stuck['norm_d']:.3f}, or" in page
    assert f"or {0.5 * stuck['norm_d']:.2f} with momentum" in page
    numbers = trained["train_loss"], trained["norm_g"], 0.05 * trained["norm_d"]
    assert "the loss is {:.2f}, $|g| = {:.2f}$ and $\\eta |d| = {:.3f}$".format(*numbers) in page
    for row in ("sam 0.4", "bsam 0.2 + 0.2"):
        assert min(epochs[row]["train_loss"][3:]) > 2.29
    assert max(rows["sam 0.4, shift 0.2"]["train_loss"]) < 2
    low, high = (100 * statistics.fmean(rows[row]["memorised"]) for row in ("sam 0.2", "sam 0.2, shift 0.1"))
    assert f"predicts {low:.0f} % of the wrong labels, with the shift {high:.0f} %" in page


def test_the_shift_on_cifar():
    page, folder = PAGES["docs/what-bsam-does.md"], ROOT / "results/cifar10-resnet18-label-noise"
    runs = [(folder, f"noise80-{name}-seed0") for name in ("sgd", "sam", "bsam", "bsam-released")]
    runs.insert(2, (ROOT / "results/shift", "noise80-sam-shifted-seed0"))
    runs.insert(3, (folder, "noise80-sam-rho0.1-seed0"))
    sgd, sam, shifted, wide, algorithm_1, released = (f"{last(name, path):.1f}" for path, name in runs)
    assert f"SGD {sgd}, SAM at 0.05 {sam}, SAM at 0.05 with a shift of 0.05 {shifted}, SAM at 0.1 {wide}, BSAM" in page
    assert f"BSAM at 0.05 / 0.05 {algorithm_1}, as released {released}. So SAM" in page
    assert f"reaches {released} % with the released code and {algorithm_1} % with Algorithm 1" in page
    ends = [json.loads((path / f"{name}.jsonl").read_text("utf-8").splitlines()[-1]) for path, name in runs]
    assert f"(training loss {ends[4]['train_loss']:.2f} after the last epoch)" in page
    assert f"SAM at the same total radius of 0.1 stays there, too ({ends[3]['train_loss']:.2f})" in page
    low, high = (f"{100 * ends[n]['memorised']:.1f}" for n in (1, 2))
    assert f"predicts {low} % of the wrong labels, with the shift {high} %" in page
    names = ("bsam-released-seed0", "bsam-seed0")
    fewer = [f"{last(f'noise40-{name}', folder):.1f}" for name in names] + [f"{last(name):.1f}" for name in names]
    sentence = "the released code is below it: {} and {} with 36 % wrong labels, {} and {} with 40 % (seed 0)"
    assert sentence.format(*fewer) in page


@pytest.mark.parametrize("file", sorted((ROOT / "results").glob("*/table.md")), ids=lambda file: file.parent.name)
def test_tables_have_the_numbers_of_the_runs(file):
    """Each cell is the mean and the standard deviation of the runs in its section, row and column."""
    runs = read_runs(file.parent)
    runs = runs[runs["state"] == "finished"]
    short = runs["row"].str.partition(", ")[0]
    names = [runs["row"], short, short.replace("SAM (sum)", "SAM")]
    checked = 0
    for title, table in re.findall(r"^## (.*)\n\n((?:\|.*\n)+)", file.read_text(encoding="utf-8"), flags=re.MULTILINE):
        header, _, *rows = ([cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines())
        for label, *cells in rows:
            for column, cell in zip(header[1:], cells, strict=True):
                here = (runs["section"] == title) & (runs["column"] == column)
                groups = [runs[here & (name == label)]["score"] for name in names]
                scores = next((group for group in groups if len(group)), None)
                if scores is not None:
                    spread = f" ± {scores.std():.2f}" if len(scores) > 1 else ""
                    assert cell == f"{scores.mean():.2f}{spread} ({len(scores)})", (title, label)
                    checked += 1
    assert checked or file.parent.name == "pose"  # whose columns are measures of a run


def test_bsam_every_fifth_step():
    """The table of `results/every`, and the gains over SGD that the page states."""
    folder = ROOT / "results/every"
    scores = json.loads((folder / "digits.json").read_text(encoding="utf-8"))["scores"]
    page = PAGES["docs/results.md"]
    rows = {
        "BSAM, `passes=2, every=5` | 1.2": ("bsam-2-every5", last("bsam-2-every5-seed1", folder)),
        "LookSAM, `alpha=0.5` | 1.2": ("looksam-alpha0.5", last("looksam-alpha0.5-rho0.1-seed1", folder)),
        "BSAM | 3": ("bsam", last("bsam-seed1")),
        "BSAM, two passes | 2": ("bsam-2", last("bsam-2-seed1")),
        "SAM | 2": ("sam", last("sam-rho0.1-seed1")),
    }
    for label, (name, cifar10) in rows.items():
        cells = [
            f"{100 * statistics.fmean(seeds):.2f} ± {100 * statistics.stdev(seeds):.2f}"
            for seeds in scores[name].values()
        ]
        assert all(len(seeds) == 10 for seeds in scores[name].values())
        assert f"| {label} | {' | '.join(cells)} | {cifar10:.2f} |" in page
    sgd, sgd_digits = last("sgd-seed1"), 100 * statistics.fmean(scores["sgd"]["0"])
    gains = {
        name: (score - sgd, 100 * statistics.fmean(scores[name]["0.2"]) - sgd_digits) for name, score in rows.values()
    }
    every, whole = gains["bsam-2-every5"], gains["bsam"]
    assert f"gains {every[0]:.1f} points on CIFAR-10 and {every[1]:.1f} on digits at 0.2" in page
    assert f"with three passes gains {whole[0]:.1f} and {whole[1]:.1f}" in page
    assert f"{gains['looksam-alpha0.5'][0] - every[0]:.1f} points above it on CIFAR-10" in page
    assert f"SAM at 0.1 is {gains['sam'][0] - every[0]:.1f} points above it" in page


def test_the_table_of_halving():
    """Means over seeds of the test accuracy of what each rule chooses, and where halving misses."""
    page = COMPARE
    replay = runpy.run_path(str(ROOT / "results/tuning/replay.py"))
    choices, losses = replay["choices"], {}
    for study, title in {
        "digits-mlp": "digits, MLP",
        "digits-conv": "digits, DigitsNet",
        "fashion-mnist": "Fashion-MNIST, small CNN",
    }.items():
        table = choices(study).groupby(["noise", "method"])[["full", "half", "cost"]].mean()
        for noise in table.index.levels[0]:
            sam, bsam = table.loc[noise, "sam"], table.loc[noise, "bsam"]
            cells = " | ".join(f"{row[rule]:.1f}" for row in (sam, bsam) for rule in ("full", "half"))
            assert f"| {title} | {100 * noise:.0f} % | {cells} | {100 * sam['cost']:.0f} % |" in page
        losses |= {(study, *key): loss for key, loss in (table["full"] - table["half"]).items()}
    cifar = json.loads((ROOT / "results/tuning/cifar10.json").read_text("utf-8"))
    full, half = (replay["choice"](pd.DataFrame(cifar["runs"]), ["factor"], halving) for halving in (False, True))
    assert cifar["runs"][full.best()]["factor"] == cifar["runs"][half.best()]["factor"] == cifar["final"]["factor"]
    test, cost = f"{cifar['final']['test']:.1f}", f"{100 * sum(half.aims) / sum(full.aims):.0f}"
    assert f"| CIFAR-10, ResNet-18, 12 epochs | 40 % | {test} | {test} | - | - | {cost} % |" in page
    losses["cifar10", 0.4, "sam"] = 0.0
    missed = {key: loss for key, loss in losses.items() if loss > 0.5}
    assert f"In {len(losses) - len(missed)} of these {len(losses)} comparisons" in page
    assert list(missed) == [("digits-mlp", 0.4, "sam"), ("digits-mlp", 0.7, "sam")]
    assert "by {:.1f} points with 40 % wrong labels and by {:.1f} with 70 %".format(*missed.values()) in page
    assert f"also {-min(losses.values()):.1f} points better once" in page
    base = choices("digits-base").groupby("noise")[["full", "half", "cost"]].mean()
    lost = "{:.1f}, {:.1f} and {:.1f}".format(*abs(base["full"] - base["half"]))
    assert f"cost {100 * base['cost'].mean():.0f} %, and lose {lost} points with 0, 40 and 70 %" in page
    wide = [choices(study, (0.5, 1, 2, 4, 8)) for study in ("digits-mlp", "digits-conv")]
    wide = [runs[(runs["noise"] == 0.4) & (runs["method"] == "sam")] for runs in wide]
    lost = [f"{(runs['full'] - runs['half']).mean():.1f}" for runs in wide]
    assert "halving loses {} points (MLP) and {} points (DigitsNet)".format(*lost) in page


def test_halving_on_the_curves_of_cifar():
    leads = []
    for method in ("sam", "bsam"):
        differences = []
        for seed in (0, 1):
            files = [NOISE / f"{method}{radius}-seed{seed}.jsonl" for radius in ("", "-rho0.1")]
            curves = [
                [100 * json.loads(line)["test_accuracy"] for line in file.read_text("utf-8").splitlines()]
                for file in files
            ]
            differences.append([large - small for small, large in zip(*curves, strict=True)])
        early = statistics.fmean(number for curve in differences for number in curve[65:75])
        leads += [early, statistics.fmean(curve[-1] for curve in differences)]
    assert "leads SAM at 0.05 by {:.1f} points, and ends {:.1f} points above it".format(*leads[:2]) in COMPARE
    behind = f"{-leads[2]:.1f} points behind BSAM at 0.05 / 0.05, and ends {leads[3]:.1f} points above it"
    assert behind in COMPARE


def test_the_table_of_unfinished_runs():
    rows = {}
    for path in ROOT.glob("results/unfinished-*/*.jsonl"):
        metrics = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert metrics[-1]["lr"] < 5e-5
        rows[f"| `{path.parent.name}` | {len(metrics)} of 200 | {last(path.stem, path.parent):.2f} |"] = metrics[-1]
    assert len(rows) == 3
    assert all(row in PAGES["docs/results.md"] for row in rows)
    assert {f"{metrics['train_loss']:.2f}" for row, metrics in rows.items() if "noise80" in row} == {"2.30"}


CLAIMS = [  # rows of the table of claims, and the verdicts of the page that they report
    ("SAM above SGD: ResNet-18, CIFAR-10", ["SAM better than SGD: ResNet-18, CIFAR-10, 200"]),
    ("BSAM above SAM by 0.08: ResNet-18, CIFAR-10", ["BSAM better than SAM: ResNet-18, CIFAR-10, 200"]),
    (
        "SGD, SAM, BSAM in this order: 40 % label noise, **Algorithm 1**",
        [
            f"{pair}: ResNet-18, CIFAR-10, 40 % of labels drawn from all"
            for pair in ("SAM better than SGD", "BSAM better than SAM")
        ],
    ),
    (
        "the same: 60 % label noise, **Algorithm 1**",
        [
            f"{pair}: ResNet-18, CIFAR-10, 60 % of labels drawn from all"
            for pair in ("SAM better than SGD", "BSAM better than SAM")
        ],
    ),
    (
        "the same: 80 % label noise, **Algorithm 1**",
        [
            f"{pair}: ResNet-18, CIFAR-10, 80 % of labels drawn from all"
            for pair in ("SAM better than SGD", "BSAM better than SAM")
        ],
    ),
    ("SAM above SGD: 20 % label noise", ["SAM better than SGD: ResNet-18, CIFAR-10, 20 % of labels drawn from all"]),
    (
        "the same: 40 % *wrong* labels, which is [harder](#harder-40-wrong-labels)",
        [
            f"{pair}: ResNet-18, CIFAR-10, 40 % of labels drawn from other"
            for pair in ("SAM better than SGD", "BSAM better than SAM")
        ],
    ),
    (
        "SGD, SAM, BSAM in this order: ResNet-18, CIFAR-100",
        ["SAM better than SGD: ResNet-18, CIFAR-100, 200", "BSAM better than SAM: ResNet-18, CIFAR-100, 200"],
    ),
    (
        "BSAM: smaller Hessian eigenvalues than SAM and SGD, CIFAR-100",
        ["BSAM flatter than SGD (λmax, cross-entropy, 1,000", "BSAM flatter than SAM (λmax, cross-entropy, 1,000"],
    ),
    (
        "BSAM: smaller eigenvalues than SGD, MobileNetV1 with 4 bits",
        ["BSAM flatter than SGD (λmax, cross-entropy, 256 training samples): MobileNetV1"],
    ),
    (
        "BSAM: smaller eigenvalues than SAM, 4 bits; than SGD, ResNet-18 with 4 bits",
        [
            "BSAM flatter than SAM (λmax, cross-entropy, 256",
            "BSAM flatter than SGD (λmax, cross-entropy, 256 training samples): ResNet-18",
        ],
    ),
    ("SAM above SGD: EfficientNet, fine-tuned on Pet", ["SAM better than SGD: tf_efficientnet_lite0, Oxford"]),
    ("BSAM above SAM: the same", ["BSAM better than SAM: tf_efficientnet_lite0, Oxford"]),
    ("SAM above SGD by 0.03: ResNet-50, fine-tuned on Pet", ["SAM better than SGD: ResNet-50"]),
    ("SAM above BSAM by 0.08: the same", ["SAM better than BSAM: ResNet-50"]),
    ("Adam, SAM, BSAM in this order: human pose", ["SAM better than Adam: SimCC", "BSAM better than SAM: SimCC"]),
    ("SAM above SGD: ResNet-18 with 4 bits", ["SAM better than SGD: ResNet-18, CIFAR-10, 4 bits"]),
    ("BSAM above SAM: the same", ["BSAM better than SAM: ResNet-18, CIFAR-10, 4 bits"]),
    ("SAM above SGD: MobileNetV1 with 4 bits", ["SAM better than SGD: MobileNetV1"]),
    ("BSAM above SAM: the same", ["BSAM better than SAM: MobileNetV1"]),
]


def test_the_claims_have_the_outcomes_of_the_page():
    """In the order of the table; a row names the number of seeds."""
    claims_found = paper_claims(join(read_runs(ROOT / "results")))
    claims_found = claims_found[claims_found["at"] != "at matched radii"].to_dict("records")
    lines = iter((ROOT / "docs/results.md").read_text(encoding="utf-8").splitlines())
    reported = []
    for start, claims in CLAIMS:
        row = next(line for line in lines if line.startswith(f"| {start} |"))
        status = row.split(" | ")[1].replace("*", "")
        for claim in claims:
            title, _, experiment = claim.partition(": ")
            found = [
                found
                for found in claims_found
                if found["claim"].startswith(title) and found["experiment"].startswith(experiment)
            ]
            assert found, claim
            for verdict in found:
                assert status.startswith(verdict["outcome"]), (row, verdict)
                assert re.search(rf"\b{verdict['shared']} seed", status), (row, verdict)
            reported += found
    left_out = {found["experiment"] for found in claims_found if found not in reported}
    assert left_out == {"tf_efficientnet_lite0, Flowers-102, pretrained, 30 epochs"}  # one or two seeds, in no row


@pytest.fixture
def add_runs(monkeypatch):
    """Run results/add_runs.py."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["add_runs.py", *map(str, words)])
        runpy.run_path(str(ROOT / "results" / "add_runs.py"), run_name="__main__")

    return call


def test_a_run_is_added(tmp_path, add_runs):
    run = tmp_path / "runs" / "mine"
    FakeFit(lambda run: 0.75)(Run("sam", {"rho": 0.2}, epochs=2), run)
    (tmp_path / "folder").mkdir()
    for _ in range(2):
        add_runs(tmp_path / "folder", run, "--commit", "abc")
    found = read_runs(tmp_path / "folder")
    assert found[["row", "score", "radius", "state"]].values.tolist() == [["SAM, rho 0.2", 75.0, 0.2, "finished"]]
    assert json.loads((tmp_path / "folder" / "results.json").read_text())["runs"][0]["commit"] == "abc"


def test_a_run_is_added_from_its_metrics(tmp_path, add_runs):
    """A run of `results/` whose directory is gone gets the entry that it had, instead of the one that it is missing."""
    stored = json.loads((RERUN / "results.json").read_text(encoding="utf-8"))
    known = next(entry for entry in stored["runs"] if entry["folder"] == "noise40-bsam-seed0")
    missing = {**known, "folder": "planned", "state": "missing", "last": None, "metrics": None}
    others = [entry for entry in stored["runs"] if entry["folder"] not in ("noise40-bsam-seed0", "noise40-sam-seed0")]
    folder, metrics = tmp_path / "folder", RERUN / known["metrics"]
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps({**stored, "runs": [missing, *others]}))
    flags = ("--model", "resnet18", "--data", "cifar10", "--label-noise", 0.4, "--precision", "bf16", "--compile")
    add_runs(folder, "--metrics", metrics, "--name", "mine", "--commit", "abc", "--", *flags, "--method", "bsam")
    results = json.loads((folder / "results.json").read_text())
    *kept, added = results["runs"]
    assert kept == others
    assert results["recipe"] == stored["recipe"]
    assert (folder / "mine.jsonl").read_bytes() == metrics.read_bytes()
    assert added["machines"] == []
    assert (added["folder"], added["metrics"], added["commit"]) == ("mine", "mine.jsonl", "abc")
    assert stored_run(added["settings"]) == stored_run(known["settings"])
    for name in ("state", "last", "wrong_labels", "about"):
        assert added[name] == known[name], name

    add_runs(folder, "--metrics", RERUN / "noise40-sam-seed0.jsonl", "--", *flags, "--method", "sam")
    added = json.loads((folder / "results.json").read_text())["runs"][-1]
    known = next(entry for entry in stored["runs"] if entry["folder"] == "noise40-sam-seed0")
    assert (added["folder"], added["last"], added["about"]) == (known["folder"], known["last"], known["about"])


def test_metrics_of_an_unfinished_run_are_refused(tmp_path, add_runs):
    with pytest.raises(SystemExit, match="200 of 300 epochs"):
        add_runs(tmp_path, "--metrics", CLEAN / "sam-seed2.jsonl", "--", "--method", "sam", "--epochs", 300)
    assert not list(tmp_path.iterdir())


def test_the_runs_added_from_metrics_have_the_settings_of_their_rows():
    """They differ from another run of their row in the seed, and from one of their experiment in the method."""
    for folder, name, other in (
        (CLEAN, "sam-seed2", "sam-seed1"),
        (CLEAN, "bsam-seed2", "bsam-seed1"),
        (RERUN, "noise20-sgd-seed1", "noise20-sgd-seed0"),
        (RERUN, "noise20-sam-seed0", "noise20-sgd-seed0"),
        (RERUN, "noise60-bsam-seed0", "noise60-sam-seed0"),
    ):
        entries = json.loads((folder / "results.json").read_text(encoding="utf-8"))["runs"]
        ours, theirs = (next(entry for entry in entries if entry["folder"] == each) for each in (name, other))
        settings, others = (stored_run(entry["settings"]).settings() for entry in (ours, theirs))
        names = {key for key in settings if settings[key] != others[key]}
        assert names == ({"seed"} if ours["about"]["row"] == theirs["about"]["row"] else {"method"})
        same = ("experiment", "section", "column")
        assert [ours["about"][key] for key in same] == [theirs["about"][key] for key in same]
        assert ours["wrong_labels"] == theirs["wrong_labels"]
        wide = json.loads((folder / ours["metrics"]).read_text(encoding="utf-8").splitlines()[0])
        assert ("rho_min" in wide) == (settings["method"] == "bsam")  # the metrics are those of the method
        assert ("memorised" in wide) == (settings["label_noise"] > 0)


def test_the_tables_are_made_from_the_runs():
    tables = runpy.run_path(str(ROOT / "results" / "write_tables.py"))
    for name in tables["FOLDERS"]:
        folder = ROOT / "results" / name
        assert tables["table"](folder) == (folder / "table.md").read_text(encoding="utf-8")


def test_radius_warmup():
    """The tables and numbers in the guide, from `results/radius-warmup` and the runs on CIFAR-10."""
    rows = pd.DataFrame(json.loads((ROOT / "results/radius-warmup/digits.json").read_text(encoding="utf-8"))["rows"])
    rows["mean"] = rows["accuracy"].map(lambda scores: 100 * statistics.fmean(scores))
    error = rows["accuracy"].map(lambda scores: 100 * statistics.stdev(scores) / len(scores) ** 0.5)
    rows["text"] = [f"{mean:.1f} ± {e:.1f}" for mean, e in zip(rows["mean"], error, strict=True)]
    guide = PAGES["docs/guides/methods-and-radii.md"]
    networks = ("mlp", "digits_net", "transformer")
    cells = rows[rows["schedule"] == "constant"].set_index(["method", "wrong", "radius", "network"])["text"]
    methods = {name: method.title for name, method in METHODS.items()} | {"sam-ascent": "SAM, `ascent=0.25`"}
    for name in rows["method"].unique():
        if name != "sgd":
            numbers = [cells[name, 0.4, radius, network] for radius in (0.2, 0.4) for network in networks]
            assert f"| {' | '.join([methods[name], *numbers])} |" in guide
    sgd = rows[(rows["method"] == "sgd") & (rows["wrong"] == 0.4)].set_index("network")["text"]
    assert all(sgd[network] in guide for network in networks)

    both = rows[rows["method"].isin(["sam", "bsam"])]
    means = both.pivot(index=["method", "wrong", "radius", "network"], columns="schedule", values="mean")
    for wrong, constant, warm in ((0.4, "10 to 17", "87 to 91"), (0.7, "10 to 10", "42 to 67")):
        large = means.loc["sam", wrong, 0.8].round().astype(int)
        assert [f"{large[name].min()} to {large[name].max()}" for name in ("constant", "warmup")] == [constant, warm]
    best = means.groupby(["method", "wrong", "network"]).max()
    gains = best[["warmup", "start"]].sub(best["constant"], axis=0)
    assert gains.xs(0.0, level="wrong").abs().max().max() < 0.25
    noisy = gains[gains.index.get_level_values("wrong") > 0]
    spans = [noisy.loc["sam", "warmup"], noisy.loc["bsam", "warmup"], noisy["start"]]
    assert [(round(gain.min()), round(gain.max())) for gain in spans] == [(0, 21), (1, 16), (-10, 14)]

    short = ROOT / "results/cifar10-resnet18-noise80-30epochs"
    for text, first, second, folder in (
        ("| 72 % | 200 | SAM 0.05 | {} | {} | - |", "noise80-sam", "noise80-sam-warmup", RERUN),
        ("| 72 % | 200 | BSAM 0.05 / 0.05 | {} | {} | - |", "noise80-bsam", "noise80-bsam-warmup", RERUN),
        ("| 80 % | 30 | SAM 0.05 | - | {} | {} |", "sam-warmup", "sam-start", short),
        ("| 80 % | 30 | BSAM 0.05 / 0.05 | {} | {} | - |", "bsam", "bsam-warmup", short),
    ):
        assert text.format(*(f"{last(f'{name}-seed0', folder):.2f}" for name in (first, second))) in guide


def test_the_losses_of_the_language_model():
    content = json.loads((ROOT / "results/language/gpt.json").read_text(encoding="utf-8"))
    losses = {(row["method"], row["rho"]): row["loss"] for row in content["rows"]}
    page = (ROOT / "docs/guides/transformers-from-scratch.md").read_text(encoding="utf-8")

    def cell(method, rho=None):
        values = losses[method, rho]
        return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}"

    assert content["passes"] == 2000
    assert f"| AdamW, 1,000 passes | 1,000 | {cell('half')} |" in page
    assert f"| AdamW | 2,000 | {cell('AdamW')} |" in page
    radii = (0.01, 0.03, 0.1, 0.3)
    for method, title in {"SAM": "SAM", "FunctionalSAM": "Functional SAM"}.items():
        assert f"| {title} | 1,000 | | {' | '.join(cell(method, rho) for rho in radii)} |" in page
    means = {key: statistics.fmean(values) for key, values in losses.items()}
    best = min(mean for (method, _), mean in means.items() if "SAM" in method)
    assert best - means["AdamW", None] > 0.28
    assert "better by 0.28 or more" in page
    assert all(means["SAM", rho] > means["half", None] for rho in radii)
    spread = statistics.stdev(losses["half", None])
    assert all(abs(means["half", None] - means["FunctionalSAM", rho]) < spread for rho in radii[:3])
    assert "Functional SAM is level with it up to 0.1" in " ".join(page.split())


def test_the_vision_transformer():
    """Table, text and the page of the runs: the stored runs, and seconds from the stored time of an epoch."""
    runs = read_runs(ROOT / "results/cifar100-vit-tiny")
    assert (runs["state"] == "finished").all()
    guide = (ROOT / "docs/guides/transformers-from-scratch.md").read_text(encoding="utf-8")
    page = " ".join(guide.split())
    made = " ".join((ROOT / "docs/runs.md").read_text(encoding="utf-8").split())
    timed = json.loads((ROOT / "benchmarks/results/throughput_vit_tiny_cuda.json").read_text("utf-8"))["results"][0]
    settings = runs["settings"].iloc[0]
    assert (timed["model"], timed["base"], timed["batch"]) == tuple(settings[key] for key in ("model", "base", "batch"))
    rows = []
    for row, group in runs.groupby("row"):
        scores, title = group["score"], str(row).partition(",")[0]  # the case that was timed
        spread = f" ± {scores.std():.2f}" if len(scores) > 1 else ""
        loss = statistics.fmean(last["train_loss"] for last in group["last"])
        seconds = group["epochs"].iloc[0] * timed["epoch_seconds"][title]["median"]
        cells = [row, group["passes"].iloc[0], f"{scores.mean():.2f}{spread} ({len(scores)})", f"{loss:.3f}"]
        rows.append(f"| {' | '.join(map(str, cells))} | {seconds:.0f} |")
    table = guide.partition("| training loss | seconds |\n|---|---|---|---|---|\n")[2].partition("\n\n")[0]
    assert table.splitlines() == rows

    seeds = {row: group.set_index("seed")["score"] for row, group in runs.groupby("row")}
    adamw, twice, best = (seeds[row] for row in ("AdamW", "AdamW, twice the epochs", "SAM, rho 0.05, warm-up"))
    assert len(adamw) == len(twice) == len(best) == 3
    level, above, fell = paired_difference(best.to_dict(), adamw.to_dict()), best - twice, adamw - twice
    assert level["low"] < 0 < level["high"]
    assert f"is {level['difference']:.2f} points above it (3 seeds; 95 % interval: {level['low']:.2f} to " in page
    assert f" to {level['high']:.2f})" in page
    unpaired = scipy.stats.ttest_ind(best, twice, equal_var=False).confidence_interval()
    assert unpaired.low > 0
    assert above.idxmax() == 0  # the seed that decided for the warm-up
    assert (
        f"AdamW with 200 epochs, which takes as many passes, by {above.min():.2f} to {above.max():.2f} points" in page
    )
    assert f"the 95 % interval is {unpaired.low:.2f} to {unpaired.high:.2f}" in page
    assert f"AdamW is {fell.min():.2f} to {fell.max():.2f} points lower with 200 epochs than with 100" in page
    lost = {rho: adamw[0] - seeds[f"SAM, rho {rho}"][0] for rho in (0.05, 0.1, 0.2, 0.4)}
    assert all(len(seeds[f"SAM, rho {rho}"]) == 1 for rho in lost)
    assert f"0.4 lose**: they are {lost[0.2]:.1f} and {lost[0.4]:.1f} points below AdamW with the same seed" in page
    assert f"At 0.05 and 0.1, the {lost[0.05]:.1f} and {lost[0.1]:.1f} points are within the noise" in page
    cost = {name: ratio["median"] for name, ratio in timed["over_base"].items()}
    assert f"takes {cost['SAM']:.1f} times as long" in page
    assert f"more epochs, which take {100 * (2 / cost['SAM'] - 1):.0f} % longer" in page
    changes = " ".join((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split())
    assert f"takes {cost['SAM']:.2f} times as long as an AdamW epoch, a BSAM epoch {cost['BSAM3']:.2f} times" in changes
    again = 56.28  # the run of which only the last line is known
    assert f"{again} %. The stored run with the same seed reached {adamw[1]:.2f} %" in made
    assert f"would be {statistics.fmean([again, *adamw]):.2f} %" in made
    assert f"trained twice with the same seed differed by {adamw[1] - again + 1e-9:.1f} points" in page

    images = Examples(torch.zeros(200, 3, 32, 32, dtype=torch.uint8), torch.arange(100).repeat(2))
    data = Dataset("blank", 100, images, None, images, (0.5,) * 3, (0.25,) * 3)
    task = Classification(stored_run(settings), torch.device("cpu"), data=data)
    smoothing = settings["label_smoothing"]
    logits = torch.zeros(1, 100, dtype=torch.float64)
    logits[0, 7] = math.log((1 - smoothing) / (smoothing / 99))  # the smoothed label
    floor = task.losses(logits, images.y[7:8]).item()
    assert f"The training loss cannot fall below {floor:.3f}, with label smoothing of {smoothing}" in page
    epochs = {
        path.stem: [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        for path in (ROOT / "results/cifar100-vit-tiny").glob("*.jsonl")
    }
    lowest = {name: min(range(len(rows)), key=lambda i: rows[i]["test_loss"]) for name, rows in epochs.items()}
    assert f"is lowest after {1 + min(lowest.values())} to {1 + max(lowest.values())} epochs" in page
    risen = [100 * (rows[-1]["test_accuracy"] - rows[lowest[name]]["test_accuracy"]) for name, rows in epochs.items()]
    assert f"rises by another {min(risen):.1f} to {max(risen):.1f} points" in page
    names = ("sam-rho0.05-warmup", "adamw", "adamw-twice")
    ends = [statistics.fmean(epochs[f"{name}-seed{n}"][-1]["test_loss"] for n in range(3)) for name in names]
    assert "is {:.2f} for SAM with the warm-up, {:.2f} for AdamW, and {:.2f} for AdamW with 200".format(*ends) in page
    cells = [f"{of.mean():.2f} ± {of.std():.2f}" for of in (best, adamw, twice)]
    assert "SAM reaches {}, AdamW {} at half the cost, and AdamW with as many passes {}".format(*cells) in changes
    commits = {
        run["commit"] for run in json.loads((ROOT / "results/cifar100-vit-tiny/results.json").read_text())["runs"]
    }
    assert all(f"at commit {commit[:7]}" in made for commit in commits)


def test_what_captured_steps_of_the_methods_cost():
    stored = json.loads((ROOT / "benchmarks/results/throughput_methods_cuda.json").read_text(encoding="utf-8"))
    cost = {name: ratio["median"] for r in stored["results"] for name, ratio in r["over_base"].items()}
    captured = {name: is_captured for r in stored["results"] for name, is_captured in r["captured"].items()}
    assert {name for name in captured if not captured[name]} == {"AESAM", "ESAM"}
    guide = PAGES["docs/guides/methods-and-radii.md"]
    assert stored["machine"]["gpu"] == "NVIDIA H200"
    assert f"{cost['SAM ascent 0.25']:.1f}" == f"{cost['MESA']:.1f}"
    words = "{SAF:.2f} times as long as SGD, MSAM {MSAM:.2f}, LookSAM {LookSAM:.1f}, RST {RST:.1f}, and SAM"
    words = "SAF takes " + words.format(**cost)
    slower = f"MESA {cost['MESA']:.1f} times"
    assert f"If that takes too long: {words} with ascent=0.25 and {slower}" in guide.replace("`", "")
    readme = f"For ResNet-18 in CUDA graphs on an H200, {words}(ascent=0.25) and {slower}"
    assert readme in PAGES["README.md"].replace("`", "")
    assert f"take {cost['AESAM']:.0f} and {cost['ESAM']:.0f} times as long as captured steps of SGD" in guide
    assert f"(1 seed), in {cost['BSAM3']:.1f} times the time of SGD" in guide
