import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bsam.core.vector import Vector
from bsam.flatness import HessianOperator

BOTH_WAYS = pytest.mark.parametrize("way", ["reverse", "forward"])


def random_vector(H, seed=0):
    return torch.randn(H.size, dtype=H.dtype, generator=torch.Generator().manual_seed(seed))


def assert_exact(H, exact, way=None):
    """``way``: which mode the operator must use afterwards."""
    v = random_vector(H)
    product = torch.cat([t.reshape(-1) for t in (H @ H.vector(v)).tensors()])
    expected = exact @ v.double()
    assert float((product - expected).norm() / expected.norm()) < 1e-12
    assert H.differentiation == (way or H.differentiation)


@BOTH_WAYS
@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("net", ["mlp", "batch norm"])
def test_products_equal_those_with_the_dense_hessian(nets, net, mode, way):
    model, data, exact = nets["reference"](nets[net], mode)
    H = HessianOperator(model, F.cross_entropy, data, mode=mode, differentiation=way)
    assert (H.size, H.size) == exact.shape
    assert_exact(H, exact, way)


def test_train_mode_without_tracked_statistics(nets):
    model, data = nets["made"](nets["batch norm"])
    expected = HessianOperator(model, F.cross_entropy, data, mode="train")
    v = random_vector(expected)
    other = copy.deepcopy(model).eval()
    for norm in (other[1], other[5]):
        norm.track_running_stats = False
        norm.running_mean = norm.running_var = None
    assert torch.equal(HessianOperator(other, F.cross_entropy, data, mode="train").times(v), expected.times(v))
    assert not other[1].track_running_stats


def test_both_modes_of_a_tracked_instance_norm(nets, unchanged):
    torch.manual_seed(0)
    norm = nn.InstanceNorm1d(2, track_running_stats=True)
    layers = nn.Linear(4, 12), nn.Unflatten(1, (2, 6)), norm, nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)
    model, data = nn.Sequential(*layers).double(), [(torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,)))]
    for _ in range(3):
        model(3 * data[0][0])
    untracked = copy.deepcopy(model)
    untracked[2] = nn.InstanceNorm1d(2)  # always that of the sample
    running = copy.deepcopy(model).eval()
    v = torch.ones(99, dtype=torch.float64).cumsum(0).sin()
    with unchanged(model):
        in_eval = HessianOperator(model, F.cross_entropy, data).times(v)
        H = HessianOperator(model, F.cross_entropy, data, mode="train")
        in_train = H.times(v)
        with H.linearized(1 << 30) as recording:
            torch.testing.assert_close(H.times(v), in_train)
        assert recording.recorded
    torch.testing.assert_close(in_train, nets["exact"](untracked, F.cross_entropy, data) @ v)
    torch.testing.assert_close(in_eval, nets["exact"](running, F.cross_entropy, data) @ v)
    assert float((in_train - in_eval).norm()) > 0.1 * float(in_eval.norm())


@BOTH_WAYS
def test_micro_batches_do_not_change_the_product(untrained, way):
    model, data, exact = untrained
    model, sizes = copy.deepcopy(model), []
    model.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    H = HessianOperator(model, F.cross_entropy, data, micro_batch=4, differentiation=way)
    assert_exact(H, exact, way)
    assert max(sizes) == 4


def test_float64_on_a_float32_model(nets):
    model, data = nets["made"](nets["mlp"], dtype=torch.float32)
    H = HessianOperator(model, F.cross_entropy, data, dtype=torch.float64)
    assert H.dtype == torch.float64
    assert_exact(H, nets["exact"](model, F.cross_entropy, data))
    assert all(p.dtype == torch.float32 for p in model.parameters())
    targets = [(x, F.one_hot(y, 5).float()) for x, y in data]  # floating-point targets are cast, too

    def loss_fn(out, y):
        assert out.dtype == y.dtype == torch.float64
        return F.mse_loss(out, y)

    H = HessianOperator(model, loss_fn, targets, dtype=torch.float64, differentiation="forward")
    assert_exact(H, nets["exact"](model, F.mse_loss, targets), "reverse")  # torch has no forward derivative for it


class Nested(nn.Module):
    """Takes its inputs from a dict and a tuple."""

    def __init__(self):
        super().__init__()
        self.linear, self.register = nn.Linear(4, 3), nn.Embedding(5, 3)

    def forward(self, batch):
        return self.linear(batch["floats"][0]) + self.register(batch["numbers"])


