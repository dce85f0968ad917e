"""Learning rates of parts, a frozen backbone, and runs on image files with pretrained weights."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bsam
from bsam.data.examples import Dataset, Examples
from bsam.models import build
from bsam.tasks.classification import Classification
from bsam.training.config import Run
from bsam.training.distributed import DistributedContext
from bsam.training.optimizers import build_base
from bsam.training.trainer import Trainer
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
    """Weights whose batch norm is not as it begins, and which need not be 0 where timm begins with 0."""
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
    """The trainer after all epochs, its weights before the first, and the metrics."""
    trainer = trainer_of(run)
    before = {name: t.clone() for name, t in trainer.network.state_dict().items()}
    return trainer, before, [trainer.train_epoch(number) for number in range(run.epochs)]


def rates(run):
    """The cosine from lr to 0 over four steps, two an epoch."""
    return [run.lr * (1 + np.cos(np.pi * step / 4)) / 2 for step in range(4)]


def batches(run):
    for epoch in range(run.epochs):
        order = np.random.default_rng((run.seed, epoch, 0x0DE)).permutation(16)
        yield from torch.from_numpy(order).view(2, 8)


def direction(method, parameters, loss, share):
    """The gradient, or BSAM's Algorithm 1, with one norm over all parameters; rho_min has the share of the lr."""

    def gradient(sign=0.0, radius=0.0, along=None):
        start = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for p, v in zip(parameters, along or [], strict=along is not None):
                p.add_(v, alpha=sign * radius)
        found = torch.autograd.grad(loss(), parameters)
        with torch.no_grad():
            for p, w in zip(parameters, start, strict=True):
                p.copy_(w)
        return found

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
    """SGD with momentum and weight decay, each parameter with the learning rate of the step times its factor."""
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
PARTS = {
    "head of ours": ("resnet8", {"head_lr": 0.2}, lambda part: 10.0 if part == "linear" else 1.0),
    "layers": ("timm:test_resnet", {"layer_decay": 0.5}, DECAY.get),
    "layers and head": (
        "timm:test_resnet",
        {"layer_decay": 0.5, "head_lr": 0.1},
        lambda part: {**DECAY, "fc": 5.0}[part],
    ),
}


@pytest.mark.parametrize("method", ["sgd", "bsam"])
@pytest.mark.parametrize(("model", "settings", "scale"), PARTS.values(), ids=PARTS)
def test_each_part_has_its_learning_rate(model, settings, scale, method, tmp_path):
    run = Run(method, RADII if method == "bsam" else {}, model=model, weight_decay=0.01, **settings, **SAME)
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
    assert metrics[-1]["lr"] == pytest.approx(rates(run)[-1])
    if method == "bsam":
        assert metrics[-1]["rho_min"] == pytest.approx(0.1 * rates(run)[-1] / run.lr)


def test_the_radius_downhill_is_that_of_the_run_in_every_group():
    """Also while the learning rate rises: it is not lr times the factor that counts, but lr."""
    run = Run("bsam", RADII, model="timm:test_resnet", head_lr=0.2, layer_decay=0.5, warmup=1, **SAME)
    trainer = trainer_of(run)
    for lr in (0.01, 0.02, 0.005):
        trainer._set_lr(lr)
        groups = trainer.optimizer.param_groups
        assert sorted(float(group["lr"]) / lr for group in groups) == pytest.approx(
            [1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 10]
        )
        assert [float(trainer.optimizer.radius(group, "rho_min")) for group in groups] == pytest.approx([5 * lr] * 6)
        trainer.optimizer.radius(groups[0], "rho_min")


@pytest.mark.parametrize("base", ["sgd", "adam", "adamw"])
def test_every_base_optimizer_begins_with_the_learning_rates_of_the_parts(base):
    run = Run("base", base=base, head_lr=0.3, model="resnet8", **{**SAME, "lr": 0.1})
    network = build("resnet8", classes=3)
    for capturable in (False, True):
        if capturable and base == "sgd":
            continue  # fused SGD with learning rates as tensors needs a GPU
        rest, own = build_base(run, network, capturable).param_groups
        assert (float(rest["lr"]), float(own["lr"])) == pytest.approx((0.1, 0.3))
        assert [p.shape for p in own["params"]] == [(3, 64), (3,)]
        assert len(rest["params"]) + 2 == len(list(network.parameters()))
        assert isinstance(own["lr"], torch.Tensor) == capturable


