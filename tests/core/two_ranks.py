"""One rank of a two-process run on gloo; started by test_ranks.py, which compares what it saves with one process on the whole batch.

python two_ranks.py RANK FOLDER
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import bsam

STEPS = 5


def network() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(24, 6, dtype=torch.float64, generator=generator), torch.randint(0, 3, (24,), generator=generator)


METHODS = {
    "sam": lambda base, model, **own: bsam.SAM(base, model, rho=0.1, **own),
    "bsam": lambda base, model, **own: bsam.BSAM(base, model, rho_max=0.1, rho_min=0.08, **own),
    "bsam2": lambda base, model, **own: bsam.BSAM(base, model, rho_max=0.1, rho_min=0.08, passes=2, **own),
    "released": lambda base, model, **own: bsam.BSAM(base, model, rho_max=0.1, rho_min=0.08, start_from_min=True, **own),
}


def build(method: str, model: nn.Module, **own):
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
    return METHODS[method](base, model, **own)


class WithSpares(nn.Module):
    """A network with a layer that nobody uses and one that a single rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.spare, self.partial = network(), nn.Linear(2, 2).double(), nn.Linear(6, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.main(x)
        return out + self.partial(x) if dist.get_rank() == 0 else out


def count_reductions():
    """Every all_reduce that is called from Python: a direction's, and those of the bucket hook below."""
    calls: list[int] = []
    reduce = dist.all_reduce

    def counted(tensor, *args, **kwargs):
        calls.append(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    dist.all_reduce = counted
    return calls, lambda: setattr(dist, "all_reduce", reduce)


def ddp(method: str, rank: int, *, m_sharpness=False, accumulate=0, bucket_view=False, unused=False, abandon=False) -> dict:
    module = WithSpares() if unused else network()
    model = DistributedDataParallel(module, gradient_as_bucket_view=bucket_view, find_unused_parameters=unused)
    reduced: list[int] = []
    model.register_comm_hook(reduced, lambda state, bucket: state.append(1) or bucket_average(bucket))
    calls, restore = count_reductions()
    optimizer = build(method, model, m_sharpness=m_sharpness)
    x, y = (t.chunk(2)[rank] for t in batch())

    def loss(x, y):
        return F.cross_entropy(model(x), y)

    for _ in range(STEPS):
        if abandon:  # what was left on its rank is thrown away, and must not be averaged later
            with model.no_sync():
                optimizer.backward(lambda: loss(x, y))
            optimizer.zero_grad()
            optimizer.backward(lambda: loss(x, y))
            optimizer.step()
        elif accumulate:
            optimizer.zero_grad()
            for i, (a, b) in enumerate(zip(x.chunk(accumulate), y.chunk(accumulate), strict=True)):
                with model.no_sync() if i == 0 else contextlib.nullcontext():
                    optimizer.backward(lambda: loss(a, b) / accumulate)
            optimizer.step()
        else:
            optimizer.step(lambda: loss(x, y))
    restore()
    weights, grads = [p.detach() for p in module.parameters()], [p.grad for p in module.parameters()]
    return {"weights": weights, "grads": grads, "buckets": len(reduced), "reductions": calls}


def bucket_average(bucket):
    tensor = bucket.buffer().div_(2)
    return dist.all_reduce(tensor, async_op=True).get_future().then(lambda f: f.value()[0])


def fsdp(method: str, rank: int) -> dict:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = build(method, model)
    x, y = (t.chunk(2)[rank] for t in batch())
    before = [p.to_local().clone() for p in model.parameters()]
    optimizer.backward(lambda: F.cross_entropy(model(x), y))
    exact = all(torch.equal(a, p.to_local()) for a, p in zip(before, model.parameters(), strict=True))
    optimizer.zero_grad()
    for _ in range(STEPS):
        optimizer.step(lambda: F.cross_entropy(model(x), y))
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {"weights": list(full.values()), "exact": exact}


CASES = {
    "ddp-sam": lambda rank: ddp("sam", rank),
    "ddp-bsam": lambda rank: ddp("bsam", rank),
    "ddp-bsam2": lambda rank: ddp("bsam2", rank),
    "ddp-released": lambda rank: ddp("released", rank),
    "ddp-bucket-view": lambda rank: ddp("bsam", rank, bucket_view=True),
    "ddp-accumulate": lambda rank: ddp("bsam", rank, accumulate=2),
    "ddp-bucket-view-accumulate": lambda rank: ddp("bsam", rank, accumulate=3, bucket_view=True),
    "ddp-abandoned": lambda rank: ddp("bsam", rank, abandon=True),
    "m-sharpness": lambda rank: ddp("bsam", rank, m_sharpness=True),
    "m-sharpness-accumulate": lambda rank: ddp("bsam", rank, m_sharpness=True, accumulate=2),
    "m-sharpness-unused": lambda rank: ddp("sam", rank, m_sharpness=True, unused=True),
    "fsdp-sam": lambda rank: fsdp("sam", rank),
    "fsdp-bsam": lambda rank: fsdp("bsam", rank),
    "fsdp-bsam2": lambda rank: fsdp("bsam2", rank),
}

if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    torch.save({case: run(rank) for case, run in CASES.items()}, folder / f"{rank}.pt")
    dist.destroy_process_group()
