import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bsam.lab.config import Run
from bsam.lab.data import DATASETS, digits
from bsam.lab.data.arrays import flip_labels
from bsam.lab.data.augment import Augment
from bsam.lab.models import build
from bsam.lab.tasks import classification
from bsam.lab.tasks.classification import Classification
from bsam.lab.training import Machine, fit
from bsam.lab.training.run_dir import RunDir
from bsam.lab.training.trainer import build_run_step

CPU = torch.device("cpu")
ON_DIGITS = {"lr": 0.1, "batch": 64, "label_smoothing": 0.0}


def spread_targets(y, classes, others):
    """The distribution that label smoothing means, written out: every other class has its share of ``others``."""
    target = torch.full((len(y), classes), others / (classes - 1))
    target[torch.arange(len(y)), y] = 1 - others
    return target


def smoothed(logits, y, others):
    return -(spread_targets(y, logits.shape[1], others) * logits.log_softmax(1)).sum(1)


def by_hand(image, draws, i, mean, std):
    """One image, padded, cropped, perhaps mirrored, normalised, perhaps with a hole, as chance decided for its place in
    the training set.
    """
    row, column, _, step, top, left = draws[i].tolist()
    padded = torch.zeros(3, 40, 40)
    padded[:, 4:36, 4:36] = image / 255
    column -= 31 if step == -1 else 0
    crop = padded[:, row : row + 32, column : column + 32]
    crop = crop.flip(2) if step == -1 else crop
    crop = (crop - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    crop[:, max(top, 0) : max(top + 16, 0), max(left, 0) : max(left + 16, 0)] = 0
    return crop


def test_sgd_equals_a_plain_loop(small_cifar):
    """The order of the samples, their augmentation, smoothing, flipped labels, the cosine, momentum, batch norm, the
    last epoch: all from the outside.
    """
    run = Run.of(
        "sgd", model="resnet8", data="cifar10", momentum=0.8, epochs=2, batch=32, label_noise=0.2, seed=7, warmup=1 / 3
    )
    result = fit(run, machine=Machine("cpu", data_dir=small_cifar))
    data = DATASETS["cifar10"].load(small_cifar)
    noisy, _ = flip_labels(data.train.y, 0.2, 10, 7)
    model = build("resnet8", 10, 3, seed=7)
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    t = 0
    for epoch in range(2):
        model.train()
        draws = Augment().draws(100, seed=7, epoch=epoch, side=32)
        order = np.random.default_rng((7, epoch, 0x0DE)).permutation(100)
        losses = []
        for i in range(0, 96, 32):  # the last 4 do not fill a batch
            chosen = order[i : i + 32].tolist()
            x = torch.stack([by_hand(data.train.x[j], draws, j, data.mean, data.std) for j in chosen])
            loss = smoothed(model(x), noisy[chosen], 0.1).mean()
            grads = torch.autograd.grad(loss, list(model.parameters()))
            lr = 0.05 if t == 0 else 0.05 * math.cos(math.pi / 2 * (t - 1) / 5) ** 2
            with torch.no_grad():
                for p, v, g in zip(model.parameters(), velocity, grads, strict=True):
                    v.mul_(0.8).add_(g + 1e-3 * p)
                    p.sub_(lr * v)
            losses.append(loss.item())
            t += 1
        found = result.epochs[epoch].metrics
        assert found["train_loss"] == pytest.approx(sum(losses) / 3, rel=1e-4)
        assert found["lr"] == pytest.approx(lr, rel=1e-12)
        model.eval()
        with torch.no_grad():
            test = (data.test.x / 255 - torch.tensor(data.mean).view(3, 1, 1)) / torch.tensor(data.std).view(3, 1, 1)
            logits = model(test)
        assert found["test_loss"] == pytest.approx(F.cross_entropy(logits, data.test.y).item(), rel=1e-3)
        assert found["test_accuracy"] == pytest.approx(
            (logits.argmax(1) == data.test.y).float().mean().item(), abs=1.01 / 30
        )
    assert (result.last.metrics["epoch"], result.score) == (2, found["test_accuracy"])


@pytest.mark.parametrize(("data", "classes"), [("cifar10", 10), ("cifar100", 100)])
@pytest.mark.parametrize("method", ["sgd", "saf", "mesa"])
def test_each_other_class_gets_its_share_of_the_smoothing(data, classes, method, small_cifar):
    """By the distribution written out; and, as log-likelihoods are linear in the targets, the targets can be read off
    the losses of one-hot logits.
    """
    run = Run.of(method, model="resnet8", data=data, label_smoothing=0.1)
    task = Classification(run, CPU, small_cifar)
    network = task.network()
    step = build_run_step(run, task, network, 10)
    torch.manual_seed(0)
    x, y, index = task.batch(torch.arange(12))
    with torch.no_grad():
        losses, logits = step.evaluate(x, y, index), network.train()(x)
    assert torch.allclose(losses, smoothed(logits, y, 0.1), rtol=1e-4)
    if method == "sgd":
        scale = 50.0
        eye = scale * torch.eye(classes)
        of_class = (
            torch.stack([task.losses(row[None], y[:1]) for row in eye]).flatten().double()
        )  # = log Z - scale * target
        log_z = math.log(math.exp(scale) + classes - 1)
        targets = (log_z - of_class) / scale
        assert torch.allclose(targets.float(), spread_targets(y[:1], classes, 0.1)[0], atol=1e-6)


def labels(task):
    return torch.cat([y for _, y in task.examples()])


def test_label_noise_flips_exactly_its_share_by_seed_and_no_label_of_the_test_set():
    true = digits().train.y
    found = {}
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    before = Classification(Run("sgd"), CPU).evaluate(network)
    for share, seed, count in ((0.0, 0, 0), (0.25, 0, 144), (0.25, 1, 144), (0.4, 0, 230)):  # nine of ten are wrong
        task = Classification(Run.of("sgd", label_noise=share, seed=seed), CPU)
        found[share, seed] = labels(task)
        wrong = (found[share, seed] != true).nonzero().flatten().tolist()
        assert len(wrong) == count
        notes = {"flipped": wrong, "labels": {"wrong": count / 640}}
        assert task.notes() == (notes if share else {})
        assert torch.equal(task.batch(torch.arange(640))[1], found[share, seed])
        assert before.items() <= task.evaluate(network).items()
    assert torch.equal(found[0.25, 0], labels(Classification(Run.of("sgd", label_noise=0.25, seed=0), CPU)))
    assert not torch.equal(found[0.25, 0], found[0.25, 1])
    other = labels(Classification(Run.of("sgd", label_noise=0.25, noise_labels="other"), CPU))
    assert int((other != true).sum()) == 160


def test_flipped_labels_are_noted_by_their_place_in_the_data_set(evenly):
    """Of which the run sees some."""
    task, data = Classification(Run.of("sgd", label_noise=0.3, seed=4, limit_train=200), CPU), digits().train
    chosen = evenly(data.y, 200)
    noisy, places = flip_labels(data.y[chosen], 0.3, 10, 4)
    assert torch.equal(labels(task), noisy)
    assert task.notes()["flipped"] == [chosen[place] for place in places.tolist()]


def test_limits_take_from_all_classes_alike(evenly):
    task = Classification(Run("sgd", limit_train=70, limit_test=33), CPU)
    assert task.samples == 70
    (x, y), *_ = task.examples()
    chosen = evenly(digits().train.y, 70)
    assert torch.equal(x, digits().train.x[chosen])
    assert torch.equal(y, digits().train.y[chosen])
    (first, _), *rest = task.examples(limit=12)
    assert (len(first), rest) == (12, [])
    zeros = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    nn.init.zeros_(zeros[1].weight)
    zeros[1].bias.data = torch.eye(10)[3]
    assert task.evaluate(zeros)["test_accuracy"] == int((digits().test.y[evenly(digits().test.y, 33)] == 3).sum()) / 33


def test_evaluation_counts_each_example_once_whatever_the_size_of_the_batches(monkeypatch):
    class Fixed(nn.Module):
        def forward(self, x):
            return F.one_hot(torch.zeros(len(x), dtype=torch.int64), 10)

    for size in (1, 100, 320, 1000):
        monkeypatch.setattr(classification, "SMALL_IMAGE_BATCHES", {"cpu": size})
        found = Classification(Run("sgd"), CPU).evaluate(Fixed())
        assert found["test_accuracy"] == int((digits().test.y == 0).sum()) / 757


def test_memorised_is_the_share_of_the_flipped_labels_that_the_network_predicts(tmp_path, monkeypatch):
    """By hand, image by image, not augmented; with many flipped labels, of every second, third ... one."""
    monkeypatch.setattr(classification, "MEMORISED_SAMPLES", 50)
    run = Run.of("sgd", epochs=4, label_noise=0.4, limit_train=256, seed=3, augment="crop-flip", **ON_DIGITS)
    found = fit(run, tmp_path, Machine("cpu")).last.metrics["memorised"]
    network = RunDir(tmp_path).load_into(build("digits_net")).eval()
    train = DATASETS["digits"].load().train.some(256)
    noisy, _ = flip_labels(train.y, 0.4, 10, 3)
    flipped = [i for i in range(256) if noisy[i] != train.y[i]]
    assert len(flipped) == 92
    counted = flipped[::2]
    right = sum(int(network(train.x[i][None]).argmax()) == int(noisy[i]) for i in counted)
    assert 0 < right < len(counted)
    assert found == right / len(counted)
    assert RunDir(tmp_path).metrics()[-1]["memorised"] == found
    assert "memorised" not in Classification(run.changed(label_noise=0.0), CPU).evaluate(network)


def test_held_out_set_is_the_named_one():
    network = Classification(Run("sgd"), CPU).network().eval()
    for name, examples in (("validation", digits().validation), ("test", digits().test)):
        found = Classification(Run.of("sgd", eval_split=name, label_noise=0.4), CPU).evaluate(network)
        expected = F.cross_entropy(network(examples.x), examples.y).item()
        assert found[f"{name}_loss"] == pytest.approx(expected, rel=1e-5)
        assert list(found) == [f"{name}_loss", f"{name}_accuracy", "memorised"]


def test_augmentation_is_the_data_sets_own_unless_another_is_asked_for(small_cifar):
    index = torch.arange(100)
    plain, own = (
        Classification(Run("sgd", model="resnet8", data="cifar10", augment=name), CPU, small_cifar)
        for name in ("none", None)
    )
    assert torch.equal(plain.batch(index)[0], plain.examples()[0][0])
    first = own.batch(index)[0]
    holes = (first == 0).all(1).flatten(1).sum(1)
    assert 20 < int((holes > 30).sum()) < 80
    own.begin_epoch(1)
    assert not torch.equal(own.batch(index)[0], first)
    own.begin_epoch(0)
    assert torch.equal(own.batch(index)[0], first)
    assert torch.equal(own.batch(index[40:50])[0], first[40:50])


def test_the_fingerprint_is_of_every_pixel_label_and_their_order_and_not_of_the_noise():
    data = digits()
    n = len(data.train)
    pixel, label = data.train.x.clone(), data.train.y.clone()
    pixel[-1, 0, 7, 7] += 1e-3
    label[0] = (label[0] + 1) % 10
    backwards = torch.arange(n - 1, -1, -1)
    sets = {
        "same": data,
        "pixel": replace(data, train=replace(data.train, x=pixel)),
        "label": replace(data, train=replace(data.train, y=label)),
        "order": replace(data, train=replace(data.train, x=data.train.x[backwards], y=data.train.y[backwards])),
        "test": replace(data, test=replace(data.test, x=data.test.x + 1)),
    }
    found = {name: Classification(Run("sgd"), CPU, data=own).fingerprint() for name, own in sets.items()}
    assert len(set(found.values())) == len(sets)
    assert Classification(Run.of("sgd", label_noise=0.4, seed=3), CPU).fingerprint() == found["same"]