@pytest.mark.parametrize("method", ["sgd", "bsam"])
@pytest.mark.parametrize("model", ["resnet8", "timm:test_efficientnet"])
def test_a_frozen_backbone_is_the_training_of_the_head_on_its_features(model, method, tmp_path):
    """Features of running statistics: a pass that took those of the batch, or moved them, would have others."""
    run = Run(method, RADII if method == "bsam" else {}, model=model, freeze_backbone=True, head_lr=0.4, **SAME)
    run = replace(run, weights=weights_file(model, tmp_path / "a.pt"))
    trainer, before, _ = trained(run)
    name = {"resnet8": "linear", "timm:test_efficientnet": "classifier"}[model]
    after = trainer.network.state_dict()
    assert all(torch.equal(t, before[key]) for key, t in after.items() if not key.startswith(f"{name}."))
    network = build(model, classes=3).eval()
    network.load_state_dict(before)
    head, features = getattr(network, name), []
    head.register_forward_pre_hook(lambda _, given: features.append(given[0]))
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


def test_evaluation_and_the_next_epoch_leave_a_frozen_backbone_frozen(tmp_path):
    run = Run("sam", model="resnet8", freeze_backbone=True, **SAME)
    trainer = trainer_of(replace(run, weights=weights_file("resnet8", tmp_path / "a.pt")))
    before = {name: t.clone() for name, t in trainer.network.state_dict().items()}
    for number in range(2):
        trainer.train_epoch(number)
        trainer.evaluate()
    changed = {name for name, t in trainer.network.state_dict().items() if not torch.equal(t, before[name])}
    assert changed == {"linear.weight", "linear.bias"}


FOLDER = {"model": "timm:test_efficientnet", "image_size": 32, "lr": 1e-3, "head_lr": 0.01, "batch": 6, "epochs": 3}


def folder_run(tmp_path, **settings):
    images = draw_images(tmp_path / "images", {"train": 4, "test": 2})
    weights = weights_file("timm:test_efficientnet", tmp_path / "pretrained.pt")
    return Run("bsam", RADII, data=f"folder:{images}", weights=weights, **{**FOLDER, **settings})


def test_a_run_on_image_files_goes_on_bit_for_bit(tmp_path, runs):
    run = folder_run(tmp_path, augment="crop-flip")
    runs.train(run, tmp_path / "whole")
    runs.train(run, tmp_path / "halves", stop=1)
    (cache,) = (tmp_path / "images/.bsam-cache").glob("*.npy")
    cache.write_bytes(cache.read_bytes()[:-100])
    start = torch.load(tmp_path / "pretrained.pt")["conv_stem.weight"]
    (tmp_path / "pretrained.pt").unlink()  # the checkpoint has all weights
    runs.train(run, tmp_path / "halves")
    assert runs.same(runs.end(tmp_path / "whole"), runs.end(tmp_path / "halves"))
    for name in ("data", "inputs", "weights"):
        assert (tmp_path / f"halves/{name}.json").read_text() == (tmp_path / f"whole/{name}.json").read_text()
    end = runs.load(tmp_path / "whole")["network"]["conv_stem.weight"]
    assert 0 < (end - start).norm() < 0.2 * start.norm()  # it began with these weights


def test_a_run_does_not_go_on_with_other_images(tmp_path, runs):
    run = folder_run(tmp_path)
    runs.train(run, tmp_path / "run", stop=1)
    before = runs.contents(tmp_path / "run")
    image = tmp_path / "images/train/cat/0.png"
    image.write_bytes((tmp_path / "images/train/dog/0.png").read_bytes())
    with pytest.raises(bsam.BsamError, match="the data has changed since the run in"):
        runs.train(run, tmp_path / "run")
    assert runs.contents(tmp_path / "run") == before


def test_what_a_run_on_image_files_notes(tmp_path, runs):
    run = folder_run(tmp_path, epochs=1)
    runs.train(run, tmp_path / "run")
    note = {name: json.loads((tmp_path / f"run/{name}.json").read_text()) for name in ("data", "inputs", "weights")}
    assert note["data"] == {"split": "folders train and test", "images": {"train": 12, "test": 6}, "left_out": []}
    assert note["inputs"] == {
        "side": 32,
        "size": 32,
        "channels": 3,
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "interpolation": "bicubic",
        "crop": 0.95,
        "class_names": ["cat", "dog", "owl"],
        "in_bytes": True,
    }
    assert note["weights"]["source"] == Path(run.weights).name
    assert list(note["weights"]["head_left_out"]) == ["classifier.weight", "classifier.bias"]
