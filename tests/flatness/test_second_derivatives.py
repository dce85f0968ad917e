import copy
import warnings

import pytest
import torch
import torch.fx.experimental.symbolic_shapes  # imports sympy, which adds filters of warnings
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.parametrizations import orthogonal, weight_norm
from torch.utils.checkpoint import checkpoint

from bsam.common.errors import BsamRuntimeError
from bsam.flatness import HessianOperator, sharpness
from bsam.flatness.second_derivatives import Substitutes


def used(norm):
    """A norm with random statistics, weights and biases."""
    torch.manual_seed(0)
    for tensor in (norm.running_mean, norm.running_var, *norm.parameters()):
        with torch.no_grad():
            tensor.copy_(torch.rand_like(tensor) + 0.5)
    return norm.double()


@pytest.mark.parametrize(
    ("kind", "shape", "affine"),
    [
        (nn.BatchNorm1d, (4, 3), True),
        (nn.BatchNorm2d, (4, 3, 5, 6), False),
        (nn.BatchNorm3d, (2, 3, 2, 3, 4), True),
    ],
)
def test_batch_norm_has_the_derivatives_of_torch(kind, shape, affine):
    norm = used(kind(3, eps=1e-2, affine=affine)).eval()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    variables = [x, *norm.parameters()]

    def derivatives():
        y = norm(x)
        first = torch.autograd.grad((y**3).sum(), variables, create_graph=True)
        return [y, *first, *torch.autograd.grad(sum((g**2).sum() for g in first), variables)]

    expected = derivatives()
    with Substitutes():
        actual = derivatives()
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_batch_norm_in_training_and_in_mixed_precision_is_torchs():
    norm, x = used(nn.BatchNorm1d(3)).train(), torch.randn(8, 3, dtype=torch.float64)
    before = norm.running_mean.clone()
    with Substitutes():
        y = norm(x)
    assert torch.allclose(y, (x - x.mean(0)) / (x.var(0, unbiased=False) + norm.eps).sqrt() * norm.weight + norm.bias)
    assert not torch.equal(norm.running_mean, before)
    half, x = nn.BatchNorm2d(3).eval(), torch.randn(2, 3, 4, 4, dtype=torch.bfloat16)
    with Substitutes():
        assert torch.equal(half(x), F.batch_norm(x, half.running_mean, half.running_var, half.weight, half.bias))


WAYS = pytest.mark.parametrize("way", ["reverse", "forward"])


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(16, 4, dtype=torch.float64, generator=generator), torch.randint(0, 4, (16,), generator=generator)
    return [(x[:8], y[:8]), (x[8:], y[8:])]  # one shape, which is recorded once


def by_differences(model, loss_fn, data, v, step=1e-5):
    """The change of the gradient along ``v``, with gradients from ``loss.backward()``."""
    model, params, grads = model.eval(), list(model.parameters()), []
    for move in (step, -2 * step, step):  # to either side, and back
        with torch.no_grad():
            torch._foreach_add_(params, v, alpha=move)
        model.zero_grad()
        (sum(loss_fn(model(x), y) * len(y) for x, y in data) / sum(len(y) for _, y in data)).backward()
        gradients = (torch.zeros_like(p) if p.grad is None else p.grad for p in params)
        grads.append(torch.cat([g.reshape(-1) for g in gradients]))
    model.zero_grad()
    return (grads[0] - grads[1]) / (2 * step)


def errors(model, data, way, loss_fn=F.cross_entropy):
    """The largest error of two products and, in reverse mode, a recorded one; and the mode that was used."""
    H = HessianOperator(model, loss_fn, data, differentiation=way)
    v = H.random(torch.Generator().manual_seed(1)) / H.size**0.5
    expected = by_differences(model, loss_fn, data, H.vector(v).tensors())
    products = [H.times(v), H.times(v)]
    if way == "reverse":  # recording does not depend on it
        with H.linearized(1 << 30):
            products.append(H.times(v))
    return max(float((p - expected).norm() / expected.norm()) for p in products), H.differentiation


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)).double()


