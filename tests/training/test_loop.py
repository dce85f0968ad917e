import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bsam
from bsam.data.digits import digits
from bsam.flatness.sharpness import sharpness
from bsam.models.digits_net import DigitsNet
from bsam.recipes.demo import TITLES, contenders
from bsam.training import loop
from bsam.training.config import Run
from bsam.training.loop import accuracy, fit, learner_of


@pytest.fixture(scope="module")
def data():
    return digits()


METHODS = [("sgd", {}), ("sam", {"rho": 0.1}), ("bsam", {"rho_max": 0.1, "rho_min": 0.05}), ("bsam", {"rho_max": 0.1, "rho_min": 0.05, "passes": 2})]


def numbers(result):
    return [(epoch.accuracy, epoch.sharpness) for epoch in result.epochs]


@pytest.mark.parametrize(("method", "arguments"), METHODS)
def test_equal_settings_give_equal_numbers_and_the_caller_keeps_his_random_numbers(method, arguments, data):
    run = Run(method, arguments, epochs=2, label_noise=0.4, seed=5, radius=0.05)
    torch.manual_seed(1)
    first, state = fit(run, data), torch.random.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    assert numbers(fit(run, data)) == numbers(first)
    assert numbers(fit(replace(run, seed=6), data)) != numbers(first)


def test_methods_and_their_arguments_matter(data):
    found = [numbers(fit(Run(method, arguments, epochs=1, radius=0.05), data))[0] for method, arguments in METHODS]
    assert len({repr(row) for row in found}) == 4


def test_sgd_equals_a_plain_loop(data):
    """Cosine by its formula, the order of the samples, the flipped labels, batch norm, the last epoch: all from the outside."""
    run = Run("sgd", lr=0.1, momentum=0.8, weight_decay=1e-3, epochs=3, batch=60, label_noise=0.4, seed=7, radius=0.1)
    result = fit(run, data)
    noisy, _ = loop.flip_labels(data.train.y, 0.4, 10, 7)
    torch.manual_seed(7)
    model = DigitsNet()
    order, steps = torch.Generator().manual_seed(7), 0
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    for epoch in range(3):
        model.train()
        permutation = torch.randperm(640, generator=order)
        for i in range(0, 600, 60):  # the last 40 do not fill a batch
            batch = permutation[i : i + 60]
            grads = torch.autograd.grad(F.cross_entropy(model(data.train.x[batch]), noisy[batch]), list(model.parameters()))
            lr = 0.1 * (1 + math.cos(math.pi * steps / 30)) / 2
            with torch.no_grad():
                for p, v, g in zip(model.parameters(), velocity, grads, strict=True):
                    v.mul_(0.8).add_(g + 1e-3 * p)
                    p.sub_(lr * v)
            steps += 1
        model.eval()
        right = (model(data.test.x).argmax(1) == data.test.y).float().mean().item()
        assert result.epochs[epoch].accuracy == pytest.approx(right, abs=2 / 757)
        loss = F.cross_entropy(model(data.train.x), noisy).item()
        assert result.epochs[epoch].sharpness.loss == pytest.approx(loss, rel=1e-3)
    expected = sharpness(model, F.cross_entropy, [(data.train.x, noisy)], rho_max=0.1, rho_min=0.1)
    assert result.last.sharpness.bilateral == pytest.approx(expected.bilateral, rel=1e-2)


def test_held_out_set_is_the_named_one_and_stays_clean(data, monkeypatch):
    seen = []
    monkeypatch.setattr(loop, "accuracy", lambda model, examples: seen.append(examples) or 0.0)
    fit(Run("sgd", epochs=1, label_noise=0.4, held_out="validation"), data)
    fit(Run("sgd", epochs=1, label_noise=0.4, held_out="test"), data)
    assert seen == [data.validation, data.test]
    assert all(torch.equal(a.y, b.y) for a, b in zip((digits().validation, digits().test), seen, strict=True))


def test_no_radius_no_sharpness(data):
    result = fit(Run("sgd", epochs=2), data)
    assert [epoch.sharpness for epoch in result.epochs] == [None, None]
    assert result.last is result.epochs[-1]
    assert 0 < result.seconds_per_step < 1


def test_step_time_is_the_mean_of_an_epochs_steps_alone_and_the_median_of_epochs(data, monkeypatch):
    """Steps may differ (LookSAM's, RST's), and an epoch may be disturbed."""
    first, disturbed, last = [0.0, 1.0] * 8 + [0.0, 2.0] * 2, [0.0, 1.0] * 9 + [0.0, 50.0], [0.0, 1.0] * 10
    ticks = iter(first + disturbed + last)
    monkeypatch.setattr(loop.time, "perf_counter", lambda: next(ticks))
    assert fit(Run("sgd", epochs=3), data).seconds_per_step == 1.2


def trained(run, data, monkeypatch):
    """The result, and the network behind it."""
    made = []
    monkeypatch.setattr(loop, "learner_of", lambda *known: made.append(learner_of(*known)) or made[-1])
    return fit(run, data), made[-1].model


