"""One of two ranks on gloo, for test_ranks.py: ``python two_ranks.py RANK FOLDER``.

The test compares the results of all cases with a single process on the whole batch.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
import warnings
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import bsam
from bsam.core.tensors import local
from bsam.flatness import Probe
from bsam.lab.quantization import parameter_groups, quantize
from processes import group_of_two

STEPS = 4
QUANTIZED = [("lsq", "bsam"), ("minmax", "looksam")]


def network() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(24, 6, dtype=torch.float64, generator=generator), torch.randint(0, 3, (24,), generator=generator)


METHODS = {
    "sam": partial(bsam.SAM, rho=0.1),
    "bsam": partial(bsam.BSAM, rho_max=0.1, rho_min=0.08),
    "released": partial(bsam.BSAM, rho_max=0.1, rho_min=0.08, start_from_min=True),
    "asam": bsam.ASAM,
    "gsam": partial(bsam.GSAM, rho=0.1),
    "fisher": partial(bsam.FisherSAM, eta=10.0),
    "friendly": partial(bsam.FriendlySAM, rho=0.1),
    "pgn": bsam.PGN,
    "gam": bsam.GAM,
    "gam-paper": partial(bsam.GAM, form="paper"),
    "looksam": partial(bsam.LookSAM, k=3, rho=0.1),
    "msam": partial(bsam.MSAM, rho=0.3),
    "aesam": partial(bsam.AESAM, total_steps=STEPS, rho=0.1),
    "aesam-reuse": partial(bsam.AESAM, total_steps=STEPS, rho=0.1, alpha=0.2),
    "rst": partial(bsam.RST, rho=0.1),
    "esam": partial(bsam.ESAM, gamma=1.0, rho=0.1),  # selects all samples, as a single process does
    "ksam": partial(bsam.KSAM, k=64, rho=0.1),
    "esam-half": partial(bsam.ESAM, rho=0.1),
    "ksam-5": partial(bsam.KSAM, k=5, rho=0.1),
}


def closure(method: str, model: nn.Module, x: torch.Tensor, y: torch.Tensor, factor: float = 1.0):
    """The mean loss times a factor; for methods that select samples, the losses of the selected ones."""
    per_sample = method.startswith(("esam", "ksam"))

    def loss(indices=slice(None)):
        losses = F.cross_entropy(model(x[indices]), y[indices], reduction="none")
        return factor * (losses if per_sample else losses.mean())

    return loss


def build(method: str, model: nn.Module, **options):
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
    return METHODS[method](base, model, **options)


class WithSpares(nn.Module):
    """A network with an unused layer and one that a single rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.spare, self.partial = network(), nn.Linear(2, 2).double(), nn.Linear(6, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.main(x)
        return out + self.partial(x) if dist.get_rank() == 0 else out


def count_reductions():
    """Record the size of every all_reduce that is called from Python."""
    calls: list[int] = []
    reduce = dist.all_reduce

    def counted(tensor, *args, **kwargs):
        calls.append(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    dist.all_reduce = counted
    return calls, lambda: setattr(dist, "all_reduce", reduce)


def ddp(
    method: str, rank: int, *, m_sharpness=False, accumulate=0, bucket_view=False, unused=False, abandon=False
) -> dict:
    module = WithSpares() if unused else network()
    model = DistributedDataParallel(module, gradient_as_bucket_view=bucket_view, find_unused_parameters=unused)
    calls, restore = count_reductions()
    optimizer = build(method, model, m_sharpness=m_sharpness)
    x, y = (t.chunk(2)[rank] for t in batch())

    for _ in range(STEPS):
        if abandon:  # a direction of one rank is discarded, and must not be averaged later
            with model.no_sync():
                optimizer.backward(closure(method, model, x, y))
            optimizer.zero_grad()
            optimizer.backward(closure(method, model, x, y))
            optimizer.step()
        elif accumulate:
            optimizer.zero_grad()
            for i, (a, b) in enumerate(zip(x.chunk(accumulate), y.chunk(accumulate), strict=True)):
                with model.no_sync() if i == 0 else contextlib.nullcontext():
                    optimizer.backward(closure(method, model, a, b, 1 / accumulate))
            optimizer.step()
        else:
            optimizer.step(closure(method, model, x, y))
    restore()
    weights, grads = [p.detach() for p in module.parameters()], [p.grad for p in module.parameters()]
    return {"weights": weights, "grads": grads, "reductions": calls, "memory": memory(optimizer)}


def quantized(scheme: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A quantized network whose input scales are not initialized."""
    model = quantize(network(), 2, 2, scheme=scheme)  # LSQ: the mean decides the second scale, the range the others
    return model, torch.optim.SGD(parameter_groups(model), lr=0.1, momentum=0.9)


def quantized_steps(
    optimizer: bsam.SharpnessAware, model: nn.Module, module: nn.Module, x: torch.Tensor, y: torch.Tensor
) -> dict:
    """Take steps; return the state of the module at the end, and its buffers after every pass."""
    loss, buffers = closure("bsam", model, x, y), []

    def watched() -> torch.Tensor:
        value = loss()
        buffers.append([t.clone() for t in module.buffers()])
        return value

    for _ in range(STEPS):
        optimizer.step(watched)
    return {"state": [t.detach() for t in module.state_dict().values()], "buffers": buffers}


def ddp_quantized(rank: int, scheme: str, method: str) -> dict:
    module, base = quantized(scheme)
    model = DistributedDataParallel(module)
    return quantized_steps(METHODS[method](base, model), model, module, *(t.chunk(2)[rank] for t in batch()))


def memory(optimizer) -> dict:
    """The remembered vectors, as tensors of this rank, and numbers."""
    vectors = [
        {k: local(t) for k, t in entry.items() if k in optimizer.vectors}
        for entry in optimizer.state_dict()["state"].values()
    ]
    return {"vectors": vectors, "numbers": [optimizer.param_groups[0][name] for name in optimizer.numbers]}


def sharded(dtype: torch.dtype = torch.float64) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = network().to(dtype)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


def fsdp(method: str, rank: int, dtype: torch.dtype = torch.float64) -> dict:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model = sharded(dtype)
    optimizer = build(method, model)
    x, y = (t.chunk(2)[rank] for t in batch())
    x = x.to(dtype)
    before = [p.to_local().clone() for p in model.parameters()]
    optimizer.backward(closure(method, model, x, y))
    exact = all(torch.equal(a, p.to_local()) for a, p in zip(before, model.parameters(), strict=True))
    optimizer.zero_grad()
    last = 2 if method in REMEMBERING else 1  # LookSAM: a step that uses its memory, and one that renews it
    for _ in range(STEPS - last):
        optimizer.step(closure(method, model, x, y))
    checks = resumed(method, model, optimizer, x, y, last)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {"weights": list(full.values()), "exact": exact, "memory": memory(optimizer), **checks}


def resumed(method: str, model: nn.Module, optimizer, x: torch.Tensor, y: torch.Tensor, steps: int) -> dict:
    """Take the last steps. Return whether memory is sharded as the parameters are, and a resumed run is identical."""
    saved = copy.deepcopy(optimizer.state_dict())
    pairs = [(saved["state"][i].get(name), p) for name in optimizer.vectors for i, p in enumerate(model.parameters())]
    as_parameters = all(
        t is None or (t.placements, t.shape, t.to_local().shape) == (p.placements, p.shape, p.to_local().shape)
        for t, p in pairs
    )
    twin = sharded(next(model.parameters()).dtype)
    twin.load_state_dict(model.state_dict())
    other = build(method, twin)
    other.load_state_dict(saved)
    for _ in range(steps):
        optimizer.step(closure(method, model, x, y))
        other.step(closure(method, twin, x, y))
    identical = all(
        torch.equal(a.to_local(), b.to_local()) for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    )
    return {"as_parameters": as_parameters, "identical": identical}


def synchronized_decisions(rank: int) -> dict:
    """AE-SAM under no_sync, with a forward pass that waits for the other rank, as SyncBatchNorm does."""
    model = DistributedDataParallel(network())
    optimizer = bsam.AESAM(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5), model, total_steps=12)
    x, y = (t.chunk(2)[rank] for t in batch())
    calls = 0

    def loss(indices):
        nonlocal calls
        calls += 1
        dist.all_reduce(torch.ones(calls))  # gloo raises if the ranks' sizes differ, in different passes
        return F.cross_entropy(model(x[indices]), y[indices])

    for t in range(12):
        with model.no_sync():  # large on one rank, small on the other
            optimizer.backward(lambda: loss(slice(0, 3 + t % 4)) * (3.0 if rank == 0 else 0.2))
        optimizer.backward(lambda: loss(slice(3, None)))
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": [p.detach() for p in model.parameters()], "calls": calls}


SIZES = ((8, 8, 6, 8), (8, 8, 8, 7))  # of the batches of each rank


def on_shares(rank: int) -> dict:
    """The perturbation comes from a share of each rank's batch; batches of other sizes come on one rank at a time."""
    model = DistributedDataParallel(network())
    optimizer = bsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), model, rho=0.1, ascent=0.25)
    x, y = (t.chunk(2)[rank] for t in batch())
    for n in SIZES[rank]:
        optimizer.step(
            lambda chosen=slice(None), n=n: F.cross_entropy(model(x[:n][chosen]), y[:n][chosen], reduction="none")
        )
    return {"weights": [p.detach() for p in model.parameters()]}


def error_of(rank: int, method: str, make) -> dict:
    """The message of a step that raises, and whether the weights are unchanged."""
    model = make()
    x, y = (t.chunk(2)[rank] for t in batch())
    before = [local(p.detach()).clone() for p in model.parameters()]
    try:
        build(method, model).step(closure(method, model, x, y))
        message = ""
    except bsam.BsamError as error:
        message = str(error)
    unchanged = all(torch.equal(a, local(p.detach())) for a, p in zip(before, model.parameters(), strict=True))
    return {"message": message, "unchanged": unchanged}


def probed(method: str, rank: int, *, make, **options) -> dict:
    """The readings of a probe on this rank."""
    model = make()
    optimizer = build(method, model, **options)
    probe = Probe(every=2).attach(optimizer)
    x, y = (t.chunk(2)[rank] for t in batch())
    for _ in range(STEPS):
        optimizer.step(closure(method, model, x, y))
    return {"readings": [asdict(reading) for reading in probe]}


def framework(method: str, rank: int, *, given: bool, compiled: bool = False, discriminator: bool = False) -> dict:
    """The loop of a framework that wraps the model after the optimizer was built, or before it (``given``)."""
    module = network()
    wrapper = None if not given else DistributedDataParallel(module)
    optimizer = build(method, wrapper if given else module)
    wrapper = wrapper or DistributedDataParallel(module)
    called = torch.compile(wrapper, backend=lambda graph, _: graph) if compiled else wrapper
    other = DistributedDataParallel(network()[:1]) if discriminator else None  # a second wrapper in the closure
    x, y = (t.chunk(2)[rank] for t in batch())
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # as AcceleratedOptimizer does
    micro = list(zip(x.chunk(3), y.chunk(3), strict=True))

    def loss(a: torch.Tensor, b: torch.Tensor):
        plain = closure(method, called, a, b, 1 / 3)
        return plain if other is None else lambda *indices: plain(*indices) + 0.0 * other(a).sum()

    for _ in range(STEPS):
        for i, (a, b) in enumerate(micro):
            with contextlib.nullcontext() if i == len(micro) - 1 else wrapper.no_sync():
                optimizer.backward(loss(a, b))
        optimizer.step()
        optimizer.zero_grad()
    weights = [p.detach() for p in module.parameters()]
    return {"weights": weights, "memory": memory(optimizer), "sync": wrapper.require_backward_grad_sync}


def not_wrapped(rank: int) -> dict:
    """Two ranks without DDP: a warning, and no hook stays behind."""
    model = network()
    optimizer = build("bsam", model)
    x, y = batch()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.step(closure("bsam", model, x, y))
    hooks = len(nn.modules.module._global_forward_pre_hooks)
    messages = [str(warning.message) for warning in caught]
    return {"weights": [p.detach() for p in model.parameters()], "hooks": hooks, "warnings": messages}


def inside(rank: int, *, own_backward: bool, accumulate: bool) -> dict:
    """The optimizer runs inside the wrapper's forward, as in Lightning's manual optimization."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = closure("bsam", self.net, x, y)

            def manual_backward() -> torch.Tensor:
                value = loss()
                value.backward()
                return value

            optimizer.backward(manual_backward if own_backward else loss)
            wrapper.require_backward_grad_sync = False  # as Lightning does, so that the reducer waits for nothing
            return torch.zeros(())

    step = Step()
    optimizer, wrapper = build("bsam", step.net), DistributedDataParallel(step)
    x, y = (t.chunk(2)[rank] for t in batch())
    for _ in range(STEPS):
        with wrapper.no_sync() if accumulate else contextlib.nullcontext():
            if accumulate:
                wrapper(x, y)
        wrapper.require_backward_grad_sync = True
        wrapper(x, y)
        wrapper.require_backward_grad_sync = True
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": [p.detach() for p in step.net.parameters()]}


def wrapped_again(rank: int) -> dict:
    """The model is wrapped again, as after unfreezing layers; the optimizer has the bare model."""
    model = network()
    optimizer = build("bsam", model)
    x, y = (t.chunk(2)[rank] for t in batch())
    for _ in range(2):
        wrapper = DistributedDataParallel(model)
        with wrapper.no_sync():
            optimizer.backward(closure("bsam", wrapper, x, y))
        optimizer.backward(closure("bsam", wrapper, x, y))
        optimizer.step()
        optimizer.zero_grad()
        del wrapper
        gc.collect()
    return {"weights": [p.detach() for p in model.parameters()]}


def adversarial(rank: int) -> dict:
    """A step of a generator through a discriminator with a DDP wrapper, whose reducer waits for gradients."""
    torch.manual_seed(rank + 1)
    g = DistributedDataParallel(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).double())
    network = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)).double()
    d = DistributedDataParallel(network, gradient_as_bucket_view=True)
    z = torch.randn(8, 4, dtype=torch.float64)
    optimizer = bsam.BSAM(torch.optim.SGD(g.parameters(), lr=0.1), [g, d])
    d(torch.randn(8, 6, dtype=torch.float64)).square().mean().backward()
    held = [p.grad.clone() for p in d.parameters()]
    for _ in range(2):
        optimizer.step(lambda: d(g(z)).mean())
    kept = all(torch.equal(p.grad, h) for p, h in zip(d.parameters(), held, strict=True))
    d(torch.randn(8, 6, dtype=torch.float64)).square().mean().backward()  # the reducer is ready for its own step
    tracked = int(d.module[1].num_batches_tracked)
    return {"kept": kept, "tracked": tracked, "weights": [p.detach() for p in g.parameters()]}


class Routed(nn.Module):
    """A network with two heads; a batch uses one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = network(), nn.ModuleList(nn.Linear(3, 3).double() for _ in range(2))

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](self.trunk(x).tanh())


