"""``fit``: its numbers, what it measures, and what each setting does."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bsam
from bsam.flatness.sharpness import sharpness
from bsam.lab.config import Run
from bsam.lab.data import digits
from bsam.lab.data.arrays import flip_labels
from bsam.lab.models.cifar import DigitsNet
from bsam.lab.tasks.classification import Classification
from bsam.lab.training import Machine, RunCallbacks, fit
from bsam.lab.training import trainer as trainer_file
from bsam.lab.training.trainer import build_run_step
from bsam.methods import METHODS
from helpers import trained_as

CPU = torch.device("cpu")
SAME = {"lr": 0.1, "batch": 64, "label_smoothing": 0.0, "weight_decay": 5e-4}
SMALL = {**SAME, "limit_train": 192, "limit_test": 20}
BSAM = {"rho_max": 0.1, "rho_min": 0.05}
ON_DIGITS = {"ksam": {"k": 32}, "saf": {"start_epoch": 0, "epochs_back": 1}, "mesa": {"start_epoch": 0}}


def numbers(result):
    """Return the metrics without times."""
    return [({k: v for k, v in epoch.metrics.items() if k != "seconds"}, epoch.sharpness) for epoch in result.epochs]


def trained(run):
    """Return the result and the trainer."""
    trainers = []
    result = fit(
        run, machine=Machine("cpu"), callbacks=RunCallbacks(at_start=lambda trainer, done: trainers.append(trainer))
    )
    return result, trainers[0]


@pytest.fixture(scope="module")
def data():
    return digits()


@pytest.mark.parametrize(("method", "arguments"), [("sgd", {}), ("bsam", BSAM)])
def test_equal_settings_give_equal_numbers_and_the_callers_generator_is_untouched(method, arguments):
    run = Run.of(method, arguments, epochs=2, label_noise=0.4, seed=5, sharpness_rho=0.05, **SMALL)
    torch.manual_seed(1)
    first, state = fit(run, machine=Machine("cpu")), torch.random.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    assert numbers(fit(run, machine=Machine("cpu"))) == numbers(first)


def test_every_setting_matters():
    """An unused setting would give the numbers of the first run."""
    first = Run.of("bsam", BSAM, epochs=1, limit_train=48, limit_test=20, **{**SAME, "batch": 16})
    optimization = {"lr": 0.11, "schedule": "constant", "warmup": 0.5, "momentum": 0.8, "nesterov": True}
    optimization |= {"head_lr": 0.2, "freeze_backbone": True, "accumulate": 2, "clip_norm": 0.1, "ema": 0.5}
    optimization |= {"base_arguments": {"dampening": 0.5}}
    optimization |= {"base": "adam", "weight_decay": 1e-3, "epochs": 2, "batch": 12, "precision": "bf16"}
    optimization |= {"rho_warmup": 0.7, "rho_start": 0.4, "decay": "weights"}
    task = {"label_smoothing": 0.1, "label_noise": 0.1, "limit_train": 32, "limit_test": 19, "augment": "crop-flip"}
    task |= {"seed": 1, "eval_split": "validation", "model": "resnet8", "image_size": 7}
    others = {
        "arguments": {"rho_max": 0.1, "rho_min": 0.06},
        "method": "asam",
        "sharpness_rho": 0.1,
        **optimization,
        **task,
    }
    bits = {"activation_bits": 3, "first_last_bits": 4, "quantizer": "minmax", "fold_batch_norm": True}
    bits |= {"perturb_scales": True}
    changes = [{}, *({name: value} for name, value in others.items()), {"weight_bits": 4}]
    changes += [{"weight_bits": 4, name: value} for name, value in bits.items()]
    changes += [{"label_noise": 0.1, "noise_labels": "other"}]
    changes = [{**change, "arguments": {}} if change.get("method") else change for change in changes]
    results = [fit(first.changed(**change), machine=Machine("cpu")) for change in changes]
    assert len({repr(numbers(result)) for result in results}) == len(changes)
    elsewhere = {"task", "data", "compile", "capture", "probe", "curvature", "surface"}  # in other tests
    elsewhere |= {"weights", "skip_corrupt", "layer_decay"}  # in those of image files
    elsewhere |= {"init"}  # in those of quantized runs
    assert set(first.settings()) == {*others, *bits, "weight_bits", "noise_labels", *elsewhere}


def test_sharpness_is_measured_after_each_epoch_on_the_labels_used_in_training(data):
    result, trainer = trained(Run.of("sgd", epochs=2, label_noise=0.4, seed=7, sharpness_rho=0.1, **SAME))
    noisy, _ = flip_labels(data.train.y, 0.4, 10, 7)
    model = trainer.network.eval()
    assert result.last.sharpness.loss == pytest.approx(F.cross_entropy(model(data.train.x), noisy).item(), rel=1e-5)
    expected = sharpness(model, F.cross_entropy, [(data.train.x, noisy)], rho_max=0.1, rho_min=0.1)
    assert result.last.sharpness.bilateral == pytest.approx(expected.bilateral, rel=1e-4)
    assert result.epochs[0].sharpness.loss > result.last.sharpness.loss


def test_step_time_is_the_median_over_epochs_of_the_mean_over_steps():
    result = fit(Run.of("sgd", epochs=3, **SMALL), machine=Machine("cpu"))
    _, median, _ = sorted(epoch.metrics["seconds"] / 3 for epoch in result.epochs)
    assert result.seconds_per_step == pytest.approx(median)
    assert median > 0
    assert [epoch.sharpness for epoch in result.epochs] == [None] * 3
    assert result.last is result.epochs[-1]
    assert result.score == result.last.metrics["test_accuracy"]
    assert (result.top_eigenvalue, result.surface) == (None, None)


def test_the_top_eigenvalue_and_the_surface_are_of_the_last_network(data, evenly, monkeypatch):
    """On samples of all classes, with the labels used in training."""
    monkeypatch.setattr(trainer_file, "CURVATURE_SAMPLES", 30)
    run = Run.of("sam", {"rho": 0.1}, epochs=1, label_noise=0.4, seed=3, curvature=True, surface=5, **SAME)
    result, trainer = trained(run)
    noisy, _ = flip_labels(data.train.y, 0.4, 10, 3)
    chosen = evenly(noisy, 30)
    model, x, y = trainer.network.eval(), data.train.x[chosen], noisy[chosen]
    centre = F.cross_entropy(model(x), y).item()
    assert [axis.tolist() for axis in result.surface.axes] == [[-1.0, -0.5, 0.0, 0.5, 1.0]] * 2
    assert result.surface.loss.shape == (5, 5)
    assert result.surface.loss[2, 2] == pytest.approx(centre, rel=1e-5)
    assert result.surface.loss[0, 0] > 1.1 * centre

    names, params = zip(*model.double().named_parameters(), strict=True)

    def gradient(*weights):
        logits = torch.func.functional_call(model, dict(zip(names, weights, strict=True)), (x.double(),))
        return torch.autograd.grad(F.cross_entropy(logits, y), weights, create_graph=True)

    v = [torch.randn(p.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) for p in params]
    for _ in range(60):  # power iteration, without any code of the library
        length = sum((t**2).sum() for t in v).sqrt()
        _, v = torch.autograd.functional.vjp(gradient, params, tuple(t / length for t in v))
    assert result.top_eigenvalue == pytest.approx(sum((t**2).sum() for t in v).sqrt().item(), rel=2e-3)


def test_without_a_folder_a_run_that_diverges_has_nan_metrics():
    result = fit(Run.of("sgd", epochs=1, curvature=True, surface=3, **{**SMALL, "lr": 1e30}), machine=Machine("cpu"))
    assert math.isnan(result.top_eigenvalue)
    assert math.isnan(result.surface.loss[1, 1])
    assert math.isnan(result.last.metrics["train_loss"])


def test_on_epoch_gets_the_metrics_and_can_end_the_run():
    calls = []

    def on_epoch(epoch, metrics):
        calls.append((epoch, metrics["epoch"], set(metrics)))
        if epoch == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        fit(
            Run.of("bsam", epochs=5, **{**SMALL, "limit_train": 64}),
            machine=Machine("cpu"),
            callbacks=RunCallbacks(on_epoch=on_epoch),
        )
    keys = {"epoch", "train_loss", "test_loss", "test_accuracy", "lr", "rho_min", "seconds"}
    assert calls == [(1, 1, keys), (2, 2, keys)]


@pytest.mark.parametrize(
    ("method", "arguments", "radius"),
    [
        ("bsam", {"rho_max": 0.1, "rho_min": 0.1, "rho_min_floor": 0.04}, "rho_min"),
        ("sam", {"rho": 0.1, "rho_floor": 0.04}, "rho"),
    ],
)
def test_metrics_have_the_learning_rate_and_the_radius_of_the_last_step(method, arguments, radius):
    epochs = fit(Run.of(method, arguments, epochs=3, **SMALL), machine=Machine("cpu")).epochs
    expected = [0.1 * math.cos(math.pi / 2 * t / 9) ** 2 for t in (2, 5, 8)]
    assert [epoch.metrics["lr"] for epoch in epochs] == pytest.approx(expected)
    radii = [{name: value for name, value in epoch.metrics.items() if "rho" in name} for epoch in epochs]
    assert radii == [{radius: pytest.approx(0.04 + 0.06 * lr / 0.1, rel=1e-6)} for lr in expected]


def test_the_optimizer_gets_every_setting():
    model, task = DigitsNet(), Classification(Run("sgd"), CPU)
    settings = {"lr": 0.3, "momentum": 0.7, "weight_decay": 0.01}
    run = Run.of("bsam", {"rho_max": 0.2, "rho_min": 0.1, "passes": 2}, nesterov=True, **settings)
    optimizer = build_run_step(run, task, model, 100).optimizer
    assert isinstance(optimizer, bsam.BSAM)
    assert isinstance(optimizer.base, torch.optim.SGD)
    assert optimizer.passes == 2
    assert optimizer.model is model
    group = optimizer.param_groups[0]
    assert {**settings, "rho_max": 0.2, "rho_min": 0.1, "nesterov": True}.items() <= group.items()
    assert len(group["params"]) == len(list(model.parameters()))
    for base, cls in (("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)):
        wrapped = build_run_step(Run.of("sam", base=base, **settings), task, model, 100).optimizer.base
        alone = build_run_step(Run.of("base", base=base, **settings), task, model, 100).optimizer
        for optimizer in (wrapped, alone):
            assert type(optimizer) is cls
            group = optimizer.param_groups[0]
            assert [group[name] for name in ("lr", "betas", "weight_decay")] == [0.3, (0.7, 0.999), 0.01]


def test_methods_get_the_settings_of_the_run():
    """RST's seed, AE-SAM's number of steps, SAF's table for all samples and its epochs."""
    _, rst = trained(Run.of("rst", epochs=1, seed=9, **SMALL))
    assert rst.optimizer.seed == 9
    _, aesam = trained(Run.of("aesam", epochs=2, **SMALL))
    assert aesam.optimizer.total_steps == aesam.optimizer.t == 6
    back = {"start_epoch": 0, "epochs_back": 1, "lam": 3.0}
    result, saf = trained(Run.of("saf", back, epochs=3, sharpness_rho=0.05, **SMALL))
    assert saf.train_step.loss.stamp.shape == (2, 192)
    assert sorted(set(saf.train_step.loss.stamp.flatten().tolist())) == [1, 2]  # every sample, in the last two epochs
    plain = numbers(fit(Run.of("sgd", epochs=3, sharpness_rho=0.05, **SMALL), machine=Machine("cpu")))
    assert numbers(result)[0] == plain[0]  # the second term starts after epoch 0
    assert numbers(result)[1] != plain[1]


