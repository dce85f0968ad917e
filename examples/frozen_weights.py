"""Fine-tune a few weights of a network, as LoRA does: the others are frozen, and neither perturbed nor changed.

A network is trained on digits, then adapted to mirrored digits through a low-rank update of each linear layer.

Run: python examples/frozen_weights.py        (the digits need pip install -c constraints.txt '.[train]')
"""

import torch
from torch import nn
from torch.nn import functional as F

import bsam
from bsam.lab.data import digits


class LowRank(nn.Module):  # a frozen linear layer plus the trainable update B A, which is 0 at the start
    def __init__(self, linear, rank=4):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.B = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x):
        return self.linear(x) + x @ self.A.T @ self.B.T


def accuracy(model, x, y):
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


def main(steps=100):
    torch.manual_seed(0)
    data = digits()
    x, y, test_x, test_y = data.train.x, data.train.y, data.test.x, data.test.y
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = bsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, rho=0.05)
    for _ in range(steps):
        optimizer.step(lambda: F.cross_entropy(model(x), y))
    optimizer.zero_grad()

    model[1], model[3] = LowRank(model[1]), LowRank(model[3])
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = bsam.SAM(torch.optim.AdamW(trainable, lr=1e-2), model, rho=0.05)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    before, start = [p.clone() for p in frozen], accuracy(model, test_x.flip(-1), test_y)
    for _ in range(steps):
        optimizer.step(lambda: F.cross_entropy(model(x.flip(-1)), y))
    end = accuracy(model, test_x.flip(-1), test_y)
    unchanged = all(torch.equal(a, b) and b.grad is None for a, b in zip(before, frozen, strict=True))
    print(f"mirrored digits, test accuracy: {start:.3f} -> {end:.3f}")
    print(f"{sum(p.numel() for p in trainable)} weights trained, {sum(p.numel() for p in frozen)} frozen: ", end="")
    print("these are as they were" if unchanged else "these have changed")
    return start, end, unchanged


if __name__ == "__main__":
    main()