def test_float64_with_nested_batches_and_a_loss_module():
    torch.manual_seed(0)
    model, loss_fn = Nested(), nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0]))
    batch, y = {"floats": (torch.randn(8, 4),), "numbers": torch.randint(0, 5, (8,))}, torch.randint(0, 3, (8,))
    H = HessianOperator(model, loss_fn, [(batch, y)], dtype=torch.float64)
    double = {"floats": (batch["floats"][0].double(),), "numbers": batch["numbers"]}
    expected = HessianOperator(copy.deepcopy(model).double(), copy.deepcopy(loss_fn).double(), [(double, y)])
    v = random_vector(H)
    torch.testing.assert_close(H.times(v), expected.times(v))
    with H.linearized(1 << 30) as recording:
        torch.testing.assert_close(H.times(v), expected.times(v))
    assert recording.recorded
    assert loss_fn.weight.dtype == torch.float32  # the user's module does not change


class Odd(nn.Module):
    """One weight is used twice, one frozen, one unused, one enters the loss linearly; 380 of 420 are trained."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(4, 10), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(30))
        self.last = nn.Linear(10, 20, bias=False)
        self.linear = nn.Parameter(torch.randn(50))

    def forward(self, x):
        hidden = self.second(torch.tanh(self.first(x))) * self.frozen.sum(0)
        return self.last(torch.tanh(hidden)), self.linear.sum()


def odd_loss(out, y):
    return F.cross_entropy(out[0], y) + out[1]


@BOTH_WAYS
def test_tied_frozen_unused_and_linear_weights(nets, way):
    torch.manual_seed(0)
    model = Odd().double()
    data = [(torch.randn(n, 10, dtype=torch.float64), torch.randint(0, 5, (n,))) for n in (5, 9)]
    H = HessianOperator(model, odd_loss, data, differentiation=way)
    assert H.size == 380
    assert_exact(H, nets["exact"](model, odd_loss, data), way)
    product = (H @ H.vector(random_vector(H))).tensors()
    zero = [t for t, p in zip(product, H.params, strict=True) if p is model.unused or p is model.linear]
    assert [bool(t.any()) for t in zero] == [False, False]


class Cube(torch.autograd.Function):
    """Without a forward derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


class Net(nn.Linear):
    """A layer and a function of its outputs."""

    def __init__(self, function):
        super().__init__(3, 2)
        self.function = function

    def forward(self, x):
        return self.function(super().forward(x))


def test_reverse_mode_is_used_without_a_forward_derivative():
    torch.manual_seed(0)
    data, model = [(torch.randn(6, 3), torch.randint(0, 2, (6,)))], Net(Cube.apply)
    plain = Net(lambda x: x**3)
    plain.load_state_dict(model.state_dict())
    H = HessianOperator(model, F.cross_entropy, data, differentiation="forward")
    v = random_vector(H)
    torch.testing.assert_close(H.times(v), HessianOperator(plain, F.cross_entropy, data).times(v))
    assert (H.products, H.differentiation) == (1, "reverse")


@pytest.mark.parametrize("net", ["mlp", "batch norm"])
def test_equals_curvlinops(nets, net):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        from curvlinops import HessianLinearOperator
    model, data = nets["made"](nets[net], dtype=torch.float32)
    H = HessianOperator(model, F.cross_entropy, data)
    v = random_vector(H)
    model.eval()  # curvlinops uses the mode of the model
    params = list(model.parameters())
    expected = HessianLinearOperator(model, nn.CrossEntropyLoss(), params, data, check_deterministic=False) @ v
    assert float((H.times(v) - expected).norm() / expected.norm()) < 1e-6
    assert float(expected.norm()) > 0.1


def test_products_use_the_current_weights(nets):
    model, data = nets["made"](nets["mlp"])
    H = HessianOperator(model, F.cross_entropy, data)
    with torch.no_grad():
        model[0].weight *= 2
    assert_exact(H, nets["exact"](model, F.cross_entropy, data))


def test_works_inside_no_grad_and_takes_vectors_of_another_dtype(untrained):
    model, data, _ = untrained
    H = HessianOperator(model, F.cross_entropy, data)
    v = random_vector(H)
    with torch.no_grad():
        inside = H.times(v)
    assert torch.equal(inside, H.times(v))
    single = H.vector(v.float().double())
    product = H @ Vector([t.float() for t in H.vector(v).tensors()])
    assert all(torch.equal(s, t) for s, t in zip(product.tensors(), (H @ single).tensors(), strict=True))
