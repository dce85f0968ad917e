"""Every pass sees the buffers from before the step; after the step they are as the first pass left them."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bsam
from bsam.flatness import Probe
from helpers import alike, detached, distance, interrupted, same, sgd


class InPlaceAverage(nn.Module):
    """Subtracts a moving average of its inputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.update(x.mean(0))
        return x - self.mean

    def update(self, mean):
        self.mean.mul_(0.9).add_(0.1 * mean)


class ReplacedAverage(InPlaceAverage):
    def update(self, mean):
        self.mean = 0.9 * self.mean + 0.1 * mean


class DataAverage(InPlaceAverage):
    """Writes through ``.data``, which does not change the tensor's version."""

    def update(self, mean):
        self.mean.data.copy_(0.9 * self.mean + 0.1 * mean)


class LateAverage(ReplacedAverage):
    """Has no value before its first batch."""

    def __init__(self):
        super().__init__()
        self.mean = None

    def update(self, mean):
        self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean


class FunctionalBatchNorm(nn.Module):
    """Normalizes with its running statistics, in training mode, too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))

    def forward(self, x):
        F.batch_norm(x.detach(), self.mean, self.var, training=True)
        return F.batch_norm(x, self.mean, self.var, training=False)


class Observed(nn.Module):
    """The per-channel observer of torch.ao, whose buffers are resized by the first batch."""

    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.ao.quantization import MovingAveragePerChannelMinMaxObserver

            self.observer = MovingAveragePerChannelMinMaxObserver(averaging_constant=0.1, ch_axis=1)

    def forward(self, x):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.observer(x)
        return x / (self.observer.max_val - self.observer.min_val).to(x.dtype)


def instance_norm():
    return nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten())


def exported():
    norm = nn.BatchNorm1d(6).double()
    return torch.export.export(norm, (torch.randn(16, 6, dtype=torch.float64),), strict=False).module()


def traced():
    return torch.jit.trace(nn.BatchNorm1d(6).double(), torch.randn(16, 6, dtype=torch.float64))


LAYERS = {
    "batch norm": lambda: nn.BatchNorm1d(6),
    "cumulative batch norm": lambda: nn.BatchNorm1d(6, momentum=None),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(6, 6)),
    "instance norm": instance_norm,
    "in-place average": InPlaceAverage,
    "replaced average": ReplacedAverage,
    "average through .data": DataAverage,
    "average without a start": LateAverage,
    "functional batch norm": FunctionalBatchNorm,
    "observer": Observed,
    "scripted": lambda: torch.jit.script(nn.BatchNorm1d(6)),
    "traced": traced,
    "exported": exported,
}


@pytest.fixture(params=LAYERS)
def layer(request):
    """A function that builds the layer, with the same values in every call."""

    def make():
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript and the old spectral norm are deprecated
            return LAYERS[request.param]().double()

    return make


class Task:
    def __init__(self, layer):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), layer, nn.Tanh(), nn.Linear(6, 1)).double()
        self.batches = torch.randn(5, 16, 4, dtype=torch.float64)

    def loss(self, x):
        return (self.model(x) - x.sum(1, keepdim=True)).square().mean()

    def state(self):
        return copy.deepcopy(dict(self.model.state_dict()))

    def train(self, optimizer):
        for x in self.batches:

            def closure():
                optimizer.zero_grad()
                loss = self.loss(x)
                loss.backward()
                return loss

            optimizer.step(closure)
        return self.state()


def test_sam_without_a_radius_equals_its_base(layer):
    """Bit for bit: if a buffer moved in the second pass or in those of a probe, weights and buffers would be off."""
    task, other = Task(layer()), Task(layer())
    optimizer = bsam.SAM(sgd(task.model.parameters()), task.model, rho=0.0)
    Probe(every=2, rho_max=0.3, rho_min=0.2).attach(optimizer)
    assert alike(task.train(optimizer), other.train(sgd(other.model.parameters())))


def test_all_passes_see_the_same_buffers(layer):
    """After the step they are as one pass at w leaves them."""
    task, twin, seen = Task(layer()), Task(layer()), []
    optimizer = bsam.BSAM(sgd(task.model.parameters(), lr=0.0), task.model, rho_max=0.5, rho_min=0.5)
    for x in task.batches[:2]:
        twin.loss(x)

        def closure():
            seen.append(copy.deepcopy(dict(task.model.named_buffers())))
            return task.loss(x)

        seen.clear()
        optimizer.step(closure)
        assert len(seen) == 3
        assert alike(seen[1], seen[0])
        assert alike(seen[2], seen[0])
        assert alike(dict(task.model.named_buffers()), dict(twin.model.named_buffers()))


@pytest.mark.parametrize("failing", [1, 2, 3])
@pytest.mark.parametrize("make", [ReplacedAverage, LateAverage])
def test_buffers_are_restored_if_a_pass_raises(make, failing):
    task = Task(make())
    optimizer = bsam.BSAM(sgd(task.model.parameters()), task.model)
    for x in task.batches[:2]:
        before = task.state()
        interrupt = interrupted(lambda: 0.0, failing)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step(lambda x=x: task.loss(x) + interrupt())  # after the forward pass
        assert alike(task.state(), before)
        optimizer.step(lambda x=x: task.loss(x))
        assert not alike(task.state(), before)


def test_a_buffer_written_in_place_stays_the_same_tensor():
    """DDP and other wrappers hold references to the buffers."""
    task = Task(InPlaceAverage())
    held = list(task.model.buffers())
    bsam.BSAM(sgd(task.model.parameters()), task.model).step(lambda: task.loss(task.batches[0]))
    assert all(a is b for a, b in zip(held, task.model.buffers(), strict=True))


def test_a_graph_that_saved_the_buffers_stays_valid():
    """Such as the graph of a generator's samples that two optimizers use."""
    generator, critic = Task(nn.BatchNorm1d(6)).model, nn.Linear(1, 1).double()
    generator.eval()  # the statistics are saved for backward
    samples = generator(torch.randn(16, 4, dtype=torch.float64))
    expected = torch.autograd.grad(critic(samples).mean(), generator[0].weight, retain_graph=True)
    optimizer = bsam.BSAM(sgd(critic.parameters(), lr=0.0), [critic, generator])
    optimizer.step(lambda: critic(samples.detach()).square().mean())
    assert same(torch.autograd.grad(critic(samples).mean(), generator[0].weight), expected)


