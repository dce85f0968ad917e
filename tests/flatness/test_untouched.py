"""Every instrument leaves the model as it was, to the bit, wherever it is stopped."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bsam.flatness import HessianOperator, landscape, sharpness, spectral_density, top_eigenvalues, trace


def of_hessian(measure, **keywords):
    return lambda model, loss_fn, data, mode: measure(HessianOperator(model, loss_fn, data, mode=mode), **keywords)


def forwards(model, loss_fn, data, mode):
    H = HessianOperator(model, loss_fn, data, mode=mode, differentiation="forward")
    H.times(torch.ones(H.size))
    H.times(torch.ones(H.size))


INSTRUMENTS = {
    "product": lambda model, loss_fn, data, mode: HessianOperator(model, loss_fn, data, mode=mode).times(
        torch.ones(685)
    ),
    "product in float64": lambda model, loss_fn, data, mode: HessianOperator(
        model, loss_fn, data, mode=mode, dtype=torch.float64
    ).times(torch.ones(685).double()),
    "products by forward mode": forwards,
    "top_eigenvalues": of_hessian(top_eigenvalues, k=2),
    "trace": of_hessian(trace, samples=6),
    "spectral_density": of_hessian(spectral_density, steps=3, probes=2),
    "sharpness": lambda model, loss_fn, data, mode: sharpness(
        model, loss_fn, data, rho_max=0.3, steps=2, random_directions=2, mode=mode
    ),
    "landscape": lambda model, loss_fn, data, mode: landscape(model, loss_fn, data, points=3, accuracy=True, mode=mode),
    "landscape of eigenvectors": lambda model, loss_fn, data, mode: landscape(
        model, loss_fn, data, points=3, dims=1, directions="hessian", mode=mode
    ),
}


@pytest.fixture
def used(nets):
    """A model in use: gradients that belong to the user, a frozen parameter, one module in eval mode, one norm that
    does not track.
    """
    model, data = nets["made"](nets["batch norm"], dtype=torch.float32)
    F.cross_entropy(model(data[2][0]), data[2][1]).backward()
    model[0].weight.grad = None
    model[5].weight.requires_grad_(False)  # 8 of 693 parameters
    model[5].bias.requires_grad_(True)
    model[3].eval()
    model[1].track_running_stats = False
    return model, data


class Stop(Exception):
    pass


def stopping(loss_fn, after):
    calls = []

    def wrapped(out, y):
        calls.append(1)
        if len(calls) > after:
            raise Stop
        return loss_fn(out, y)

    return wrapped, calls


class Breaking:
    """Data that raises after ``after`` batches, counted over all walks."""

    def __init__(self, data, after):
        self.data, self.after = data, after

    def __iter__(self):
        for batch in self.data:
            self.after -= 1
            if self.after < 0:
                raise Stop
            yield batch


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("instrument", INSTRUMENTS)
def test_the_model_is_as_before_after_each_instrument_and_after_a_failure_at_any_call(
    used, unchanged, instrument, mode
):
    model, data = used
    measure = INSTRUMENTS[instrument]
    (counted, calls), batches = stopping(F.cross_entropy, after=10**9), Breaking(data, after=10**9)
    with unchanged(model):
        measure(model, counted, batches, mode)
    given = 10**9 - batches.after
    for after in {
        0,
        1,
        2,
        3,
        7,
        16,
        len(calls) - 1,
    }:  # the first few passes and the last one: those between repeat them
        if after < len(calls):
            with unchanged(model), pytest.raises(Stop):
                measure(model, stopping(F.cross_entropy, after)[0], data, mode)
    for after in {0, 1, 2, 3, 7, 16, given - 1}:
        if after < given:
            with unchanged(model), pytest.raises(Stop):
                measure(model, F.cross_entropy, Breaking(data, after), mode)


def recorded(model, loss_fn, data):
    H = HessianOperator(model, loss_fn, data, mode="train")
    with H.linearized(1 << 40):
        H.times(torch.ones(685))


def test_the_model_is_as_before_after_recorded_products_and_a_failure_in_them(used, unchanged):
    model, data = used[0], [used[1][0]] * 3
    counted, calls = stopping(F.cross_entropy, after=10**9)
    with unchanged(model):
        recorded(model, counted, data)
    for after in range(len(calls)):
        with (
            unchanged(model),
            contextlib.suppress(Stop),
        ):  # while a graph is recorded, it means that this cannot be done
            recorded(model, stopping(F.cross_entropy, after)[0], data)
    for after in range(6):
        with unchanged(model), pytest.raises(Stop):
            recorded(model, F.cross_entropy, Breaking(data, after))


class Moving(nn.Module):
    """Buffers that move in eval mode: one in place, one replaced, one by its data, one that holds no number."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        for name, value in (("calls", 0.0), ("replaced", 1.0), ("seen", 2.0), ("unknown", math.nan)):
            self.register_buffer(name, torch.full((2,), value))

    def forward(self, x):
        self.calls += 1
        self.replaced = self.replaced * 2
        self.seen.data.mul_(3)
        self.unknown.zero_()
        return self.linear(x)


MOVING = {
    "product": lambda model, *rest: HessianOperator(model, *rest).times(torch.ones(15)),
    "sharpness": sharpness,
    "landscape": lambda model, *rest: landscape(model, *rest, points=3, dims=1),
}


@pytest.mark.parametrize("instrument", MOVING.values(), ids=MOVING)
def test_buffers_that_move_in_eval_mode_come_back(instrument):
    torch.manual_seed(0)
    model, data = Moving(), [(torch.randn(6, 4), torch.randint(0, 3, (6,))) for _ in range(2)]
    buffers = dict(model.named_buffers())
    before = {name: t.clone() for name, t in buffers.items()}
    instrument(model, F.cross_entropy, data)
    with pytest.raises(Stop):
        instrument(model, stopping(F.cross_entropy, after=1)[0], data)
    for name, t in model.named_buffers():
        assert t is buffers[name]
        assert torch.equal(t.view(torch.int32), before[name].view(torch.int32))  # to the bit, NaN too


def test_a_graph_of_the_users_that_needs_a_buffer_survives():
    model, (x, y) = (
        nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval(),
        (torch.randn(6, 4), torch.randint(0, 3, (6,))),
    )
    loss = F.cross_entropy(model(x), y)
    HessianOperator(model, F.cross_entropy, [(x, y)]).times(torch.ones(21))
    loss.backward()
