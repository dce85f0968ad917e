import contextlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

import bsam
from bsam.lab.recipes import RECIPES, Published, PublishedTable, Recipe
from bsam.lab.recipes.choices import TunedRuns, tuned_recipe
from bsam.lab.recipes.columns import state_of, states_of
from bsam.lab.recipes.run_settings import select
from bsam.lab.report.recipe_results import check_folder, origin_info, runs_info, write_recipe_page, write_results
from bsam.lab.training.config import Run
from bsam.lab.training.run_dir import run_dir_name
from fake_fit import FakeFit

PNG = b"\x89PNG\r\n\x1a\n"
pytestmark = pytest.mark.usefixtures("coarse")


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_recipe_writes(name, out, tmp_path):
    recipe, states = out(name)
    assert all(state.finished for state in states)
    written = write_results(tmp_path, recipe, recipe.scale_names[0], states, states[:1])
    figures = [f"{figure}.png" for figure in recipe.figures]
    assert [path.name for path in written] == ["table.md", "results.json", *figures]
    assert all(path.read_bytes().startswith(PNG) for path in written[2:])
    results = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    assert (results["recipe"], results["scale"], results["seeds"]) == (name, recipe.scales[0], [0, 1])
    assert len(results["runs"]) == len(states)
    for state, run in zip(states, results["runs"], strict=True):
        assert run["settings"] == json.loads(json.dumps(state.run.settings()))
        assert run["last"] == state.epochs[-1]
        assert run["state"] == "done"
        assert run["training_seconds"] == sum(metrics["seconds"] for metrics in state.epochs)
        assert (run["top_eigenvalue"] is not None) == state.run.curvature
        assert run["machines"][0]["device"] == "cpu"
        wrong = {("all", True): 0.9, ("other", True): 1.0}.get((state.run.noise_labels, bool(state.run.label_noise)))
        assert run["wrong_labels"] == (wrong and pytest.approx(wrong * state.run.label_noise))
    assert results["tuning"] == results["runs"][:1]
    assert sum(cell["n"] for cell in results["table"]) == len(states) * max(1, len(recipe.measures))
    assert "Run on cpu, torch 2, bsam 1, 2026-11-10 to 2026-11-11." in (tmp_path / "table.md").read_text()


def test_nothing_finished_is_a_table_of_dashes_and_no_figure(tmp_path):
    recipe = RECIPES["training-curves"]
    states = [state_of(run, tmp_path) for run in recipe.runs("smoke")]
    assert [path.name for path in write_results(tmp_path, recipe, "smoke", states)] == ["table.md", "results.json"]
    assert "5 runs are not finished." in (tmp_path / "table.md").read_text()
    assert origin_info(runs_info(states)) == []


@pytest.fixture
def pages(monkeypatch):
    """The content of each page, by path."""
    written = {}
    monkeypatch.setattr("bsam.lab.report.recipe_results.write_page", lambda path, data: written.update({path: data}))
    return written


def test_the_page_shows_all_runs_of_a_recipe(out, tmp_path, pages):
    recipe, states = out("label-noise")
    assert write_recipe_page(tmp_path, recipe, states) == [tmp_path / "report.html"]
    data = pages[tmp_path / "report.html"]
    assert (data["title"], data["problems"]) == (recipe.title, [])
    names = [run["name"] for experiment in data["experiments"] for run in experiment["runs"]]
    assert sorted(names) == sorted(state.path.name for state in states)
    assert {row["n"] for experiment in data["experiments"] for row in experiment["rows"]} == {2}


def test_the_page_of_a_tuned_recipe_has_no_tuning_runs(tmp_path, pages):
    recipe = tuned_recipe(RECIPES["classification"])
    runs = select(recipe.runs("smoke"), ["sgd", "sam", "bsam"], ["resnet8"], [])
    trials = TunedRuns(recipe, runs, Path("nowhere")).trials
    fit = FakeFit(lambda run: 0.5 + len(fit.asked) / 1000)  # runs with equal metrics count as copies
    for run in trials:
        fit(run, tmp_path / run_dir_name(run))
    finals = TunedRuns(recipe, runs, tmp_path).finals
    for run in finals:
        fit(run, tmp_path / run_dir_name(run))
    write_recipe_page(tmp_path, recipe, states_of([*finals, *trials], tmp_path))
    (experiment,) = pages[tmp_path / "report.html"]["experiments"]
    assert sorted(run["name"] for run in experiment["runs"]) == sorted(map(run_dir_name, finals))
    assert {row["method"].partition(",")[0]: row["chosen"] for row in experiment["rows"]}[
        "SAM"
    ] == "tuned on held-out samples"


