"""Distributed data parallel: each process gets a share of every batch, and all processes take the same step.

Gradients of each pass are averaged over the processes; with `m_sharpness=True`, each process perturbs along its own.
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


def train(device, epochs=3, batch=64):
    torch.manual_seed(0)  # the same data and the same weights in all processes
    x = torch.randn(640, 10)
    dataset = TensorDataset(x, x[:, :3].argmax(1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=batch // dist.get_world_size(), sampler=sampler)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3)).to(device)
    model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = bsam.BSAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            inputs, labels = inputs.to(device), labels.to(device)
            if optimizer.t == 0:
                optimizer.check(lambda: F.cross_entropy(model(inputs), labels))  # in all processes
            loss = optimizer.step(lambda: F.cross_entropy(model(inputs), labels))  # of the share of this process
    return loss, torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def main():
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
    alone = {} if dist.is_torchelastic_launched() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if alone:
        print("One process. For two: torchrun --nproc-per-node 2 examples/ddp.py")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **alone)
    loss, weights = train(device)  # a function, so that the DDP wrapper is freed before the process group
    dist.all_reduce(loss)  # the sum over processes
    first = weights.clone()
    dist.broadcast(first, 0)
    difference = (weights - first).abs().max()
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        n, norm = dist.get_world_size(), weights.norm().item()
        print(f"{n} process(es): loss of the last batch {loss.item() / n:.5f}, norm of the weights {norm:.5f}", end="")
        print(f", largest difference between processes {difference.item():g}")
    dist.barrier()  # wait until all processes are done
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
