import copy
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bsam.common.errors import BsamValueError
from bsam.core.vector import Vector
from bsam.flatness import HessianOperator, landscape, plane_through, sharpness, top_eigenvalues


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def directions_of(model, data, seed=0):
    """The two directions of a landscape, from the weights at which it evaluates the loss."""
    w, seen = flat(model), []

    def loss_fn(out, y):
        seen.append(flat(model) - w)
        return F.cross_entropy(out, y)

    landscape(model, loss_fn, data, points=3, seed=seed)
    grid = seen[-9 * len(data) :: len(data)]  # in rows of three
    sizes = [p.numel() for p in model.parameters()]
    pieces = [[t.view(p.shape) for t, p in zip(grid[i].split(sizes), model.parameters(), strict=True)] for i in (7, 5)]
    return [Vector(tensors) for tensors in pieces]


def moved(model, *steps):
    """A copy of the model at ``w`` plus the sum of ``c * v``."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for c, v in steps:
            for p, t in zip(other.parameters(), v.tensors(), strict=True):
                p += c * t
    return other


def plain(model, data, loss_fn=F.cross_entropy):
    """Loss and accuracy of a copy, over all samples at once, in eval mode."""
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
        out = model(x)
        return float(loss_fn(out, y)), float((out.argmax(1) == y).double().mean())


@pytest.mark.parametrize("net", ["mlp", "batch norm"])
def test_plane_equals_a_plain_loop(nets, net):
    model, data = nets["made"](nets[net])
    result = landscape(model, F.cross_entropy, data, span=0.7, points=5, seed=3, accuracy=True)
    np.testing.assert_allclose(result.axes[0], [-0.7, -0.35, 0, 0.35, 0.7], rtol=1e-15)
    assert result.loss.shape == result.accuracy.shape == (5, 5)
    u, v = directions_of(model, data, seed=3)
    for i, a in enumerate(result.axes[0]):
        for j, b in enumerate(result.axes[1]):
            loss, accuracy = plain(moved(model, (a, u), (b, v)), data)
            assert result.loss[i, j] == pytest.approx(loss, rel=1e-12)
            assert result.accuracy[i, j] == pytest.approx(accuracy, abs=1e-12)
    assert np.ptp(result.loss) > 0.05
    assert np.abs(result.loss - result.loss.T).max() > 1e-3  # so that the order of the axes counts
    assert len(set(result.accuracy.flat)) > 3


def test_line_equals_a_plain_loop(nets):
    model, data = nets["made"](nets["mlp"])
    calls = []
    result = landscape(
        model, F.cross_entropy, data, span=2, points=7, dims=1, progress=lambda *call: calls.append(call)
    )
    v, _ = directions_of(model, data)
    assert len(result.axes) == 1
    assert result.loss.shape == (7,)
    assert result.accuracy is None
    np.testing.assert_allclose(result.loss, [plain(moved(model, (a, v)), data)[0] for a in result.axes[0]], rtol=1e-12)
    assert calls == [(n, 7) for n in range(1, 8)]
    single, data = nets["made"](nets["mlp"], dtype=torch.float32)  # directions in another dtype
    again = landscape(single, F.cross_entropy, data, span=2, points=7, dims=1, directions=[v])
    np.testing.assert_allclose(again.loss, [plain(moved(single, (a, v)), data)[0] for a in result.axes[0]], rtol=1e-5)


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_accuracy_of_a_segmentation_counts_pixels(micro_batch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1))
    data = [(torch.randn(n, 1, *size), torch.randint(0, 3, (n, *size))) for n, size in ((3, (4, 5)), (2, (6, 3)))]
    result = landscape(model, F.cross_entropy, data, points=3, accuracy=True, micro_batch=micro_batch).accuracy
    right = [(model(x).argmax(1) == y).flatten() for x, y in data]
    assert result[1, 1] == pytest.approx(float(torch.cat(right).double().mean()), abs=1e-12)
    assert 0 <= result.min() < result.max() <= 1


def test_accuracy_does_not_count_ignored_labels():
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(12, 4)
    predicted = model(x).argmax(1)
    y = torch.where(torch.arange(12) < 5, predicted, (predicted + 1) % 3)  # five are right
    for ignored, loss_fn in (
        (-100, F.cross_entropy),
        (2, nn.CrossEntropyLoss(ignore_index=2)),
        (1, partial(F.cross_entropy, ignore_index=1)),
        (255, lambda out, y: F.cross_entropy(out, y, ignore_index=255)),
    ):
        labels = y.clone()
        labels[[0, 6, 7, 11]] = ignored
        kept = labels != ignored
        expected = float((predicted == labels)[kept].double().mean())
        measured = partial(landscape, model, loss_fn, points=3, dims=1, accuracy=True)
        assert measured([(x, labels)]).accuracy[1] == pytest.approx(expected, abs=1e-12)
        nothing = measured([(x[:2], torch.full((2,), ignored))]).accuracy
        assert np.isnan(nothing).all()


@pytest.mark.parametrize(
    ("classes", "y", "loss_fn"),
    [
        (3, torch.eye(3)[torch.arange(10) % 3], F.cross_entropy),  # one-hot
        (1, torch.ones(10, 1), F.mse_loss),  # regression
        (3, [0] * 10, lambda out, y: F.cross_entropy(out, torch.tensor(y))),
    ],
)
def test_accuracy_without_labels_is_refused(classes, y, loss_fn):
    with pytest.raises(BsamValueError, match="accuracy"):
        landscape(nn.Linear(4, classes), loss_fn, [(torch.randn(10, 4), y)], points=3, accuracy=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [(49,), (7, 2, 15)])  # of 49 `loss * n / n` is not always the loss
def test_centre_is_exactly_the_loss_of_the_model(nets, dtype, sizes):
    for seed in range(3):
        model, data = nets["made"](nets["batch norm"], sizes=sizes, dtype=dtype)
        with torch.no_grad():
            model[-1].bias += seed / 10
        result = landscape(model, F.cross_entropy, data, points=3, dims=1)
        assert result.loss[1] == sharpness(model, F.cross_entropy, data).loss
        assert len(data) > 1 or result.loss[1] == plain(model, data)[0]


def test_filters_have_the_lengths_of_those_of_the_model(nets):
    model, data = nets["made"](nets["batch norm"])
    first, second = directions_of(model, data)
    for v in (first, second):
        for p, t in zip(model.parameters(), v.tensors(), strict=True):
            if p.dim() < 2:
                assert not t.any()  # biases and batch norm stay
            else:
                lengths = (tensor.detach().flatten(1).norm(dim=1) for tensor in (t, p))
                torch.testing.assert_close(*lengths, rtol=1e-12, atol=0)
    assert abs(float(first.dot(second))) < 0.2 * float(first.norm() * second.norm())
    again, other = (directions_of(model, data, seed=seed)[0] for seed in (0, 1))
    assert float((again - first).norm()) == 0
    assert float((other - first).norm()) > 0.5 * float(first.norm())


def test_filters_of_zeros_do_not_move(nets):
    model, data = nets["made"](nets["batch norm"])
    with torch.no_grad():
        model[0].bias.zero_()
        model[4].weight[2].zero_()  # one filter
        model[-1].weight.zero_()
        model[5].weight.zero_()
    u, v = directions_of(model, data)
    assert not u.tensors()[4][2].any()
    assert u.tensors()[4][1].any()
    assert not v.tensors()[8].any()
    assert np.isfinite(landscape(model, F.cross_entropy, data, points=3).loss).all()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    result = landscape(model, F.cross_entropy, data, points=3)
    np.testing.assert_allclose(result.loss, np.log(5), rtol=1e-12)  # nowhere to go


def test_hessian_directions_are_the_eigenvectors(untrained):
    model, data, exact = untrained
    loss = landscape(model, F.cross_entropy, data, span=1e-3, points=3, directions="hessian").loss
    curvatures = [(ends.sum() - 2 * loss[1, 1]) / 1e-6 for ends in (loss[[0, 2], 1], loss[1, [0, 2]])]
    assert curvatures == pytest.approx(torch.linalg.eigvalsh(exact)[-2:].flip(0).tolist(), rel=1e-4)


def test_hessian_directions_follow_the_mode_and_the_micro_batches(nets):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 5)).double()
    data = nets["made"](nets["mlp"], sizes=(7, 5))[1]
    measured = partial(landscape, model, F.cross_entropy, data, span=0.1, points=3, dims=1)
    (train,) = top_eigenvalues(HessianOperator(model, F.cross_entropy, data, mode="train"), k=1, vectors=True).vectors
    result, expected = (measured(directions=directions, mode="train") for directions in ("hessian", [train]))
    np.testing.assert_array_equal(result.loss, expected.loss)
    seen = []
    hook = model.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    small = measured(directions="hessian", micro_batch=4)
    hook.remove()
    assert max(seen) == 4
    np.testing.assert_allclose(small.loss, measured(directions="hessian").loss, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_plane_through_three_models_shows_all_of_them(nets, dtype):
    model, data = nets["made"](nets["mlp"], dtype=dtype)
    torch.manual_seed(5)
    steps = (Vector([torch.randn_like(p, requires_grad=False) / 5 for p in model.parameters()]) for _ in range(2))
    models = [model, *(moved(model, (1.0, step)) for step in steps)]
    plane = plane_through(models)
    u, v = plane.directions
    digits = 1e-12 if dtype == torch.float64 else 1e-5
    assert [float(u.norm()), float(v.norm()), float(u.dot(v))] == pytest.approx([1, 1, 0], abs=digits)
    assert np.array_equal(plane.coordinates[0], [0, 0])
    assert (plane.distances < digits).all()
    for other, (a, b) in zip(models, plane.coordinates, strict=True):
        torch.testing.assert_close(flat(moved(model, (a, u), (b, v))), flat(other), rtol=0, atol=digits)
        assert np.hypot(a, b) == pytest.approx(float((flat(other) - flat(model)).norm()), rel=1e-6)
        line = landscape(model, F.cross_entropy, data, points=3, dims=1, directions=[float(a) * u + float(b) * v])
        grid = landscape(model, F.cross_entropy, data, points=3, directions=[float(a) * u, float(b) * v])
        assert [line.loss[2], grid.loss[2, 2]] == pytest.approx([plain(other, data)[0]] * 2, rel=digits)


def test_distances_from_the_plane_of_more_models():
    torch.manual_seed(0)
    models = [nn.Linear(20, 10).double() for _ in range(5)]
    plane = plane_through(models)
    assert plane.coordinates.shape == (5, 2)
    assert (plane.distances > 0.1).sum() >= 2
    lengths = [float((flat(m) - flat(models[0])).norm()) for m in models]
    result = np.hypot(np.linalg.norm(plane.coordinates, axis=1), plane.distances)
    np.testing.assert_allclose(result, lengths, rtol=1e-12)