def test_buffers_that_cannot_be_written():
    """Expanded, created in inference mode, or lazy before the first batch."""
    task = Task(nn.Identity())
    task.model.register_buffer("wide", torch.zeros(1).expand(8))
    task.model.append(nn.LazyBatchNorm1d(affine=False).double())
    with torch.inference_mode():
        task.model.register_buffer("constant", torch.ones(3))
    bsam.BSAM(sgd(task.model.parameters()), task.model).step(lambda: task.loss(task.batches[0]))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_network_equals_the_eager_one():
    ends = []
    for compiled in (False, True):
        torch.manual_seed(0)
        task = Task(nn.Sequential(nn.BatchNorm1d(6), InPlaceAverage()))
        network = task.model
        call = torch.compile(network, backend="aot_eager") if compiled else network
        optimizer = bsam.BSAM(sgd(network.parameters()), call)
        for x in task.batches[:3]:
            optimizer.step(lambda: (call(x) - x.sum(1, keepdim=True)).square().mean())
        ends.append(task.state())
    assert alike(*ends)


def test_batch_norm_without_a_model_raises(problem):
    before = problem.buffers(), problem.weights()
    optimizer = bsam.BSAM(sgd(problem.model.parameters()), None)
    compiled = torch.compile(problem.model, backend="eager")
    for call in (problem.model, compiled):
        with pytest.raises(bsam.BsamError, match="model"):
            optimizer.step(lambda call=call: call(problem.x).square().mean())
    assert same(before[0], problem.buffers())
    assert same(before[1], problem.weights())
    problem.model.eval()
    optimizer.step(problem.loss)
    resumed = bsam.BSAM(sgd(problem.model.parameters()), None)
    resumed.load_state_dict(optimizer.state_dict())
    problem.model.train()
    with pytest.raises(bsam.BsamError, match="model"):
        resumed.step(problem.loss)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_renormalize_their_weights(kind):
    """The forward pass changes the weights; the only pass of MSAM would change perturbed ones, so MSAM raises."""
    torch.manual_seed(0)
    model = nn.Sequential(kind(7, 4, max_norm=1.0), nn.Flatten(), nn.LazyLinear(1)).double()
    x = torch.randint(0, 7, (9, 3))
    model(x)
    other = copy.deepcopy(model)
    with pytest.raises(bsam.BsamError, match="max_norm"):
        bsam.MSAM(sgd(model.parameters()), model)
    optimizer, base = bsam.SAM(sgd(model.parameters()), model, rho=0.0), sgd(other.parameters())
    for _ in range(3):
        optimizer.step(lambda: model(x).square().mean())
        base.zero_grad()
        other(x).square().mean().backward()
        base.step()
    assert distance(detached(model.parameters()), detached(other.parameters())) == 0


