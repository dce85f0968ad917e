"""Passes side by side, on two streams of a captured step, equal passes in turn."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bsam
from bsam.lab.config import Run
from bsam.lab.data.arrays import Dataset, Examples
from bsam.lab.tasks.classification import Classification
from bsam.lab.training.graphs import CapturedSteps
from bsam.lab.training.machine import DistributedContext, side_stream
from bsam.lab.training.trainer import Trainer, TrainStep

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _deterministic():
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False


class Network(nn.Module):
    """Batch norm, dropout, noise and spectral norm: statistics, draws, and a buffer that the output depends on."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Flatten(),
            nn.utils.parametrizations.spectral_norm(nn.Linear(16 * 64, 32)),
            nn.ReLU(),
            nn.Linear(32, 10),
        )

    def forward(self, x):
        return self.layers(x + 0.1 * torch.randn_like(x))


def batch():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(48, 3, 8, 8, generator=generator)
    return x.cuda(), torch.randint(0, 10, (48,), generator=generator).cuda()


def whole(model, x, y):
    return F.cross_entropy(model(x), y, label_smoothing=0.1)


def by_micro_batches(model, x, y):
    for part in range(0, 48, 16):
        yield whole(model, x[part : part + 16], y[part : part + 16])


class Recorder:
    """A closure that records the stream of each call and may raise in one of them."""

    def __init__(self, loss, model, fails_at=None):
        self.loss, self.model, self.fails_at, self.data = loss, model, fails_at, batch()
        self.streams = []

    def __call__(self):
        self.streams.append(torch.cuda.current_stream())
        if len(self.streams) == self.fails_at:
            raise KeyError("from the closure")
        return self.loss(self.model, *self.data)


def started(side_by_side, *, groups=False, **options):
    torch.manual_seed(0)
    model = Network().cuda()
    params = list(model.parameters())
    if groups:
        params = [
            {"params": params[:2], "perturb": False},
            {"params": params[2:4], "rho_max": 0.1},
            {"params": params[4:]},
        ]
    base = torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3)
    options = {"rho_max": 0.2, "rho_min": 0.1, **options}
    return model, bsam.BSAM(base, model, side_by_side=side_by_side, **options)


def capture(optimizer, closure, stream):
    graph = torch.cuda.CUDAGraph()
    for generator in optimizer.generators():
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph, stream=stream):
        loss = optimizer.step(closure)
    return graph, loss


def trained(side_by_side, loss, steps=6, **options):
    """Return the losses, the state, the momentum and the streams after some replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model, optimizer = started(side_by_side, **options)
        closure = Recorder(loss, model)
        for _ in range(3):
            optimizer.step(closure)
        assert set(closure.streams) == {stream}  # eager passes run in turn
        closure.streams.clear()
        graph, value = capture(optimizer, closure, stream)
        losses = []
        for t in range(steps):
            if t:
                optimizer.count_step()
            graph.replay()
            losses.append(value.clone())
    torch.cuda.synchronize()
    momentum = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    return [*losses, *model.state_dict().values(), *momentum], closure.streams


@pytest.mark.parametrize("loss", [whole, by_micro_batches])
@pytest.mark.parametrize(
    "options",
    [{}, {"start_from_min": True}, {"adaptive": True}, {"same_draws": False}, {"groups": True}],
    ids=str,
)
def test_side_by_side_equals_in_turn(loss, options):
    together, streams = trained(True, loss, **options)
    in_turn, one_stream = trained(False, loss, **options)
    first, second, third = streams
    assert first == second != third
    assert len(set(one_stream)) == 1
    assert all(torch.equal(a, b) for a, b in zip(together, in_turn, strict=True))


def test_an_error_in_the_second_pass_leaves_the_memory_as_it_was():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model, optimizer = started(True)
        closure = Recorder(whole, model)
        for _ in range(3):
            optimizer.step(closure)
        state = {name: (t.data_ptr(), t.clone()) for name, t in model.state_dict().items()}
        closure.fails_at = len(closure.streams) + 3
        with pytest.raises(KeyError, match="closure"):
            capture(optimizer, closure, stream)
    torch.cuda.synchronize()
    for name, t in model.state_dict().items():
        pointer, before = state[name]
        assert t.data_ptr() == pointer, name
        assert torch.equal(t, before), name


@pytest.mark.parametrize("first", [0, 1])
def test_all_kinds_of_steps_draw_as_plain_steps_do(first):
    """With ``every``, two graphs share the generators, whichever is captured first."""

    def losses(captured):
        model, optimizer = started(False, passes=2, every=2)
        for group in optimizer.param_groups:
            group["steps_taken"] = first
        step = TrainStep(model, optimizer)
        take_step = CapturedSteps(step) if captured else step.step
        x, y = batch()
        return torch.stack([take_step(x, y, torch.arange(48, device="cuda")).clone() for _ in range(16)])

    with torch.cuda.stream(torch.cuda.Stream()):
        replayed, plain = losses(True), losses(False)
    torch.cuda.synchronize()
    torch.testing.assert_close(replayed, plain, rtol=1e-3, atol=1e-4)


def noise():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (640, 3, 32, 32), dtype=torch.uint8, generator=generator)
    examples = Examples(x, torch.randint(0, 10, (640,), generator=generator))
    return Dataset("noise", 10, examples, None, examples.some(64), (0.5,) * 3, (0.25,) * 3)


def by_bsam_train(messages, **settings):
    device = torch.device("cuda")
    run = Run.of("bsam", data="cifar10", model="resnet8", batch=64, epochs=2, label_smoothing=0.1, **settings)
    with side_stream(device):
        task = Classification(run, device, data=noise())
        trainer, streams = Trainer(run, task, DistributedContext(device), messages.append), set()
        if not run.compile:
            trainer.network.register_forward_pre_hook(lambda *_: streams.add(torch.cuda.current_stream()))
        losses = [trainer.train_epoch(number)["train_loss"] for number in range(2)]
    return losses, [t.clone() for t in trainer.network.state_dict().values()], trainer.optimizer, streams


@pytest.mark.filterwarnings("default")  # importing inductor warns
@pytest.mark.parametrize("compiled", [False, True])
def test_bsam_train_runs_side_by_side_and_says_so(compiled):
    messages, quiet = [], []
    losses, tensors, optimizer, streams = by_bsam_train(messages, compile=compiled)
    expected, reference, _, one = by_bsam_train(quiet, compile=compiled, arguments={"side_by_side": False})
    assert optimizer.side_by_side
    assert (len(streams), len(one)) == ((0, 0) if compiled else (2, 1))
    assert [m for m in messages if "side by side" in m]
    assert not [m for m in quiet if "side by side" in m]
    assert losses == pytest.approx(expected, rel=1e-6)
    for a, b in zip(tensors, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_without_memory_the_passes_run_in_turn(monkeypatch):
    messages = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (-torch.cuda.memory_reserved(), 0))
    *_, optimizer, streams = by_bsam_train(messages)
    assert not optimizer.side_by_side
    assert len(streams) == 1
    assert [m for m in messages if "in turn" in m]
