"""The files of an experiment: what is in them, where the numbers come from, and what is not overwritten."""

import json
from dataclasses import replace

import pytest

import bsam
from bsam.lab.analysis.runs_table import read_runs
from bsam.lab.config import Run
from bsam.lab.models import model_entry
from bsam.lab.recipes import RECIPES, recipe
from bsam.lab.recipes.compare import plan_comparison
from bsam.lab.recipes.study import Snapshot
from bsam.lab.report.recipe_results import _entry, check_folder, claim_folder, origin_info, runs_of, write_results
from bsam.lab.training.run_dir import RunDir
from finished_runs import write_run


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_recipe_writes(name, out, tmp_path, pages):
    seeds = 1 if name in ("classification", "transformers") else 2  # these have many runs
    experiment, _ = out(name, seeds)
    experiment = replace(experiment, tuning=None)
    result = write_results(experiment, experiment.decide(Snapshot(tmp_path)))
    assert result.files == [tmp_path / file for file in ("table.md", "results.json", "report.html")]
    stored = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    assert (stored["recipe"], stored["scale"], stored["seeds"]) == (name, experiment.scale, list(range(seeds)))
    for plan, run in zip(experiment.plans, stored["runs"], strict=True):
        assert run["settings"] == json.loads(json.dumps(plan.run.settings()))
        assert run["last"] == RunDir(tmp_path / plan.name).last_metrics()
        assert (run["state"], run["machines"][0]["device"]) == ("done", "cpu")
        assert run["flatness"] == RunDir(tmp_path / plan.name).flatness()
        assert bool(run["flatness"]) == plan.run.curvature
        assert run["about"] == RunDir(tmp_path / plan.name).about() == {**plan.about, "shared": True}
        noise = getattr(plan.run.task, "label_noise", 0.0)
        wrong = noise * {"all": 0.9, "other": 1.0}[plan.run.task.noise_labels] if noise else None
        assert run["wrong_labels"] == (wrong and pytest.approx(wrong))
    measures = 8 if name == "pose" else 1
    assert sum(cell["n"] for cell in stored["table"]) == len(experiment.plans) * measures
    text = (tmp_path / "table.md").read_text()
    dates = "2026-11-10 to 2026-11-11" if seeds == 2 else "2026-11-10"
    assert f"Run on cpu, torch 2, bsam 1, {dates}." in text
    assert text.count("## ") == len(result.tables) > 0
    assert all(line in text for line in result.notes)
    context = pages[0]["context"]
    assert [*context["notes"], *context["findings"]] == result.notes
    assert bool(context["findings"]) == (name in ("demo", "radius"))


def test_nothing_finished_has_no_table_and_no_page(tmp_path):
    experiment = RECIPES["training-curves"]("smoke")
    result = write_results(experiment, experiment.decide(Snapshot(tmp_path)))
    assert (result.tables, result.page, len(result.files)) == ([], None, 2)
    assert "5 runs are not finished." in (tmp_path / "table.md").read_text()
    assert origin_info([_entry(plan, Snapshot(tmp_path)) for plan in experiment.plans]) == []


def test_what_is_known_of_a_run_is_kept_and_renewed(out, tmp_path):
    """A run that trained alone stays so; a row that the plan names otherwise now gets the new name."""
    experiment, _ = out("training-curves", seeds=1)
    first = tmp_path / experiment.plans[0].name / "run.json"
    first.write_text(json.dumps({**experiment.plans[0].about, "row": "old", "shared": False}))
    table = runs_of(experiment.plans, tmp_path)
    assert table["row"].tolist() == [plan.about["row"] for plan in experiment.plans]
    assert json.loads(first.read_text()) == {**experiment.plans[0].about, "shared": False}
    assert table["seconds"].notna().tolist() == [True, False, False, False, False]