class MadeInForward(InPlaceAverage):
    """Registers its buffer in the first forward pass."""

    def __init__(self, first=0):
        nn.Module.__init__(self)
        self.first, self.calls = first, 0

    def forward(self, x):
        """Create it in the first pass of a step, which the test counts."""
        if self.calls < self.first:
            return x
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(6))
        return super().forward(x)


@pytest.mark.parametrize("make", [lambda: nn.LazyBatchNorm1d(affine=False), MadeInForward, lambda: MadeInForward(2)])
@pytest.mark.parametrize("method", [bsam.SAM, bsam.BSAM])
def test_buffers_that_the_first_forward_creates(make, method):
    """They are updated once per step, as with the base optimizer alone."""
    x, ends = torch.randn(8, 4), []
    for wrap in (lambda base, model: base, method):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), make(), nn.Linear(6, 1))
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.0), model)

        def closure():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        buffers = []
        for step in range(5):
            model[1].calls = step
            optimizer.step(closure)
            buffers += detached(model.buffers())
        ends.append(buffers)
    assert len(ends[0]) >= 3
    assert same(*ends)


def test_a_buffer_that_is_a_view_of_a_parameter():
    """It moves with the parameter; another buffer in the same storage is restored as usual."""
    memory, x = torch.randn(20, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1)).double()
    model[0].weight.data = memory[:16].view(4, 4)
    model.register_buffer("count", memory[16:17])
    w, losses = detached(model.parameters()), []

    def closure():
        model.count.add_(1)
        losses.append(model(x).square().mean())
        return losses[-1]

    def steps():
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), w)  # in place: the memory stays
        optimizer = bsam.BSAM(sgd(model.parameters()), model, rho_max=0.3, rho_min=0.3)
        count = float(model.count)
        for _ in range(3):
            optimizer.step(closure)
        assert float(model.count) == count + 3
        return detached(model.parameters())

    without = steps()
    model.register_buffer("view", model[0].weight.detach())
    assert same(steps(), without)
    assert model.view.data_ptr() == model[0].weight.data_ptr() == memory.data_ptr()


class Wrapped(torch.Tensor):
    """A tensor without memory, as quantized weights may be."""

    @staticmethod
    def __new__(cls, inside):
        return torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype)

    def __init__(self, inside):
        self.inside = inside

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        result = func(*(a.inside if isinstance(a, cls) else a for a in args), **(kwargs or {}))
        return cls(result) if func is torch.ops.aten.detach.default else result


@pytest.mark.parametrize("make", [Wrapped, torch.Tensor.to_sparse])
def test_a_frozen_parameter_without_memory(make):
    model, x = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)), torch.randn(8, 4)
    optimizer = bsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model.register_parameter("frozen", nn.Parameter(make(torch.eye(4)), requires_grad=False))
    optimizer.step(lambda: model(x).square().mean())
    assert int(model[1].num_batches_tracked) == 1
