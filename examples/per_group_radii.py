"""Radii per parameter group: a large one for the head, a small one for the body, none for biases and norm layers.

Set the radius of a group next to its learning rate. The perturbation follows the whole gradient: the weights of group k
move by `rho_k |g_k| / |g|`.

Run: python examples/per_group_radii.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import bsam


def main(steps=20):
    torch.manual_seed(0)
    x = torch.randn(128, 10)
    y = x[:, :3].argmax(1)
    body = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU())
    head = nn.Linear(32, 3)
    model = nn.Sequential(body, head)

    vectors = [p for p in model.parameters() if p.ndim == 1]  # biases, and weights of norm layers
    groups = [
        {"params": [p for p in body.parameters() if p.ndim > 1], "rho": 0.05},
        {"params": [p for p in head.parameters() if p.ndim > 1], "rho": 0.2, "lr": 0.05},
        {"params": vectors, "rho": 0.0, "weight_decay": 0.0},
    ]
    base = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=1e-3)
    optimizer = bsam.SAM(base, model, rho=0.1)  # for groups without a radius

    for _ in range(steps):
        loss = optimizer.step(lambda: F.cross_entropy(model(x), y))

    # How far does each group move between the first and the second pass of a step?
    start = [[p.detach().clone() for p in group["params"]] for group in optimizer.param_groups]
    moved = []

    def closure():
        for group, before in zip(optimizer.param_groups, start, strict=True):
            pairs = zip(group["params"], before, strict=True)
            moved.append(torch.cat([(p.detach() - p0).flatten() for p, p0 in pairs]).norm().item())
        return F.cross_entropy(model(x), y)

    optimizer.backward(closure)
    moved = moved[len(groups) :]  # in the second pass; in the first, nothing has moved
    for name, group, distance in zip(("body", "head", "vectors"), optimizer.param_groups, moved, strict=True):
        print(f"{name:8} rho {group['rho']:.2f}  moved by {distance:.4f}")
    print(f"loss after {steps} steps: {loss.item():.4f}")
    return model, (x, y), start, moved


if __name__ == "__main__":
    main()
