import contextlib
import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bsam
from bsam.core.undo import Undo
from bsam.flatness import HessianOperator, landscape, sharpness
from bsam.flatness.dataset_loss import DatasetLoss

refused = partial(pytest.raises, bsam.BsamError)
WEIGHTS = torch.tensor([0.1, 1.0, 4.0])
NOT_MEANS = {
    "class weights": nn.CrossEntropyLoss(weight=WEIGHTS),
    "ignored labels": nn.CrossEntropyLoss(ignore_index=1),
    "a sum": lambda out, y: F.cross_entropy(out, y, reduction="sum"),
    "a maximum": lambda out, y: F.cross_entropy(out, y, reduction="none").max(),
    "a square root": lambda out, y: F.cross_entropy(out, y).sqrt(),
}


def recorded(H):
    with H.linearized(1 << 30):
        return H.times(torch.ones(21))


MEASURES = {
    "sharpness": lambda *arguments, **options: sharpness(*arguments, **options).loss,
    "landscape": lambda *arguments, **options: landscape(*arguments, points=3, dims=1, **options).loss,
    "product": lambda *arguments, **options: HessianOperator(*arguments, **options).times(torch.ones(21)),
    "recorded product": lambda *arguments, **options: recorded(HessianOperator(*arguments, **options)),
}
REFUSED = [("sharpness", 3, loss_fn) for loss_fn in NOT_MEANS]  # the others get the same losses from DatasetLoss
REFUSED += [(measure, None, "class weights") for measure in ("landscape", "product", "recorded product")]


def whole(model, samples, loss_fn=F.cross_entropy):
    """The loss of all samples as one batch, in float64."""
    x, y = samples
    return loss_fn(copy.deepcopy(model).double()(x.double()), y).item()


@contextlib.contextmanager
def measuring(L):
    with Undo() as undo, undo:
        L.begin(undo)
        yield


def value(*arguments, autocast=False, **options):
    L = DatasetLoss(*arguments, **options)
    with measuring(L), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return L.value()[0]


@pytest.mark.parametrize(("measure", "micro_batch", "loss_fn"), REFUSED)
def test_losses_that_are_not_means_are_refused(model, samples, data, unchanged, loss_fn, measure, micro_batch):
    with unchanged(model), refused(match="mean over"):
        MEASURES[measure](model, NOT_MEANS[loss_fn], data, micro_batch=micro_batch)
    if measure == "sharpness":
        sharpness(model, NOT_MEANS[loss_fn], [samples], micro_batch=10)  # one batch


@pytest.mark.parametrize("loss_fn", NOT_MEANS)
def test_losses_that_are_not_means_are_refused_for_batches_of_one(model, samples, loss_fn):
    singles = list(zip(*(t.split(1) for t in samples), strict=True))
    for measure, data, micro_batch in (("sharpness", [samples], 1), ("product", singles, None)):
        with refused(match="mean over"):
            MEASURES[measure](model, NOT_MEANS[loss_fn], data, micro_batch=micro_batch)
    MEASURES["product"](model, NOT_MEANS[loss_fn], [(samples[0][:1], samples[1][:1])])  # one batch


def test_class_weights_are_refused_for_batches_of_one_class(model, samples):
    x, y = samples
    for classes in ((0, 1), (1, 0), (2, 2, 1)):
        with refused(match="mean over"):
            sharpness(model, NOT_MEANS["class weights"], [(x[y == c], y[y == c]) for c in classes])


def test_one_ignored_label_among_many_batches_of_one_is_noticed(model):
    torch.manual_seed(0)
    x, y = torch.randn(40, 6), torch.randint(0, 3, (40,))
    expected = whole(model, (x, y))
    assert value(model, F.cross_entropy, [(x, y)], micro_batch=1) == pytest.approx(expected, rel=1e-6)
    for place in (0, 15, 16, 39):
        ignored = y.clone()
        ignored[place] = -100
        with refused(match="mean over"):
            value(model, F.cross_entropy, [(x, ignored)], micro_batch=1)


class Pooled(nn.Linear):
    """Averages images of any size; optionally also returns a penalty, as one row."""

    penalty = False

    def forward(self, x):
        out = super().forward(x.mean((2, 3)))
        return (out, self.weight.square().sum().reshape(1)) if self.penalty else out


@pytest.mark.parametrize("penalty", [False, True])
def test_batches_of_one_with_different_shapes(penalty):
    torch.manual_seed(0)
    net = Pooled(3, 4)
    net.penalty = penalty
    data = [(torch.randn(1, 3, 2, size), torch.randint(0, 4, (1,))) for size in (2, 3, 3, 5)]

    def mean(out, y):
        out, extra = out if penalty else (out, 0.0)
        return F.cross_entropy(out, y) + torch.as_tensor(extra).sum()

    def total(out, y):
        return F.cross_entropy(out[0] if penalty else out, y, reduction="sum")

    with torch.no_grad():
        expected = sum(mean(net(x), y).item() for x, y in data) / 4
    assert value(net, mean, data) == pytest.approx(expected, rel=1e-6)
    with refused(match="mean over"):
        value(net, total, data)


