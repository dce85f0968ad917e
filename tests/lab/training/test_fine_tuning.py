"""Learning rates per layer, a frozen backbone, and runs on image files with pretrained weights."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bsam
from bsam.lab.config import Run
from bsam.lab.data.arrays import Dataset, Examples
from bsam.lab.models import build
from bsam.lab.tasks.classification import Classification
from bsam.lab.training.machine import DistributedContext
from bsam.lab.training.trainer import Trainer, build_base
from helpers import draw_images

CPU = torch.device("cpu")
RADII = {"rho_max": 0.1, "rho_min": 0.1}
SAME = {"lr": 0.02, "epochs": 2, "batch": 8, "label_smoothing": 0.0, "data": "oxford_pet", "image_size": 16}
STAGES = {"conv1": 0, "bn1": 0, "layer1": 1, "layer2": 2, "layer3": 3, "layer4": 4, "fc": 5}  # of timm:test_resnet


def data_of(classes=3, side=16):
    generator = torch.Generator().manual_seed(3)
    sets = [
        Examples(torch.randint(0, 256, (n, 3, side, side), dtype=torch.uint8, generator=generator), torch.arange(n) % 3)
        for n in (16, 6)
    ]
    return Dataset("noise", classes, sets[0], None, sets[1], (0.4, 0.5, 0.6), (0.2, 0.25, 0.3))


def weights_file(model, path):
    """Save weights that differ from the initial ones, also in batch norm and where timm starts with 0."""
    network = build(model, classes=7, seed=5)
    torch.manual_seed(6)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            module.weight.data.uniform_(0.5, 1.5)
    torch.save(network.state_dict(), path)
    return str(path)


def trainer_of(run):
    return Trainer(run, Classification(run, CPU, data=data_of()), DistributedContext(CPU))


def trained(run):
    """Return the trainer after all epochs, the weights before the first, and the metrics of the last."""
    trainer = trainer_of(run)
    before = {name: t.clone() for name, t in trainer.network.state_dict().items()}
    for number in range(run.epochs):
        metrics = trainer.train_epoch(number)
        trainer.evaluate()
    return trainer, before, metrics


def rates(run):
    """Return the cosine schedule over four steps, two per epoch."""
    return [run.lr * (1 + np.cos(np.pi * step / 4)) / 2 for step in range(4)]


def batches(run):
    for epoch in range(run.epochs):
        order = np.random.default_rng((run.seed, epoch, 0x0DE)).permutation(16)
        yield from torch.from_numpy(order).view(2, 8)


def direction(method, parameters, loss, share):
    """Return the gradient, or the direction of BSAM's Algorithm 1; rho_min is scaled with the learning rate."""

    def gradient(sign=0.0, radius=0.0, along=None):
        start = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for p, v in zip(parameters, along or [], strict=along is not None):
                p.add_(v, alpha=sign * radius)
        grads = torch.autograd.grad(loss(), parameters)
        with torch.no_grad():
            for p, w in zip(parameters, start, strict=True):
                p.copy_(w)
        return grads

    def norm(vectors):
        return torch.cat([v.flatten() for v in vectors]).norm()

    g = gradient()
    if method == "base":
        return g
    unit = [v / norm(g) for v in g]
    g_max, g_min = gradient(1, 0.1, unit), gradient(-1, 0.1 * share, unit)
    ratio = norm(g_max) / norm(g_min)
    return [a + b - ratio * c for a, b, c in zip(g, g_max, g_min, strict=True)]


def trained_by_hand(run, parameters, scales, loss):
    """Train with SGD, momentum and weight decay, and a learning-rate factor per parameter."""
    momentum = [torch.zeros_like(p) for p in parameters]
    for lr, index in zip(rates(run), batches(run), strict=True):
        ds = direction(run.method, parameters, lambda: loss(index), lr / run.lr)
        with torch.no_grad():
            for p, v, d, scale in zip(parameters, momentum, ds, scales, strict=True):
                v.mul_(run.momentum).add_(d + run.weight_decay * p)
                p.sub_(lr * scale * v)


def normalised(x, mean, std):
    return (x.double() / 255 - torch.tensor(mean).view(3, 1, 1)).div(torch.tensor(std).view(3, 1, 1)).float()


DECAY = {name: 0.5 ** (5 - depth) for name, depth in STAGES.items()}
PARTS = [
    ("bsam", "resnet8", {"head_lr": 0.2}, lambda part: 10.0 if part == "linear" else 1.0),
    ("sgd", "timm:test_resnet", {"layer_decay": 0.5}, DECAY.get),
    ("bsam", "timm:test_resnet", {"layer_decay": 0.5, "head_lr": 0.1}, lambda part: {**DECAY, "fc": 5.0}[part]),
]


@pytest.mark.parametrize(("method", "model", "settings", "scale"), PARTS, ids=["head", "layers", "layers and head"])
def test_each_part_has_its_learning_rate(method, model, settings, scale, tmp_path):
    run = Run.of(method, RADII if method == "bsam" else {}, model=model, weight_decay=0.01, **settings, **SAME)
    run = replace(run, weights=weights_file(model, tmp_path / "a.pt"))
    trainer, before, metrics = trained(run)
    network = build(model, classes=3).train()
    network.load_state_dict(before)
    task = trainer.task
    x = normalised(data_of().train.x, task.inputs.mean, task.inputs.std)
    named = dict(network.named_parameters())
    trained_by_hand(
        run,
        list(named.values()),
        [scale(name.partition(".")[0]) for name in named],
        lambda index: F.cross_entropy(network(x[index]), data_of().train.y[index]),
    )
    for name, p in trainer.network.named_parameters():
        way = (named[name] - before[name]).norm()
        assert way > 1e-5
        assert (p - named[name]).norm() < 2e-3 * way, name
    assert metrics["lr"] == pytest.approx(rates(run)[-1])
    if method == "bsam":
        assert metrics["rho_min"] == pytest.approx(0.1 * rates(run)[-1] / run.lr)


