"""The examples run, and their results are those of plain torch; those of frameworks are in tests/integrations."""

from __future__ import annotations

import re
import runpy
import socket
from collections import defaultdict
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_pre_hook

import bsam
from bsam.flatness import Probe
from bsam.lab.data import digits
from example_checks import FRAMEWORKS, first_findings
from processes import Script

EXAMPLES = Path(__file__).parents[2] / "examples"
TASKS = ("segmentation",)  # modules for the commands, not scripts: tests/lab/test_own_tasks.py
FILES = [path for path in sorted(EXAMPLES.glob("*.py")) if path.stem not in TASKS]


@pytest.fixture(autouse=True)
def methods():
    """Remove the methods that an example has added."""
    with mock.patch.dict(bsam.METHODS):
        yield


@pytest.fixture
def example(capsys, monkeypatch):
    """A function that runs ``main`` of an example on the CPU and returns its globals, its result and its output."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(name, **arguments):
        names = runpy.run_path(str(EXAMPLES / f"{name}.py"))
        result = names["main"](**arguments)
        return names, result, capsys.readouterr().out

    return run


def test_every_example_is_tested_and_listed_and_short():
    tests = (Path(__file__), *Path(__file__).parents[1].glob("integrations/test_*.py"))
    tested = {name for test in tests for name in re.findall(r'example\("(\w+)"', test.read_text(encoding="utf-8"))}
    listed = re.findall(r"\| \[(\w+)\.py\]\(\1\.py\) \|", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted([*tested, *TASKS])
    assert sorted(tested) == [path.stem for path in FILES]
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) < 60, path
        assert text.startswith('"""'), path
        assert re.search(rf"\nRun: (python|torchrun --nproc-per-node 2) examples/{path.name}\b", text), path
        assert text.endswith('\n\nif __name__ == "__main__":\n    main()\n'), path


def gradient(model, x, y, at=None):
    """Return the loss and the gradient at ``w``, or at ``w + at``; the weights are restored."""
    params = list(model.parameters())
    before = [p.detach().clone() for p in params]
    with torch.no_grad():
        for p, e in zip(params, at or [], strict=False):
            p += e
    loss = F.cross_entropy(model(x), y)
    gradients = torch.autograd.grad(loss, params)
    with torch.no_grad():
        for p, w in zip(params, before, strict=True):
            p.copy_(w)
    return loss.item(), gradients


def perturbation(gradients, rho):
    return [rho * g / torch.cat([g.flatten() for g in gradients]).norm() for g in gradients]


