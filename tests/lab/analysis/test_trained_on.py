"""Runs whose settings read alike are one experiment only if data and initial networks are the same."""

import json

import pytest

from bsam.lab.analysis.runs_table import read_runs
from bsam.lab.config import Run
from bsam.lab.recipes.plan import describe
from bsam.lab.training import Machine, RunCallbacks, fit
from bsam.lab.training.run_dir import RunDir, run_dir_name
from fake_fit import FakeFit
from helpers import draw_images

TITLE = "ResNet-8, photos, 2 epochs"


@pytest.fixture
def train(tmp_path):
    """Write the directories of runs without training; each run comes with the content of ``identity.json``."""

    def fit(*runs):
        for number, (run, identity) in enumerate(runs):
            folder = tmp_path / "runs" / str(number)
            FakeFit(lambda run: 0.5 + 0.01 * run.seed)(run, folder)
            (folder / "run.json").write_text(json.dumps(describe(run)))
            if identity is not None:
                (folder / "identity.json").write_text(json.dumps(identity))
        problems = []
        table = read_runs(tmp_path / "runs", problems)
        assert problems == []
        return {title: sorted(group["seed"]) for title, group in table.groupby("experiment", sort=False)}

    return fit


def on(folder, seed=0, digest=None, **settings):
    run = Run("sgd", model="resnet8", data=f"folder:{folder}", epochs=2, seed=seed, **settings)
    return run, None if digest is None else {"data": digest}


def test_the_same_name_of_two_folders_is_two_experiments(train):
    found = train(on("/a/photos", 0, "1" * 64), on("/b/photos", 0, "2" * 64), on("/b/photos", 1, "2" * 64))
    assert found == {f"{TITLE}, data a/photos": [0], f"{TITLE}, data b/photos": [0, 1]}


def test_the_same_data_at_two_places_is_one_experiment(train):
    assert train(on("/a/photos", 0, "1" * 64), on("/b/photos", 1, "1" * 64)) == {TITLE: [0, 1]}


def test_a_folder_whose_content_has_changed_is_two_experiments(train):
    found = train(on("photos", 0, "1" * 64), on("photos", 1, "2" * 64))
    assert found == {f"{TITLE}, data photos (11111111)": [0], f"{TITLE}, data photos (22222222)": [1]}


def test_without_a_digest_the_path_decides(train):
    """A run of an older version belongs to the runs with the same path, if these agree."""
    found = train(on("/a/photos", 0), on("/a/photos", 1, "1" * 64), on("/b/photos", 0))
    assert found == {f"{TITLE}, data a/photos": [0, 1], f"{TITLE}, data b/photos": [0]}


@pytest.mark.parametrize("identity", [{"data": 3, "init": "x"}, {"data": None}])
def test_damaged_digests_are_no_digests(identity, train):
    assert train((on("/a/photos")[0], identity), on("/a/photos", 1)) == {TITLE: [0, 1]}


def test_held_out_samples_of_arrays_do_not_matter(train):
    """Their digest depends on the seed, that of image files does not."""
    runs = [Run("sgd", model="resnet8", data="mine:data", epochs=2, seed=seed, eval_split="holdout") for seed in (0, 1)]
    assert len(train(*((run, {"data": str(run.seed)}) for run in runs))) == 1


def test_a_data_set_of_ours_is_known_by_its_name(train):
    runs = [Run("sgd", model="resnet8", data="digits", epochs=2, seed=seed) for seed in (0, 1)]
    assert len(train(*((run, {"data": str(run.seed)}) for run in runs))) == 1


def test_an_experiment_that_a_plan_names_may_have_several_data_sets(tmp_path, train):
    for number, folder in enumerate(("/a/photos", "/b/photos")):
        run, _ = on(folder)
        path = tmp_path / "runs" / f"named{number}"
        FakeFit()(run, path)
        (path / "run.json").write_text(json.dumps(describe(run, experiment="Mine", row=f"row {number}")))
    assert train() == {"Mine": [0, 0]}


def from_network(init, seed=0, network=None, training=None):
    run = Run("sgd", model="resnet8", data="digits", epochs=2, seed=seed, init=init)
    return run, None if network is None else {"init": {"network": network, "training": training}}


START = "ResNet-8, Digits, from a trained network, 2 epochs"


def test_two_initial_networks_are_two_experiments(train):
    found = train(
        from_network("runs/sgd", 0, "1" * 64, "a" * 64),
        from_network("runs/sgd", 1, "1" * 64, "a" * 64),
        from_network("runs/sam", 2, "2" * 64, "b" * 64),
    )
    assert found == {f"{START}, initial network sgd": [0, 1], f"{START}, initial network sam": [2]}