WEIGHT = {"class weights": lambda x, y: WEIGHTS[y].sum(), "ignored labels": lambda x, y: int((y != 1).sum())}


@pytest.mark.parametrize(
    ("measure", "loss_fn", "micro_batch"),
    [
        ("sharpness", "class weights", None),
        ("sharpness", "ignored labels", 3),
        ("landscape", "class weights", 3),
        ("product", "ignored labels", None),
        ("recorded product", "class weights", None),
    ],
)
def test_batch_weights_make_the_result_independent_of_the_batches(model, samples, data, measure, loss_fn, micro_batch):
    measured = partial(MEASURES[measure], model, NOT_MEANS[loss_fn])
    parts = measured(data, micro_batch=micro_batch, batch_weight=WEIGHT[loss_fn])
    expected = MEASURES[measure.removeprefix("recorded ")](model, NOT_MEANS[loss_fn], [samples])
    torch.testing.assert_close(torch.as_tensor(parts), torch.as_tensor(expected), rtol=1e-5, atol=1e-6)


def test_padded_sequences_of_several_lengths_are_checked():
    """Sequences of two lengths, with padding that is ignored."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7))

    def loss_fn(out, y):
        return F.cross_entropy(out.flatten(0, 1), y.flatten())

    x = torch.randint(0, 7, (4, 6))
    y = x.masked_fill(torch.arange(6) >= torch.tensor([6, 5, 3, 2])[:, None], -100)
    short = x[:2, :4]
    for data in ([(x, y), (short, short)], [(short, short), (x, y)]):
        with refused(match="mean over"):
            sharpness(net, loss_fn, data)
    result = sharpness(net, loss_fn, data, batch_weight=lambda x, y: (y != -100).sum())
    flat = torch.cat([x.flatten(), short.flatten()]), torch.cat([y.flatten(), short.flatten()])
    assert result.loss == pytest.approx(F.cross_entropy(net(flat[0]), flat[1]).item(), rel=1e-6)


def test_micro_batches_of_ignored_labels_have_no_weight(model, samples):
    data, loss_fn = [(samples[0][:5], torch.tensor([1, 1, 0, 2, 0]))], nn.CrossEntropyLoss(ignore_index=1)
    with refused(match="mean over"):
        sharpness(model, loss_fn, data, micro_batch=2)
    result = sharpness(model, loss_fn, data, micro_batch=2, batch_weight=lambda x, y: (y != 1).sum())
    assert result.loss == pytest.approx(whole(model, data[0], loss_fn), rel=1e-6)


class WithLoss(nn.Linear):
    """Gives its loss, too, if it gets the labels."""

    def forward(self, batch):
        x, y = batch if isinstance(batch, tuple) else (batch, None)
        out = super().forward(x)
        return out if y is None else {"loss": F.cross_entropy(out, y), "logits": out}


KINDS = {
    "labels": (lambda x, y: (x, y), F.cross_entropy),
    "a loss inside of the outputs": (lambda x, y: ((x, y), y), lambda out, y: out["loss"]),
    "numbers beside the labels": (
        lambda x, y: (x, {"y": y, "w": 1.0, "t": torch.tensor(2.0)}),
        lambda out, y: F.cross_entropy(out, y["y"]) * y["w"],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [0, 2])
def test_ignored_labels_are_noticed_in_any_batch(samples, kind, place):
    torch.manual_seed(0)
    (x, y), net = samples, WithLoss(6, 3)
    ignored = y.clone()
    ignored[1:4] = -100
    wrap, loss_fn = KINDS[kind]
    data = [wrap(x, ignored if i == place else y) for i in range(3)]
    with refused(match="mean over"):
        sharpness(net, loss_fn, data)
    sharpness(net, loss_fn, [wrap(x, y)] * 3)
    if kind == "labels":
        for options in ({"micro_batch": 4}, {"autocast": True}):
            with refused(match="mean over"):
                value(net, loss_fn, data, **options)


def test_losses_of_whole_batches_are_not_checked(model, samples):
    def loss_fn(out, y):
        if len(y) != 5:
            raise ValueError("five at a time")
        return F.cross_entropy(out, y)

    assert value(model, loss_fn, [samples], micro_batch=5) == pytest.approx(whole(model, samples), rel=1e-6)


def test_outputs_without_a_row_per_sample_are_not_checked(samples):
    class Two(nn.Linear):
        def forward(self, x):
            return super().forward(x), self.weight.square().sum()

    two, loss_fn = Two(6, 3), lambda out, y: F.cross_entropy(out[0], y) + out[1]
    assert value(two, loss_fn, [samples], micro_batch=3) == pytest.approx(value(two, loss_fn, [samples]), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [30.0, 1e-3])
def test_rounding_errors_of_a_mean_are_accepted(dtype, scale):
    losses = F.cross_entropy, nn.CrossEntropyLoss(label_smoothing=0.1)
    losses += (lambda out, y: F.mse_loss(out, F.one_hot(y, 5).to(out)),)
    for seed, micro_batch in enumerate((7, 1, 7, 7)):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 5))
        with torch.no_grad():
            net[-1].weight.mul_(scale)
        x = torch.randn(23, 6)
        y = net(x).argmax(1) if seed % 2 else torch.randint(0, 5, (23,))  # small losses of large outputs, too
        for loss_fn in losses:
            value(copy.deepcopy(net).to(dtype), loss_fn, [(x.to(dtype), y)], micro_batch=micro_batch)
    value(net, F.cross_entropy, [(x, y)], micro_batch=3, autocast=True)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 2])
def test_one_loss_that_is_not_finite_decides_the_mean(model, place, bad):
    losses = [1.0, 2.0, 3.0]
    losses[place] = bad
    data = [(torch.ones(3, 6), torch.tensor([loss] * 3)) for loss in losses]
    L = DatasetLoss(model, lambda out, y: out.sum() * 0 + y.mean(), data, micro_batch=2)
    with measuring(L):
        assert [L.value()[0], L.value_and_grad()[0]] == pytest.approx([bad] * 2, nan_ok=True)


def test_loss_of_one_batch_is_exact(model):
    for n in (7, 49):
        for loss in torch.rand(10, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).tolist():
            L = DatasetLoss(model, lambda out, y, loss=loss: out.sum().double() * 0 + loss, [(torch.ones(n, 6), None)])
            with measuring(L):
                assert L.value()[0] == L.value_and_grad()[0] == loss


def test_batches_without_a_sample_are_skipped(model, samples, data):
    x, y = samples
    holes = [(x[:0], y[:0]), *data[:1], (x[:0], y[:0]), *data[1:]]
    assert sharpness(model, F.cross_entropy, holes) == sharpness(model, F.cross_entropy, data)
    expected = HessianOperator(model, F.cross_entropy, data).times(torch.ones(21))
    for measure, micro_batch in (("product", 4), ("recorded product", None)):
        product = MEASURES[measure](model, F.cross_entropy, holes, micro_batch=micro_batch)
        torch.testing.assert_close(product, expected)
    with refused(match="empty"):
        sharpness(model, F.cross_entropy, holes[:1])


class Noisy(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn_like(x), y


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize(("kind", "options"), [(TensorDataset, {"shuffle": True, "drop_last": True}), (Noisy, {})])
def test_every_pass_sees_the_same_random_numbers(samples, mode, kind, options):
    """Also in another scope; the caller's random numbers are not affected."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()
    L = DatasetLoss(net, F.cross_entropy, DataLoader(kind(*samples), 4, **options), mode=mode)
    losses, state = [], torch.get_rng_state()
    for _ in range(3):
        with measuring(L):
            losses += [L.value()[0], L.value_and_grad()[0]]
        assert torch.equal(torch.get_rng_state(), state)
        torch.randn(3)
        state = torch.get_rng_state()
    assert len(set(losses)) == 1


def test_data_or_networks_that_change_are_refused(model, samples, data, Passes):
    class Doubling(nn.Linear):
        def forward(self, x):
            return super().forward(x.mul_(2))

    class Counting(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * self.calls

    x, y = samples
    shuffled = DataLoader(TensorDataset(x, y), 4, shuffle=True, generator=torch.Generator().manual_seed(1))
    for net, changing in (
        (model, shuffled), (model, Passes([(x, y)], [(x + 0.01, y)])), (model, Passes([(x, y)], [(x, y.flip(0))])),
        (Doubling(6, 3), [(x.clone(), y)]), (Counting(6, 3), data),
    ):  # fmt: skip
        for measure in ("sharpness", "landscape", "product"):
            with refused(match="first batch"):
                MEASURES[measure](net, F.cross_entropy, changing)
            if isinstance(changing, Passes):
                changing.number = 0
    nn.init.zeros_(model.weight)  # every batch has the same loss, and another gradient
    nn.init.zeros_(model.bias)
    with refused(match="gradient"):
        sharpness(model, F.cross_entropy, shuffled)
    with refused(match="empty"):
        value(model, F.cross_entropy, Passes(data, []))
