"""A loop with Fabric: any precision, clipping and micro-batches. `fabric.setup` treats BSAM like any other optimizer.

Run: python examples/fabric_loop.py        (needs pip install -c constraints.txt '.[train,integrations]')
"""

import bsam.integrations.torchvision  # before lightning, for the sake of torchvision

# isort: split
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn import functional as F

import bsam
from bsam.lab.data import digits


def main(epochs=5, precision="32-true"):
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    fabric.launch()
    data = digits()
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    base = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    model, optimizer = fabric.setup(net, bsam.BSAM(base, net, rho_max=0.05, rho_min=0.05))  # built on the plain net
    scaler = getattr(fabric.strategy.precision, "scaler", None)  # with 16-mixed precision

    for epoch in range(epochs):
        for i, (x, y) in enumerate(data.train.batches(32)):

            def closure():
                loss = F.cross_entropy(model(x), y) / 2
                fabric.backward(loss)  # required in mixed precision; otherwise returning the loss is enough
                return loss

            stepping = i % 2 == 1
            with fabric.no_backward_sync(model, enabled=not stepping):
                loss = optimizer.backward(closure, scaler=scaler)
            if stepping:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        fabric.print(f"epoch {epoch + 1}: loss of the last batch {2 * loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        accuracy = (model(data.test.x).argmax(1) == data.test.y).float().mean().item()
    fabric.print(f"{optimizer.t} steps, test accuracy {accuracy:.3f}")
    return net, accuracy


if __name__ == "__main__":
    main()
