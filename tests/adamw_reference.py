"""AdamW with SAM, written by hand in float64, and the same steps by the laboratory."""

from __future__ import annotations

import copy
import functools
import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.func import functional_call

from bsam.lab.config import Run
from bsam.lab.models import build
from bsam.lab.training.graphs import CapturedSteps
from bsam.lab.training.machine import side_stream
from bsam.lab.training.trainer import build_run_step

STEPS, BATCH = 12, 6
SETTINGS = {"base": "adamw", "lr": 3e-3, "weight_decay": 0.3, "decay": "weights", "clip_norm": 4.0, "warmup": 1}
SETTINGS |= {"epochs": 6, "batch": BATCH, "base_arguments": {"betas": [0.8, 0.95], "eps": 1e-4}}
RUNS = {
    "adamw": Run.of("base", **SETTINGS),
    "sam": Run.of("sam", {"rho": 0.2}, **SETTINGS),
    "sam, warm-up": Run.of("sam", {"rho": 0.2}, rho_warmup=2, **SETTINGS),
}


def problem(device="cpu"):
    """Return a vision transformer in float64, and the batches of all steps."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # the initial weights are the same with any default
    network = build("vit-nano", image_size=8, seed=0).double().to(device)
    torch.set_default_dtype(default)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, BATCH, 1, 8, 8, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 10, (STEPS, BATCH), generator=generator)
    return network, list(zip(x.to(device), y.to(device), strict=True))


def rate(run: Run, step: int) -> float:
    """Linear warm-up over the first of six epochs with two steps each, then half a cosine to 0."""
    warm = STEPS // run.epochs
    return run.lr * (step + 1) / warm if step < warm else run.lr * 0.5 * (
        1 + math.cos(math.pi * (step - warm) / (STEPS - warm))
    )  # fmt: skip


@functools.cache
def by_hand(run: Run, device="cpu"):
    """Return the weights after all steps, and the number of steps in which the direction was clipped."""
    network, batches = problem(device)
    w = {name: p.detach().clone() for name, p in network.named_parameters()}
    m, v = ({name: torch.zeros_like(p) for name, p in w.items()} for _ in range(2))
    decayed = {name for name, p in w.items() if p.ndim > 1 and name not in ("cls_token", "pos_embed")}
    (b1, b2), eps = run.base_arguments["betas"], run.base_arguments["eps"]
    clipped = 0

    def gradient(at, x, y):
        leaves = {name: p.clone().requires_grad_() for name, p in at.items()}
        F.cross_entropy(functional_call(network, leaves, (x,)), y).backward()
        return {name: p.grad for name, p in leaves.items()}

    def norm_of(g):
        return math.sqrt(sum(float(t.square().sum()) for t in g.values()))

    for t, (x, y) in enumerate(batches):
        g, lr = gradient(w, x, y), rate(run, t)
        if run.method == "sam":
            warm = run.rho_warmup * STEPS / run.epochs
            rho = run.arguments["rho"] * (min(1.0, (t + 1) / warm) if warm else 1.0)
            norm = norm_of(g)
            g = gradient({name: p + rho * g[name] / norm for name, p in w.items()}, x, y)
        factor = min(1.0, run.clip_norm / (norm_of(g) + 1e-6))
        clipped += factor < 1
        for name, p in w.items():
            direction = factor * g[name]
            m[name] = b1 * m[name] + (1 - b1) * direction
            v[name] = b2 * v[name] + (1 - b2) * direction**2
            if name in decayed:
                p *= 1 - lr * run.weight_decay
            p -= lr * (m[name] / (1 - b1 ** (t + 1))) / ((v[name] / (1 - b2 ** (t + 1))).sqrt() + eps)
    return w, clipped


def by_the_laboratory(run: Run, device="cpu", captured: bool = False):
    """Return the weights after all steps, and the object that took them."""
    network, batches = problem(device)

    def losses(outputs, batch):
        return F.cross_entropy(outputs, batch[1], reduction="none")

    task = SimpleNamespace(samples=STEPS // run.epochs * BATCH, classes=10, smoothing=0.0, batch_losses=losses)
    with side_stream(torch.device(device)):
        network = copy.deepcopy(network)
        step = build_run_step(run, task, network, STEPS, capturable=captured)
        take = CapturedSteps(step) if captured else step.step
        for t, (x, y) in enumerate(batches):
            for group in step.optimizer.param_groups:
                lr = run.learning_rate(t, STEPS // run.epochs)
                if captured:
                    group["lr"].fill_(lr)
                else:
                    group["lr"] = lr
            take(x, y)
    return dict(network.named_parameters()), take


def apart(ours, theirs) -> float:
    """Return the largest difference between two sets of weights."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).detach().abs().max()) for name in ours)
