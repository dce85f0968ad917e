import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bsam
from bsam.flatness import HessianOperator, landscape, sharpness, spectral_density, top_eigenvalues, trace
from bsam.recipes import flatness as recipe
from bsam.recipes.measure import STAGES, Instruments, glance, load, loader, measure

ITS = Instruments(
    k=3,
    which="magnitude",
    tol=1e-3,
    trace_samples=9,
    density_steps=5,
    density_probes=2,
    span=0.5,
    points=5,
    rho=0.2,
    seed=3,
)


@pytest.fixture
def data(problem):
    return list(zip(problem.x.split(10), problem.y.split(10), strict=True))


@pytest.mark.parametrize("its", [ITS, replace(ITS, mode="train"), replace(ITS, micro_batch=4)])
def test_every_instrument_gets_every_setting(its, problem, data):
    before = [t.clone() for t in problem.model.state_dict().values()]
    found = measure(problem.model, F.cross_entropy, data, its)
    options = {"micro_batch": its.micro_batch, "mode": its.mode}
    H = HessianOperator(problem.model, F.cross_entropy, data, **options)
    assert found.sharpness == sharpness(problem.model, F.cross_entropy, data, 0.2, 0.2, **options)
    assert found.eigenvalues.values.tolist() == top_eigenvalues(H, 3, "magnitude", 1e-3, 3).values.tolist()
    assert found.trace == trace(H, 9, 3)
    assert found.density.nodes.tolist() == spectral_density(H, 5, 2, 3).nodes.tolist()
    expected = landscape(problem.model, F.cross_entropy, data, 0.5, 5, 2, 3, **options)
    assert found.landscape.loss.tolist() == expected.loss.tolist()
    assert found.landscape.axes[0].tolist() == expected.axes[0].tolist()
    assert (found.parameters, found.samples) == (sum(p.numel() for p in problem.model.parameters()), 24)
    assert tuple(found.seconds) == STAGES
    assert min(found.seconds.values()) > 0
    assert all(torch.equal(a, b) for a, b in zip(before, problem.model.state_dict().values(), strict=True))


@pytest.mark.parametrize("its", [ITS, replace(ITS, mode="train"), replace(ITS, micro_batch=4)])
def test_a_glance_finds_the_loss_and_the_samples_of_the_whole_measurement(its, problem, data):
    found = measure(problem.model, F.cross_entropy, data, its)
    assert glance(problem.model, F.cross_entropy, data, its) == (found.landscape.loss[2, 2], found.samples)


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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("k", 0),
            ("which", "smallest"),
            ("tol", -1.0),
            ("trace_samples", 1),
            ("density_steps", 0),
            ("density_probes", 0),
            ("span", 0.0),
            ("points", 4),
        ),
        *(("rho", -0.1), ("mode", "test"), ("micro_batch", 0), ("max_bytes", -1), ("seed", -1)),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_is_measured(name, value):
    with pytest.raises(
        bsam.BsamError,
        match={"trace_samples": "samples", "density_steps": "steps", "density_probes": "probes"}.get(name, name),
    ):
        Instruments(**{name: value})


@pytest.mark.parametrize("name", ["seed", "micro_batch", "points"])
def test_a_setting_that_is_far_too_large_is_refused(name):
    with pytest.raises(bsam.BsamError, match=f"{name} must be a whole number between"):
        Instruments(**{name: 10**30 + 1})


def test_large_counts_are_tried_with_fewer(monkeypatch):
    asked = []

    def fewer(name, genuine):
        def take(H, *counts, **more):
            asked.append((name, *counts[:-1]))  # the last one is the seed
            return genuine(H, *(min(count, 6) for count in counts[:-1]), counts[-1], **more)

        return take

    monkeypatch.setattr(recipe, "trace", fewer("trace", trace))
    monkeypatch.setattr(recipe, "spectral_density", fewer("density", spectral_density))
    its = Instruments(trace_samples=200_000, density_steps=10**6, density_probes=10**5)
    assert (its.trace_samples, its.density_steps, its.density_probes) == (200_000, 10**6, 10**5)
    assert asked == [("trace", 30), ("density", 80, 4)]