@pytest.mark.parametrize("content", ["{", "{}", '{"row": "x"}', "[]"])
def test_a_damaged_description_is_written_again(content, out, tmp_path):
    experiment, _ = out("training-curves", seeds=1)
    first = experiment.plans[0]
    (tmp_path / first.name / "run.json").write_text(content)
    write_results(experiment, experiment.decide(Snapshot(tmp_path)))
    assert RunDir(tmp_path / first.name).about() == {**first.about, "shared": True}


@pytest.mark.parametrize("options", [{"baseline": "SGD"}, {"at_equal_radii": True}])
def test_each_experiment_has_its_own_comparison(options, tmp_path, monkeypatch):
    """SGD, SAM and ASAM, from bad to good with the first network, from good to bad with the second."""
    networks, radii = ("resnet8", "digits_net"), {"base": {}, "sam": {"rho": 0.1}, "asam": {"rho": 0.1}}

    def accuracy(run):
        gain = {"base": 0.0, "sam": 0.1 + 0.001 * run.seed, "asam": 0.15 + 0.002 * run.seed}[run.method]
        return 0.6 + (gain if run.model == "resnet8" else -gain)

    monkeypatch.setattr("finished_runs.accuracy_of", accuracy)

    @recipe("Two networks", scales={"small": {"data": "digits", "epochs": 2}}, **options)
    def two(**settings):
        return [Run(name, radii[name], model=model, **settings) for model in networks for name in radii]

    experiment = two(seeds=3)
    for plan in experiment.plans:
        write_run(plan.run, tmp_path)
    notes = write_results(experiment, experiment.decide(Snapshot(tmp_path))).notes
    first, second = ([note for note in notes if note.startswith(model_entry(name).title)] for name in networks)
    assert len(first) == len(second) == 1
    for note, sign in ((first[0], "+"), (second[0], "-")):
        gains = ["10.10", "15.20"] if "baseline" in options else ["5.10"]  # of SAM and ASAM; of ASAM against SAM
        assert all(f"({sign}{gain} points" in note for gain in gains)


def test_data_that_changed_between_two_seeds_is_not_averaged(tmp_path):
    settings = {"data": "folder:photos", "model": "resnet8", "epochs": 2}
    experiment = plan_comparison(["sgd", "sam"], settings, seeds=3)
    for plan in experiment.plans:
        path = write_run(plan.run, tmp_path).path
        (path / "identity.json").write_text(json.dumps({"data": "new" if plan.run.seed else "old"}))
    result = write_results(experiment, experiment.decide(Snapshot(tmp_path)))
    assert [section.title for section in result.tables] == [
        f"ResNet-8, data photos ({name})" for name in ("old", "new")
    ]
    cells = json.loads((tmp_path / "results.json").read_text())["table"]
    assert [cell["n"] for cell in cells] == [1, 1, 2, 2]
    assert {run["identity"]["data"] for run in json.loads((tmp_path / "results.json").read_text())["runs"]} == {
        "old",
        "new",
    }


SPLIT = {"split": "folders train and test", "images": {"train": 12, "test": 6}, "left_out": []}
WEIGHTS = {"source": "a.safetensors", "sha256": "0123abcd" * 8, "loaded": 3, "head_left_out": {}}


def test_split_and_weights_are_read_from_the_run_directories(out, tmp_path):
    experiment, _ = out("transfer", seeds=1)
    (tmp_path / experiment.plans[0].name / "data.json").write_text(json.dumps(SPLIT))
    (tmp_path / experiment.plans[0].name / "weights.json").write_text(json.dumps(WEIGHTS))
    first, second = (_entry(plan, Snapshot(tmp_path)) for plan in experiment.plans[:2])
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


SMOKE = {"epochs": 2, "batch": 64, "limit_train": 128, "limit_test": 80}