def train(model, x, y, direction, steps, lr, max_norm=float("inf")):
    """Train with SGD with momentum along a direction; return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for _ in range(steps):
        loss, d = direction(model, x, y)
        losses.append(loss)
        for p, g in zip(model.parameters(), d, strict=True):
            p.grad = g
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return losses


def test_minimal(example):
    calls = []
    with register_module_forward_pre_hook(lambda module, _: calls.append(isinstance(module, nn.Sequential))):
        _, (model, accuracy), out = example("minimal", epochs=2)
    # the check, its step and trials of two radii in two directions; three passes in each of 20 steps; two evaluations
    assert sum(calls) == 2 + 3 + 5 + 3 * 20 + 2
    assert int(model[2].num_batches_tracked) == 20
    test = digits().test
    assert accuracy == pytest.approx(float((model(test.x).argmax(1) == test.y).float().mean()))
    assert accuracy > 0.85
    assert out.splitlines()[-1].endswith(f"test accuracy {accuracy:.3f}")


def test_amp_clipping_accumulation(example):
    """Against SAM on the whole batch in float32, with clipping and without a scaler."""
    names, (losses, norms, skipped), out = example("amp_clipping_accumulation", steps=25)

    def sam(model, x, y):
        loss, g = gradient(model, x, y)
        return loss, gradient(model, x, y, perturbation(g, 0.05))[1]

    def problem():
        torch.manual_seed(0)
        x = torch.randn(256, 20)
        return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3)), x, x[:, :3].argmax(1)

    max_norm = names["MAX_NORM"]
    expected = train(*problem(), sam, len(losses) - skipped, 0.2, max_norm)
    assert skipped >= 1
    assert [not np.isfinite(norm) for norm in norms] == [True] * skipped + [False] * (len(norms) - skipped)
    assert losses[skipped:] == pytest.approx(expected, rel=0.02, abs=1e-3)
    clipped = sum(max_norm < norm < np.inf for norm in norms)
    assert clipped >= 5
    assert f"steps that were clipped: {clipped}\n" in out
    assert train(*problem(), sam, 10, 0.2) != pytest.approx(expected[:10], rel=0.02, abs=1e-3)  # clipping matters


def test_per_group_radii(example):
    _, (model, (x, y), start, moved), out = example("per_group_radii")
    gradients = dict(zip(model.parameters(), gradient(model, x, y)[1], strict=True))
    total = torch.cat([g.flatten() for g in gradients.values()]).norm()
    body, head = (torch.linalg.vector_norm(gradients[layer.weight]) for layer in (model[0][0], model[1]))
    assert moved == pytest.approx([float(0.05 * body / total), float(0.2 * head / total), 0.0], rel=1e-4)
    assert [len(group) for group in start] == [1, 1, 4]
    assert [float(rho) for rho in re.findall(r"rho (\S+)  moved", out)] == [0.05, 0.2, 0.0]
    assert float(out.split()[-1]) < 0.3


def test_warmup_and_schedules(example, monkeypatch):
    """The radii in effect are the lengths of the two perturbations."""
    lengths, original = defaultdict(list), bsam.BSAM.epsilon

    def epsilon(self, v, radius, length=None):
        e = original(self, v, radius, length)
        lengths[radius].append(float(e.norm()))
        return e

    monkeypatch.setattr(bsam.BSAM, "epsilon", epsilon)
    _, history, out = example("warmup_and_schedules")
    steps = np.arange(60)
    rising, falling = 0.1 + 0.9 * steps / 10, (1 + np.cos(np.pi * (steps - 10) / 50)) / 2
    share = np.where(steps < 10, rising, falling)
    lr, rho_max, rho_min, losses = map(list, zip(*history, strict=True))
    assert lr == pytest.approx(0.01 * share, rel=1e-4, abs=1e-9)
    assert lengths["rho_max"] == pytest.approx(rho_max, rel=1e-4)
    assert rho_max == pytest.approx(0.1 * np.minimum(1, (steps + 1) / 10))
    assert lengths["rho_min"] == pytest.approx(rho_min, rel=1e-4)
    assert rho_min == pytest.approx(0.01 + 0.09 * share, rel=1e-4)
    assert losses[-1] < losses[0] / 4
    assert len(out.splitlines()) == 8


def test_own_method(example):
    _, losses, out = example("own_method", steps=30)

    def two_sided(model, x, y):
        loss, g = gradient(model, x, y)
        e = perturbation(g, 0.1)
        up, down = (gradient(model, x, y, at)[1] for at in (e, [-t for t in e]))
        return loss, [0.7 * a + 0.3 * b for a, b in zip(up, down, strict=True)]

    torch.manual_seed(0)
    x = torch.randn(128, 10)
    model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
    assert losses == pytest.approx(train(model, x, x[:, :3].argmax(1), two_sided, 30, 0.1), rel=1e-3)
    assert out.startswith("TwoSided: loss ")


def test_shifted_start(example, tmp_path):
    """Against a plain loop, and SAM where the shift is 0; a run with flags is written to its folder."""
    names, accuracies, out = example("shifted_start", epochs=1)
    assert [line.split("  ")[0] for line in out.splitlines()] == list(accuracies) == list(names["ROWS"])
    x, y = digits().train.batches(64)[0]

    def trained(make, lr=0.05):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
        base = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-2)
        make(model, base, torch.optim.lr_scheduler.CosineAnnealingLR(base, 8))
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    def steps(method, **radii):
        def make(model, base, scheduler):
            optimizer = method(base, model, **radii)
            for _ in range(8):
                optimizer.step(lambda: F.cross_entropy(model(x), y))
                scheduler.step()

        return make

    def plain(model, base, scheduler):
        for _ in range(8):
            g = gradient(model, x, y)[1]
            d = gradient(model, x, y, perturbation(g, 0.1))[1]
            shift = perturbation(g, 0.2 * base.param_groups[0]["lr"] / 0.05)
            for p, e, direction in zip(model.parameters(), shift, d, strict=True):
                p.data -= e
                p.grad = direction
            base.step()
            scheduler.step()

    shifted = trained(steps(names["ShiftedSAM"], rho=0.1, rho_min=0.2))
    torch.testing.assert_close(shifted, trained(plain))
    sam = trained(steps(bsam.SAM, rho=0.1))
    assert torch.equal(trained(steps(names["ShiftedSAM"], rho=0.1, rho_min=0)), sam)
    assert (shifted - sam).norm() > 0.2

    with pytest.raises(SystemExit) as end:
        names["main"](["--method", "shifted_sam", "--epochs", "1", "--batch", "64", "--out", str(tmp_path)])
    assert end.value.code == 0
    assert "rho_min" in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")


def test_gan(example):
    _, (samples, untouched, generator, discriminator), out = example("gan")
    assert untouched
    assert "gradients as they were: True" in out
    assert [int(module[1].num_batches_tracked) for module in (generator, discriminator)] == [600, 600]  # 2 a step
    assert samples.mean(0).tolist() == pytest.approx([2.0, -1.0], abs=0.3)
    assert samples.std(0).tolist() == pytest.approx([0.5, 1.0], abs=0.3)


def test_frozen_weights(example):
    seen = defaultdict(set)

    def note(module, _):
        if isinstance(module, nn.Linear) and not module.weight.requires_grad:
            seen[module].add(module.weight.sum().item())

    with register_module_forward_pre_hook(note):
        _, (start, end, unchanged), out = example("frozen_weights")
    assert [len(sums) for sums in seen.values()] == [1, 1]  # frozen weights are the same in all passes
    assert unchanged
    assert out.endswith("4810 frozen: these are as they were\n")
    assert start < 0.6
    assert end > 0.85


def test_fine_tune(example, monkeypatch):
    """72 images train and the other 18 test, and the head has another learning rate."""
    bases, original = [], torch.optim.SGD
    monkeypatch.setattr(torch.optim, "SGD", lambda *args, **kw: bases.append(original(*args, **kw)) or bases[-1])
    _, (network, accuracy), out = example("fine_tune")
    rest, head = bases[0].param_groups
    assert {id(p) for p in head["params"]} == {id(p) for p in network.fc.parameters()}
    assert len(rest["params"]) + len(head["params"]) == len(list(network.parameters()))
    assert (rest["lr"], head["lr"]) == (0.02, 0.04)
    assert int(network.conv1[1].num_batches_tracked) == 3 * 6  # 72 images in batches of 12, three epochs
    assert accuracy > 0.7
    assert out.splitlines()[-1].endswith(f"test accuracy {accuracy:.3f}")


def test_measure_flatness(example):
    """Against the dense Hessian of the model trained with SAM."""
    _, measured, out = example("measure_flatness")
    model, top, total, near = measured["SAM"]
    x, y = (t.double() if t.is_floating_point() else t for t in (digits().train.x, digits().train.y))
    weights = {name: p.detach().double() for name, p in model.named_parameters()}
    names, shapes = list(weights), [p.shape for p in weights.values()]

    def loss(flat):
        parts = flat.split([shape.numel() for shape in shapes])
        at = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        return F.cross_entropy(torch.func.functional_call(model, at, x), y)

    flat = torch.cat([p.flatten() for p in weights.values()])
    H = torch.func.jacrev(torch.func.grad(loss), chunk_size=121)(flat)
    assert top.values == pytest.approx(torch.linalg.eigvalsh(H).flip(0)[:3].numpy(), rel=1e-3)
    assert abs(total.value - float(H.trace())) < 4 * total.standard_error < 0.5 * total.value
    g = torch.func.grad(loss)(flat)
    assert near.max_sharpness == pytest.approx(float(loss(flat + 0.1 * g / g.norm()) - loss(flat)), rel=1e-2)
    assert top.values[0] < 0.8 * measured["SGD"][1].values[0]
    assert f"SAM: loss {near.loss:.4f}; largest eigenvalues {top.values[0]:.3f}" in out


def test_probe_training(example):
    names, readings, out = example("probe_training")
    assert [r.step for r in readings["BSAM"]] == [r.step for r in readings["SAM"]] == [0, 10, 20, 30, 40, 50]
    assert {r.extra_passes for r in readings["BSAM"]} == {0}
    assert {r.extra_passes for r in readings["SAM"]} == {1}
    assert len(out.splitlines()) == 2 * 8

    model = names["train"](bsam.SAM, epochs=0, rho=0.1)
    x, y = digits().train.batches(64)[0]
    loss, g = gradient(model, x, y)
    e = perturbation(g, 0.1)
    (up, _), (down, _) = (gradient(model, x, y, at) for at in (e, [-t for t in e]))
    for first in (readings["BSAM"][0], readings["SAM"][0]):
        measured = first.loss, first.max_sharpness, first.min_sharpness
        assert measured == pytest.approx((loss, up - loss, loss - down), rel=1e-4)

    with_probe, without = (names["train"](bsam.SAM, probe, epochs=2, rho=0.1) for probe in (Probe(every=3), None))
    for a, b in zip(with_probe.state_dict().values(), without.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_ddp(example, tmp_path):
    """Two processes, with the variables that torchrun sets, against one process on whole batches."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    same = {"TORCHELASTIC_RUN_ID": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    environments = [{"CUDA_VISIBLE_DEVICES": "", "RANK": rank, "LOCAL_RANK": rank, **same} for rank in "01"]
    files = [tmp_path / "0", tmp_path / "1"]
    ranks = [Script(EXAMPLES / "ddp.py", output=file, env=env) for file, env in zip(files, environments, strict=True)]
    codes = [rank.wait(timeout=100) for rank in ranks]
    two, nothing = (file.read_text() for file in files)
    checked = "BSAM.check: nothing found\n"
    assert (codes, nothing) == ([0, 0], checked), two + nothing
    two = two.removeprefix(checked)
    _, _, one = example("ddp")
    note, one = one.replace(checked, "").splitlines()
    assert note.startswith("One process. For two: torchrun")
    numbers = [[float(n) for n in re.findall(r"\d+(?:\.\d+)?(?:e-\d+)?", line)] for line in (one, two)]
    assert [n[0] for n in numbers] == [1, 2]
    assert numbers[1][1:3] == pytest.approx(numbers[0][1:3], rel=1e-4)
    assert numbers[0][1] < 0.3
    assert numbers[0][3] == numbers[1][3] == 0


