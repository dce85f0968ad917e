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
    readme, results, page, guide = PAGES
    return [
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
    found, text = digits(), PAGES["docs/results.md"]
    follow, bsam, two = (lambda total, title=TITLES[name]: found[title, total] for name in ("follow", "bsam", "bsam-2"))
    against = [difference(bsam(total), follow(total)) for total in (0.1, 0.2)]
    assert f"{against[0]} points at total radius 0.1, {against[1]} at 0.2" in text
    against = [difference(two(total), follow(total)) for total in (0.1, 0.2, 0.4)]
    assert f"with two passes {against[0]}, {against[1]}, and {against[2]} at 0.4" in text
    three, *two_passes = (difference(runs(x), found["SAM", x / 2]) for runs, x in ((bsam, 0.2), (two, 0.2), (two, 0.4)))
    assert f"{three} at total radius 0.2; with two passes {two_passes[0]}, and {two_passes[1]} at 0.4" in text
    assert (sum(value < 20 for value in bsam(0.4)), sum(value < 20 for value in bsam(0.8))) == (1, 10)
    best = [max((statistics.fmean(found[title, x]), x) for x in (0.1, 0.2, 0.4, 0.8)) for title in TITLES.values()]
    sam, falling, three, two_passes = (f"{mean:.2f} ({radius:g})" for mean, radius in best)
    assert f"SAM {sam}, SAM (follow) {falling}, BSAM with two passes {two_passes}, BSAM {three}" in text


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

    for data, totals in (("cifar", (0.05, 0.1, 0.2)), ("digits", (0.1, 0.2, 0.4))):
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
