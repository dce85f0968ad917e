import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bsam
from bsam.data.digits import digits
from bsam.data.label_noise import flip_labels
from bsam.flatness.sharpness import sharpness
from bsam.methods import METHODS
from bsam.models.digits_net import DigitsNet
from bsam.tasks.classification import Classification
from bsam.training import loop
from bsam.training.config import Run
from bsam.training.loop import fit
from bsam.training.optimizers import build_train_step

CPU = torch.device("cpu")
SAME = {"lr": 0.1, "batch": 64, "label_smoothing": 0.0, "weight_decay": 5e-4}
BSAM = {"rho_max": 0.1, "rho_min": 0.05}
RUNS = [("sgd", {}), ("sam", {"rho": 0.1}), ("bsam", BSAM), ("bsam", {**BSAM, "passes": 2})]
ON_DIGITS = {"ksam": {"k": 32}, "saf": {"start_epoch": 1, "epochs_back": 1}, "mesa": {"start_epoch": 1}}


def numbers(result):
    """All that does not depend on the clock."""
    return [({k: v for k, v in epoch.metrics.items() if k != "seconds"}, epoch.sharpness) for epoch in result.epochs]


def trained(run):
    """The result, and the trainer behind it."""
    found = []
    result = fit(run, device="cpu", at_start=lambda trainer, done: found.append(trainer))
    return result, found[0]


@pytest.fixture(scope="module")
def data():
    return digits()


@pytest.mark.parametrize(("method", "arguments"), RUNS)
def test_equal_settings_give_equal_numbers_and_the_caller_keeps_his_random_numbers(method, arguments):
    small = {"limit_train": 192, "limit_test": 100}
    run = Run(method, arguments, epochs=2, label_noise=0.4, seed=5, radius=0.05, **small, **SAME)
    torch.manual_seed(1)
    first, state = fit(run, device="cpu"), torch.random.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    assert numbers(fit(run, device="cpu")) == numbers(first)


def test_every_setting_that_training_depends_on_matters():
    """A setting that is not used would give the numbers of the first run."""
    first = Run("bsam", BSAM, epochs=1, limit_train=48, limit_test=20, **{**SAME, "batch": 16})
    optimization = {"lr": 0.11, "schedule": "constant", "warmup": 0.5, "momentum": 0.8, "nesterov": True}
    optimization |= {"head_lr": 0.2, "freeze_backbone": True}
    optimization |= {"base": "adam", "weight_decay": 1e-3, "epochs": 2, "batch": 12, "precision": "bf16"}
    task = {"label_smoothing": 0.1, "label_noise": 0.1, "limit_train": 32, "limit_test": 19, "augment": "crop-flip"}
    task |= {"seed": 1, "eval_split": "validation", "model": "resnet8", "image_size": 7}
    others = {"arguments": {"rho_max": 0.1, "rho_min": 0.06}, "method": "asam", "radius": 0.1, **optimization, **task}
    bits = {"activation_bits": 3, "first_last_bits": 4, "quantizer": "minmax", "fold_batch_norm": True}
    bits |= {"perturb_scales": True}
    changes = [{}, *({name: value} for name, value in others.items()), {"weight_bits": 4}]
    changes += [{"weight_bits": 4, name: value} for name, value in bits.items()]
    changes = [{**change, "arguments": {}} if change.get("method") else change for change in changes]
    found = [fit(replace(first, **change), device="cpu") for change in changes]
    assert len({repr(numbers(result)) for result in found}) == len(changes)
    elsewhere = {"task", "data", "compile", "capture", "probe", "curvature", "surface"}  # in other tests
    elsewhere |= {"weights", "skip_corrupt", "layer_decay"}  # in those of image files
    elsewhere |= {"init"}  # in those of quantized runs
    elsewhere |= {"simcc_k", "simcc_sigma", "flip_test"}  # in those of poses
    assert set(first.settings()) == {*others, *bits, "weight_bits", *elsewhere}


def test_sharpness_is_that_of_the_network_after_the_epoch_on_labels_as_trained_on(data):
    result, trainer = trained(Run("sgd", epochs=2, label_noise=0.4, seed=7, radius=0.1, **SAME))
    noisy, _ = flip_labels(data.train.y, 0.4, 10, 7)
    model = trainer.network.eval()
    assert result.last.sharpness.loss == pytest.approx(F.cross_entropy(model(data.train.x), noisy).item(), rel=1e-5)
    expected = sharpness(model, F.cross_entropy, [(data.train.x, noisy)], rho_max=0.1, rho_min=0.1)
    assert result.last.sharpness.bilateral == pytest.approx(expected.bilateral, rel=1e-4)
    assert result.epochs[0].sharpness.loss > result.last.sharpness.loss


