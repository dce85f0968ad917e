"""Two processes of Lightning and Fabric on gloo; tests/integrations/test_framework_ranks.py compares their weights."""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import os
import warnings
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import bsam
from bsam.common.timm_import import import_torchvision
from bsam.integrations.lightning import SharpnessAwareMixin
from lightning_training import EPOCHS, Batches
from processes import fork_ranks, group_of_two

METHODS = {
    "bsam": partial(bsam.BSAM, rho_max=0.2, rho_min=0.15),
    # four of six steps have one pass, which Lightning ran before: the closure does not call the wrapper
    "rst": partial(bsam.RST, rho=0.2, p=0.5, seed=4),
    "friendly": partial(bsam.FriendlySAM, rho=0.2),
}


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()


def build(method: str, net: nn.Module) -> bsam.SharpnessAware:
    return METHODS[method](torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9), net)


def plain(method: str, net: nn.Module, data: Batches, accumulate: int = 1) -> list[torch.Tensor]:
    """Train in a plain loop; ``net`` may be a DDP wrapper."""
    optimizer = build(method, net)
    for _ in range(EPOCHS):
        for i, (x, y) in enumerate(data):
            last = (i + 1) % accumulate == 0 or i + 1 == len(data)
            with contextlib.nullcontext() if last else net.no_sync():
                optimizer.backward(lambda: F.cross_entropy(net(x), y) / accumulate)
            if last:
                nn.utils.clip_grad_norm_(net.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()
    return [p.detach() for p in net.parameters()]


def rank_of_two(rank: int, folder: Path) -> None:
    """Train all cases and save their weights."""
    import lightning
    from lightning.fabric.strategies import DDPStrategy as FabricDDP
    from lightning.pytorch.strategies import DDPStrategy

    class Net(SharpnessAwareMixin, lightning.LightningModule):
        def __init__(self, method: str, manual: bool) -> None:
            super().__init__()
            self.net, self.method, self.automatic_optimization = network(), method, not manual

        def training_step(self, batch, batch_idx):
            def closure():
                return F.cross_entropy(self.net(batch[0]), batch[1])

            if not self.automatic_optimization:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                loss = optimizer.backward(closure)
                self.clip_gradients(optimizer, gradient_clip_val=0.3)
                optimizer.step()
                return loss
            loss = closure()
            self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return build(self.method, self)

    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)

    def fit(method: str, *, manual: bool = False, accumulate: int = 1, **ddp) -> list[torch.Tensor]:
        module = Net(method, manual)
        clip = {} if manual else {"gradient_clip_val": 0.3, "accumulate_grad_batches": accumulate}
        trainer = lightning.Trainer(
            accelerator="cpu", devices=2, strategy=DDPStrategy(**ddp), max_epochs=EPOCHS, **quiet, **clip
        )
        trainer.fit(module, Batches(rank=rank))
        return [p.detach() for p in module.net.parameters()]

    def with_fabric(method: str, accumulate: int) -> list[torch.Tensor]:
        fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=FabricDDP())
        fabric.launch()
        net = network()
        model, optimizer = fabric.setup(net, build(method, net))
        data = Batches(rank=rank)
        for _ in range(EPOCHS):
            for i, (x, y) in enumerate(data):
                last = (i + 1) % accumulate == 0 or i + 1 == len(data)
                with fabric.no_backward_sync(model, enabled=not last):
                    optimizer.backward(lambda: F.cross_entropy(model(x), y) / accumulate)
                if last:
                    fabric.clip_gradients(model, optimizer, max_norm=0.3)
                    optimizer.step()
                    optimizer.zero_grad()
        return [p.detach() for p in net.parameters()]

    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": "2"}  # both processes already run
    warnings.filterwarnings("error", "torch.distributed has")  # no wrapper found
    cases = {
        "bsam": fit("bsam"),
        "unused": fit("bsam", find_unused_parameters=True),
        "manual": fit("bsam", manual=True),
        "fabric": with_fabric("bsam", 1),
        "fabric accumulating": with_fabric("bsam", 2),
    }
    for method in METHODS:
        cases[f"{method} accumulating"] = fit(method, accumulate=2)
        cases[f"{method} accumulating, plain"] = plain(
            method, DistributedDataParallel(network()), Batches(rank=rank), 2
        )
    torch.save(copy.deepcopy(cases), folder / f"{rank}.pt")


def rank_in_group(rank: int, folder: Path) -> None:
    with group_of_two(rank, folder):
        rank_of_two(rank, folder)


def both_ranks(folder: Path) -> None:
    """Import the frameworks once, and fork into two processes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_torchvision()
        importlib.import_module("lightning.pytorch")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    fork_ranks(rank_in_group, folder)
