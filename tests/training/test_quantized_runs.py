"""Runs that begin with the network of another run, and runs of quantized networks."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from bsam.core.errors import BsamError
from bsam.quantization import QuantConv2d, QuantLinear, calibrate, parameter_groups, quantize
from bsam.recipes.subjects import load_run
from bsam.tasks.classification import Classification
from bsam.training.config import Run
from bsam.training.initial_run import initial_network
from bsam.training.loop import fit
from bsam.training.run_dir import NETWORK, RunDir

CPU = torch.device("cpu")
SMALL = {"limit_train": 128, "limit_test": 60, "batch": 64, "epochs": 1, "lr": 0.1, "label_smoothing": 0.0}
W4 = {**SMALL, "lr": 0.02, "weight_bits": 4}


class Interrupted(Exception):
    pass


def quiet(sentence):
    pass


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a finished run of a float network, ``float``, and a quantized one that begins with it, ``w4``."""
    out = tmp_path_factory.mktemp("runs")
    fit(Run("sgd", **SMALL), out / "float", tell=quiet)
    fit(Run("bsam", init="float", **{**W4, "epochs": 2}), out / "w4", tell=quiet)
    return out


def start_of(run, folder):
    """The network that a run begins with, its groups of parameters and what was told."""
    seen, told = {}, []

    def at_start(trainer, epochs):
        seen.update({name: t.clone() for name, t in trainer.network.state_dict().items()})
        raise Interrupted(trainer)

    with pytest.raises(Interrupted) as caught:
        fit(run, folder, at_start=at_start, tell=told.append)
    return seen, caught.value.args[0], told


def test_a_run_begins_with_all_weights_of_another(runs, tmp_path):
    run = Run("sam", init=str(runs / "float"), **{**SMALL, "seed": 5})
    start, _, told = start_of(run, tmp_path / "next")
    expected = RunDir(runs / "float").weights()
    assert start.keys() == expected.keys()
    assert all(torch.equal(start[name], expected[name]) for name in expected)  # the last layer, too
    assert told == [f"Training begins with the network of {runs / 'float'}."]
    note = json.loads((tmp_path / "next/weights.json").read_text())
    assert note["source"] == NETWORK
    assert note["head_left_out"] == {}
    assert len(note["sha256"]) == 64


def test_a_run_is_found_beside_the_one_that_begins_with_it(runs, tmp_path, monkeypatch):
    run = Run("sgd", init="float", **SMALL)
    assert initial_network(run, runs / "another") == runs / "float" / NETWORK
    monkeypatch.chdir(runs)
    assert initial_network(run).resolve() == runs / "float" / NETWORK
    assert initial_network(replace(run, init=None)) is None
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BsamError, match=r"there is no folder float or .*float: init names a run of bsam train"):
        initial_network(run, tmp_path / "another")


def test_what_a_run_cannot_begin_with(runs, tmp_path):
    def refused(message, **settings):
        with pytest.raises(BsamError, match=message):
            initial_network(Run("sgd", **{**SMALL, "init": str(runs / "float"), **settings}))

    refused("trained digits_net, and this run trains resnet8: give --model digits_net", model="resnet8")
    refused("trained a quantized network: begin with a run of a float one", init=str(runs / "w4"))
    (tmp_path / "empty").mkdir()
    refused("is not a run directory of bsam train", init=str(tmp_path / "empty"))
    shutil.copytree(runs / "float", tmp_path / "unfinished")
    (tmp_path / "unfinished" / NETWORK).unlink()
    refused("is not finished", init=str(tmp_path / "unfinished"))
    shutil.copytree(runs / "float", tmp_path / "damaged")
    content = bytearray((tmp_path / "damaged" / NETWORK).read_bytes())
    content[-1] ^= 1
    (tmp_path / "damaged" / NETWORK).write_bytes(content)
    refused("is damaged", init=str(tmp_path / "damaged"))
    for settings, message in (
        ({"weights": "a.pt"}, "init and weights both say what training begins with"),
        ({"activation_bits": 4}, "activation_bits has no effect on a network that is not quantized: set weight_bits"),
        ({"quantizer": "minmax"}, "quantizer has no effect"),
        ({"weight_bits": 9}, "weight_bits must be a whole number between 2 and 8, got 9"),
        ({"weight_bits": 1}, "weight_bits must be a whole number between 2 and 8, got 1"),
        ({"weight_bits": 4, "quantizer": "minmax", "perturb_scales": True}, "perturb_scales is for learned scales"),
        ({"weight_bits": 4, "freeze_backbone": True}, "freeze_backbone does not go with quantization"),
        ({"weight_bits": 4, "head_lr": 0.1}, "head_lr and layer_decay do not go with quantization"),
    ):
        refused(message, **settings)
    with pytest.raises(BsamError, match="weight_bits has no meaning for pose"):
        fit(Run("sgd", task="pose", model="simcc_resnet8", data="stick_figures", weight_bits=4, label_smoothing=0.0))


