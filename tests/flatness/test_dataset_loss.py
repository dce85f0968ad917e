"""What the instruments make of the batches of a data set."""

import copy
import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bsam
from bsam.flatness import HessianOperator, landscape, sharpness, trace
from bsam.flatness.dataset_loss import DatasetLoss


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(6, 3)


@pytest.fixture
def samples():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(10, 6, generator=generator), torch.randint(0, 3, (10,), generator=generator)


@pytest.fixture
def data(samples):
    x, y = samples
    return [(x[:7], y[:7]), (x[7:], y[7:])]


def whole(model, samples, loss_fn=F.cross_entropy):
    """The loss of all samples as one batch, in float64."""
    x, y = samples
    return loss_fn(copy.deepcopy(model).double()(x.double()), y).item()


class Wrapped(NamedTuple):
    inner: dict


TARGETS = {
    "dict": (lambda y: {"a": y}, lambda y: y["a"]),
    "dict of a dict": (lambda y: {"name": "b", "a": {"b": y, "c": y}}, lambda y: y["a"]["b"]),
    "tuple": (lambda y: (torch.tensor(2.0), y, y), lambda y: y[1]),
    "list": (lambda y: [y, y], lambda y: y[0]),
    "named tuple": (lambda y: Wrapped({"a": y}), lambda y: y.inner["a"]),
    "list of numbers": (lambda y: y.tolist(), torch.tensor),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_a_batch_counts_by_its_samples_however_its_targets_are_held(model, samples, data, kind):
    wrap, unwrap = TARGETS[kind]
    found = sharpness(model, lambda out, y: F.cross_entropy(out, unwrap(y)), [(x, wrap(y)) for x, y in data])
    assert found.loss == pytest.approx(whole(model, samples), rel=1e-6)


@pytest.mark.parametrize("y", [None, torch.tensor(1.0), "x", 3])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"x": x}])
def test_targets_without_rows_leave_it_to_the_inputs(samples, y, wrap):
    class Net(nn.Linear):
        def forward(self, batch):
            return super().forward(batch["x"] if isinstance(batch, dict) else batch)

    x, net = samples[0], Net(6, 3)
    found = sharpness(net, lambda out, y: out.square().mean(), [(wrap(x[:7]), y), (wrap(x[7:]), y)])
    assert found.loss == pytest.approx(float(F.linear(x, net.weight, net.bias).square().mean().detach()), rel=1e-6)


def test_a_length_of_the_targets_counts_where_there_is_no_tensor():
    class Net(nn.Linear):
        def forward(self, rows):
            return super().forward(torch.tensor(rows))

    net, rows = Net(1, 1), [[1.0], [2.0], [5.0]]
    data = [(rows[:2], [0.0, 1.0]), (rows[2:], [2.0])]
    found = sharpness(net, lambda out, y: F.mse_loss(out[:, 0], torch.tensor(y)), data)
    assert found.loss == pytest.approx(
        float(F.mse_loss(net(rows)[:, 0], torch.tensor([0.0, 1.0, 2.0])).detach()), rel=1e-6
    )
    with pytest.raises(
        bsam.BsamError, match="does not say how many samples it has: give its inputs or its targets as tensors"
    ):
        sharpness(net, lambda out, y: out.square().mean(), [(rows, None)])


def test_a_list_of_targets_has_an_entry_for_each_image():
    class Net(nn.Linear):
        def forward(self, images):
            return torch.stack([super(Net, self).forward(image.mean((1, 2))) for image in images])

    def loss_fn(out, y):
        return (out[:, 0] - torch.tensor([float(len(target["boxes"])) for target in y])).square().mean()

    def batch(*boxes):
        return [torch.randn(3, 4, 5, generator=generator) for _ in boxes], [
            {"boxes": torch.rand(k, 4, generator=generator)} for k in boxes
        ]

    generator, net = torch.Generator().manual_seed(0), Net(3, 1)
    data = [batch(0, 2), batch(4, 1, 5), batch(0, 0, 0, 2)]  # the first image of a batch may have no box
    images, targets = ([entry for pair in data for entry in pair[part]] for part in (0, 1))
    assert sharpness(net, loss_fn, data).loss == pytest.approx(float(loss_fn(net(images), targets).detach()), rel=1e-6)
    threes = [batch(3), batch(1, 2)]  # as many boxes as channels
    values = [float(loss_fn(net(x), y).detach()) for x, y in threes]
    assert sharpness(net, loss_fn, threes).loss == pytest.approx((values[0] + 2 * values[1]) / 3, rel=1e-6)
    ragged = [(x, [target["boxes"] for target in y]) for x, y in data]
    found = sharpness(net, lambda out, y: loss_fn(out, [{"boxes": boxes} for boxes in y]), ragged)
    assert found.loss == pytest.approx(float(loss_fn(net(images), targets).detach()), rel=1e-6)


