"""Watch sharpness during training: a probe reads it every few steps and does not change the training.

BSAM evaluates all points that the probe needs, so its readings cost no extra pass. With SAM, the probe adds one pass to
the steps that it reads.

Run: python examples/probe_training.py        (the digits need pip install -c constraints.txt '.[train]')
"""

import torch
from torch import nn
from torch.nn import functional as F

import bsam
from bsam.flatness import Probe
from bsam.lab.data import digits


def train(method, probe=None, epochs=6, **radii):
    torch.manual_seed(0)
    batches = digits().train.batches(64)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = method(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model, **radii)
    if probe is not None:
        probe.attach(optimizer)
    for _ in range(epochs):
        for x, y in batches:
            optimizer.step(lambda: F.cross_entropy(model(x), y))
    return model


def main():
    readings = {}
    for method, radii in ((bsam.BSAM, {"rho_max": 0.1, "rho_min": 0.1}), (bsam.SAM, {"rho": 0.1})):
        probe = Probe(every=10)
        train(method, probe, **radii)
        readings[method.__name__] = probe.readings
        print(f"{method.__name__}\nstep    loss    MaxS    MinS    |g|  cos(g, g_min)  extra passes")
        for r in probe.readings:
            print(f"{r.step:4d}  {r.loss:.4f}  {r.max_sharpness:.4f}  {r.min_sharpness:.4f}", end="  ")
            print(f"{r.g_norm:.3f}  {r.cosine:13.3f}  {r.extra_passes:12d}")
    return readings  # bsam.lab.report.figures.flatness_figures.probe_figure draws them


if __name__ == "__main__":
    main()
