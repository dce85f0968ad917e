"""Train a small network on handwritten digits with BSAM: the shortest complete loop.

Run: python examples/minimal.py        (the digits need pip install -c constraints.txt '.[train]')
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import bsam
from bsam.lab.data import digits


def main(epochs=5):
    torch.manual_seed(0)
    data = digits()
    loader = DataLoader(TensorDataset(data.train.x, data.train.y), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))

    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    optimizer = bsam.BSAM(base, model, rho_max=0.05, rho_min=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * len(loader))

    x, y = next(iter(loader))
    optimizer.check(lambda: F.cross_entropy(model(x), y))  # reports silent mistakes; changes nothing

    for epoch in range(epochs):
        model.train()
        for x, y in loader:
            loss = optimizer.step(lambda: F.cross_entropy(model(x), y))  # three passes, then a step of SGD
            scheduler.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(data.test.x).argmax(1) == data.test.y).float().mean().item()
        print(f"epoch {epoch + 1}: loss of the last batch {loss.item():.4f}, test accuracy {accuracy:.3f}")
    return model, accuracy


if __name__ == "__main__":
    main()
