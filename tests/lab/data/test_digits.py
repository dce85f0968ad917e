import pytest
import torch
from sklearn.datasets import load_digits

from bsam.lab.data import digits


@pytest.fixture(scope="module")
def data():
    return digits()


def parts(data):
    return data.train, data.validation, data.test


def test_every_image_is_in_exactly_one_set(data):
    images, labels = load_digits(return_X_y=True)
    x = torch.cat([part.x for part in parts(data)])
    y = torch.cat([part.y for part in parts(data)])
    assert x.shape == (1797, 1, 8, 8)
    restored = ((x - x.min()) / (x.max() - x.min()) * 16).reshape(-1, 64).round().int()
    ours = sorted([*row, label] for row, label in zip(restored.tolist(), y.tolist(), strict=True))
    assert ours == sorted([*row, label] for row, label in zip(images.tolist(), labels.tolist(), strict=True))


def test_classes_have_their_share_in_every_set(data):
    whole = torch.cat([part.y for part in parts(data)]).bincount(minlength=10) / 1797
    for part in parts(data):
        counts = part.y.bincount(minlength=10)
        assert (counts - whole * len(part)).abs().max() <= 1.5


def test_training_pixels_are_standardised_and_the_others_by_the_same_numbers(data):
    assert abs(float(data.train.x.mean())) < 1e-5
    assert abs(float(data.train.x.std()) - 1) < 1e-5
    assert abs(float(data.test.x.mean())) > 1e-5  # by its own mean it would be 0
    assert data.train.x.min() == data.test.x.min()


def test_split_follows_the_seed(data):
    assert torch.equal(digits(0).train.x, data.train.x)
    assert not torch.equal(digits(1).train.y, data.train.y)