def test_step_time_is_the_mean_of_an_epochs_steps_and_the_median_of_epochs(monkeypatch):
    """Steps may differ (LookSAM's, RST's), and an epoch may be disturbed."""
    ticks = iter([0.0, 12.0, 100.0, 159.0, 200.0, 210.0])
    monkeypatch.setattr("bsam.training.trainer.time.perf_counter", lambda: next(ticks))
    result = fit(Run("sgd", epochs=3, **SAME), device="cpu")
    assert result.seconds_per_step == 1.2
    assert [epoch.sharpness for epoch in result.epochs] == [None] * 3
    assert result.last is result.epochs[-1]
    assert result.score == result.last.metrics["test_accuracy"]


def test_the_top_eigenvalue_and_the_surface_are_of_the_last_network_on_samples_of_all_classes(
    data, evenly, monkeypatch
):
    monkeypatch.setattr(loop, "CURVATURE_SAMPLES", 60)
    run = Run("sam", {"rho": 0.1}, epochs=2, label_noise=0.4, seed=3, curvature=True, surface=5, **SAME)
    result, trainer = trained(run)
    noisy, _ = flip_labels(data.train.y, 0.4, 10, 3)  # labels as trained on
    some = evenly(noisy, 60)
    model, x, y = trainer.network.eval(), data.train.x[some], noisy[some]
    centre = F.cross_entropy(model(x), y).item()
    assert result.surface.axis == (-1.0, -0.5, 0.0, 0.5, 1.0)
    assert [len(row) for row in result.surface.loss] == [5] * 5
    assert result.surface.loss[2][2] == pytest.approx(centre, rel=1e-5)
    assert result.surface.loss[0][0] > 1.1 * centre
    without = fit(replace(run, curvature=False, surface=None), device="cpu")
    assert (without.top_eigenvalue, without.surface) == (None, None)
    assert numbers(without) == numbers(result)

    names, params = zip(*model.double().named_parameters(), strict=True)

    def gradient(*weights):
        logits = torch.func.functional_call(model, dict(zip(names, weights, strict=True)), (x.double(),))
        return torch.autograd.grad(F.cross_entropy(logits, y), weights, create_graph=True)

    v = [torch.randn(p.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) for p in params]
    for _ in range(60):  # power iteration: no Lanczos, no code of ours
        length = sum((t**2).sum() for t in v).sqrt()
        _, v = torch.autograd.functional.vjp(gradient, params, tuple(t / length for t in v))
    assert result.top_eigenvalue == pytest.approx(sum((t**2).sum() for t in v).sqrt().item(), rel=2e-3)


def test_a_run_that_diverges_has_no_eigenvalue_and_is_a_result():
    result = fit(Run("sgd", epochs=1, curvature=True, surface=3, **{**SAME, "lr": 1e30}), device="cpu")
    assert math.isnan(result.top_eigenvalue)
    assert math.isnan(result.surface.loss[1][1])
    assert math.isnan(result.last.metrics["train_loss"])


def test_each_epoch_is_told_with_its_metrics_and_may_end_the_run():
    told = []

    def on_epoch(epoch, metrics):
        told.append((epoch, metrics["epoch"], set(metrics)))
        if epoch == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        fit(Run("bsam", epochs=5, limit_train=64, limit_test=20, **SAME), device="cpu", on_epoch=on_epoch)
    keys = {"epoch", "train_loss", "test_loss", "test_accuracy", "lr", "rho_min", "seconds"}
    assert told == [(1, 1, keys), (2, 2, keys)]


def test_rho_min_is_told_as_the_last_step_of_the_epoch_had_it():
    arguments = {"rho_max": 0.1, "rho_min": 0.08, "rho_min_floor": 0.02}
    found = fit(Run("bsam", arguments, epochs=3, limit_train=192, limit_test=20, **SAME), device="cpu").epochs
    for epoch in found:
        assert epoch.metrics["rho_min"] == pytest.approx(0.02 + 0.06 * epoch.metrics["lr"] / 0.1, rel=1e-6)
    expected = [0.1 * math.cos(math.pi / 2 * t / 9) ** 2 for t in (2, 5, 8)]
    assert [epoch.metrics["lr"] for epoch in found] == pytest.approx(expected)


