"""The quantization table: its runs, what they begin with, and the paper's numbers."""

from dataclasses import replace

import pytest

from bsam.lab.recipes import RECIPES
from bsam.lab.recipes.image_recipes import quantization
from bsam.lab.recipes.run_settings import select, with_initial_runs
from bsam.lab.recipes.scales import scale_of
from bsam.lab.recipes.variants import variant_of
from bsam.lab.running.runner import Callbacks, RunsFailed, run_all
from bsam.lab.training.config import Run
from bsam.lab.training.run_dir import RunDir, run_dir_name

PRINTED = {  # test accuracy in %, as the paper has it: full precision, then 4 bits with each method
    "resnet18": ((88.72, None), (88.86, 0.18), (89.75, 0.21), (89.84, 0.11)),
    "mobilenet_v1": ((85.81, None), (84.04, 0.13), (84.72, 0.11), (84.76, 0.10)),
}
COLUMNS = ("sgd", "sam", "sam-sum", "sam-follow", "bsam", "bsam-2", "bsam-released")
RECIPE = RECIPES["quantization"]


@pytest.mark.parametrize("scale", ["short", "paper"])
def test_the_runs_of_a_scale(scale):
    runs = quantization(scale_of(scale))
    assert [(run.model, run.weight_bits) for run in runs] == [
        (network, bits) for network in PRINTED for bits in (None, *[4] * 7)
    ]
    epochs = {"short": (24, 12), "paper": (200, 60)}[scale]
    for first in (0, 8):
        base, own = runs[first], runs[first + 1 : first + 8]
        assert (base.method, base.lr, base.weight_decay, base.init) == ("base", 0.05, 1e-3, None)
        assert base.epochs == epochs[0]
        assert [variant_of(run).name for run in own] == list(COLUMNS)
        for run in own:
            assert (run.init, run.epochs, run.lr, run.weight_decay) == (run_dir_name(base), epochs[1], 0.01, 1e-4)
            assert (run.activation_bits, run.first_last_bits, run.perturb_scales) == (None, 8, False)
            assert (run.quantizer, run.data, run.precision, run.batch) == ("lsq", "cifar10", "bf16", 128)
            assert run.compile
            assert run.curvature


def test_every_published_number():
    for run in quantization(scale_of("paper")):
        if variant_of(run).name in ("sam-sum", "sam-follow"):
            assert RECIPE.published(run) is None
            continue
        full, *own = PRINTED[run.model]
        number = full if run.weight_bits is None else dict(zip(("base", "sam", "bsam"), own, strict=True))[run.method]
        found = RECIPE.published(run)
        assert (found.mean, found.std) == number
    assert RECIPE.published(replace(quantization(scale_of("paper"))[1], weight_bits=2)) is None
    assert RECIPE.published(quantization(scale_of("smoke"))[0]) is None


def test_a_run_begins_with_the_float_network_of_its_own_seed():
    runs = RECIPE.runs("short", seeds=3)
    by_name = {run_dir_name(run): run for run in runs}
    assert len(by_name) == len(runs) == 48
    for run in runs:
        if run.weight_bits is not None:
            base = by_name[run.init]
            assert (base.seed, base.model, base.weight_bits) == (run.seed, run.model, None)
    assert [run.seed for run in RECIPE.runs("short", seeds=1, first_seed=7)] == [7] * 16


def test_chosen_runs_bring_what_they_begin_with():
    runs = RECIPE.runs("short", seeds=2)
    chosen = select(runs, ["bsam-2"], ["mobilenet_v1"])
    assert [(run.weight_bits, run.seed) for run in chosen] == [(4, 0), (4, 1)]
    whole = with_initial_runs(chosen, runs)
    assert [(run.model, run.weight_bits, run.seed) for run in whole] == [
        ("mobilenet_v1", bits, seed) for bits in (None, 4) for seed in (0, 1)
    ]
    assert with_initial_runs(whole, runs) == whole
    assert with_initial_runs(runs, runs) == runs


def test_a_run_waits_for_the_one_that_it_begins_with(tmp_path):
    settings = {"epochs": 1, "limit_train": 64, "limit_test": 20, "batch": 64}
    base = Run("sgd", **settings)
    run, told = Run("sgd", init=run_dir_name(base), weight_bits=4, **settings), []
    with pytest.raises(RunsFailed, match=f"no folder.*{run_dir_name(base)}"):
        run_all([run], tmp_path)
    states = run_all([run, base], tmp_path, Callbacks(on_message=told.append))  # in the wrong order: it waits
    assert [str(state) for state in states] == ["done", "done"]
    assert told == [f"Training begins with the network of {run_dir_name(base)}."]
    assert RunDir(tmp_path / run_dir_name(run)).note("weights")["loaded"] == 14
    (tmp_path / run_dir_name(base) / "model.safetensors").unlink()
    (tmp_path / run_dir_name(base) / "diverged.json").write_text('{"reason": "NaN"}')
    (tmp_path / run_dir_name(run) / "model.safetensors").unlink()
    assert [str(state) for state in run_all([run], tmp_path)] == ["done"]  # its checkpoint has all that it needs
    with pytest.raises(RunsFailed, match=f"{run_dir_name(base)}.*diverged"):
        run_all([base, replace(run, seed=1)], tmp_path)
