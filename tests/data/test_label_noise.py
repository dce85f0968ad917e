import pytest
import torch

from bsam.data.label_noise import flip_labels

LABELS = torch.arange(1000) % 10


@pytest.mark.parametrize("share", [0.0, 0.25, 0.4, 0.4567, 1.0])
def test_exactly_the_asked_share_is_wrong_and_reported(share):
    noisy, places = flip_labels(LABELS, share, classes=10, seed=3)
    wrong = [i for i in range(1000) if int(noisy[i]) != int(LABELS[i])]
    assert len(wrong) == round(share * 1000)
    assert places.tolist() == wrong
    assert noisy.dtype == LABELS.dtype
    assert int(noisy.min()) >= 0
    assert int(noisy.max()) <= 9


def test_every_other_class_is_equally_likely():
    labels = torch.full((18_000,), 4)
    noisy, _ = flip_labels(labels, 1.0, classes=10, seed=0)
    counts = noisy.bincount(minlength=10)
    assert counts[4] == 0
    others = counts[torch.arange(10) != 4]
    assert (others - 2000).abs().max() < 6 * (2000 * 8 / 9) ** 0.5


def test_is_a_function_of_the_seed_and_changes_nothing_else():
    before, state = LABELS.clone(), torch.random.get_rng_state()
    (first, places), (again, _), (other, _) = (flip_labels(LABELS, 0.4, classes=10, seed=seed) for seed in (1, 1, 2))
    assert 150 < int((places < 500).sum()) < 250  # spread over the set
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(LABELS, before)
    assert torch.equal(torch.random.get_rng_state(), state)
