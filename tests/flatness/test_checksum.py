"""Passes over the data are compared by checksums: other samples are refused, another order is not."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bsam
from bsam.flatness import sharpness
from bsam.flatness.dataset_loss import DatasetLoss

refused = partial(pytest.raises, bsam.BsamError)
OTHER = {
    mode: rf"data gave different {what} in two passes: use shuffle=False, drop_last=False and no random augmentation"
    for mode, what in (("eval", "samples"), ("train", "batches"))
}
MODES = pytest.mark.parametrize("mode", ["eval", "train"])


def losses_of(model, data, mode="eval", loss_fn=F.cross_entropy, passes=3):
    L = DatasetLoss(model, loss_fn, data, mode=mode)
    with L.measuring():
        return [L.value()[0] for _ in range(passes)]


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


@MODES
@pytest.mark.parametrize("what", ["one number", "flipped", "swapped inputs", "swapped labels", "another label"])
def test_other_samples_in_a_later_pass_are_refused(model, samples, unchanged, Passes, what, mode):
    data = Passes([samples], [samples], [changed(*samples, what)])
    with unchanged(model), refused(match=OTHER[mode]):
        losses_of(model, data, mode)
    assert data.number == 3
    assert len(set(losses_of(model, Passes([samples], [samples]), mode))) == 1


@pytest.mark.parametrize("what", ["one number", "another label"])
def test_samples_of_nested_batches_and_beside_non_finite_numbers_are_compared(model, samples, Passes, what):
    class Net(nn.Linear):
        def forward(self, batch):
            return super().forward(batch["x"])

    def nested(x, y):
        return [({"x": x, "name": "n"}, (y, None))]

    data = Passes(nested(*samples), nested(*changed(*samples, what)))
    with refused(match=OTHER["eval"]):
        losses_of(Net(6, 3), data, loss_fn=lambda out, y: F.cross_entropy(out, y[0]))
    x, y = samples[0].clone(), samples[1]
    x[0, 0] = math.nan
    with refused(match=OTHER["eval"]):
        losses_of(model, Passes([(x, y)], [changed(x, y, what)]))


class Noisy(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn_like(x), y


@MODES
@pytest.mark.parametrize(("kind", "options"), [(TensorDataset, {"shuffle": True, "drop_last": True}), (Noisy, {})])
def test_loaders_that_give_other_samples_in_each_pass_are_refused(model, samples, mode, kind, options):
    with refused(match=OTHER[mode]):
        sharpness(model, F.cross_entropy, DataLoader(kind(*samples), 4, **options), rho_max=0, rho_min=0, mode=mode)


def test_order_and_batches_do_not_matter_in_eval_mode_and_do_in_train_mode(samples, data, Passes):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()
    expected = F.cross_entropy(net(samples[0]), samples[1]).item()
    for build in (lambda: DataLoader(TensorDataset(*samples), 4, shuffle=True), lambda: Passes(data, [samples])):
        assert losses_of(net, build()) == pytest.approx([expected] * 3, rel=1e-6)
        with refused(match=OTHER["train"]):
            losses_of(net, build(), "train")


class Tokens(nn.Linear):
    """Of sequences of numbers of at least 2; 1 is padding."""

    def forward(self, x):
        return super().forward((x * (x != 1)).sum(1, keepdim=True).float())


def padded(rows):
    x = nn.utils.rnn.pad_sequence([x for x, _ in rows], batch_first=True, padding_value=1)
    return x, torch.tensor([y for _, y in rows])


def padded_labels(rows):
    x, _ = padded(rows)
    return x, x - 2


def test_padding_that_depends_on_the_batch_does_not_make_other_samples(Passes):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 9, (20,), generator=generator).tolist()
    sequences = [(torch.randint(2, 9, (length,), generator=generator), length % 3) for length in lengths]

    def loader(collate):
        return DataLoader(sequences, 4, shuffle=True, generator=torch.Generator().manual_seed(1), collate_fn=collate)

    losses = losses_of(Tokens(1, 3), loader(padded))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    losses_of(Tokens(1, 3), loader(padded_labels), loss_fn=lambda out, y: out.mean())
    parts = [padded(sequences[:9]), padded(sequences[9:])]
    losses_of(Tokens(1, 3), Passes([padded(sequences)], parts, [padded(sequences)]))
    with refused(match=OTHER["train"]):
        losses_of(Tokens(1, 3), loader(padded), "train")


def test_images_and_boxes_in_lists_may_come_in_any_order():
    class Net(nn.Linear):
        def forward(self, images):
            return super().forward(torch.stack([image.mean((1, 2)) for image in images]))

    def loss_fn(out, y):
        return (out[:, 0] - torch.tensor([float(target["boxes"].sum()) for target in y])).square().mean()

    def as_lists(batch):
        return tuple(map(list, zip(*batch, strict=True)))

    generator = torch.Generator().manual_seed(0)
    images = [torch.randn(3, 4, 5, generator=generator) for _ in range(10)]
    rows = [(image, {"boxes": torch.rand(k % 4, 4, generator=generator)}) for k, image in enumerate(images)]
    loader = DataLoader(rows, 4, shuffle=True, generator=generator, collate_fn=as_lists)
    losses = losses_of(Net(3, 1), loader, loss_fn=loss_fn)
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_many_batches_in_any_order_are_one_data_set(Passes):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3000, 6, generator=generator) * 10.0 ** torch.randint(-6, 7, (3000, 1), generator=generator)
    parts = [torch.randperm(3000, generator=generator).split(size) for size in (3, 7, 500, 3000)]
    data = Passes(*([(x[part], torch.zeros(len(part)).long()) for part in split] for split in parts))
    assert len(losses_of(nn.Linear(6, 3), data, passes=4)) == 4


INPUTS = {
    "not finite": lambda: torch.tensor([[math.nan], [math.inf], [-math.inf], [1.0]]),
    "complex": lambda: torch.tensor([[1j], [2], [3], [4]]),
    "bool": lambda: torch.tensor([[True], [False], [True], [True]]),
    "half": lambda: torch.tensor([[65504.0]] * 4, dtype=torch.float16),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4, 1), 0.1, 0, torch.qint8),
    "empty": lambda: torch.ones(4, 0),
    "no tensor": object,
    "0-dim": lambda: torch.tensor(3.0),
    "not by sample": lambda: {"x": torch.ones(4, 2), "edges": torch.ones(2, 9)},
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", INPUTS)
def test_data_of_any_kind_can_be_iterated_twice(kind):
    class Net(nn.Linear):
        def forward(self, batch):
            return super().forward(torch.ones(4, 2))

    y = [0, 1, 0, 1] if kind == "no tensor" else torch.tensor([0, 1, 0, 1])
    loss_fn = lambda out, y: F.cross_entropy(out, torch.as_tensor(y))  # noqa: E731
    assert len(set(losses_of(Net(2, 2), [(INPUTS[kind](), y)], loss_fn=loss_fn))) == 1


def test_a_label_among_raw_images_is_noticed(Passes):
    class Net(nn.Linear):
        def forward(self, x):
            return super().forward(x.flatten(1).float() / 255)

    generator = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 256, (128, 3, 64, 64), dtype=torch.uint8, generator=generator), torch.zeros(128).long()
    other = y.clone()
    other[7] = 1
    with refused(match=OTHER["eval"]):
        losses_of(Net(3 * 64 * 64, 2), Passes([(x, y)], [(x, other)]))


def test_a_pass_that_was_not_finished_is_not_compared(model, data):
    L = DatasetLoss(model, F.cross_entropy, data)
    for unfinished in (L.weighted_batches(), L.weighted_batches()):
        next(unfinished)
        unfinished.close()
    assert L.num_samples is None
    with L.measuring():
        assert L.value() == L.value()


@pytest.mark.parametrize(("left", "words"), [(0, "nothing"), (1, "7")])
def test_fewer_samples_in_a_later_pass_are_refused(model, data, Passes, left, words):
    with refused(match=f"10 samples in the first pass and {words} in a later one: pass a list or a DataLoader"):
        losses_of(model, Passes(data, data[:left]))
