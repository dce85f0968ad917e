"""Every measurement leaves the model unchanged, bit for bit, wherever it is interrupted."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bsam.flatness import HessianOperator, landscape, sharpness, spectral_density, top_eigenvalues, trace


def of_hessian(measure, **options):
    def measured(*arguments, mode="eval"):
        return measure(HessianOperator(*arguments, mode=mode, **options))

    return measured


def product(H):
    for _ in range(2 if H.differentiation == "forward" else 1):
        H.times(torch.ones(H.size, dtype=H.dtype))


def recorded(H):
    with H.linearized(1 << 40):
        product(H)


def of_model(measure, **options):
    return lambda *arguments, mode="eval": measure(*arguments, mode=mode, **options)


MEASURES = {
    "product": of_hessian(product),
    "product in float64": of_hessian(product, dtype=torch.float64),
    "products in forward mode": of_hessian(product, differentiation="forward"),
    "top_eigenvalues": of_hessian(lambda H: top_eigenvalues(H, k=2, tol=0.1)),
    "trace": of_hessian(lambda H: trace(H, samples=6)),
    "spectral_density": of_hessian(lambda H: spectral_density(H, steps=3, probes=2)),
    "sharpness": of_model(sharpness, rho_max=0.3, steps=2, random_directions=2),
    "landscape": of_model(landscape, points=3, accuracy=True),
    "landscape of eigenvectors": of_model(landscape, points=3, dims=1, directions="hessian"),
}


def in_use(model, data):
    """With gradients of the user, a frozen parameter, a module in eval mode, a norm that does not track."""
    F.cross_entropy(model(data[0][0]), data[0][1]).backward()
    model[0].weight.grad = None
    model[5].weight.requires_grad_(False)
    model[3].eval()
    model[1].track_running_stats = False
    return model, data


@pytest.fixture
def used(nets, monkeypatch):
    """A model in use, whose eigenvalues need not be accurate."""
    monkeypatch.setattr("bsam.flatness.spectrum.MIN_STEPS", 1)
    monkeypatch.setattr("bsam.flatness.spectrum.MAX_CYCLES", 0.2)
    return in_use(*nets["made"](nets["batch norm"], sizes=(7, 2), dtype=torch.float32))


@pytest.fixture
def small():
    """The same with few operations, to be recorded often."""
    torch.manual_seed(3)
    layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 3), nn.BatchNorm1d(3)
    return in_use(nn.Sequential(*layers), [(torch.randn(4, 3), torch.tensor([0, 2, 1, 1]))] * 2)


@pytest.mark.parametrize(
    ("measure", "mode"), [*((measure, "train") for measure in MEASURES), ("product", "eval"), ("sharpness", "eval")]
)
def test_model_is_unchanged_after_measurements_and_errors(used, unchanged, Passes, stop, measure, mode):
    (model, data), (Stop, stopping) = used, stop
    measured = MEASURES[measure]
    (counted, calls), batches = stopping(F.cross_entropy, after=10**9), Passes(data)
    with unchanged(model):
        measured(model, counted, batches, mode=mode)
    given = 10**9 - batches.left
    # the first few passes and the last one: those between repeat them
    for after in {0, 2, 7, len(calls) - 1} & set(range(len(calls))):
        with unchanged(model), pytest.raises(Stop):
            measured(model, stopping(F.cross_entropy, after)[0], data, mode=mode)
    for after in {0, 3, 16, given - 1} & set(range(given)):
        with unchanged(model), pytest.raises(Stop):
            measured(model, F.cross_entropy, Passes(data, limit=after), mode=mode)


def test_model_is_unchanged_after_recorded_products_and_errors(small, unchanged, Passes, stop):
    (model, data), (Stop, stopping), measured = small, stop, of_hessian(recorded)
    counted, calls = stopping(F.cross_entropy, after=10**9)
    with unchanged(model):
        measured(model, counted, data, mode="train")
    # while a graph is traced, Stop means that this batch cannot be recorded
    for after in (len(calls) // 2, len(calls) - 1):
        with unchanged(model), contextlib.suppress(Stop):
            measured(model, stopping(F.cross_entropy, after)[0], data, mode="train")
    for after in (0, 3):
        with unchanged(model), pytest.raises(Stop):
            measured(model, F.cross_entropy, Passes(data, limit=after), mode="train")


class Moving(nn.Module):
    """Buffers that change in eval mode: one in place, one replaced, one by its data, one that is NaN."""

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


@pytest.mark.parametrize("measure", ["product", "sharpness", "landscape"])
def test_changed_buffers_and_rescaled_embeddings_are_restored(stop, measure):
    (Stop, stopping), measured = stop, MEASURES[measure]
    torch.manual_seed(0)
    embedding = nn.Sequential(nn.Embedding(5, 4, max_norm=0.1), Moving())
    for model, x in ((Moving(), torch.randn(6, 4)), (embedding, torch.arange(5))):
        tensors = dict(model.named_buffers()) | dict(model.named_parameters())
        before = {name: t.detach().clone() for name, t in tensors.items()}
        data = [(x, torch.randint(0, 3, (len(x),))) for _ in range(2)]
        measured(model, F.cross_entropy, data)
        with pytest.raises(Stop):
            measured(model, stopping(F.cross_entropy, after=1)[0], data)
        for name, t in (*model.named_buffers(), *model.named_parameters()):
            assert t is tensors[name]
            assert torch.equal(t.view(torch.int32), before[name].view(torch.int32))  # to the bit, NaN too


def test_graphs_of_the_user_stay_valid():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval()
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    loss = F.cross_entropy(model(x), y)
    for measure in ("product", "products in forward mode"):
        MEASURES[measure](model, F.cross_entropy, [(x, y)])
    loss.backward()  # raises if a tensor that it needs was written to


@pytest.mark.parametrize("measure", ["sharpness", "landscape", "product"])
def test_loaders_do_not_change_the_random_state(model, samples, stop, measure):
    (Stop, stopping), measured = stop, MEASURES[measure]
    loader = DataLoader(TensorDataset(*samples), 4, shuffle=True)
    state = torch.get_rng_state()
    list(loader)
    assert not torch.equal(torch.get_rng_state(), state)  # by itself it does
    state = torch.get_rng_state()
    measured(model, F.cross_entropy, loader)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(Stop):
        measured(model, stopping(F.cross_entropy, after=0)[0], loader)
    assert torch.equal(torch.get_rng_state(), state)