def test_inputs_and_targets_in_dicts_count_by_the_rows_that_all_of_them_have(samples):
    class Net(nn.Linear):
        def forward(self, batch):
            return super().forward(batch["x"])

    (x, y), net = samples, Net(6, 3)
    data = [
        ({"x": a, "mask": a > 0}, {"y": b, "weight": torch.tensor(1.0)}) for a, b in ((x[:7], y[:7]), (x[7:], y[7:]))
    ]
    found = sharpness(net, lambda out, y: F.cross_entropy(out, y["y"]), data)
    assert found.loss == pytest.approx(float(F.cross_entropy(F.linear(x, net.weight, net.bias), y).detach()), rel=1e-6)
    with pytest.raises(bsam.BsamError, match="does not say how many samples it has"):
        sharpness(net, lambda out, y: F.cross_entropy(out, y["y"]), [({"x": x, "edges": torch.ones(2, 9)}, {"y": y})])


WEIGHTS = torch.tensor([0.1, 1.0, 4.0])
NOT_MEANS = {
    "weights of classes": nn.CrossEntropyLoss(weight=WEIGHTS),
    "ignored labels": nn.CrossEntropyLoss(ignore_index=1),
    "a sum": lambda out, y: F.cross_entropy(out, y, reduction="sum"),
    "a maximum": lambda out, y: F.cross_entropy(out, y, reduction="none").max(),
    "a square root": lambda out, y: F.cross_entropy(out, y).sqrt(),
}
MEASURES = {
    "sharpness": lambda *arguments, **options: sharpness(*arguments, **options),
    "landscape": lambda *arguments, **options: landscape(*arguments, points=3, dims=1, **options),
    "product": lambda *arguments, **options: HessianOperator(*arguments, **options).times(torch.ones(21)),
    "recorded product": lambda *arguments, **options: recorded(HessianOperator(*arguments, **options)),
}


def recorded(H):
    with H.linearized(1 << 30):
        return H.times(torch.ones(21))


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("loss_fn", NOT_MEANS)
@pytest.mark.parametrize("micro_batch", [None, 3, 1])
def test_a_loss_that_is_no_mean_over_samples_is_refused_where_it_matters(
    model, samples, data, unchanged, loss_fn, measure, micro_batch
):
    match = r"loss_fn is not a mean over samples.*class weights\? ignore_index\?.*take a mean, or one batch, or give batch_weight"
    with unchanged(model), pytest.raises(bsam.BsamError, match=match):
        MEASURES[measure](model, NOT_MEANS[loss_fn], data, micro_batch=micro_batch)
    MEASURES[measure](model, NOT_MEANS[loss_fn], [samples], micro_batch=10)  # one batch


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("micro_batch", [None, 3, 1])
def test_with_the_weight_of_a_batch_the_result_does_not_depend_on_the_batches(
    model, samples, data, measure, micro_batch
):
    weights = {
        "weights of classes": lambda x, y: WEIGHTS[y].sum(),
        "ignored labels": lambda x, y: int((y != 1).sum()),
    }
    for name, weight in weights.items():
        whole = MEASURES[measure](model, NOT_MEANS[name], [samples])
        parts = MEASURES[measure](model, NOT_MEANS[name], data, micro_batch=micro_batch, batch_weight=weight)
        if isinstance(whole, torch.Tensor):
            torch.testing.assert_close(parts, whole)
        else:
            assert parts.loss == pytest.approx(whole.loss, rel=1e-5)
        with pytest.raises(
            bsam.BsamError, match="batch_weight must return a finite number that is not negative, got nan"
        ):
            MEASURES[measure](model, NOT_MEANS[name], data, batch_weight=lambda x, y: math.nan)
        with pytest.raises(bsam.BsamError, match="batch_weight is 0 for every batch"):
            MEASURES[measure](model, NOT_MEANS[name], data, batch_weight=lambda x, y: 0)