@pytest.mark.parametrize(
    ("content", "other"),
    [
        ({"recipe": "label-noise"}, ""),  # of an older version
        ({"recipe": "label-noise", "scale": "smoke", "settings": SMOKE}, ""),
        ({"recipe": "label-noise", "scale": "smoke", "settings": {**SMOKE, "lr": 0.05}}, ""),  # the default
        ({"recipe": "label-noise", "tuned": True}, "label-noise, with --tune"),
        ({"recipe": "label-noise", "scale": "short"}, "label-noise at the scale short"),
        ({"recipe": "label-noise", "scale": "smoke", "settings": {**SMOKE, "epochs": 3}}, "epochs 3 there, 2 here"),
        ({"recipe": "label-noise", "settings": {**SMOKE, "lr": 0.1}}, "lr 0.1 there, 0.05 here"),
        ({"recipe": "label-noise", "weights": {"resnet50": "a.pt"}}, "weights a.pt there"),
        ({"recipe": "radius"}, "radius"),
        ({"mine": 1}, "None"),
    ],
)
def test_other_results_are_not_overwritten(content, other, tmp_path):
    experiment = RECIPES["label-noise"]()
    check_folder(tmp_path / "new", experiment)
    file = tmp_path / "results.json"
    file.write_text(json.dumps(content))
    if not other:
        check_folder(tmp_path, experiment)
        return
    for check in (check_folder, claim_folder):
        with pytest.raises(bsam.BsamError, match=r"holds other results .*: choose another folder") as error:
            check(tmp_path, experiment)
        assert str(file) in str(error.value)
        assert other in str(error.value)
    assert json.loads(file.read_text()) == content


def test_a_table_that_does_not_exist_is_an_error_before_training(tmp_path):
    made = recipe("Mine", scales={"small": {}}, published="nope")(lambda: [Run("sam")])
    for check in (check_folder, claim_folder):
        with pytest.raises(bsam.BsamError, match=r"published must be one of classification, .*nope"):
            check(tmp_path, made())
    assert not (tmp_path / "results.json").exists()


def test_a_folder_says_what_it_is_for_before_there_are_results(tmp_path):
    plans = [plan_comparison(["sgd", "sam"], {"data": "digits", "epochs": epochs}, seeds=1) for epochs in (2, 3)]
    claim_folder(tmp_path, plans[0])
    claim_folder(tmp_path, plans[0])
    with pytest.raises(bsam.BsamError, match="epochs 2 there, 3 here"):
        claim_folder(tmp_path, plans[1])
    assert read_runs(tmp_path, []).empty


def test_a_comparison_may_be_extended(tmp_path):
    """By methods and seeds; a default that is given is the same setting, and so is a radius schedule."""
    shared = {"data": "digits", "epochs": 4, "rho_warmup": 2.0}
    claim_folder(tmp_path, plan_comparison(["sgd", "sam"], shared, seeds=1))
    check_folder(tmp_path, plan_comparison(["bsam", "saf", "sgd"], {**shared, "lr": 0.05}, seeds=3, baseline="saf"))
    for change in ({"rho_warmup": 1.0}, {"lr": 0.1}, {"curvature": True}, {"label_noise": 0.4}):
        with pytest.raises(bsam.BsamError, match=f"{next(iter(change))} .* there"):
            check_folder(tmp_path, plan_comparison(["sgd", "sam"], {**shared, **change}, seeds=1))


def test_a_list_of_a_scale_may_be_extended(tmp_path):
    """By networks and data sets; other settings are other results."""
    claim_folder(tmp_path, RECIPES["label-noise"]())
    check_folder(tmp_path, RECIPES["label-noise"](networks=("resnet8", "digits_net")))
    with pytest.raises(bsam.BsamError, match="epochs 2 there, 3 here"):
        check_folder(tmp_path, RECIPES["label-noise"](epochs=3))


def test_initial_weights_of_more_networks_may_be_added(tmp_path):
    first, second = {"timm:resnet50": "a.pt"}, {"timm:efficientnet_b0": "b.pt"}
    claim_folder(tmp_path, RECIPES["transfer"]("short", weight_files=first))
    check_folder(tmp_path, RECIPES["transfer"]("short", weight_files={**first, **second}))
    with pytest.raises(bsam.BsamError, match=r"weights a\.pt there"):
        check_folder(tmp_path, RECIPES["transfer"]("short"))
