"""The networks that ``bsam flatness`` measures, and what it measures."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bsam
from bsam.flatness import HessianOperator, landscape, sharpness, spectral_density, top_eigenvalues, trace
from bsam.lab.common.names import find_function
from bsam.lab.config import Run
from bsam.lab.inference.run_flatness import FlatnessSettings, load, loss_of, measure, runs_in_folders
from bsam.lab.recipes.plan import describe
from fake_fit import FakeFit


@pytest.fixture
def folder(tmp_path, script_path, monkeypatch):
    """A current folder whose modules can be found, and are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_loader_is_found_in_the_current_folder_and_in_a_package(folder):
    (folder / "my_loader_1.py").write_text("def load(path):\n    return 'mine', path\n")
    assert find_function("my_loader_1:load", "loader")("x") == ("mine", "x")
    (folder / "my_package_1").mkdir()
    (folder / "my_package_1" / "inner.py").write_text("def load(path):\n    return 'inner', path\n")
    assert find_function("my_package_1.inner:load", "loader")("x") == ("inner", "x")


MODEL, BATCHES = nn.Linear(2, 1), [(torch.ones(3, 2), torch.ones(3, 1))]


class Own:
    """Something that knows itself how to move."""

    def to(self, device):
        return f"moved to {device}"


def test_tensors_in_nested_batches_and_in_a_loss_that_is_a_module_go_to_the_device():
    x, y = {"a": torch.ones(1, 2), "b": (torch.ones(1), ["text", torch.ones(1)])}, (torch.ones(1), 3, Own())
    loss_fn = nn.CrossEntropyLoss(weight=torch.ones(2))
    _, loss_fn, data = load(
        lambda path: (nn.Linear(2, 1), loss_fn, [(x, y), [x, y]]), Path("some.pt"), torch.device("meta")
    )
    assert loss_fn.weight.device.type == "meta"
    for moved_x, moved_y in data:
        tensors = moved_x["a"], moved_x["b"][0], moved_x["b"][1][1], moved_y[0]
        assert [t.device.type for t in tensors] == ["meta"] * 4
        assert (moved_x["b"][1][0], moved_y[1:]) == ("text", (3, "moved to meta"))


def test_batches_of_a_loader_that_are_not_pairs_are_refused_where_they_are_measured():
    model, loss_fn, data = load(
        lambda path: (MODEL, F.mse_loss, [(*BATCHES[0], "index")]), Path("some.pt"), torch.device("cpu")
    )
    with pytest.raises(bsam.BsamError, match=r"pair.*tuple"):
        loss_of(model, loss_fn, data, FlatnessSettings())


def test_a_folder_stands_for_the_finished_runs_in_it(tmp_path):
    runs = {name: Run("sgd", epochs=2, seed=seed) for seed, name in enumerate(("b", "deep/a", "half", "tuning"))}
    for name, run in runs.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        FakeFit()(run, tmp_path / name, until=1 if name == "half" else None)
    (tmp_path / "tuning" / "run.json").write_text(json.dumps(describe(runs["tuning"], trial=True)))
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")
    messages, file = [], tmp_path / "model.pt"
    file.touch()
    given = [file, tmp_path, tmp_path / "tuning"]  # a run directory is always measured
    found = runs_in_folders(given, messages.append)
    assert found == [file, tmp_path / "b", tmp_path / "deep" / "a", tmp_path / "tuning"]
    assert [name in message for name, message in zip(("damaged", "half"), messages, strict=True)] == [True, True]
    with pytest.raises(bsam.BsamError, match=r"has no finished runs"):
        runs_in_folders([_folder_with(tmp_path, "half")], messages.append)
    assert runs_in_folders([tmp_path / "nothing"], messages.append) == [tmp_path / "nothing"]


def _folder_with(folder, name):
    (folder / "other").mkdir()
    return (folder / name).rename(folder / "other" / name).parent


ITS = FlatnessSettings(
    k=3,
    which="magnitude",
    tol=0.03,
    trace_samples=9,
    density_steps=5,
    density_probes=2,
    span=0.5,
    points=5,
    rho=0.2,
    seed=3,
)

STAGES = ("sharpness", "eigenvalues", "trace", "density", "landscape")


@pytest.fixture
def data(problem):
    return list(zip(problem.x.split(14), problem.y.split(14), strict=True))


@pytest.mark.parametrize("its", [replace(ITS, mode="train"), replace(ITS, micro_batch=8)])
def test_every_instrument_gets_every_setting_and_the_loss_alone_is_the_same(its, problem, data):
    before = [t.clone() for t in problem.model.state_dict().values()]
    found = measure(problem.model, F.cross_entropy, data, its)
    options = {"micro_batch": its.micro_batch, "mode": its.mode}
    H = HessianOperator(problem.model, F.cross_entropy, data, **options)
    assert found["sharpness"] == asdict(sharpness(problem.model, F.cross_entropy, data, 0.2, 0.2, **options))
    assert found["eigenvalues"]["values"] == top_eigenvalues(H, 3, "magnitude", 0.03, 3).values.tolist()
    assert found["eigenvalues"]["which"] == "magnitude"
    assert found["trace"] == asdict(trace(H, 9, 3))
    assert found["density"]["nodes"] == spectral_density(H, 5, 2, 3).nodes.tolist()
    expected = landscape(problem.model, F.cross_entropy, data, 0.5, 5, 2, 3, **options)
    assert found["landscape"]["loss"] == expected.loss.tolist()
    assert found["landscape"]["axis"] == expected.axes[0].tolist()
    assert (found["parameters"], found["samples"]) == (sum(p.numel() for p in problem.model.parameters()), 24)
    assert tuple(found["seconds"]) == STAGES
    assert min(found["seconds"].values()) > 0
    assert all(torch.equal(a, b) for a, b in zip(before, problem.model.state_dict().values(), strict=True))
    assert loss_of(problem.model, F.cross_entropy, data, its) == found["landscape"]["centre"]


def test_progress_names_the_stage_and_ends_at_the_end(problem, data):
    told = []
    measure(problem.model, F.cross_entropy, data, ITS, lambda *what: told.append(what))
    assert list(dict.fromkeys(stage for stage, _, _ in told)) == list(STAGES)
    for stage in STAGES:
        done = [(d, n) for name, d, n in told if name == stage]
        assert [d for d, _ in done] == sorted(d for d, _ in done)
        assert done[-1][0] == done[-1][1]
    assert [(d, n) for name, d, n in told if name == "trace"][:2] == [(1, 9), (2, 9)]
    assert ("landscape", 25, 25) in told