@pytest.mark.parametrize("path", [path for path in FILES if path.stem not in FRAMEWORKS], ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore")
def test_check_finds_nothing(path, monkeypatch):
    """Neither does it in the examples of frameworks, as tests/integrations shows."""
    assert first_findings(path, monkeypatch) == [[], []]


def test_gpt(example):
    """The AdamW rows are a loop of plain torch; SAM and Functional SAM take half as many steps."""
    names, losses, shown = example("gpt_from_scratch", passes=4, last=1_280)
    assert list(losses) == ["SAM", "FunctionalSAM", "half", "AdamW"]
    assert [int(steps) for steps in re.findall(r": (\d+) steps", shown)] == [2, 2, 2, 4]
    torch.manual_seed(0)
    model = names["GPT"](256)
    text = torch.tensor(list("\n".join(names["topics"][name] for name in sorted(names["topics"])).encode()))
    held_out = text[-1_280:].view(-1, 64)

    def loss_of(rows):
        return F.cross_entropy(model(rows)[:, :-1].reshape(-1, 256), rows[:, 1:].reshape(-1))

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, 4, pct_start=0.1, cycle_momentum=False)
    for _ in range(4):
        starts = torch.randint(len(text) - 1_280 - 64, (32, 1))
        optimizer.zero_grad()
        loss_of(text[:-1_280][starts + torch.arange(64)]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    assert losses["AdamW"] == pytest.approx(loss_of(held_out).item(), abs=1e-5)
    assert len(set(losses.values())) == 4
    again = example("gpt_from_scratch", passes=4, methods=["SAM"], rho=0.0, last=1_280)[1]
    assert again["SAM"] == pytest.approx(losses["half"], abs=1e-6)
    future = torch.randint(0, 256, (1, 64))
    changed = torch.cat([future[:, :40], torch.randint(0, 256, (1, 24))], dim=1)
    assert torch.allclose(model(future)[:, :40], model(changed)[:, :40], atol=1e-5)  # no look ahead