def test_to_try_the_settings_takes_no_random_number_of_the_caller():
    state = torch.random.get_rng_state()
    Instruments()
    assert torch.equal(torch.random.get_rng_state(), state)


def test_every_setting_has_been_tried_wrong():
    (mark,) = (
        mark
        for mark in test_a_wrong_setting_is_refused_before_anything_is_measured.pytestmark
        if mark.name == "parametrize"
    )
    assert {name for name, _ in mark.args[1]} == {field.name for field in fields(Instruments)}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A current folder whose modules can be found, and are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_loader_is_found_in_the_current_folder_and_in_a_package(folder):
    (folder / "my_loader_1.py").write_text("def load(path):\n    return 'mine', path\n")
    assert loader("my_loader_1:load")("x") == ("mine", "x")
    (folder / "my_package_1").mkdir()
    (folder / "my_package_1" / "inner.py").write_text("def load(path):\n    return 'inner', path\n")
    assert loader("my_package_1.inner:load")("x") == ("inner", "x")


def test_what_is_wrong_with_a_loader_is_named(folder):
    (folder / "my_loader_2.py").write_text("value = 3\n")
    (folder / "my_loader_3.py").write_text("import not_there_at_all\n")
    for name in ("no_colon", ":f", "m:", ".m:f", "..:f"):
        with pytest.raises(bsam.BsamError, match=f"module:function, got '{name}'"):
            loader(name)
    with pytest.raises(bsam.BsamError, match=r"no module 'nowhere'.*nor in"):
        loader("nowhere:load")
    with pytest.raises(bsam.BsamError, match=r"no module 'bsam\.nowhere'"):
        loader("bsam.nowhere:load")
    with pytest.raises(bsam.BsamError, match="'my_loader_2' has no function 'load'"):
        loader("my_loader_2:load")
    with pytest.raises(bsam.BsamError, match="no function 'value'"):
        loader("my_loader_2:value")
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):  # the loader's own trouble, with its traceback
        loader("my_loader_3:load")


MODEL, BATCHES = nn.Linear(2, 1), [(torch.ones(3, 2), torch.ones(3, 1))]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "NoneType"),
        ((MODEL, F.mse_loss), "2 values"),
        ((MODEL.state_dict(), F.mse_loss, BATCHES), "model as OrderedDict"),
        ((MODEL, "mse", BATCHES), "loss_fn as str"),
        ((MODEL, F.mse_loss, 3), "data as int"),
        ((MODEL, F.mse_loss, iter(BATCHES)), "iterator can be walked once"),
    ],
)
def test_what_is_wrong_with_what_a_loader_returns_is_named(returned, words):
    with pytest.raises(bsam.BsamError, match=rf"(?s)some\.pt.*{words}|{words}.*some\.pt"):
        load(lambda path: returned, Path("some.pt"), torch.device("cpu"))


def test_model_and_batches_go_to_the_device_and_other_things_pass():
    model, _, data = load(
        lambda path: (nn.Linear(2, 1), F.mse_loss, [(torch.ones(1, 2), "label")]), Path("some.pt"), torch.device("meta")
    )
    assert model.weight.device.type == "meta"
    for _ in range(2):
        ((x, y),) = data
        assert (x.device.type, y) == ("meta", "label")


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


def test_batches_of_a_loader_that_are_no_pairs_are_refused_where_they_are_measured():
    model, loss_fn, data = load(
        lambda path: (MODEL, F.mse_loss, [(*BATCHES[0], "index")]), Path("some.pt"), torch.device("cpu")
    )
    with pytest.raises(bsam.BsamError, match=r"must be a pair.*tuple of 3"):
        glance(model, loss_fn, data, ITS)