def test_rho_min_is_the_same_in_every_group():
    """It follows the run's learning rate, not that of the group."""
    run = Run.of("bsam", RADII, model="timm:test_resnet", head_lr=0.2, layer_decay=0.5, warmup=1, **SAME)
    trainer = trainer_of(run)
    for lr in (0.01, 0.02, 0.005):
        trainer._set_lr(lr)
        groups = trainer.optimizer.param_groups
        assert sorted(float(group["lr"]) / lr for group in groups) == pytest.approx(
            [1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 10]
        )
        assert [float(trainer.optimizer.radius(group, "rho_min")) for group in groups] == pytest.approx([5 * lr] * 6)


@pytest.mark.parametrize("base", ["sgd", "adam", "adamw"])
def test_every_base_optimizer_starts_with_the_learning_rates_of_the_parts(base):
    run = Run.of("base", base=base, decay="all", head_lr=0.3, model="resnet8", **{**SAME, "lr": 0.1})
    network = build("resnet8", classes=3)
    for capturable in (False, True):
        if capturable and base == "sgd":
            continue  # fused SGD with learning rates as tensors needs a GPU
        rest, head = build_base(run, network, capturable).param_groups
        assert (float(rest["lr"]), float(head["lr"])) == pytest.approx((0.1, 0.3))
        assert [p.shape for p in head["params"]] == [(3, 64), (3,)]
        assert len(rest["params"]) + 2 == len(list(network.parameters()))
        assert isinstance(head["lr"], torch.Tensor) == capturable


@pytest.mark.parametrize(("method", "model"), [("bsam", "resnet8"), ("sgd", "timm:test_efficientnet")])
def test_with_a_frozen_backbone_the_head_is_trained_on_fixed_features(method, model, tmp_path):
    """The features use the running statistics of batch norm, which no pass and no evaluation changes."""
    run = Run.of(method, RADII if method == "bsam" else {}, model=model, freeze_backbone=True, head_lr=0.4, **SAME)
    run = replace(run, weights=weights_file(model, tmp_path / "a.pt"))
    trainer, before, _ = trained(run)
    name = {"resnet8": "linear", "timm:test_efficientnet": "classifier"}[model]
    after = trainer.network.state_dict()
    assert all(torch.equal(t, before[key]) for key, t in after.items() if not key.startswith(f"{name}."))
    network = build(model, classes=3).eval()
    network.load_state_dict(before)
    head, features = getattr(network, name), []
    head.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
    with torch.no_grad():
        network(normalised(data_of().train.x, trainer.task.inputs.mean, trainer.task.inputs.std))
    alone = nn.Linear(*reversed(head.weight.shape))
    alone.load_state_dict(head.state_dict())
    parameters = list(alone.parameters())
    y = data_of().train.y
    trained_by_hand(run, parameters, [20.0, 20.0], lambda index: F.cross_entropy(alone(features[0][index]), y[index]))
    for key, p in alone.named_parameters():
        way = (p - before[f"{name}.{key}"]).norm()
        assert way > 1e-3
        assert (after[f"{name}.{key}"] - p).norm() < 1e-3 * way


def test_a_run_on_image_files_continues_bit_for_bit_unless_the_images_changed(tmp_path, runs):
    images = draw_images(tmp_path / "images", {"train": 4, "test": 2})
    pretrained = tmp_path / "pretrained.pt"
    settings = {"model": "timm:test_efficientnet", "image_size": 32, "lr": 1e-3, "head_lr": 0.01, "batch": 6}
    settings |= {"weights": weights_file("timm:test_efficientnet", pretrained), "augment": "crop-flip", "epochs": 2}
    run, whole, stopped = (
        Run.of("bsam", RADII, data=f"folder:{images}", **settings),
        tmp_path / "whole",
        tmp_path / "stop",
    )
    runs.train(run, whole)
    runs.train(run, stopped, stop=1)

    before, image = runs.contents(stopped), images / "train/cat/0.png"
    content = image.read_bytes()
    image.write_bytes((images / "train/dog/0.png").read_bytes())
    with pytest.raises(bsam.BsamError, match="has changed"):
        runs.train(run, stopped)
    assert runs.contents(stopped) == before

    image.write_bytes(content)
    for cache in (images / ".bsam-cache").glob("*.npy"):
        cache.write_bytes(cache.read_bytes()[:-100])
    start = torch.load(pretrained)["conv_stem.weight"]
    pretrained.unlink()  # the checkpoint has all weights
    runs.train(run, stopped)
    assert runs.same(runs.end(whole), runs.end(stopped))
    end = runs.load(whole)["network"]["conv_stem.weight"]
    assert 0 < (end - start).norm() < 0.2 * start.norm()  # training started from these weights

    for name in ("data", "inputs", "weights"):
        assert (stopped / f"{name}.json").read_text() == (whole / f"{name}.json").read_text()
    note = {name: json.loads((whole / f"{name}.json").read_text()) for name in ("data", "inputs", "weights")}
    assert note["data"] == {"split": "folders train and test", "images": {"train": 12, "test": 6}, "left_out": []}
    inputs = {"side": 32, "size": 32, "channels": 3, "in_bytes": True, "interpolation": "bicubic", "crop": 0.95}
    inputs |= {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "class_names": ["cat", "dog", "owl"]}
    assert note["inputs"] == inputs
    assert note["weights"]["source"] == pretrained.name
    assert list(note["weights"]["head_left_out"]) == ["classifier.weight", "classifier.bias"]
