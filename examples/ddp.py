"""Distributed data parallel: each process takes its share of every batch, and all of them take the same step.

Give the optimizer the DDP wrapper. The gradient of each pass is averaged over the processes, so the step is that of
one process on the whole batch. With `m_sharpness=True` each process perturbs along its own gradient instead.

Run: torchrun --nproc-per-node 2 examples/ddp.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import bsam


def main(epochs=3, batch=64):
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if use_cuda else torch.device("cpu")
    if dist.is_torchelastic_launched():
        dist.init_process_group("nccl" if use_cuda else "gloo")
    else:
        print("One process. For two: torchrun --nproc-per-node 2 examples/ddp.py")
        dist.init_process_group("nccl" if use_cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)  # the same data and the same weights in all processes
        x = torch.randn(640, 10)
        dataset = TensorDataset(x, x[:, :3].argmax(1))
        sampler = DistributedSampler(dataset)
        loader = DataLoader(dataset, batch_size=batch // dist.get_world_size(), sampler=sampler)
        model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3)).to(device)
        model = DistributedDataParallel(model, device_ids=[device] if use_cuda else None)
        optimizer = bsam.BSAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)

        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for inputs, labels in loader:
                inputs, labels = inputs.to(device), labels.to(device)
                loss = optimizer.step(lambda: F.cross_entropy(model(inputs), labels))  # of this process's share
        dist.all_reduce(loss)  # the sum over processes
        loss /= dist.get_world_size()
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        top, low = weights.clone(), weights.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX)
        dist.all_reduce(low, dist.ReduceOp.MIN)
        if dist.get_rank() == 0:
            print(f"{dist.get_world_size()} process(es): loss of the last batch {loss.item():.5f}", end=", ")
            print(f"norm of the weights {weights.norm().item():.5f}", end=", ")
            print(f"largest difference between processes {(top - low).max().item():g}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
