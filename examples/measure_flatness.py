"""Measure how flat the minimum of your own model is: eigenvalues, trace, sharpness, here after SGD and after SAM.

`bsam.flatness` needs a model, a loss that is a mean over samples, and batches that are the same each time. MaxS, the
rise of the loss along its gradient, also grows with the remaining gradient: compare it after convergence.

Run: python examples/measure_flatness.py        (the digits need pip install -c constraints.txt '.[train]')
"""

import torch
from torch import nn
from torch.nn import functional as F

import bsam
from bsam.flatness import HessianOperator, sharpness, top_eigenvalues, trace
from bsam.lab.data import digits


class MyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x.flatten(1))))


def train(batches, rho, epochs=20):
    torch.manual_seed(0)
    model = MyModel()
    optimizer = bsam.SAM(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model, rho=rho)
    for _ in range(epochs):
        for x, y in batches:
            optimizer.step(lambda: F.cross_entropy(model(x), y))
    return model


def main():
    data = digits()
    batches = data.train.batches(320)  # or a DataLoader without shuffling and augmentation
    measured = {}
    for name, rho in (("SGD", 0.0), ("SAM", 0.2)):  # with radius 0, SAM is its base optimizer
        model = train(data.train.batches(64), rho)
        H = HessianOperator(model, F.cross_entropy, batches)
        with H.linearized():  # computes the part that all products share once
            top, total = top_eigenvalues(H, k=3), trace(H, seed=0)
        near = sharpness(model, F.cross_entropy, batches, rho_max=0.1, rho_min=0.1)
        print(f"{name}: loss {near.loss:.4f}; largest eigenvalues {', '.join(f'{v:.3f}' for v in top.values)}")
        print(f"     trace {total.value:.2f}, 95 % interval {total.interval[0]:.2f} to {total.interval[1]:.2f}", end="")
        print(f"; MaxS at 0.1: {near.max_sharpness:.5f}")
        measured[name] = model, top, total, near
    return measured


if __name__ == "__main__":
    main()
