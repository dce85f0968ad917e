"""Radii that are chosen on held-out training samples: the candidates, what they begin with, and what is chosen."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bsam.lab import cli
from bsam.lab.recipes import RECIPES
from bsam.lab.recipes.choices import TunedRuns, tuned_recipe
from bsam.lab.recipes.scales import scale_of
from bsam.lab.recipes.variants import variant_of
from bsam.lab.report.recipe_results import write_results
from bsam.lab.report.recipe_table import sections_info
from bsam.lab.report.tuning_section import tuning_notes, tuning_sections
from bsam.lab.running import job
from bsam.lab.running.runner import run_all
from bsam.lab.training.run_dir import run_dir_name
from fake_fit import FakeFit

FACTORS = (0.5, 1, 2, 4)
TUNABLE = ("classification", "label-noise", "transfer", "pose", "quantization")


def radii(run):
    return {name: value for name, value in run.arguments.items() if name.startswith("rho")}


@pytest.mark.parametrize("name", TUNABLE)
def test_every_method_has_four_tries_that_differ_in_the_radius_alone(name):
    recipe = tuned_recipe(RECIPES[name])
    runs = recipe.runs("short", seeds=2)
    trials = TunedRuns(recipe, runs, Path("nowhere")).trials
    assert {run.eval_split for run in trials} == {"holdout"}
    assert {run.seed for run in trials} == {10_000}
    first = [run for run in runs if run.seed == 0]
    methods = [run for run in first if run.method != "base"]
    assert "sam-sum" not in {variant_of(run).name for run in runs}  # SAM's candidates contain it
    own = [run for run in trials if run.method != "base"]
    assert len(own) == 4 * len(methods)
    for run, tries in zip(methods, zip(*[iter(own)] * 4, strict=True), strict=True):
        assert {variant_of(trial) for trial in tries} == {variant_of(run)}
        assert {trial.model for trial in tries} == {run.model}
        changed = ("arguments", "seed", "eval_split", "init", "curvature", "limit_test")
        kept = {key: value for key, value in run.settings().items() if key not in changed}
        assert all(kept.items() <= trial.settings().items() for trial in tries)


def test_the_candidates_are_multiples_of_the_papers_radii():
    recipe = tuned_recipe(RECIPES["label-noise"])
    noisy = [run for run in TunedRuns(recipe, recipe.runs("paper"), Path("nowhere")).trials if run.label_noise == 0.4]

    def tried(data, name):
        return [radii(run) for run in noisy if run.data == data and variant_of(run).name == name]

    for data, rho in (("cifar10", 0.05), ("cifar100", 0.1)):
        assert tried(data, "sam") == [{"rho": factor * rho} for factor in FACTORS]
        assert tried(data, "sam-follow") == [{"rho": 2 * factor * rho, "rho_floor": factor * rho} for factor in FACTORS]
        for name in ("bsam", "bsam-2", "bsam-released"):
            assert tried(data, name) == [{"rho_max": factor * rho, "rho_min": factor * rho} for factor in FACTORS]
    classification = tuned_recipe(RECIPES["classification"])
    losses = [
        run
        for run in TunedRuns(classification, classification.runs("short"), Path("nowhere")).trials
        if run.method == "saf"
    ]
    assert [run.arguments["lam"] for run in losses[:4]] == [factor * 0.3 for factor in FACTORS]


def test_a_quantized_try_begins_with_a_float_network_that_has_not_seen_the_held_out_images():
    recipe = tuned_recipe(RECIPES["quantization"])
    runs = recipe.runs("short", seeds=2)
    trials = {run_dir_name(run): run for run in TunedRuns(recipe, runs, Path("nowhere")).trials}
    quantized = [run for run in trials.values() if run.weight_bits is not None]
    assert quantized
    for run in quantized:
        initial = trials[run.init]  # which is trained, too
        assert (initial.eval_split, initial.seed, initial.model) == ("holdout", run.seed, run.model)
        assert initial.weight_bits is None


@pytest.fixture
def small(monkeypatch):
    """The recipe of flipped labels with a few methods, tuned."""
    recipe = RECIPES["label-noise"]
    chosen = ("sgd", "sam", "bsam")
    grid = [run for run in recipe.grid(scale_of("smoke")) if run.label_noise == 0.4 and variant_of(run).name in chosen]
    return tuned_recipe(replace(recipe, grid=lambda scale: grid))


def scored(noisy, clean=None):
    """A training whose runs have these scores by the factor on the radius."""

    class Fit(FakeFit):
        def __call__(self, run, folder, **options):
            super().__call__(run, folder, **options)
            if run.eval_split == "holdout" and clean is not None:
                file = folder / "metrics.jsonl"
                share = clean[next(iter(radii(run).values()))]
                file.write_text(file.read_text().replace('"seconds"', f'"holdout_clean_accuracy": {share}, "seconds"'))

    return Fit(lambda run: noisy[next(iter(radii(run).values()))] if run.eval_split == "holdout" else 0.7)


NOISY = {0.025: 0.3, 0.05: 0.5, 0.1: 0.55, 0.2: 0.4}
CLEAN = {0.025: 0.5, 0.05: 0.8, 0.1: 0.85, 0.2: 0.9}


def test_the_choice_is_by_the_noisy_labels_and_that_by_clean_ones_stands_beside_it(small, monkeypatch, tmp_path):
    fit = scored(NOISY, CLEAN)
    monkeypatch.setattr(job, "fit", fit)
    runs = small.runs("smoke", seeds=2)
    assert len(TunedRuns(small, runs, tmp_path).waiting) == 4
    run_all(TunedRuns(small, runs, Path("nowhere")).trials, tmp_path)
    finals = TunedRuns(small, runs, tmp_path).finals
    assert [radii(run) for run in finals] == [{}, {"rho": 0.1}, {"rho_max": 0.1, "rho_min": 0.1}] * 2
    assert {run.eval_split for run in finals} == {"test"}
    assert not TunedRuns(small, runs, tmp_path).waiting
    found = TunedRuns(small, runs, tmp_path).choices
    assert [choice.best() for choice in found] == [None, 2, 2]
    assert [choice.best(clean=True) for choice in found] == [None, 3, 3]
    states = run_all(finals, tmp_path)
    (section,) = tuning_sections(small, found)
    assert section.title == "Tuning: ResNet-8, Digits, 40%"
    assert section.header == ("method", "x 0.5", "x 1", "x 2", "x 4", "noise", "chosen", "cost")
    scores = ("30.00 (50.00)", "50.00 (80.00)", "55.00 (85.00)", "40.00 (90.00)")
    assert section.rows == (
        ("SAM", *scores, "-", "rho 0.1 (rho 0.2)", "16 passes, 8.0 s"),  # 4 candidates, 2 epochs, 2 passes
        (
            "BSAM (Algorithm 1)",
            *scores,
            "-",
            "rho_max 0.1, rho_min 0.1 (rho_max 0.2, rho_min 0.2)",
            "24 passes, 8.0 s",
        ),
    )
    assert len(tuning_notes(small, found)) == 4
    write_results(tmp_path, replace(small, figures=()), "smoke", states, chosen=found)
    table = (tmp_path / "table.md").read_text()
    assert "| SAM | 70.00 ± 0.00 (2) | rho 0.1 |" in table
    assert "## Tuning: ResNet-8, Digits, 40%" in table
    assert "some of their labels are wrong, too" in table


def test_a_try_that_diverged_is_a_result(small, monkeypatch, tmp_path):
    fit = scored(NOISY)
    runs = small.runs("smoke")
    trials = TunedRuns(small, runs, Path("nowhere")).trials
    fit.trouble = {run_dir_name(trials[2]): "nan", **{run_dir_name(trial): "nan" for trial in trials[4:]}}
    monkeypatch.setattr(job, "fit", fit)
    run_all(trials, tmp_path)
    (section,) = tuning_sections(small, TunedRuns(small, runs, tmp_path).choices)
    assert section.rows[0][1:7] == ("30.00 (30.00)", "50.00 (50.00)", "diverged", "40.00 (40.00)", "-", "rho 0.05")
    assert section.rows[1][1:7] == ("diverged",) * 4 + ("-", "rho_max 0.025, rho_min 0.025*")  # at the edge


def test_a_row_of_measures_says_what_was_chosen(monkeypatch, tmp_path):
    """The columns of the pose table are groups of joints: there is no column for the choice."""
    from bsam.lab.recipes.experiments import table_info

    recipe = tuned_recipe(RECIPES["pose"])
    runs = recipe.runs("smoke")

    class Fit(FakeFit):
        def __call__(self, run, folder, **options):
            super().__call__(run, folder, **options)
            file = folder / "metrics.jsonl"
            file.write_text(file.read_text().replace("_accuracy", "_pck"))

    monkeypatch.setattr(job, "fit", Fit(lambda run: 0.9 if 0.1 in radii(run).values() else 0.5))
    run_all(TunedRuns(recipe, runs, Path("nowhere")).trials, tmp_path)
    states = run_all(TunedRuns(recipe, runs, tmp_path).finals, tmp_path)
    (section,) = sections_info(recipe, table_info(recipe, states))
    labels = [row[0] for row in section.rows]
    assert labels[:2] == ["Adam", "SAM, rho 0.1"]
    assert "BSAM (2 passes), rho_max 0.1, rho_min 0.1" in labels


def test_the_command_line_tunes_runs_of_several_seeds(monkeypatch, tmp_path):
    """Quantized ones, which begin with a network of their own seed: the choice of the first seed holds for all."""
    fit = FakeFit(lambda run: 0.9 if radii(run) == {"rho": 0.2} else 0.5)
    monkeypatch.setattr(job, "fit", fit)
    monkeypatch.chdir(tmp_path)
    command = ["run", "quantization", "--only", "sgd", "sam", "--models", "resnet8", "--seeds", "2", "--device", "cpu"]
    assert cli.main([*command, "--tune"]) == 0
    finals = [run for run in fit.asked if run.eval_split == "test"]
    by_seed = {seed: [run for run in finals if run.seed == seed] for seed in (0, 1)}
    for runs in by_seed.values():
        rows = [(variant_of(run).name, run.weight_bits, radii(run)) for run in runs]
        assert rows == [("sgd", None, {}), ("sgd", 4, {}), ("sam", 4, {"rho": 0.2})]
    assert len(fit.asked) == 5 + 6  # a float network and four radii; three runs of each seed
    out = tmp_path / "runs" / "quantization-smoke-tuned"
    assert "rho 0.2*" in (out / "table.md").read_text()  # the largest candidate
    assert json.loads((out / "results.json").read_text())["tuned"]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_without_tuning_the_settings_stay_as_they_are(recipe, tmp_path):
    """Also if runs with different seeds start from different runs."""
    runs = recipe.runs(None, 2)
    assert TunedRuns(recipe, runs, tmp_path).finals == runs
    assert bool(TunedRuns(recipe, runs, tmp_path).waiting) == (recipe.tuning is not None)