def test_the_radius_of_sam_is_told_and_follows_the_learning_rate():
    small = {**SAME, "limit_train": 192, "limit_test": 20}
    found = fit(Run("sam", {"rho": 0.1, "rho_floor": 0.04}, epochs=3, **small), device="cpu").epochs
    for epoch in found:
        assert epoch.metrics["rho"] == pytest.approx(0.04 + 0.06 * epoch.metrics["lr"] / 0.1, rel=1e-6)
        assert "rho_min" not in epoch.metrics
    assert "rho" not in fit(Run("sam", epochs=1, **small), device="cpu").last.metrics  # it is fixed


def test_the_optimizer_gets_every_setting():
    model, task = DigitsNet(), Classification(Run("sgd"), CPU)
    settings = {"lr": 0.3, "momentum": 0.7, "weight_decay": 0.01}
    run = Run("bsam", {"rho_max": 0.2, "rho_min": 0.1, "passes": 2}, nesterov=True, **settings)
    optimizer = build_train_step(run, task, model, 100).optimizer
    assert isinstance(optimizer, bsam.BSAM)
    assert isinstance(optimizer.base, torch.optim.SGD)
    assert optimizer.passes == 2
    assert optimizer.model is model
    group = optimizer.param_groups[0]
    assert {**settings, "rho_max": 0.2, "rho_min": 0.1, "nesterov": True}.items() <= group.items()
    assert len(group["params"]) == len(list(model.parameters()))
    for base, cls in (("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)):
        around = build_train_step(Run("sam", base=base, **settings), task, model, 100).optimizer.base
        alone = build_train_step(Run("base", base=base, **settings), task, model, 100).optimizer
        for found in (around, alone):
            assert type(found) is cls
            group = found.param_groups[0]
            assert [group[name] for name in ("lr", "betas", "weight_decay")] == [0.3, (0.7, 0.999), 0.01]


def test_methods_learn_what_the_run_knows():
    """RST's seed, AE-SAM's number of steps, SAF's table for all samples and its epochs."""
    back = {"start_epoch": 1, "epochs_back": 1}
    _, rst = trained(Run("rst", epochs=1, seed=9, **SAME))
    _, aesam = trained(Run("aesam", epochs=2, **{**SAME, "batch": 60}))
    _, saf = trained(Run("saf", back, epochs=3, **SAME))
    assert rst.optimizer.seed == 9
    assert aesam.optimizer.total_steps == aesam.optimizer.t == 20
    assert saf.train_step.loss.stamp.shape == (2, 640)
    assert sorted(set(saf.train_step.loss.stamp.flatten().tolist())) == [1, 2]  # every sample, in the last two epochs
    changed, plain = (
        numbers(fit(Run(*method, epochs=2, radius=0.05, limit_train=192, limit_test=20, **SAME), device="cpu"))
        for method in (("saf", {**back, "lam": 3.0}), ("sgd",))
    )
    assert changed[0] == plain[0]  # no second term yet
    assert changed[1] != plain[1]


@pytest.mark.parametrize("method", ["base", *METHODS])
def test_every_method_learns(method):
    small = {"batch": 32, "limit_train": 320, "limit_test": 200, "epochs": 4 if method == "mesa" else 2}
    assert fit(Run(method, ON_DIGITS.get(method, {}), seed=3, **{**SAME, **small}), device="cpu").score > 0.8


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on Arm CPUs without bf16
@pytest.mark.parametrize("method", ["sgd", "bsam"])
def test_bfloat16_runs_the_network_under_autocast_and_learns(method):
    seen = []

    class Looked(Classification):
        def losses(self, outputs, batch):
            seen.append((outputs.dtype, super().losses(outputs, batch).dtype))
            return super().losses(outputs, batch)

    size = {"epochs": 2, "limit_train": 128} if method == "sgd" else {"epochs": 1, "limit_train": 32}
    size |= {"batch": 16, "limit_test": 50}  # slow on CPUs without bf16
    result = fit(Run(method, precision="bf16", **{**SAME, **size}), device="cpu", task=Looked)
    assert set(seen) == {(torch.bfloat16, torch.float32)}
    assert result.score > (0.5 if method == "sgd" else 0.1)


def test_the_network_trains_in_train_mode_and_is_evaluated_in_eval_mode():
    modes = []

    class Looking(nn.Sequential):
        def forward(self, x):
            modes.append((self.training, len(x)))
            return super().forward(x)

    class Looked(Classification):
        def network(self):
            return Looking(super().network())

    fit(Run("sgd", epochs=2, **SAME), device="cpu", task=Looked)
    assert modes == ([(True, 64)] * 10 + [(False, 320), (False, 320), (False, 117)]) * 2


def test_an_unknown_task_is_refused():
    with pytest.raises(bsam.BsamError, match="task must be one of classification, pose; got 'juggling'"):
        fit(Run("sgd", task="juggling"), device="cpu")
