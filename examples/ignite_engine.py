"""An Engine of Ignite with a custom update function: clipping, micro-batches, a schedule, metrics.

Run: python examples/ignite_engine.py        (needs pip install -c constraints.txt '.[train,integrations]')
"""

import torch
from ignite.engine import Engine, Events
from ignite.handlers import CosineAnnealingScheduler
from ignite.metrics import Accuracy, Average
from torch import nn
from torch.nn import functional as F

import bsam
from bsam.lab.data import digits


def sharpness_aware_step(model, optimizer, scaler, max_norm=1.0, accumulate=1):
    def update(engine, batch):
        model.train()
        x, y = batch
        outputs = []

        def closure():
            y_pred = model(x)
            outputs.append(y_pred.detach())
            return F.cross_entropy(y_pred, y) / accumulate

        if (engine.state.iteration - 1) % accumulate == 0:
            optimizer.zero_grad()
        loss = optimizer.backward(closure, scaler=scaler)
        if engine.state.iteration % accumulate == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()
        return {"loss": loss.item() * accumulate, "y_pred": outputs[0], "y": y}  # all from the first pass

    return update


def main(epochs=3):
    torch.manual_seed(0)
    data = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = bsam.BSAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3), model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)  # enable it for float16
    trainer = Engine(sharpness_aware_step(model, optimizer, scaler, accumulate=2))
    lr = CosineAnnealingScheduler(optimizer, "lr", 0.1, 0.01, cycle_size=20 * epochs)
    trainer.add_event_handler(Events.ITERATION_STARTED, lr)
    Accuracy().attach(trainer, "accuracy")  # uses y_pred and y, which the update function returns
    Average(lambda output: output["loss"]).attach(trainer, "loss")
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: print(trainer.state.epoch, trainer.state.metrics))
    trainer.run(data.train.batches(32), max_epochs=epochs)
    return model, optimizer, trainer.state


if __name__ == "__main__":
    main()