def test_the_page_has_the_published_numbers_of_an_own_recipe(tmp_path, pages):
    numbers = PublishedTable(("data", "method"), {("digits", "sam"): Published(97.1, 0.3)})
    runs = [Run(method, data="digits", epochs=2) for method in ("base", "sam")]
    recipe = Recipe("toy", "A toy", lambda scale: runs, published_table=numbers)
    for run in runs:
        FakeFit()(run, tmp_path / run_dir_name(run))
    write_recipe_page(tmp_path, recipe, states_of(runs, tmp_path))
    (experiment,) = pages[tmp_path / "report.html"]["experiments"]
    assert {row["method"]: row["published"] for row in experiment["rows"]} == {"SGD": None, "SAM": 97.1}


def test_the_page_has_the_papers_numbers_only_for_its_protocol(tmp_path, pages):
    runs = [Run("sam", model="resnet18", data="cifar10", epochs=epochs) for epochs in (2, 200)]
    for run in runs:
        FakeFit()(run, tmp_path / run_dir_name(run))
    write_recipe_page(tmp_path, RECIPES["classification"], states_of(runs, tmp_path))
    published = [row["published"] for e in pages[tmp_path / "report.html"]["experiments"] for row in e["rows"]]
    assert published == [None, 96.74]


def test_nothing_started_has_no_page(tmp_path, pages):
    recipe = RECIPES["training-curves"]
    assert write_recipe_page(tmp_path, recipe, states_of(recipe.runs("smoke"), tmp_path)) == []
    assert pages == {}


@pytest.mark.parametrize("name", ["gradient-conflict", "demo"])
def test_figures_leave_out_what_is_not_finished(name, out, tmp_path):
    (tmp_path / name).mkdir()
    recipe, states = out(name)
    states[0] = replace(states[0], finished=False, diverged="the training loss is nan")
    assert len(write_results(tmp_path / name, recipe, recipe.scales[0], states)) == 2 + len(recipe.figures)


SPLIT = {"split": "folders train and test", "images": {"train": 12, "test": 6}, "left_out": []}
WEIGHTS = {"source": "a.safetensors", "sha256": "0123abcd" * 8, "loaded": 3, "head_left_out": {}}


def test_split_and_weights_are_read_from_the_run_directories(out):
    _, states = out("transfer", seeds=1)
    (states[0].path / "data.json").write_text(json.dumps(SPLIT))
    (states[0].path / "weights.json").write_text(json.dumps(WEIGHTS))
    first, second, *_ = runs_info(states)
    assert (first["data"], first["weights"]) == (SPLIT, WEIGHTS)
    assert not {"data", "weights"} & second.keys()


def test_where_the_numbers_come_from():
    machine = {"device": "cpu", "torch": "2", "bsam": "1", "date": "2026-11-12T00:00:00+00:00"}
    settings = {"data": "oxford_pet", "model": "resnet50"}
    data = {**SPLIT, "images": {"train": 3, "test": 2}}
    run = {"settings": settings, "machines": [machine], "data": data, "weights": {**WEIGHTS, "sha256": None}}
    other = {"settings": {"data": "cifar10", "model": "resnet18"}, "machines": [{**machine, "date": "2026-11-14"}]}
    pet, weights, machines = origin_info([run, other])
    assert pet.startswith("Oxford-IIIT Pet: 3 training and 2 test images; ")
    assert weights.startswith("ResNet-50: initial weights from a.safetensors (SHA-256 unknown), ")
    assert machines == "Run on cpu, torch 2, bsam 1, 2026-11-12 to 2026-11-14."
    assert origin_info([{**other, "machines": []}]) == []
    begun = {**run, "settings": {**settings, "init": "another"}}  # with all layers of another run
    assert origin_info([begun, other]) == [pet, machines]


@pytest.mark.parametrize(("content", "fits"), [
    ({"recipe": "label-noise"}, True),
    ({"recipe": "label-noise", "tuned": True}, False),
    ({"recipe": "radius"}, False),
    ({"mine": 1}, False),
])  # fmt: skip
def test_other_results_are_not_overwritten(content, fits, tmp_path):
    check_folder(tmp_path / "new", RECIPES["label-noise"])
    (tmp_path / "results.json").write_text(json.dumps(content))
    with contextlib.nullcontext() if fits else pytest.raises(bsam.BsamError, match=r"results\.json"):
        check_folder(tmp_path, RECIPES["label-noise"])