class Weights(nn.Module):
    """Uses a weight through a list; its loss is a method that uses another weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.held = [self.a.weight]

    def forward(self, x):
        return torch.tanh(self.a(x)) @ self.held[0]

    def loss(self, out, y):
        return F.cross_entropy(torch.tanh(out) @ self.b.weight, y)


@WAYS
def test_every_use_of_a_weight_is_differentiated(data, way):
    model = mlp()

    def penalised(out, y):
        return F.cross_entropy(out, y) + 0.01 * sum(p.square().sum() for p in model.parameters())

    assert errors(model, data, way, penalised) == (pytest.approx(0, abs=1e-7), way)
    held = Weights()
    assert errors(held, data, way, held.loss)[0] < 1e-7


class Determinant(nn.Linear):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(4, 4, dtype=torch.float64)

    def forward(self, x):
        return super().forward(x) + torch.linalg.det(self.weight) * torch.arange(4, dtype=torch.float64)


class Attention(nn.Linear):
    """Attention between the two halves of a sample; torch's fused kernels have no second derivative."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(2, 6, dtype=torch.float64)

    def forward(self, x):
        q, k, v = super().forward(x.unflatten(1, (1, 2, 2))).chunk(3, dim=-1)  # one head
        return F.scaled_dot_product_attention(q, k, v).flatten(1)


@WAYS
def test_attention(data, way):
    filters = list(warnings.filters)
    assert errors(Attention(), data, way)[0] < 1e-6
    assert warnings.filters == filters


@pytest.mark.parametrize("name", ["determinant", "cayley"])
def test_wrong_forward_derivatives_are_noticed(data, name):
    orthogonal_layer = orthogonal(nn.Linear(4, 4), orthogonal_map="cayley")
    cayley = nn.Sequential(orthogonal_layer, nn.Tanh(), nn.Linear(4, 4)).double()
    model = cayley if name == "cayley" else Determinant()
    assert errors(model, data, "forward") == (pytest.approx(0, abs=1e-6), "reverse")


@pytest.mark.filterwarnings("ignore:`?torch.nn.utils.weight_norm")
@pytest.mark.parametrize(
    ("normalized", "dim", "way"),
    [(weight_norm, 0, "forward"), (weight_norm, 1, "reverse"), (nn.utils.weight_norm, None, "forward")],
)
def test_weight_norm(data, way, normalized, dim):
    torch.manual_seed(0)
    kwargs = {"dim": dim} if dim is not None or normalized is nn.utils.weight_norm else {"dim": -1}
    model = nn.Sequential(normalized(nn.Linear(4, 5).double(), **kwargs), nn.Tanh(), nn.Linear(5, 4).double())
    error, taken = errors(model, data, way)
    assert error < 1e-6
    assert taken == ("reverse" if dim is None else way)  # the norm of a whole tensor has a wrong forward derivative


@WAYS
def test_hardsigmoid(data, way):
    model = nn.Sequential(*mlp(), nn.Hardsigmoid(), nn.Linear(4, 4).double())
    assert errors(model, data, way)[0] < 1e-6


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] ** 2 * g


class Module(nn.Module):
    """A network that ends in a function."""

    def __init__(self, function):
        super().__init__()
        self.inner, self.function = mlp(), function

    def forward(self, x):
        return self.function(self.inner(x))


class Bag(nn.EmbeddingBag):
    def forward(self, x):
        return super().forward(x.argsort(1))


def ctc(out, y):
    n = len(y)
    steps = out.log_softmax(-1)[:, None].repeat(1, n, 1)
    return F.ctc_loss(steps, y[:, None].clamp(1), torch.full((n,), len(out)), torch.ones(n, dtype=torch.long))


class Wrapped(Cube):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x):
        return Cube.forward(ctx, x)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    @once_differentiable
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] ** 2 * g


