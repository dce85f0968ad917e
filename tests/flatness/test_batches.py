from collections import UserDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bsam.common.errors import BsamValueError
from bsam.flatness import HessianOperator, sharpness


class Net(nn.Linear):
    """Takes its inputs as they are, from a dict, or from a list of rows."""

    def forward(self, batch):
        x = batch["x"] if isinstance(batch, dict) else batch
        return super().forward(x if isinstance(x, torch.Tensor) else torch.tensor(x))


TARGETS = {
    "dict of a dict": (lambda y: {"name": "b", "a": {"b": y, "c": y}}, lambda y: y["a"]["b"]),
    "tuple": (lambda y: (torch.tensor(2.0), y, y), lambda y: y[1]),
    "list": (lambda y: [y, y], lambda y: y[0]),
    "list of numbers": (lambda y: y.tolist(), torch.tensor),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_batches_count_by_their_samples(model, samples, data, kind):
    wrap, unwrap = TARGETS[kind]
    result = sharpness(model, lambda out, y: F.cross_entropy(out, unwrap(y)), [(x, wrap(y)) for x, y in data])
    assert result.loss == pytest.approx(F.cross_entropy(model(samples[0]), samples[1]).item(), rel=1e-6)


@pytest.mark.parametrize("y", [None, torch.tensor(1.0)])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"x": x}], ids=["tensor", "dict"])
def test_rows_of_the_inputs_count_without_rows_in_the_targets(samples, y, wrap):
    x, net = samples[0], Net(6, 3)
    result = sharpness(net, lambda out, y: out.square().mean(), [(wrap(x[:7]), y), (wrap(x[7:]), y)])
    assert result.loss == pytest.approx(net(x).square().mean().item(), rel=1e-6)


def test_length_of_the_targets_counts_without_tensors():
    net, rows = Net(1, 1), [[1.0], [2.0], [5.0]]
    data = [(rows[:2], [0.0, 1.0]), (rows[2:], [2.0])]
    result = sharpness(net, lambda out, y: F.mse_loss(out[:, 0], torch.tensor(y)), data)
    assert result.loss == pytest.approx(F.mse_loss(net(rows)[:, 0], torch.tensor([0.0, 1.0, 2.0])).item(), rel=1e-6)
    with pytest.raises(BsamValueError, match="samples"):
        sharpness(net, lambda out, y: out.square().mean(), [(rows, None)])


def test_lists_of_targets_count_by_image():
    class Detector(nn.Linear):
        def forward(self, images):
            return super().forward(torch.stack([image.mean((1, 2)) for image in images]))

    def loss_fn(out, y):
        return (out[:, 0] - torch.tensor([float(len(target["boxes"])) for target in y])).square().mean()

    def batch(*boxes):
        images = [torch.randn(3, 4, 5, generator=generator) for _ in boxes]
        return images, [{"boxes": torch.rand(k, 4, generator=generator)} for k in boxes]

    generator, net = torch.Generator().manual_seed(0), Detector(3, 1)
    data = [batch(0, 2), batch(4, 1, 5), batch(0, 0, 0, 2)]  # the first image of a batch may have no box
    images, targets = ([entry for pair in data for entry in pair[part]] for part in (0, 1))
    expected = loss_fn(net(images), targets).item()
    assert sharpness(net, loss_fn, data).loss == pytest.approx(expected, rel=1e-6)
    ragged = [(x, [target["boxes"] for target in y]) for x, y in data]
    result = sharpness(net, lambda out, y: loss_fn(out, [{"boxes": boxes} for boxes in y]), ragged)
    assert result.loss == pytest.approx(expected, rel=1e-6)
    threes = [batch(3), batch(1, 2)]  # as many boxes as channels
    values = [loss_fn(net(x), y).item() for x, y in threes]
    assert sharpness(net, loss_fn, threes).loss == pytest.approx((values[0] + 2 * values[1]) / 3, rel=1e-6)


def test_dicts_count_by_the_rows_of_their_tensors(samples, data):
    (x, y), net = samples, Net(6, 3)

    def loss_fn(out, y):
        return F.cross_entropy(out, y["y"])

    dicts = [({"x": a, "mask": a > 0}, {"y": b, "weight": torch.tensor(1.0)}) for a, b in data]
    assert sharpness(net, loss_fn, dicts).loss == pytest.approx(F.cross_entropy(net(x), y).item(), rel=1e-6)
    with pytest.raises(BsamValueError, match="samples"):
        sharpness(net, loss_fn, [({"x": x, "edges": torch.ones(2, 9)}, {"y": y})])


class Named(nn.Linear):
    """Takes its inputs by name, as networks of Transformers do."""

    def forward(self, input_ids=None, scale=None, labels=None, **kwargs):
        out = super().forward(input_ids * (1.0 if scale is None else scale))
        return {"logits": out, "loss": None if labels is None else F.cross_entropy(out, labels)}


class Wrapped(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("mapping", [dict, UserDict])
@pytest.mark.parametrize("wrap", [lambda model: model, Wrapped])
def test_inputs_by_name(samples, mapping, wrap):
    """For products, too, recorded or not; the same as with a network that takes a tensor."""
    torch.manual_seed(0)
    (x, y), net, named = samples, nn.Linear(6, 3), Named(6, 3)
    named.load_state_dict(net.state_dict())
    parts = [*zip(x.split(20), y.split(20), strict=True)]
    scale = torch.full((20, 1), 2.0)
    data = [(mapping(input_ids=a, scale=scale[: len(a)]), b) for a, b in parts]
    model = wrap(named)

    def loss_fn(out, y):
        return F.cross_entropy(out["logits"], y)

    doubled = [(2 * a, b) for a, b in parts]
    expected = sharpness(net, F.cross_entropy, doubled)
    assert sharpness(model, loss_fn, data) == expected
    v = torch.ones(21)
    product = HessianOperator(net, F.cross_entropy, doubled).times(v)
    H = HessianOperator(model, loss_fn, data)
    torch.testing.assert_close(H.times(v), product)
    with H.linearized(1 << 30) as recording:
        torch.testing.assert_close(H.times(v), product)
        assert recording.recorded == len(data)
    if mapping is dict:
        batches = [{"input_ids": 2 * a, "labels": b} for a, b in parts]
        with pytest.raises(BsamValueError, match=r"pass \[\(batch, batch\['labels'\]\) for batch in data\]"):
            sharpness(model, lambda out, _: out["loss"], batches)
        pairs = [(batch, batch["labels"]) for batch in batches]
        assert sharpness(model, lambda out, _: out["loss"], pairs).loss == pytest.approx(expected.loss, rel=1e-6)
