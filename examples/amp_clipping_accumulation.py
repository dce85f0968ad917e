"""Mixed precision with GradScaler, gradient clipping and accumulation over micro-batches, in one loop.

`optimizer.backward` replaces `loss.backward()`; the rest is torch's usual recipe. The closure yields one loss per
micro-batch: they share one perturbation, and the step is that of the whole batch. (Several calls of `backward` before
one `step` also accumulate, but then each micro-batch has its own perturbation.) With bfloat16, leave out the scaler.

Run: python examples/amp_clipping_accumulation.py        (on a GPU if there is one)
"""

import torch
from torch import nn
from torch.nn import functional as F

import bsam

MAX_NORM = 0.3


def main(steps=40, micro_batches=4):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(256, 20).to(device)
    y = x[:, :3].argmax(1)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3)).to(device)

    optimizer = bsam.SAM(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), model, rho=0.05)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**24)  # too large on purpose: the first steps are skipped

    def closure():
        for part, labels in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
            with torch.autocast(device, dtype=torch.float16):
                yield F.cross_entropy(model(part), labels)  # the average of these is the loss

    losses, norms, skipped = [], [], 0
    for _ in range(steps):
        loss = optimizer.backward(closure, scaler=scaler)  # adds SAM's direction, scaled, to p.grad
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scale = scaler.get_scale()
        scaler.step(optimizer)  # skips the step if a pass overflowed
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(norm.item())
        skipped += scaler.get_scale() < scale
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {skipped} of {steps} steps skipped, scale {scaler.get_scale():g}")
    print(f"steps that were clipped: {sum(MAX_NORM < norm < float('inf') for norm in norms)}")
    return losses, norms, skipped


if __name__ == "__main__":
    main()
