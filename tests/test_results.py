"""The numbers that README and docs state are those of the metrics in results/, and the tables are made from them."""

from __future__ import annotations

import json
import runpy
import statistics
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOISE, RADIUS, DIGITS = (
    ROOT / "results" / name for name in ("cifar10-resnet18-noise40", "cifar10-resnet18-radius", "digits-radius")
)
PAGES = {
    name: " ".join((ROOT / name).read_text(encoding="utf-8").split())
    for name in ("README.md", "docs/results.md", "docs/what-bsam-does.md", "docs/guides/methods-and-radii.md")
}
TITLES = {"sam": "SAM", "follow": "SAM (follow)", "bsam": "BSAM (Algorithm 1)", "bsam-2": "BSAM (2 passes)"}


def last(name: str) -> float:
    """The test accuracy of the last epoch of a run, in %."""
    return 100 * json.loads((NOISE / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[-1])["test_accuracy"]


def digits() -> dict[tuple[str, float], list[float]]:
    """The test accuracies in % of the ten seeds, by method and total radius."""
    runs = json.loads((DIGITS / "results.json").read_text(encoding="utf-8"))["runs"]
    found: dict[tuple[str, float], dict[int, float]] = {}
    for run in runs:
        arguments, seed = run["settings"]["arguments"], run["settings"]["seed"]
        total = arguments.get("rho", arguments.get("rho_max", 0) + arguments.get("rho_min", 0))
        found.setdefault((run["title"], round(total, 6)), {})[seed] = 100 * run["last"]["test_accuracy"]
    assert all(sorted(seeds) == list(range(10)) for seeds in found.values())
    return {key: [seeds[seed] for seed in range(10)] for key, seeds in found.items()}


def difference(a: list[float], b: list[float]) -> str:
    found = [x - y for x, y in zip(a, b, strict=True)]
    return f"{statistics.fmean(found):+.1f} ± {statistics.stdev(found) / len(found) ** 0.5:.1f}"


def noise_claims() -> list[tuple[str, list[str]]]:
    """The sentences on CIFAR-10 with flipped labels, and the pages that have them."""
    low, high = sorted(last(f"bsam-seed{seed}") - last(f"sam-seed{seed}") for seed in (0, 1))
    fixed, follow = last("sam-rho0.1-seed1"), last("sam-follow-seed1")
    bsam, wide, wide2 = (last(f"{name}-seed1") for name in ("bsam", "bsam-rho0.1", "bsam-2-rho0.1"))
    two = [last(f"bsam-2-seed{seed}") - last(f"sam-seed{seed}") for seed in (0, 1)]
    means = [statistics.fmean(last(f"{name}-seed{seed}") for seed in (0, 1)) for name in ("sgd", "sam", "bsam")]
    readme, results, page, guide = PAGES
    return [
        (f"confirmed, 2 seeds | {means[0]:.2f}, {means[1]:.2f}, {means[2]:.2f} |", [results]),
        (f"with two passes the gap is {two[0]:.1f} and {two[1]:.1f} points", [results]),
        (f"at total radius 0.1 is {bsam - follow:+.1f} points", [results]),
        (f"(with two passes {last('bsam-2-seed1') - follow:+.1f}), minus SAM {bsam - fixed:+.1f}", [results]),
        (f"BSAM is {low:.1f} to {high:.1f} points above SAM", [readme, guide]),
        (f"is {fixed - bsam:.1f} points above BSAM", [readme, guide]),
        (f"it is {bsam - follow:.1f} points below", [readme]),
        (f"gives SAM {fixed:.2f}, BSAM {wide:.2f}, and with two passes {wide2:.2f}", [readme]),
        (f"the labels flipped: {fixed:.2f} (1) fixed, {follow:.2f} (1) with BSAM's schedule", [readme]),
        (f"SAM at 0.1 reaches {fixed:.2f}, and {follow:.2f} if its radius falls", [guide]),
        (f"**BSAM below**, by {fixed - bsam:.1f}, 1 seed | {bsam:.2f} and {fixed:.2f} |", [results]),
        (f"BSAM above, by {bsam - follow:.1f}, 1 seed | {bsam:.2f} and {follow:.2f} |", [results]),
        (f"by {fixed - wide:.1f} (2 passes: {fixed - wide2:.1f}), 1 seed | {wide:.2f} and {fixed:.2f} |", [results]),
        (f"between BSAM and SAM ({low:.1f} and {high:.1f} points here, 5.9 there)", [results]),
        (f"BSAM at 0.05 / 0.05 is {low:.1f} to {high:.1f} points above SAM at 0.05", [page]),
        (f"above SAM at 0.05, and {fixed - bsam:.1f} below SAM at 0.1", [page]),
        (f"loses {fixed - follow:.1f} points against SAM at 0.1", [page]),
        (f"From 0.05 to 0.1, SAM gains {fixed - last('sam-seed1'):.1f} points", [page]),
        (f"BSAM is {bsam - follow:.1f} points above SAM on CIFAR-10 (1 seed)", [page]),
        (f"SAM {fixed:.2f}, BSAM {wide:.2f} and with two passes {wide2:.2f} on CIFAR-10", [page]),
    ]


@pytest.mark.parametrize(("sentence", "pages"), noise_claims(), ids=lambda value: str(value)[:40])
def test_the_sentences_on_flipped_labels(sentence, pages):
    assert all(sentence in PAGES[page] for page in pages)


def test_the_sentences_on_digits():
    found, text, page = digits(), PAGES["docs/results.md"], PAGES["docs/what-bsam-does.md"]
    sam, follow, bsam, two = (lambda total, title=title: found[title, total] for title in TITLES.values())
    against = [difference(bsam(total), follow(total)) for total in (0.1, 0.2)]
    assert f"{against[0]} points at total radius 0.1 and {against[1]} at 0.2" in text
    means = [text.split(" ±")[0].lstrip("+") for text in against]
    assert f"BSAM above, by {means[0]} and {means[1]}, 10 seeds" in text
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
    below = f"by {top - three_passes:.1f} (2 passes: {top - two_best:.1f}), 10 seeds | {three_passes:.2f} and {top:.2f}"
    assert below in text
    spread = [f"{statistics.fmean(x):.2f} ± {statistics.stdev(x):.2f}" for x in (sam(0.6), two(0.4))]
    assert f"SAM {spread[0]}, BSAM with two passes {spread[1]} on digits" in page


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
    assert f"is {first} and {second} points above SAM there" in PAGES["docs/what-bsam-does.md"]


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
    cells = json.loads((RADIUS / "results.json").read_text(encoding="utf-8"))["table"]
    cifar = {(cell["row"], float(cell["section"].rpartition(" ")[2])): cell for cell in cells if cell["n"]}

    def shown(title, total, data):
        if data == "digits":
            return f"{statistics.fmean(found[title, total]):.2f} (10)"
        cell = cifar.get((title, total))
        return "-" if cell is None else f"{cell['mean']:.2f} ({cell['n']})"

    for data, totals in (("cifar", (0.05, 0.1, 0.2)), ("digits", (0.1, 0.2, 0.4, 0.6))):
        for total in totals:
            row = " | ".join(shown(title, total, data) for title in TITLES.values())
            assert f"{total:g} | {row} |" in text


@pytest.fixture
def coarse_figures(monkeypatch):
    monkeypatch.setattr("bsam.report.panels.DPI", 20)


@pytest.mark.usefixtures("coarse_figures")
def test_tables_are_made_from_the_metrics(tmp_path, monkeypatch):
    """The script gives the stored tables and numbers again."""
    folder = tmp_path / NOISE.name
    folder.mkdir()
    for path in NOISE.glob("*.json*"):
        (folder / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(sys, "argv", ["assemble.py", str(folder)])
    runpy.run_path(str(ROOT / "results" / "assemble.py"), run_name="__main__")
    for stored in (NOISE, RADIUS):
        made = tmp_path / stored.name
        assert (made / "table.md").read_text("utf-8") == (stored / "table.md").read_text("utf-8")
        assert json.loads((made / "results.json").read_text("utf-8")) == json.loads(
            (stored / "results.json").read_text("utf-8")
        )
    listed = json.loads((NOISE / "runs.json").read_text("utf-8"))["runs"]
    assert sorted(listed) == sorted(path.stem for path in NOISE.glob("*.jsonl"))
