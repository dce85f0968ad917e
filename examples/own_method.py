"""Write your own method: a class with `direction`, a few lines of algebra on gradients around the weights.

This one averages the gradients on both sides, uphill and downhill. `L.grad(at=e)` is the gradient of the mini-batch
loss at `w + e`. Batch norm, mixed precision, accumulation, DDP and checkpoints come with the base class.

Run: python examples/own_method.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import bsam


class TwoSided(bsam.SharpnessAware):
    """d = share * grad(w + e) + (1 - share) * grad(w - e), where e = rho g / |g| and g = grad(w)."""

    passes = 3

    def __init__(self, base, model, *, rho=0.05, share=0.5):
        super().__init__(base, model, {"rho": rho})  # a value of the parameter groups, which may differ in it
        self.share = share

    def direction(self, L):
        g = L.grad()
        e = self.epsilon(g, "rho")
        return self.share * L.grad(at=e) + (1 - self.share) * L.grad(at=-e)


def main(steps=100):
    torch.manual_seed(0)
    x = torch.randn(128, 10)
    y = x[:, :3].argmax(1)
    model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = TwoSided(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, rho=0.1, share=0.7)
    losses = [optimizer.step(lambda: F.cross_entropy(model(x), y)).item() for _ in range(steps)]
    print(f"{type(optimizer).__name__}: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {steps} steps")
    return losses


if __name__ == "__main__":
    main()
