"""A LightningModule that trains with BSAM; the Trainer clips, accumulates and logs as usual.

Run: python examples/lightning_module.py        (needs pip install -c constraints.txt '.[train,integrations]')
"""

from bsam.integrations.lightning import SharpnessAwareMixin  # before lightning, for the sake of torchvision

# isort: split
import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import bsam
from bsam.lab.data import digits


class Classifier(SharpnessAwareMixin, L.LightningModule):  # the mixin first
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
        self.batches = 0

    def training_step(self, batch, batch_idx):  # runs three times per batch: at w and at two points around it
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True)  # of the pass at w
        if not self.extra_pass:  # once per batch
            self.batches += 1
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        base = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        return bsam.BSAM(base, self, rho_max=0.05, rho_min=0.05)


def main(epochs=5):
    torch.manual_seed(0)
    data = digits()
    train = DataLoader(TensorDataset(data.train.x, data.train.y), batch_size=32)
    test = DataLoader(TensorDataset(data.test.x, data.test.y), batch_size=757)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    model = Classifier()
    x, y = data.train.x[:32], data.train.y[:32]
    model.configure_optimizers().check(lambda: F.cross_entropy(model.net(x), y))  # reports silent mistakes
    trainer = L.Trainer(accelerator="cpu", max_epochs=epochs, gradient_clip_val=1.0, accumulate_grad_batches=2, **quiet)
    trainer.fit(model, train, test)
    loss, accuracy = (trainer.callback_metrics[name].item() for name in ("loss", "accuracy"))
    print(f"{trainer.global_step} steps, {model.batches} batches: loss {loss:.4f}, test accuracy {accuracy:.3f}")
    return model, loss, accuracy


if __name__ == "__main__":
    main()