def test_batches_that_cannot_be_joined_are_halved(samples):
    """Sequences of two lengths, with padding that is ignored."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7))

    def loss_fn(out, y):
        return F.cross_entropy(out.flatten(0, 1), y.flatten())

    x = torch.randint(0, 7, (4, 6))
    y = x.masked_fill(torch.arange(6) >= torch.tensor([6, 5, 3, 2])[:, None], -100)
    data = [(x, y), (x[:2, :4], x[:2, :4])]
    for batches in (data, data[::-1]):
        with pytest.raises(bsam.BsamError, match="loss_fn is not a mean over samples"):
            sharpness(net, loss_fn, batches)
    found = sharpness(net, loss_fn, data, batch_weight=lambda x, y: (y != -100).sum())
    both = F.cross_entropy(
        net(torch.cat([x.flatten(), x[:2, :4].flatten()])), torch.cat([y.flatten(), x[:2, :4].flatten()])
    )
    assert found.loss == pytest.approx(both.item(), rel=1e-6)


def test_micro_batches_of_a_norm_that_tracks_no_statistics_are_refused(samples):
    def net(**options):
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, **options), nn.Linear(4, 3))

    with pytest.raises(
        bsam.BsamError,
        match="statistics a batch norm without running statistics uses: leave it out, and make the batches of data smaller",
    ):
        sharpness(net(track_running_stats=False), F.cross_entropy, [samples], micro_batch=4)
    sharpness(net(), F.cross_entropy, [samples], micro_batch=4)
    sharpness(net(track_running_stats=False), F.cross_entropy, [samples])


def test_a_piece_of_ignored_labels_alone_is_refused(model, samples):
    data = [(samples[0][:5], torch.tensor([1, 1, 0, 2, 0]))]
    with pytest.raises(bsam.BsamError, match=r"and nan on average over two parts"):
        sharpness(model, nn.CrossEntropyLoss(ignore_index=1), data, micro_batch=2)
    found = sharpness(
        model, nn.CrossEntropyLoss(ignore_index=1), data, micro_batch=2, batch_weight=lambda x, y: (y != 1).sum()
    )
    assert found.loss == pytest.approx(whole(model, data[0], nn.CrossEntropyLoss(ignore_index=1)), rel=1e-6)


def test_ignored_labels_are_noticed_in_whatever_batch_they_come(model, samples):
    x, y = samples
    ignored = y.clone()
    ignored[0] = -100
    for micro_batch in (None, 4):
        with pytest.raises(bsam.BsamError, match="mean over samples"):
            sharpness(model, F.cross_entropy, [(x, y), (x, y), (x, ignored)], micro_batch=micro_batch)


def test_the_loss_is_checked_in_the_first_pass_alone(model, samples):
    sizes = []

    def loss_fn(out, y):
        sizes.append(len(y))
        return F.cross_entropy(out, y)

    L = DatasetLoss(model, loss_fn, [samples, samples], micro_batch=5)
    with L.measuring():
        L.value()
        first = len(sizes)
        L.value()
    assert first > 4
    assert sizes[first:] == [5] * 4


def test_a_loss_that_needs_a_batch_as_it_comes_is_not_checked(model, samples):
    def loss_fn(out, y):
        if len(y) != 5:
            raise ValueError("five at a time")
        return F.cross_entropy(out, y)

    L = DatasetLoss(model, loss_fn, [samples], micro_batch=5)
    with L.measuring():
        assert L.value()[0] == pytest.approx(whole(model, samples), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e-3])
def test_rounding_is_no_reason_to_refuse_a_mean(dtype, scale):
    for seed in range(20):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 5))
        with torch.no_grad():
            net[-1].weight.mul_(scale)
        x = torch.randn(23, 6)
        y = net(x).argmax(1) if seed % 2 else torch.randint(0, 5, (23,))  # small losses of large outputs, too
        for loss_fn in (
            F.cross_entropy,
            lambda out, y: F.mse_loss(out, F.one_hot(y, 5).to(out)),
            nn.CrossEntropyLoss(label_smoothing=0.1),
        ):
            L = DatasetLoss(copy.deepcopy(net).to(dtype), loss_fn, [(x.to(dtype), y)], micro_batch=7)
            with L.measuring():
                L.value()


def test_rounding_of_autocast_is_no_reason_either(samples):
    net = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))
    L = DatasetLoss(net, F.cross_entropy, [samples], micro_batch=3)
    with L.measuring(), torch.autocast("cpu", dtype=torch.bfloat16):
        L.value()


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_losses_that_are_no_numbers_on_both_sides_agree(model, samples, loss):
    L = DatasetLoss(model, lambda out, y: out.sum() * 0 + loss, [samples], micro_batch=4)
    with L.measuring():
        assert L.value()[0] == pytest.approx(loss, nan_ok=True)


def test_outputs_with_no_row_for_each_sample_are_not_judged(model, samples):
    class Two(nn.Linear):
        def forward(self, x):
            return super().forward(x), self.weight.square().sum()

    def loss_fn(out, y):
        return F.cross_entropy(out[0], y) + out[1]

    two = Two(6, 3)
    assert sharpness(two, loss_fn, [samples], micro_batch=3).loss == pytest.approx(
        sharpness(two, loss_fn, [samples]).loss, rel=1e-6
    )


class Walks:
    """Data that is another one from the second walk on."""

    def __init__(self, *walks):
        self.walks, self.walked = walks, 0

    def __iter__(self):
        self.walked += 1
        return iter(self.walks[min(self.walked, len(self.walks)) - 1])


def walked(model, data, mode="eval", loss_fn=F.cross_entropy, times=3):
    L = DatasetLoss(model, loss_fn, data, mode=mode)
    with L.measuring():
        return [L.value()[0] for _ in range(times)]


OTHER = r"data gives other {} in each pass: take shuffle=False, drop_last=False and no random augmentation"


def changed(x, y, what):
    x, y = x.clone(), y.clone()
    if what == "one number":
        x[4, 2] += 1e-3
    elif what == "flipped":
        x[4] = x[4].flip(0)
    elif what == "swapped inputs":
        x[[3, 4]] = x[[4, 3]]
    elif what == "swapped labels":
        places = [int((y == label).nonzero()[0]) for label in (0, 1)]
        y[places] = y[places[::-1]]
    elif what == "another label":
        y[4] = (y[4] + 1) % 3
    return x, y


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("what", ["one number", "flipped", "swapped inputs", "swapped labels", "another label"])
def test_other_samples_on_a_later_walk_are_refused(model, samples, unchanged, what, mode):
    data = Walks([samples], [samples], [changed(*samples, what)])
    with (
        unchanged(model),
        pytest.raises(bsam.BsamError, match=OTHER.format("samples" if mode == "eval" else "batches")),
    ):
        walked(model, data, mode)
    assert data.walked == 3
    assert len(set(walked(model, Walks([samples], [samples]), mode))) == 1


def test_samples_of_nested_batches_are_compared(samples):
    class Net(nn.Linear):
        def forward(self, batch):
            return super().forward(batch["x"])

    def nested(x, y):
        return [({"x": x, "name": "n"}, (y, None))]

    net = Net(6, 3)
    for what in ("one number", "another label"):
        with pytest.raises(bsam.BsamError, match=OTHER.format("samples")):
            walked(
                net,
                Walks(nested(*samples), nested(*changed(*samples, what))),
                loss_fn=lambda out, y: F.cross_entropy(out, y[0]),
            )


class Noisy(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn_like(x), y


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize(
    "loader",
    [lambda s: DataLoader(TensorDataset(*s), 4, shuffle=True, drop_last=True), lambda s: DataLoader(Noisy(*s), 4)],
)
def test_loaders_that_give_other_samples_on_each_walk_are_refused(model, samples, mode, loader):
    with pytest.raises(bsam.BsamError, match=OTHER.format("samples" if mode == "eval" else "batches")):
        sharpness(model, F.cross_entropy, loader(samples), rho_max=0, rho_min=0, mode=mode)


def test_the_order_and_the_batches_do_not_matter_in_eval_mode_and_do_in_train_mode(samples):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    loader = DataLoader(TensorDataset(*samples), 4, shuffle=True)
    assert walked(net, loader) == pytest.approx([whole(net.eval(), samples)] * 3, rel=1e-6)
    with pytest.raises(bsam.BsamError, match=OTHER.format("batches")):
        walked(net, loader, "train")
    x, y = samples
    walks = [(x[:4], y[:4]), (x[4:], y[4:])], [samples]
    assert walked(net, Walks(*walks)) == pytest.approx([whole(net, samples)] * 3, rel=1e-6)
    with pytest.raises(bsam.BsamError, match=OTHER.format("batches")):
        walked(net, Walks(*walks), "train")


class Tokens(nn.Linear):
    """Of sequences of numbers of at least 2; 1 stands for none."""

    def forward(self, x):
        return super().forward((x * (x != 1)).sum(1, keepdim=True).float())


@pytest.fixture
def sequences():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 9, (20,), generator=generator).tolist()
    return [(torch.randint(2, 9, (length,), generator=generator), length % 3) for length in lengths]


def padded(rows):
    return nn.utils.rnn.pad_sequence([x for x, _ in rows], batch_first=True, padding_value=1), torch.tensor(
        [y for _, y in rows]
    )


def test_padding_that_depends_on_the_batch_makes_no_other_samples(sequences):
    def labels_too(rows):
        x, _ = padded(rows)
        return x, x - 2

    def loader(collate):
        return DataLoader(sequences, 4, shuffle=True, generator=torch.Generator().manual_seed(1), collate_fn=collate)

    losses = walked(Tokens(1, 3), loader(padded))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    walked(Tokens(1, 3), loader(labels_too), loss_fn=lambda out, y: out.mean())
    walked(
        Tokens(1, 3), Walks([padded(sequences)], [padded(sequences[:9]), padded(sequences[9:])], [padded(sequences)])
    )
    with pytest.raises(bsam.BsamError, match=OTHER.format("batches")):
        walked(Tokens(1, 3), loader(padded), "train")


def test_images_and_boxes_in_lists_may_come_in_any_order():
    class Net(nn.Linear):
        def forward(self, images):
            return super().forward(torch.stack([image.mean((1, 2)) for image in images]))

    generator = torch.Generator().manual_seed(0)
    rows = [
        (torch.randn(3, 4, 5, generator=generator), {"boxes": torch.rand(k % 4, 4, generator=generator)})
        for k in range(10)
    ]
    loader = DataLoader(
        rows, 4, shuffle=True, generator=generator, collate_fn=lambda batch: tuple(map(list, zip(*batch, strict=True)))
    )
    losses = walked(
        Net(3, 1),
        loader,
        loss_fn=lambda out, y: (out[:, 0] - torch.tensor([float(t["boxes"].sum()) for t in y])).square().mean(),
    )
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_many_batches_in_any_order_are_one_data_set():
    generator = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(3000, 6, generator=generator) * 10.0 ** torch.randint(-6, 7, (3000, 1), generator=generator),
        torch.zeros(3000).long(),
    )
    orders = [torch.randperm(3000, generator=generator) for _ in range(4)]
    walks = [
        [(x[part], y[part]) for part in order.split(size)]
        for order, size in zip(orders, (1, 7, 500, 3000), strict=True)
    ]
    assert len(walked(nn.Linear(6, 3), Walks(*walks), times=4)) == 4


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "kind",
    [
        "not finite",
        "complex",
        "bool",
        "half",
        "sparse",
        "quantized",
        "no number",
        "no tensor",
        "0-dim",
        "not by sample",
    ],
)
def test_data_of_any_kind_can_be_walked_twice(kind):
    class Net(nn.Linear):
        def forward(self, batch):
            return super().forward(torch.ones(4, 2))

    x = {
        "not finite": torch.tensor([[math.nan], [math.inf], [-math.inf], [1.0]]),
        "complex": torch.tensor([[1j], [2], [3], [4]]),
        "bool": torch.tensor([[True], [False], [True], [True]]),
        "half": torch.tensor([[65504.0]] * 4, dtype=torch.float16),
        "sparse": torch.eye(4).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(4, 1), 0.1, 0, torch.qint8),
        "no number": torch.ones(4, 0),
        "no tensor": object(),
        "0-dim": torch.tensor(3.0),
        "not by sample": {"x": torch.ones(4, 2), "edges": torch.ones(2, 9)},
    }[kind]
    y = [0, 1, 0, 1] if kind == "no tensor" else torch.tensor([0, 1, 0, 1])
    assert len(set(walked(Net(2, 2), [(x, y)], loss_fn=lambda out, y: F.cross_entropy(out, torch.as_tensor(y))))) == 1


def test_not_finite_numbers_do_not_hide_the_others(model, samples):
    x, y = samples
    x = x.clone()
    x[0, 0] = math.nan
    with pytest.raises(bsam.BsamError, match=OTHER.format("samples")):
        walked(model, Walks([(x, y)], [changed(x, y, "one number")]))


def test_a_walk_that_was_left_midway_compares_nothing(model, data):
    L = DatasetLoss(model, F.cross_entropy, data)
    for walk in (L.weighted_batches(), L.weighted_batches()):
        next(walk)
        walk.close()
    assert L.samples is None
    with L.measuring():
        assert L.value() == L.value()


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_infinite_loss_makes_the_mean_infinite_wherever_it_comes(model, samples, order, bad):
    x = samples[0]
    batches = [(x[:3], torch.tensor([bad] * 3)), (x[3:5], torch.tensor([1.0] * 2)), (x[5:], torch.tensor([2.0] * 5))]
    data = [batches[i] for i in order]
    L = DatasetLoss(model, lambda out, y: out.sum() * 0 + y.mean(), data)
    with L.measuring():
        assert [L.value()[0], L.value_and_grad()[0]] == pytest.approx([bad] * 2, nan_ok=True)


def test_one_batch_has_its_loss_to_the_last_bit(model):
    for n in (7, 49, 110):
        for loss in torch.rand(20, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).tolist():
            L = DatasetLoss(model, lambda out, y, loss=loss: out.sum().double() * 0 + loss, [(torch.ones(n, 6), None)])
            with L.measuring():
                assert L.value()[0] == L.value_and_grad()[0] == loss


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ((torch.ones(10, 6), torch.zeros(10).long()), "Tensor"),
        ([(torch.ones(2, 6), torch.zeros(2).long(), torch.arange(2))], "tuple of 3"),
        ([[torch.ones(2, 6)]], "list of 1"),
        ([{"x": torch.ones(2, 6), "y": torch.zeros(2).long()}], "dict"),
        ([torch.ones(2, 6)], "Tensor"),
    ],
)
def test_batches_that_are_no_pairs_are_refused(model, data, what):
    for measure in MEASURES.values():
        with pytest.raises(
            bsam.BsamError,
            match=rf"must be a pair \(inputs, targets\), and one is a {what}: pass \[\(x, y\), \.\.\.\] or a DataLoader",
        ):
            measure(model, F.cross_entropy, data)


def test_inputs_and_targets_of_different_length_cannot_be_split(model, samples):
    x, y = samples
    with pytest.raises(
        bsam.BsamError,
        match=r"inputs of the shape \(10, 6\) and targets of the shape \(4,\): give both a row for each sample, or leave it out",
    ):
        sharpness(model, F.cross_entropy, [(x, y[:4])], micro_batch=2)
    with pytest.raises(bsam.BsamError, match=r"targets of the shape \(\): give both"):
        sharpness(model, lambda out, y: out.mean(), [(x, torch.tensor(1.0))], micro_batch=2)


def test_a_parameter_frozen_afterwards_is_named(model, data):
    H = HessianOperator(model, F.cross_entropy, data)
    H.times(torch.ones(21))
    model.bias.requires_grad_(False)
    with pytest.raises(
        bsam.BsamError,
        match=r"parameters were frozen after this was built for them: bias\. Build it anew, or unfreeze them",
    ):
        H.times(torch.ones(21))
    model.requires_grad_(False)
    with pytest.raises(bsam.BsamError, match=r"weight, bias\. Build"):
        trace(H)
    model.requires_grad_(True)
    H.times(torch.ones(21))


class Stop(Exception):
    pass


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("measure", MEASURES)
def test_a_loader_takes_no_random_number_of_the_caller(model, samples, measure, shuffle):
    loader = DataLoader(TensorDataset(*samples), 4, shuffle=shuffle)
    noise = torch.get_rng_state()
    list(loader)
    assert not torch.equal(torch.get_rng_state(), noise)  # by itself it does
    noise = torch.get_rng_state()
    MEASURES[measure](model, F.cross_entropy, loader)
    assert torch.equal(torch.get_rng_state(), noise)

    def failing(out, y):
        raise Stop

    with pytest.raises(Stop):
        MEASURES[measure](model, failing, loader)
    assert torch.equal(torch.get_rng_state(), noise)


def test_a_label_among_raw_images_is_noticed():
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 2))

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net(x.float() / 255)

    generator = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 256, (128, 3, 64, 64), dtype=torch.uint8, generator=generator), torch.zeros(128).long()
    other = y.clone()
    other[7] = 1
    with pytest.raises(bsam.BsamError, match=OTHER.format("samples")):
        walked(Scaled(), Walks([(x, y)], [(x, other)]))


@pytest.mark.parametrize("kind", ["a loss inside of the outputs", "numbers beside the labels"])
def test_ignored_labels_are_noticed_whatever_is_beside_them(samples, kind):
    class Net(nn.Linear):
        def forward(self, batch):
            x, y = batch if isinstance(batch, tuple) else (batch, None)
            out = super().forward(x)
            return out if y is None else {"loss": F.cross_entropy(out, y), "logits": out}

    (x, y), net = samples, Net(6, 3)
    ignored = y.clone()
    ignored[1:4] = -100
    if kind == "numbers beside the labels":
        data = [(x, {"y": ignored, "w": 1.0, "t": torch.tensor(2.0)}), (x, {"y": y, "w": 1.0, "t": torch.tensor(2.0)})]
        loss_fn = lambda out, y: F.cross_entropy(out, y["y"]) * y["w"]  # noqa: E731
    else:
        data = [((x, ignored), ignored), ((x, y), y)]
        loss_fn = lambda out, y: out["loss"]  # noqa: E731
    with pytest.raises(bsam.BsamError, match="loss_fn is not a mean over samples"):
        sharpness(net, loss_fn, data)
    sharpness(net, loss_fn, data[1:] * 2)


def test_ignored_labels_are_noticed_under_autocast(samples):
    x, y = samples
    ignored = y.clone()
    ignored[:2] = -100
    L = DatasetLoss(nn.Linear(6, 3), F.cross_entropy, [(x, y), (x, ignored)])
    with (
        L.measuring(),
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(bsam.BsamError, match="mean over samples"),
    ):
        L.value()


def test_weights_of_batches_that_are_no_numbers_are_refused(model, data):
    with pytest.raises(bsam.BsamError, match="batch_weight must be a function of inputs and targets, got float"):
        sharpness(model, F.cross_entropy, data, batch_weight=2.0)
    with pytest.raises(bsam.BsamError, match="batch_weight must return one number, got Tensor"):
        sharpness(model, F.cross_entropy, data, batch_weight=lambda x, y: y)


def test_an_embedding_with_a_largest_norm_keeps_its_weights():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(5, 3, max_norm=0.1), nn.Linear(3, 2))
    before = net[0].weight.detach().clone()
    data = [(torch.arange(5), torch.zeros(5).long())]
    HessianOperator(net, F.cross_entropy, data).times(torch.ones(23))
    sharpness(net, F.cross_entropy, data)
    assert torch.equal(net[0].weight, before)