def routed(rank: int, method: str, accumulate: bool = False) -> dict:
    """The ranks use different parameters, and swap them in the next step; ``accumulate`` adds a call under no_sync."""
    model = DistributedDataParallel(Routed(), find_unused_parameters=True)
    optimizer = build(method, model)
    x, y = (t.chunk(2)[rank] for t in batch())
    for t in range(STEPS):
        loss = closure(method, lambda x, t=t: model(x, (rank + t) % 2), x, y)
        optimizer.zero_grad()
        if accumulate:
            with model.no_sync():
                optimizer.backward(loss)
        optimizer.backward(loss)
        optimizer.step()
    return {"weights": [p.detach() for p in model.parameters()]}


HEADS = ((0, 1), (0, 0), (1, 1), (0, 0), (1, 0))  # of each rank in each step: in some, no rank uses the other one


def rested(rank: int, method: str, accumulate: bool = False, m_sharpness: bool = False) -> dict:
    """Heads that no rank uses in some steps. All ranks must take the same passes, which wait for each other."""
    model = DistributedDataParallel(Routed(), find_unused_parameters=True)
    optimizer = build(method, model, m_sharpness=m_sharpness)
    x, y = (t.chunk(2)[rank] for t in batch())
    calls = 0

    def network(x, heads):
        nonlocal calls
        calls += 1
        dist.all_reduce(torch.ones(calls))  # gloo raises if the ranks' sizes differ, in different passes
        return model(x, heads[rank])

    for heads in HEADS:
        optimizer.zero_grad()
        loss = closure(method, partial(network, heads=heads), x, y)
        if accumulate:
            with model.no_sync():
                optimizer.backward(loss)
        optimizer.backward(loss)
        optimizer.step()
    return {"weights": [p.detach() for p in model.parameters()], "calls": calls}