def test_the_top_eigenvalue_is_that_of_the_last_network_on_the_first_samples_labels_as_trained_on(data, monkeypatch):
    run = Run("sam", {"rho": 0.1}, epochs=2, label_noise=0.4, seed=3, curvature=True)
    result, model = trained(run, data, monkeypatch)
    noisy, _ = loop.flip_labels(data.train.y, 0.4, 10, 3)
    model.double().eval()
    names, params = zip(*model.named_parameters(), strict=True)

    def gradient(*weights):
        loss = F.cross_entropy(torch.func.functional_call(model, dict(zip(names, weights, strict=True)), (data.train.x[:256].double(),)), noisy[:256])
        return torch.autograd.grad(loss, weights, create_graph=True)

    v = [torch.randn(p.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) for p in params]
    for _ in range(60):  # power iteration: no Lanczos, no code of ours
        length = sum((t**2).sum() for t in v).sqrt()
        _, v = torch.autograd.functional.vjp(gradient, params, tuple(t / length for t in v))
    assert result.top_eigenvalue == pytest.approx(sum((t**2).sum() for t in v).sqrt().item(), rel=2e-3)
    assert numbers(fit(replace(run, curvature=False), data)) == numbers(result)
    assert fit(replace(run, curvature=False), data).top_eigenvalue is None


def test_the_relief_is_of_the_last_network_on_the_first_samples_labels_as_trained_on(data, monkeypatch):
    run = Run("sgd", epochs=1, label_noise=0.4, seed=3, relief=5)
    result, model = trained(run, data, monkeypatch)
    noisy, _ = loop.flip_labels(data.train.y, 0.4, 10, 3)
    model.eval()
    centre = F.cross_entropy(model(data.train.x[:256]), noisy[:256]).item()
    assert result.relief.axis == (-1.0, -0.5, 0.0, 0.5, 1.0)
    assert [len(row) for row in result.relief.loss] == [5] * 5
    assert result.relief.loss[2][2] == pytest.approx(centre, rel=1e-5)
    assert result.relief.loss[0][0] > 1.1 * centre
    assert result.relief == fit(run, data).relief
    assert fit(replace(run, relief=None), data).relief is None


def test_a_run_that_diverges_has_no_eigenvalue_and_is_a_result(data):
    result = fit(Run("sgd", lr=1e30, epochs=1, curvature=True, relief=3), data)
    assert math.isnan(result.top_eigenvalue)
    assert math.isnan(result.relief.loss[1][1])


def test_each_epoch_is_told_and_may_end_the_run(data):
    told = []

    def tell(epoch):
        told.append(epoch)
        if epoch == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        fit(Run("sgd", epochs=5), data, tell)
    assert told == [1, 2]


def test_accuracy_counts_each_example_once(data):
    class Fixed(nn.Module):
        def forward(self, x):
            return F.one_hot(torch.zeros(len(x), dtype=torch.int64), 10)

    assert accuracy(Fixed(), data.test) == int((data.test.y == 0).sum()) / 757


def test_optimizer_gets_every_setting():
    model = DigitsNet()
    run = Run("bsam", {"rho_max": 0.2, "rho_min": 0.1, "passes": 2}, lr=0.3, momentum=0.7, weight_decay=0.01)
    optimizer = learner_of(run, model, 640, 100).optimizer
    assert isinstance(optimizer, bsam.BSAM)
    assert optimizer.passes == 2
    assert optimizer.model is model
    group = optimizer.param_groups[0]
    assert [group[name] for name in ("lr", "momentum", "weight_decay", "rho_max", "rho_min")] == [0.3, 0.7, 0.01, 0.2, 0.1]
    assert len(group["params"]) == len(list(model.parameters()))


def test_methods_learn_what_the_run_knows(data, monkeypatch):
    """Coins from the run's seed, AE-SAM's whole length, SAF's table for all samples and its epochs."""
    made = []
    monkeypatch.setattr(loop, "learner_of", lambda *known: made.append(learner_of(*known)) or made[-1])
    fit(Run("rst", epochs=1, seed=9), data)
    fit(Run("aesam", epochs=2, batch=60), data)
    fit(Run("saf", {"start_epoch": 1, "epochs_back": 1}, epochs=3), data)
    rst, aesam, saf = made
    assert rst.optimizer.seed == 9
    assert aesam.optimizer.total_steps == aesam.optimizer.t == 20
    assert saf.loss.stamp.shape == (2, 640)
    assert sorted(set(saf.loss.stamp.flatten().tolist())) == [1, 2]  # every sample was noted in the last two epochs
    changed = fit(Run("saf", {"start_epoch": 1, "epochs_back": 1, "lam": 3.0}, epochs=3, radius=0.05), data)
    assert numbers(changed)[0] == numbers(fit(Run("sgd", epochs=3, radius=0.05), data))[0]  # no second term yet
    assert numbers(changed)[1] != numbers(fit(Run("sgd", epochs=3, radius=0.05), data))[1]


@pytest.mark.parametrize("name", TITLES)
def test_any_method_of_the_demo_learns_and_repeats_itself(name, data):
    (contender,) = contenders([name])
    run = replace(contender.candidates[-1], weight_decay=5e-4, epochs=4, seed=3, radius=0.05)
    first = fit(run, data)
    assert first.last.accuracy > 0.8
    assert numbers(fit(run, data)) == numbers(first)


def test_run_refuses_what_cannot_be():
    with pytest.raises(bsam.Refusal, match=r"method must be one of sgd, sam, .*bsam"):
        Run("adam")
    with pytest.raises(bsam.Refusal, match="sgd takes no arguments"):
        Run("sgd", {"rho": 0.1})
    with pytest.raises(bsam.Refusal, match="epochs"):
        Run("sgd", epochs=0)
