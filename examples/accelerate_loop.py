"""A loop with Accelerate: `backward` of bsam replaces `accelerator.backward(loss)`.

It divides and scales the loss and synchronizes the processes as Accelerate does.
Run: python examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import bsam
from bsam.integrations.accelerate import backward


def main():
    accelerator = Accelerator(gradient_accumulation_steps=4, cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    x = torch.randn(600, 10)
    data = TensorDataset(x, x[:, :3].argmax(1))
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = bsam.BSAM(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5 * 10)
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for epoch in range(5):
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = backward(accelerator, optimizer, lambda: F.cross_entropy(model(inputs), labels))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss).mean().item())
        accelerator.print(f"epoch {epoch + 1}: loss {sum(losses[-len(loader) :]) / len(loader):.4f}")
    return losses, optimizer


if __name__ == "__main__":
    main()