REFUSED = {
    "once_differentiable": (Module(Cube.apply), lambda out, y: out.mean(), "Cube"),
    "once_differentiable, wrapped": (Module(Wrapped.apply), lambda out, y: out.mean(), "Wrapped"),
    "embedding bag": (Bag(4, 4).double(), F.cross_entropy, "embedding_bag"),
    "ctc": (mlp(), ctc, "ctc_loss"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_operations_without_a_second_derivative_are_refused(data, name):
    model, loss_fn, message = REFUSED[name]
    for way in ("reverse", "forward"):
        H = HessianOperator(model, loss_fn, data[:1], differentiation=way)
        with pytest.raises(RuntimeError, match=message):  # from torch, or ours for decorated functions
            H.times(torch.ones(H.size, dtype=H.dtype))
    assert sharpness(model, loss_fn, data[:1]).bilateral > 0


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.inner, self.last, self.reentrant = mlp(), nn.Linear(4, 4).double(), reentrant

    def forward(self, x):
        return self.last(checkpoint(self.inner, x.clone().requires_grad_(), use_reentrant=self.reentrant))


@WAYS
def test_checkpoints(data, way):
    assert errors(Checkpointed(False), data, way)[0] < 1e-6
    for measure in (sharpness, lambda *rest: errors(rest[0], rest[2], way)):
        with pytest.raises(BsamRuntimeError, match="use_reentrant=False"):
            measure(Checkpointed(True), F.cross_entropy, data)


@pytest.mark.parametrize(("kind", "way"), [(nn.LSTM, "reverse"), (nn.GRU, "forward")])
def test_recurrent_networks_run_without_cudnn(data, kind, way):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.recurrent, self.seen = kind(4, 4, batch_first=True).double(), set()

        def forward(self, x):
            self.seen.add(torch.backends.cudnn.enabled)
            return self.recurrent(x[:, None].repeat(1, 2, 1))[0][:, -1]

    model = Last()
    assert errors(model, data, way)[0] < 1e-6
    model.seen.clear()
    sharpness(model, F.cross_entropy, data)
    assert model.seen == {False}
    assert torch.backends.cudnn.enabled


def test_compiled_networks_run_eagerly(data):
    plain = mlp()
    H = HessianOperator(plain, F.cross_entropy, data)
    v = H.random(torch.Generator().manual_seed(1))
    expected = H.times(v)
    part = copy.deepcopy(plain)
    part[0] = torch.compile(part[0], backend="aot_eager")
    for model in (torch.compile(copy.deepcopy(plain), backend="aot_eager"), part):
        model(data[0][0]).sum().backward()
        model.zero_grad()
        H = HessianOperator(model, F.cross_entropy, data)
        torch.testing.assert_close(H.times(v), expected, rtol=1e-9, atol=1e-12)


def test_wrong_forward_derivatives_are_noticed_in_small_parts_and_for_new_weights(data):
    class Part(nn.Module):
        """A determinant whose part of the product is small."""

        def __init__(self, scale):
            super().__init__()
            torch.manual_seed(0)
            self.main, self.part = nn.Linear(4, 4).double(), nn.Linear(3, 3, bias=False).double()
            self.scale = nn.Parameter(torch.tensor(scale, dtype=torch.float64), requires_grad=False)

        def forward(self, x):
            return 30 * self.main(x) + self.scale * torch.linalg.det(self.part.weight) * torch.arange(4.0).double()

    for scale, later in ((2e-7, None), (0.0, 1.0)):
        model = Part(scale)
        H = HessianOperator(model, F.cross_entropy, data, differentiation="forward")
        H.times(torch.zeros(H.size, dtype=H.dtype))
        if later is not None:
            with torch.no_grad():
                model.scale.fill_(later)
                model.main.weight.mul_(1.0)  # a new version of the weights
        v = H.random(torch.Generator().manual_seed(1))
        plain = HessianOperator(model, F.cross_entropy, data).times(v)
        torch.testing.assert_close(H.times(v), plain, rtol=1e-9, atol=1e-12)
        assert H.differentiation == "reverse"
        H = HessianOperator(model, F.cross_entropy, data, differentiation="forward")
        with H.linearized(1 << 30):
            torch.testing.assert_close(H.times(v), plain, rtol=1e-9, atol=1e-12)
        assert H.differentiation == "reverse"


def test_cached_casts_of_autocast_are_not_used(data):
    model, batches = mlp().float(), [(x.float(), y) for x, y in data]
    H = HessianOperator(model, F.cross_entropy, batches, differentiation="forward")
    v = H.random(torch.Generator().manual_seed(1))
    expected = H.times(v)
    with torch.autocast("cpu", torch.bfloat16):
        model(batches[0][0])
        for _ in range(2):
            assert float((H.times(v) - expected).norm() / expected.norm()) < 0.1
    assert H.differentiation == "forward"