@pytest.mark.parametrize("method", ["base", *METHODS])
def test_every_method_learns(method):
    small = {"batch": 32, "limit_train": 320, "limit_test": 200, "epochs": 4 if method == "mesa" else 2}
    assert (
        fit(Run.of(method, ON_DIGITS.get(method, {}), seed=3, **{**SAME, **small}), machine=Machine("cpu")).score > 0.8
    )


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on Arm CPUs without bf16
def test_bf16_runs_the_network_under_autocast():
    dtypes = []

    class Recorded(Classification):
        def losses(self, outputs, y):
            losses = super().losses(outputs, y)
            dtypes.append((outputs.dtype, losses.dtype))
            return losses

    size = {"batch": 16, "epochs": 1, "limit_train": 48, "limit_test": 20}  # slow on CPUs without bf16
    run = Run.of("bsam", precision="bf16", **{**SAME, **size})
    with trained_as(Recorded):
        result = fit(run, machine=Machine("cpu"))
    assert set(dtypes) == {(torch.bfloat16, torch.float32)}
    in_fp32 = fit(replace(run, precision="fp32"), machine=Machine("cpu")).last.metrics["train_loss"]
    assert result.last.metrics["train_loss"] == pytest.approx(in_fp32, rel=0.02)


def test_the_network_trains_in_train_mode_and_is_evaluated_in_eval_mode():
    modes = []

    class Recording(nn.Sequential):
        def forward(self, x):
            modes.append((self.training, len(x)))
            return super().forward(x)

    class Recorded(Classification):
        def network(self):
            return Recording(super().network())

    with trained_as(Recorded):
        fit(Run.of("sgd", epochs=2, **{**SMALL, "limit_test": 330}), machine=Machine("cpu"))
    assert modes == ([(True, 64)] * 3 + [(False, 320), (False, 10)]) * 2


def test_each_epoch_has_an_order_of_its_own_that_follows_from_the_seed():
    orders = []

    class Noted(Classification):
        def batches(self, indices):
            orders.append(indices.flatten().tolist())
            return super().batches(indices)

    with trained_as(Noted):
        for seed in (0, 0, 1):
            fit(Run("sgd", epochs=2, batch=64, seed=seed, limit_train=128, limit_test=20), None, Machine("cpu"))
    assert [sorted(order) for order in orders] == [list(range(128))] * 6
    assert orders[:2] == orders[2:4]
    assert len({tuple(order) for order in orders}) == 4
