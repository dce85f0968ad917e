"""Warm-up and schedules: torch's schedulers set the learning rate, and BSAM's `rho_min` follows it.

The radius downhill is `rho_min` at the largest learning rate and `rho_min_floor` at learning rate 0. All other radii
are plain values of the parameter groups: to schedule one, set it before the step, as here for `rho_max`.

Run: python examples/warmup_and_schedules.py
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import bsam


def main(steps=60, warmup=10):
    torch.manual_seed(0)
    x = torch.randn(128, 10)
    y = x[:, :3].argmax(1)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))

    base = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = bsam.BSAM(base, model, rho_max=0.1, rho_min=0.1, rho_min_floor=0.01)
    rising = LinearLR(optimizer, start_factor=0.1, total_iters=warmup)
    falling = CosineAnnealingLR(optimizer, T_max=steps - warmup)
    scheduler = SequentialLR(optimizer, [rising, falling], milestones=[warmup])

    history = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["rho_max"] = 0.1 * min(1.0, (step + 1) / warmup)
        lr, radii = scheduler.get_last_lr()[0], (optimizer.radii("rho_max"), optimizer.radii("rho_min"))
        loss = optimizer.step(lambda: F.cross_entropy(model(x), y))
        history.append((lr, *radii, loss.item()))
        scheduler.step()

    print("step      lr  rho_max  rho_min    loss")
    for step in [*range(0, steps, 10), steps - 1]:
        print("{:4d}  {:.4f}   {:.4f}   {:.4f}  {:.4f}".format(step, *history[step]))
    return history


if __name__ == "__main__":
    main()
