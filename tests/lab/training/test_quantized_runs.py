"""Runs that start from the network of another run, and runs of quantized networks."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bsam.common.errors import BsamError
from bsam.flatness import HessianOperator, landscape, sharpness, top_eigenvalues
from bsam.lab.config import Run
from bsam.lab.inference.run_flatness import load_run
from bsam.lab.quantization import QuantConv2d, QuantLinear, calibrate, parameter_groups, quantize
from bsam.lab.tasks.classification import Classification
from bsam.lab.training import Machine, RunCallbacks, fit, trainer
from bsam.lab.training.run_dir import NETWORK, RunDir, initial_network
from helpers import draw_images

CPU = torch.device("cpu")
SMALL = {"limit_train": 128, "limit_test": 60, "batch": 64, "epochs": 1, "lr": 0.1, "label_smoothing": 0.0}
W4 = {**SMALL, "lr": 0.02, "weight_bits": 4}


class Interrupted(Exception):
    pass


def quiet(sentence):
    pass


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a finished run of a float network, ``float``, and a quantized one that starts from it, ``w4``."""
    out = tmp_path_factory.mktemp("runs")
    fit(Run.of("sgd", **SMALL), out / "float", callbacks=RunCallbacks(on_message=quiet))
    fit(
        Run.of("bsam", init="float", **{**W4, "epochs": 2}),
        out / "w4",
        init=out / "float",
        callbacks=RunCallbacks(on_message=quiet),
    )
    return out


def start_of(run, folder):
    """Return the weights that a run starts from, its trainer and the messages."""
    weights, messages = {}, []

    def at_start(trainer, epochs):
        weights.update({name: t.clone() for name, t in trainer.network.state_dict().items()})
        raise Interrupted(trainer)

    with pytest.raises(Interrupted) as caught:
        fit(run, folder, callbacks=RunCallbacks(at_start=at_start, on_message=messages.append))
    return weights, caught.value.args[0], messages


def test_a_run_starts_with_all_weights_of_another(runs, tmp_path):
    run = Run.of("sam", init=str(runs / "float"), **{**SMALL, "seed": 5})
    start, _, messages = start_of(run, tmp_path / "next")
    expected = RunDir(runs / "float").weights()
    assert start.keys() == expected.keys()
    assert all(torch.equal(start[name], expected[name]) for name in expected)  # the last layer, too
    assert len(messages) == 1
    assert str(runs / "float") in messages[0]
    note = json.loads((tmp_path / "next/weights.json").read_text())
    assert note["source"] == NETWORK
    assert note["head_left_out"] == {}
    assert len(note["sha256"]) == 64


def test_where_the_initial_run_is_looked_up(runs, tmp_path, monkeypatch):
    run = Run.of("sgd", init="float", **SMALL)
    monkeypatch.chdir(runs)
    assert initial_network(run, Path(run.init)).resolve() == runs / "float" / NETWORK
    monkeypatch.setenv("HOME", str(runs))
    assert initial_network(run, Path("~/float")) == runs / "float" / NETWORK
    monkeypatch.chdir(tmp_path)
    assert initial_network(run, runs / "float") == runs / "float" / NETWORK
    with pytest.raises(BsamError, match="float"):
        initial_network(run, Path("float"))


def test_what_a_run_cannot_start_from(runs, tmp_path):
    (tmp_path / "empty").mkdir()
    shutil.copytree(runs / "float", tmp_path / "unfinished")
    (tmp_path / "unfinished" / NETWORK).unlink()
    for settings, word in (
        ({"model": "resnet8"}, "--model digits_net"),
        ({"init": str(runs / "w4")}, "quantized"),
        ({"init": str(tmp_path / "empty")}, "config.json"),
        ({"init": str(tmp_path / "unfinished")}, "not finished"),
    ):
        run = Run.of("sgd", **{**SMALL, "init": str(runs / "float"), **settings})
        with pytest.raises(BsamError, match=word):
            initial_network(run, Path(run.init))
    with pytest.raises(BsamError, match="weight_bits"):
        fit(Run.of("sgd", task="pose", model="simcc_resnet8", data="stick_figures", weight_bits=4))


@pytest.mark.parametrize("settings", [{}, {"quantizer": "minmax", "activation_bits": 8, "first_last_bits": 4}], ids=str)
def test_a_quantized_run_starts_from_the_float_network(runs, tmp_path, settings):
    run = Run.of("sgd", init=str(runs / "float"), **W4, **settings)
    start, trainer, _ = start_of(run, tmp_path / "w4")
    task = Classification(run, CPU)
    network = RunDir(runs / "float").load_into(Classification(Run.of("sgd", **SMALL), CPU).network())
    bits, ends = settings.get("activation_bits", 4), settings.get("first_last_bits", 8)
    expected = quantize(network, 4, bits, scheme=settings.get("quantizer", "lsq"), first_last_bits=ends)
    calibrate(expected, task.examples(256)[0][0])
    assert start.keys() == expected.state_dict().keys()
    assert all(torch.equal(start[name], t) for name, t in expected.state_dict().items())
    layers = [m for m in trainer.network.modules() if isinstance(m, (QuantConv2d, QuantLinear))]
    assert [(m.weight_quantizer.bits, m.input_quantizer.bits) for m in layers] == [
        (ends, ends),
        (4, bits),
        (ends, ends),
    ]