def test_two_initial_networks_that_differ_in_their_seed_are_two_experiments_only_for_one_seed(train):
    one, other = ("1" * 64, "a" * 64), ("2" * 64, "a" * 64)
    paired = train(from_network("float0", 0, *one), from_network("float1", 1, *other))
    assert paired == {START: [0, 1]}
    found = train(from_network("float0", 0, *one), from_network("float1", 0, *other))
    assert found == {f"{START}, initial network float0": [0], f"{START}, initial network float1": [0]}


def test_paths_of_initial_networks_decide_where_no_digest_was_stored(train):
    """The names of directories that a recipe planned differ in their seed."""
    planned = [run_dir_name(Run("sgd", model="resnet8", epochs=3, seed=seed)) for seed in (0, 1)]
    assert train(*(from_network(init, seed) for seed, init in enumerate(planned))) == {START: [0, 1]}
    found = train(from_network("a/float", 0), from_network("b/float", 1))
    assert found == {f"{START}, initial network a/float": [0], f"{START}, initial network b/float": [1]}


def test_results_of_runs_whose_directories_are_gone_keep_their_data(train, tmp_path):
    train(on("/a/photos", 0, "1" * 64), on("/b/photos", 0, "2" * 64))
    for name in ("0", "1"):
        folder = tmp_path / "runs" / name
        entry = {"folder": "gone", "about": RunDir(folder).about(), "state": "done", "reason": None}
        entry |= {"last": RunDir(folder).last_metrics(), "settings": RunDir(folder).run().settings()}
        identity = RunDir(folder).note("identity")
        for file in folder.iterdir():
            file.unlink()
        (folder / "results.json").write_text(json.dumps({"runs": [{**entry, "identity": identity}]}))
    titles = read_runs(tmp_path / "runs", problems := [])["experiment"].tolist()
    assert titles == [f"{TITLE}, data a/photos", f"{TITLE}, data b/photos"]
    assert problems == []


def test_trained_runs_store_the_digests(tmp_path, monkeypatch):
    """Of the data, wherever it lies, and of the initial network, whatever its seed."""
    monkeypatch.chdir(tmp_path)
    for place in ("a", "b"):
        draw_images(tmp_path / place / "photos", {"train": 4, "test": 2}, size=(8, 8))
    settings = {"model": "digits_net", "image_size": 8, "batch": 4, "label_smoothing": 0.0, "epochs": 1}

    def train(name, data="folder:a/photos", **more):
        fit(
            Run.of("sgd", data=data, **{**settings, **more}),
            name,
            Machine("cpu"),
            callbacks=RunCallbacks(on_message=lambda sentence: None),
        )
        return json.loads((tmp_path / name / "identity.json").read_text())

    first, second = train("float0"), train("float1", "folder:b/photos", seed=1)
    assert first["data"] == second["data"]
    assert "init" not in first
    other = train("other", lr=0.2)
    inits = [train(f"on-{name}", init=name, seed=2)["init"] for name in ("float0", "float1", "other")]
    assert len({init["network"] for init in inits}) == 3
    assert inits[0]["training"] == inits[1]["training"] != inits[2]["training"]
    assert other["data"] == first["data"]
    draw_images(tmp_path / "c" / "photos", {"train": 5, "test": 2}, size=(8, 8))
    assert train("more", "folder:c/photos")["data"] != first["data"]
    # a run that continues keeps what it started from, also if that is gone
    longer = {"init": "other", "seed": 3, "data": "folder:b/photos", "epochs": 2}
    run = Run.of("sgd", **{**settings, **longer})
    fit(run, "long", Machine("cpu"), until=1, callbacks=RunCallbacks(on_message=lambda sentence: None))
    before = json.loads((tmp_path / "long" / "identity.json").read_text())
    (tmp_path / "other").rename("gone")
    fit(run, "long", Machine("cpu"), callbacks=RunCallbacks(on_message=lambda sentence: None))
    assert json.loads((tmp_path / "long" / "identity.json").read_text()) == before
    assert before["init"] == inits[2]


def test_the_seeds_of_a_recipe_remain_one_experiment(out, tmp_path):
    experiment, _ = out("quantization", seeds=2)
    table = read_runs(tmp_path)
    assert set(table["experiment"]) == {plan.about["experiment"] for plan in experiment.plans}
