import pytest
import torch
from scipy.stats import chisquare

from bsam.lab.data.label_noise import flip_labels

LABELS = torch.arange(1000) % 10


def transitions(share, noise_labels, classes):
    """The probability of each label for each true class, entry by entry."""
    matrix = [[0.0] * classes for _ in range(classes)]
    for true in range(classes):
        for label in range(classes):
            if noise_labels == "all":
                matrix[true][label] = share / classes + (1 - share) * (true == label)
            else:
                matrix[true][label] = 1 - share if true == label else share / (classes - 1)
    return matrix


@pytest.mark.parametrize("share", [0.0, 0.25, 0.4, 0.4567, 1.0])
@pytest.mark.parametrize(("noise_labels", "drawn_right"), [("all", 0.1), ("other", 0.0)])
def test_the_number_of_wrong_labels_is_the_expected_one_and_they_are_reported(share, noise_labels, drawn_right):
    noisy, places = flip_labels(LABELS, share, classes=10, seed=3, noise_labels=noise_labels)
    wrong = [i for i in range(1000) if int(noisy[i]) != int(LABELS[i])]
    assert len(wrong) == round(share * (1 - drawn_right) * 1000)
    assert places.tolist() == wrong
    assert noisy.dtype == LABELS.dtype
    assert int(noisy.min()) >= 0
    assert int(noisy.max()) <= 9


@pytest.mark.parametrize("noise_labels", ["all", "other"])
@pytest.mark.parametrize(("share", "classes"), [(0.4, 10), (0.8, 10), (0.6, 3)])
def test_labels_are_drawn_with_the_transition_matrix_of_the_convention(share, classes, noise_labels):
    """By a chi-square test for each true class; classes have different sizes."""
    sizes = [20_000 + 1000 * c for c in range(classes)]
    labels = torch.cat([torch.full((size,), c) for c, size in enumerate(sizes)])
    noisy, _ = flip_labels(labels, share, classes, seed=0, noise_labels=noise_labels)
    p_values = {}
    for convention in ("all", "other"):
        matrix = transitions(share, convention, classes)
        p_values[convention] = [
            chisquare(noisy[labels == c].bincount(minlength=classes), [size * p for p in matrix[c]]).pvalue
            for c, size in enumerate(sizes)
        ]
    wrong_convention = "other" if noise_labels == "all" else "all"
    assert min(p_values[noise_labels]) > 1e-3
    assert max(p_values[wrong_convention]) < 1e-4


def test_labels_drawn_from_all_classes_are_fewer_labels_drawn_from_the_others():
    labels = torch.arange(50_000) % 10
    every, other = flip_labels(labels, 0.8, 10, seed=5), flip_labels(labels, 0.72, 10, seed=5, noise_labels="other")
    assert torch.equal(every[0], other[0])
    assert len(every[1]) == 36_000


def test_labels_drawn_from_the_others_are_those_of_earlier_versions():
    noisy, _ = flip_labels(torch.arange(12) % 4, 0.5, classes=4, seed=0, noise_labels="other")
    assert noisy.tolist() == [3, 1, 2, 3, 1, 2, 2, 1, 3, 2, 2, 3]


def test_is_a_function_of_the_seed_and_changes_nothing_else():
    before, state = LABELS.clone(), torch.random.get_rng_state()
    (first, places), (again, _), (other, _) = (flip_labels(LABELS, 0.4, classes=10, seed=seed) for seed in (1, 1, 2))
    assert 150 < int((places < 500).sum()) < 250  # spread over the set
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(LABELS, before)
    assert torch.equal(torch.random.get_rng_state(), state)