def test_batch_norm_is_folded_with_the_statistics_of_the_float_network(runs, tmp_path):
    run = Run.of("sgd", init=str(runs / "float"), **{**W4, "weight_bits": 8}, fold_batch_norm=True)
    _, trainer, _ = start_of(run, tmp_path / "folded")
    x = trainer.task.examples(64)[0][0]
    network = RunDir(runs / "float").load_into(Classification(Run.of("sgd", **SMALL), CPU).network()).eval()
    assert not any("running_mean" in name for name in trainer.network.state_dict())
    with torch.no_grad():
        expected, folded = network(x), trainer.network.eval()(x)
    assert (folded - expected).abs().max() < 0.05 * expected.abs().max()  # 8 bits


@pytest.mark.parametrize("perturb", [False, True])
def test_scales_are_a_separate_group(runs, tmp_path, perturb):
    run = Run.of("bsam", init=str(runs / "float"), **W4, weight_decay=0.01, perturb_scales=perturb)
    _, trainer, _ = start_of(run, tmp_path / "w4")
    weights, scales = trainer.optimizer.param_groups
    expected = parameter_groups(trainer.network)
    for ours, theirs in zip((weights, scales), expected, strict=True):
        assert [id(p) for p in ours["params"]] == [id(p) for p in theirs["params"]]
    assert (weights["weight_decay"], scales["weight_decay"]) == (0.01, 0.0)
    assert (weights.get("perturb", True), scales["perturb"]) == (True, perturb)


def test_a_quantized_run_learns_and_is_loaded(runs):
    run_dir = RunDir(runs / "w4")
    run, metrics = run_dir.finished_run(), run_dir.metrics()
    network, *_ = load_run(runs / "w4", 128, CPU)
    accuracy = Classification(run, CPU).evaluate(network.eval())["test_accuracy"]
    assert accuracy == metrics[-1]["test_accuracy"] > 0.5
    assert isinstance(network[0], QuantConv2d)
    start = quantize(RunDir(runs / "float").load_into(Classification(Run.of("sgd", **SMALL), CPU).network()))
    for name, initial in start.named_parameters():  # weights and scales are trained
        assert not torch.equal(network.get_parameter(name), initial), name


def test_an_interrupted_quantized_run_continues_bit_for_bit_without_the_initial_run(runs, tmp_path):
    shutil.copytree(runs / "float", tmp_path / "float")
    run = RunDir(runs / "w4").run()

    def stop(done, metrics):
        raise Interrupted

    with pytest.raises(Interrupted):
        fit(
            run,
            tmp_path / "w4",
            Machine(checkpoint_every=0),
            init=tmp_path / "float",
            callbacks=RunCallbacks(on_epoch=stop, on_message=quiet),
        )
    shutil.rmtree(tmp_path / "float")
    fit(run, tmp_path / "w4", callbacks=RunCallbacks(on_message=quiet))
    ours, expected = RunDir(tmp_path / "w4").weights(), RunDir(runs / "w4").weights()
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_flatness_in_training_is_measured_with_fixed_scales(runs, tmp_path, monkeypatch):
    """The measurement does not change the training of the scales."""
    monkeypatch.setattr(trainer, "CURVATURE_SAMPLES", 20)
    settings = {**W4, "epochs": 2, "sharpness_rho": 0.05, "curvature": True, "surface": 3}
    result = fit(
        Run.of("sgd", init=str(runs / "float"), **settings), tmp_path / "w4", callbacks=RunCallbacks(on_message=quiet)
    )
    network, loss_fn, _ = load_run(tmp_path / "w4", 20, CPU)
    data = Classification(RunDir(tmp_path / "w4").run(), CPU)
    top = top_eigenvalues(HessianOperator(network, loss_fn, data.examples(20)), k=1, tol=1e-3)
    assert result.top_eigenvalue == pytest.approx(top.values[0], rel=1e-2)
    expected = sharpness(network, loss_fn, data.examples(), rho_max=0.05, rho_min=0.05)
    assert result.last.sharpness.max_sharpness == pytest.approx(expected.max_sharpness, rel=1e-4)
    surface = landscape(network, loss_fn, data.examples(20), points=3)
    assert result.surface.loss[0] == pytest.approx(surface.loss[0].tolist(), rel=1e-4)
    plain = fit(
        Run.of("sgd", init=str(runs / "float"), **{**W4, "epochs": 2}),
        tmp_path / "plain",
        callbacks=RunCallbacks(on_message=quiet),
    )
    measured, unmeasured = RunDir(tmp_path / "w4").weights(), RunDir(tmp_path / "plain").weights()
    assert all(torch.equal(measured[name], t) for name, t in unmeasured.items())
    assert plain.top_eigenvalue is None


def test_image_files_must_have_the_classes_of_the_initial_run(tmp_path):
    for name in ("one", "two"):
        draw_images(tmp_path / name, {"train": 2, "test": 1})
    for split in ("train", "test"):
        (tmp_path / "two" / split / "cat").rename(tmp_path / "two" / split / "another")
    small = {"model": "resnet8", "image_size": 16, "batch": 6, "epochs": 1, "label_smoothing": 0.0}
    run = Run.of("sgd", data=f"folder:{tmp_path / 'one'}", **small)
    fit(run, tmp_path / "float", callbacks=RunCallbacks(on_message=quiet))
    run, messages = replace(run, init=str(tmp_path / "float")), []
    fit(run, callbacks=RunCallbacks(on_message=messages.append))
    assert len(messages) == 1  # and no message about random weights
    assert str(tmp_path / "float") in messages[0]
    with pytest.raises(BsamError, match="another"):
        fit(replace(run, data=f"folder:{tmp_path / 'two'}"), callbacks=RunCallbacks(on_message=quiet))
