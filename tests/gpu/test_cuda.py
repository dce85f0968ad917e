"""No host synchronisation, capture in a CUDA graph, half precision with a scaler, and compiled CUDA graphs."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bsam

pytestmark = pytest.mark.gpu

METHODS = {
    "sam": bsam.SAM,
    "sam-following": partial(bsam.SAM, rho=0.1, rho_floor=0.02),
    "asam": bsam.ASAM,
    "gsam": partial(bsam.GSAM, rho_floor=0.01),
    "fisher-sam": bsam.FisherSAM,
    "friendly-sam": bsam.FriendlySAM,
    "pgn": bsam.PGN,
    "gam": bsam.GAM,
    "gam-paper": partial(bsam.GAM, form="paper"),
    "looksam": partial(bsam.LookSAM, k=3),
    "esam": bsam.ESAM,
    "ksam": partial(bsam.KSAM, k=12),
    "msam": partial(bsam.MSAM, rho=0.1),
    "aesam": partial(bsam.AESAM, total_steps=20),
    "aesam-reuse": partial(bsam.AESAM, total_steps=20, alpha=0.2),
    "rst": bsam.RST,
    "functional-sam": bsam.FunctionalSAM,
    "saner": bsam.SANER,
    "vasso": bsam.VaSSO,
    "crsam": bsam.CRSAM,
    "bsam": bsam.BSAM,
    "bsam-2": partial(bsam.BSAM, passes=2),
    "bsam-released": partial(bsam.BSAM, start_from_min=True),
    "bsam-adaptive": partial(bsam.BSAM, rho_max=0.2, rho_min=0.2, adaptive=True),
}
WAITING = dict.fromkeys(
    ("aesam", "aesam-reuse"), "whether there is a second pass is decided on the host, by a number from the device"
)
NOT_IN_ONE_GRAPH = {
    **WAITING,
    "looksam": "whether there is a second pass depends on the step",
    "rst": "its random choice depends on the step",
    "esam": "its random choice depends on the step",
}
BASES = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda params, **options: torch.optim.AdamW(params, lr=1e-3, **options),
}


def network(dtype=torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(256, 10),
    ]
    return nn.Sequential(*layers).to(device="cuda", dtype=dtype)


def batch(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(32, 3, 16, 16, generator=generator).to("cuda", dtype), torch.randint(
        0, 10, (32,), generator=generator
    ).cuda()


def closure_of(optimizer, model, x, y):
    """Return a closure for the mean loss, or for the loss of each chosen sample if the method selects samples."""

    def closure(indices=slice(None)):
        chosen = [t[indices if isinstance(indices, slice) else indices.to(t.device)] for t in (x, y)]
        outputs = model(chosen[0])
        losses = F.cross_entropy(outputs, chosen[1], reduction="none")
        if isinstance(optimizer, bsam.FunctionalSAM):
            return losses.mean(), outputs
        return losses if isinstance(optimizer, (bsam.ESAM, bsam.KSAM)) else losses.mean()

    return closure


@pytest.fixture(params=sorted(METHODS))
def method(request):
    return METHODS[request.param]


def methods_without(left_out):
    return pytest.mark.parametrize(
        "method", [pytest.param(METHODS[name], id=name) for name in sorted(METHODS) if name not in left_out]
    )


@pytest.fixture(params=sorted(BASES))
def base(request):
    return BASES[request.param]


@pytest.fixture(autouse=True)
def _deterministic():
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False


@methods_without(WAITING)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_host_synchronisation_in_a_step(method, base):
    model, (x, y) = network(), batch()
    groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[1:].parameters()}]
    for parameters in (model.parameters(), groups):
        optimizer = method(base(parameters), model)
        closure = closure_of(optimizer, model, x, y)
        optimizer.step(closure)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with pytest.raises(RuntimeError, match="synchronizing"):
                x.sum().item()  # the check itself works
            for _ in range(6):  # both kinds of steps, if a method has two
                optimizer.step(closure)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", sorted(WAITING))
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_these_wait_for_the_device(name):
    """They are left out above for this reason only. An error during a step leaves the weights unchanged."""
    model, (x, y) = network(), batch()
    optimizer = METHODS[name](BASES["sgd"](model.parameters()), model)
    optimizer.step(closure_of(optimizer, model, x, y))
    before = [p.detach().clone() for p in model.parameters()]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            optimizer.step(closure_of(optimizer, model, x, y))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, p.detach()) for a, p in zip(before, model.parameters(), strict=True))


@methods_without(NOT_IN_ONE_GRAPH)
@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True")
def test_a_captured_step_replays_to_the_weights_of_the_eager_step(method, base):
    stream = torch.cuda.Stream()
    options = {"capturable": True} if base is BASES["adamw"] else {}
    with torch.cuda.stream(stream):  # everything captured is on one stream from the start
        model, (x, y) = network(), batch()
        optimizer = method(base(model.parameters(), **options), model)
        for _ in range(3):
            optimizer.step(closure_of(optimizer, model, x, y))
        eager = copy.deepcopy((model, optimizer))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            loss = optimizer.step(closure_of(optimizer, model, x, y))
        for _ in range(5):
            graph.replay()
        twin, twin_optimizer = eager
        for _ in range(5):
            expected = twin_optimizer.step(closure_of(twin_optimizer, twin, x, y))
    torch.cuda.synchronize()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-7)
    for (name, a), (_, b) in zip(model.state_dict().items(), twin.state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, msg=name)
    assert int(model[1].num_batches_tracked) == 8


def test_the_gpu_equals_the_cpu_in_double(method, base):
    ends = []
    for device in ("cpu", "cuda"):
        model, (x, y) = network(torch.float64).to(device), batch(torch.float64)
        x, y = x.to(device), y.to(device)
        optimizer = method(base(model.parameters()), model)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        for _ in range(20):
            optimizer.step(closure_of(optimizer, model, x, y))
            scheduler.step()
        ends.append([p.detach().cpu() for p in model.parameters()])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


def test_single_precision_agrees_with_double_on_the_cpu(method):
    """Single precision uses other kernels: factors stay on the device, and products need no memory. Adam is left out,
    since it would divide rounding errors by rounding errors.
    """
    ends = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        model, (x, y) = network(torch.float64).to(device, dtype), batch(torch.float64)
        x, y = x.to(device, dtype), y.to(device)
        groups = [{"params": model[0].parameters(), "lr": 1e-3}, {"params": model[1:].parameters()}]
        optimizer = method(BASES["sgd"](groups), model)
        for group, scale in zip(optimizer.param_groups, (1.0, 2.0), strict=True):
            group.update({name: scale * value for name, value in group.items() if name.startswith("rho") and value})
        for _ in range(5):
            optimizer.step(closure_of(optimizer, model, x, y))
        ends.append([p.detach().cpu().double() for p in model.parameters()])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=3e-4)


def test_half_precision_with_a_scaler(method, base):
    """After overflows at first, training is as in single precision without a scaler."""
    model, (x, y) = network(), batch()
    optimizer = method(base(model.parameters()), model)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)
    start = [p.detach().clone() for p in model.parameters()]

    losses_of = closure_of(optimizer, model, x, y)

    def closure(*indices):
        with torch.autocast("cuda", dtype=torch.float16):
            return losses_of(*indices)

    skipped = 0
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        losses.append(float(optimizer.backward(closure, scaler=scaler)))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
        if skipped == len(losses):
            assert all(torch.equal(a, p.detach()) for a, p in zip(start, model.parameters(), strict=True))
    assert 0 < skipped < 40
    part = isinstance(
        optimizer, (bsam.ESAM, bsam.KSAM)
    )  # a method that uses a part of the batch lowers the loss of the whole less
    assert losses[-1] < losses[0] * (0.9 if part else 0.8)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    state = optimizer.state_dict()
    kept = [value for entry in state["state"].values() for name, value in entry.items() if name in optimizer.vectors]
    numbers = [group[name] for group in state["param_groups"] for name in optimizer.numbers]
    assert all(torch.isfinite(value).all() for value in kept)
    assert all(math.isfinite(number) for number in numbers)  # no overflow is left in the state


@pytest.mark.parametrize("around", [False, True])
def test_bf16_autocast_sees_the_moved_weights(around):
    model, (x, y) = network(), batch()
    optimizer = bsam.BSAM(BASES["sgd"](model.parameters()), model, rho_max=0.1, rho_min=0.1, rho_min_floor=0.1)
    seen = []

    def closure():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        seen.append(loss.item())
        return loss

    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=around):
        optimizer.backward(closure)
    assert seen[2] < seen[0] < seen[1]


@pytest.mark.filterwarnings("default")  # importing inductor warns
def test_a_model_compiled_with_cuda_graphs():
    """The next pass overwrites the memory of the gradients, which have to be copied."""
    torch._dynamo.reset()
    model, (x, y) = network(), batch()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, mode="reduce-overhead")
    ours = bsam.BSAM(BASES["sgd"](compiled.parameters()), compiled)
    whole = bsam.BSAM(BASES["sgd"](twin.parameters()), twin)
    for _ in range(6):
        loss = ours.step(lambda: F.cross_entropy(compiled(x), y)).clone()
        expected = whole.step(lambda: F.cross_entropy(twin(x), y))
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-4)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
    assert int(model[1].num_batches_tracked) == 6
    torch._dynamo.reset()


def test_a_model_spread_over_two_devices(method):
    class Spread(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(6, 8).double(), nn.Linear(8, 3).double()

        def forward(self, x):
            return self.second(torch.tanh(self.first(x)).to(self.second.weight.device))

    ends = []
    for device in ("cpu", "cuda"):
        model = Spread()
        model.second.to(device)
        torch.manual_seed(1)
        x, y = torch.randn(16, 6, dtype=torch.float64), torch.randint(0, 3, (16,)).to(device)
        optimizer = method(BASES["sgd"](model.parameters()), model)
        for _ in range(5):
            optimizer.step(closure_of(optimizer, model, x, y))
        ends.append([p.detach().cpu() for p in model.parameters()])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_sync_batch_norm_moves_once_a_step(tmp_path):
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model, (x, y) = network(), batch()
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        twin = copy.deepcopy(model)
        optimizer = bsam.BSAM(BASES["sgd"](model.parameters()), model)
        optimizer.backward(lambda: F.cross_entropy(model(x), y))
        twin(x)
        for a, b in zip(model.buffers(), twin.buffers(), strict=True):
            assert torch.equal(a, b)
    finally:
        torch.distributed.destroy_process_group()