@pytest.mark.parametrize("settings", [{}, {"quantizer": "minmax", "activation_bits": 8, "first_last_bits": 4}], ids=str)
def test_a_quantized_run_begins_with_the_float_network(runs, tmp_path, settings):
    run = Run("sgd", init=str(runs / "float"), **W4, **settings)
    start, trainer, _ = start_of(run, tmp_path / "w4")
    task = Classification(run, CPU)
    network = RunDir(runs / "float").load_into(Classification(Run("sgd", **SMALL), CPU).network())
    bits, ends = settings.get("activation_bits", 4), settings.get("first_last_bits", 8)
    expected = quantize(network, 4, bits, scheme=settings.get("quantizer", "lsq"), first_last_bits=ends)
    calibrate(expected, task.examples(256)[0][0])
    assert start.keys() == expected.state_dict().keys()
    assert all(torch.equal(start[name], t) for name, t in expected.state_dict().items())
    layers = [m for m in trainer.network.modules() if isinstance(m, (QuantConv2d, QuantLinear))]
    found = [(m.weight_quantizer.bits, m.input_quantizer.bits) for m in layers]
    assert found == [(ends, ends), (4, bits), (ends, ends)]


def test_batch_norm_is_folded_with_the_statistics_of_the_float_network(runs, tmp_path):
    run = Run("sgd", init=str(runs / "float"), **{**W4, "weight_bits": 8}, fold_batch_norm=True)
    _, trainer, _ = start_of(run, tmp_path / "folded")
    x = trainer.task.examples(64)[0][0]
    network = RunDir(runs / "float").load_into(Classification(Run("sgd", **SMALL), CPU).network()).eval()
    assert not any("running_mean" in name for name in trainer.network.state_dict())
    with torch.no_grad():
        expected, found = network(x), trainer.network.eval()(x)
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()  # 8 bits


@pytest.mark.parametrize("perturb", [False, True])
def test_scales_have_a_group_of_their_own(runs, tmp_path, perturb):
    run = Run("bsam", init=str(runs / "float"), **W4, weight_decay=0.01, perturb_scales=perturb)
    _, trainer, _ = start_of(run, tmp_path / "w4")
    weights, scales = trainer.optimizer.param_groups
    expected = parameter_groups(trainer.network)
    for ours, theirs in zip((weights, scales), expected, strict=True):
        assert [id(p) for p in ours["params"]] == [id(p) for p in theirs["params"]]
    assert (weights["weight_decay"], scales["weight_decay"]) == (0.01, 0.0)
    assert (weights.get("perturb", True), scales["perturb"]) == (True, perturb)


def test_a_quantized_run_learns_and_is_read_again(runs):
    run_dir = RunDir(runs / "w4")
    run, metrics = run_dir.finished_run(), run_dir.metrics()
    network, *_ = load_run(runs / "w4", 128, CPU)
    accuracy = Classification(run, CPU).evaluate(network.eval())["test_accuracy"]
    assert accuracy == metrics[-1]["test_accuracy"] > 0.5
    assert isinstance(network[0], QuantConv2d)
    start = quantize(RunDir(runs / "float").load_into(Classification(Run("sgd", **SMALL), CPU).network()))
    for name, begun in start.named_parameters():  # weights and scales are trained
        assert not torch.equal(network.get_parameter(name), begun), name


def test_an_interrupted_quantized_run_continues_bit_for_bit_without_the_run_that_it_began_with(runs, tmp_path):
    shutil.copytree(runs / "float", tmp_path / "float")
    run = RunDir(runs / "w4").run()

    def stop(done, metrics):
        raise Interrupted

    with pytest.raises(Interrupted):
        fit(run, tmp_path / "w4", each_epoch=stop, tell=quiet)
    shutil.rmtree(tmp_path / "float")
    fit(run, tmp_path / "w4", tell=quiet)
    ours, expected = RunDir(tmp_path / "w4").weights(), RunDir(runs / "w4").weights()
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