def rested_inside(rank: int, method: str) -> dict:
    """The same in the wrapper's forward, where DDP's reducer sees none of the passes."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Routed()

        def forward(self, x: torch.Tensor, y: torch.Tensor, head: int) -> torch.Tensor:
            optimizer.backward(closure(method, lambda x: self.net(x, head), x, y))
            wrapper.require_backward_grad_sync = False
            return torch.zeros(())

    step = Step()
    optimizer, wrapper = build(method, step.net), DistributedDataParallel(step, find_unused_parameters=True)
    x, y = (t.chunk(2)[rank] for t in batch())
    for heads in HEADS:
        wrapper.require_backward_grad_sync = True
        wrapper(x, y, heads[rank])
        wrapper.require_backward_grad_sync = True
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": [p.detach() for p in step.parameters()]}


def wrapped(**options) -> nn.Module:
    return DistributedDataParallel(network(), **options)


def spectral_network() -> nn.Module:
    """A network whose buffers, the vectors of spectral norm, change its output in every pass."""
    net = network()
    nn.utils.parametrizations.spectral_norm(net[2])
    return net


def spectral(rank: int) -> dict:
    model = DistributedDataParallel(spectral_network())
    optimizer = build("bsam", model)
    x, y = (t.chunk(2)[rank] for t in batch())
    for _ in range(STEPS):
        optimizer.step(closure("bsam", model, x, y))
    return {"state": [t.detach() for t in model.module.state_dict().values()]}


def check_findings(rank: int) -> dict:
    """The findings of ``check`` for a closure that calls the wrapper, the network inside, or an unwrapped network."""
    x, y = (t.chunk(2)[rank] for t in batch())
    wrapper, alone = DistributedDataParallel(network()), network()
    optimizer, other = build("bsam", wrapper), build("bsam", alone)
    shards = sharded()
    shards[4].requires_grad_(False)
    before = [p.to_local().clone() for p in shards.parameters()]
    findings = build("bsam", shards).check(closure("bsam", shards, x, y))
    unchanged = all(torch.equal(a, p.to_local()) for a, p in zip(before, shards.parameters(), strict=True))
    return {
        "sharded": (findings, unchanged),
        "right": optimizer.check(closure("bsam", wrapper, x, y)),
        "bypassed": optimizer.check(closure("bsam", wrapper.module, x, y)),
        "not wrapped": other.check(closure("bsam", alone, x, y)),
        "steps": [p.detach() for _ in [optimizer.step(closure("bsam", wrapper, x, y))] for p in wrapper.parameters()],
    }


ALL = sorted(METHODS)
# on sharded parameters: an offset, a metric, memory, numbers, the base's momentum, selected weights and samples
FSDP = ["released", "asam", "looksam", "aesam", "msam", "esam", "ksam-5"]
WRAPPED_LATER = ["bsam", "released", "friendly", "esam-half", "gam-paper"]
REMEMBERING = ["friendly", "looksam", "aesam", "aesam-reuse"]
ROUTED = ["bsam", "gam-paper", "esam"]
RESTED = ["friendly", "looksam", "msam"]
ALONE = ["asam", "esam-half", "ksam-5", *REMEMBERING]
CASES = {
    **{f"ddp-{method}": partial(ddp, method) for method in ALL},
    "ddp-bucket-view": partial(ddp, "bsam", bucket_view=True),
    "ddp-bucket-view-esam": partial(ddp, "esam", bucket_view=True),
    "ddp-accumulate": partial(ddp, "bsam", accumulate=2),
    "ddp-bucket-view-accumulate": partial(ddp, "bsam", accumulate=3, bucket_view=True),
    **{f"ddp-accumulate-{method}": partial(ddp, method, accumulate=2) for method in REMEMBERING},
    "ddp-abandoned": partial(ddp, "bsam", abandon=True),
    "m-sharpness": partial(ddp, "bsam", m_sharpness=True),
    **{f"m-sharpness-{method}": partial(ddp, method, m_sharpness=True) for method in ALONE},
    "m-sharpness-released": partial(ddp, "released", m_sharpness=True),
    "m-sharpness-accumulate": partial(ddp, "bsam", m_sharpness=True, accumulate=2),
    "m-sharpness-unused": partial(ddp, "sam", m_sharpness=True, unused=True),
    **{f"fsdp-{method}": partial(fsdp, method) for method in FSDP},
    "fsdp-half": partial(fsdp, "friendly", dtype=torch.bfloat16),
    "probe-ddp": partial(probed, "bsam", make=wrapped),
    "probe-m-sharpness": partial(probed, "sam", make=wrapped, m_sharpness=True),
    "probe-fsdp": partial(probed, "bsam", make=sharded),
    **{f"{method}-given": partial(framework, method, given=True) for method in WRAPPED_LATER},
    **{f"{method}-found": partial(framework, method, given=False) for method in WRAPPED_LATER},
    "compiled-found": partial(framework, "bsam", given=False, compiled=True),
    "two-wrappers-found": partial(framework, "bsam", given=False, discriminator=True),
    "not-wrapped": not_wrapped,
    "on-shares": on_shares,
    "wrapped-again": wrapped_again,
    "inside-ours": partial(inside, own_backward=False, accumulate=False),
    "inside-own": partial(inside, own_backward=True, accumulate=False),
    "inside-own-accumulate": partial(inside, own_backward=True, accumulate=True),
    **{
        f"quantized-{scheme}-{method}": partial(ddp_quantized, scheme=scheme, method=method)
        for scheme, method in QUANTIZED
    },
    "adversarial": adversarial,
    **{f"routed-{method}": partial(routed, method=method) for method in ROUTED},
    **{f"rested-{method}": partial(rested, method=method) for method in RESTED},
    **{f"rested-inside-{method}": partial(rested_inside, method=method) for method in RESTED},
    "rested-accumulate-msam": partial(rested, method="msam", accumulate=True),
    "rested-m-sharpness-msam": partial(rested, method="msam", m_sharpness=True),
    "routed-accumulate": partial(routed, method="bsam", accumulate=True),
    "spectral": spectral,
    "check": check_findings,
    "decisions": synchronized_decisions,
    "error-fsdp": partial(error_of, method="gam-paper", make=sharded),
    "error-static": partial(error_of, method="esam", make=partial(wrapped, static_graph=True)),
}

if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    with group_of_two(rank, folder):
        torch.save({name: case(rank=rank) for name, case in CASES.items()}, folder / f"{rank}.pt")
