"""A loop like timm's: its loss scaler with adaptive clipping, micro-batches, mixup, a schedule and averaged weights.

Run: python examples/timm_loop.py        (needs pip install -c constraints.txt '.[train,timm]')
"""

from bsam.integrations.timm import ClosureScaler  # before timm: torchvision may be built for another torch

# isort: split
import numpy as np
import timm
import torch
from timm.data import Mixup
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch.nn import functional as F

import bsam
from bsam.lab.data import digits


def main(epochs=2, accum_steps=2):
    torch.manual_seed(0)
    np.random.seed(0)  # for mixup
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"layers": (1, 1, 1, 1), "channels": (8, 16, 16, 16), "in_chans": 1, "num_classes": 10}
    model = timm.create_model("resnet18", drop_path_rate=0.05, **sizes).to(device)
    optimizer = bsam.BSAM(create_optimizer_v2(model, "sgd", lr=0.1, weight_decay=1e-4), model)
    scheduler = CosineLRScheduler(optimizer, 5 * epochs, warmup_t=2, warmup_lr_init=0.05, t_in_epochs=False)
    scaler, ema, mixup = ClosureScaler(device), ModelEmaV3(model, decay=0.8), Mixup(mixup_alpha=0.1, num_classes=10)
    for epoch in range(epochs):
        for i, (x, y) in enumerate(digits().train.batches(64)):
            x, y = mixup(x.to(device), y.to(device))  # outside the closure: once for all passes

            def closure():
                with torch.autocast(device, torch.float16, enabled=device == "cuda"):
                    return F.cross_entropy(model(x), y) / accum_steps

            need_update = (i + 1) % accum_steps == 0
            loss = scaler(closure, optimizer, 0.5, "agc", model.parameters(), need_update=need_update)
            if need_update:
                optimizer.zero_grad()
                ema.update(model, step=optimizer.t)
                scheduler.step_update(optimizer.t)
        print(f"epoch {epoch + 1}: loss of the last batch {accum_steps * loss.item():.4f}")
    return model, ema, optimizer


if __name__ == "__main__":
    main()
