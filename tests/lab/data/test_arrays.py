from dataclasses import replace

import pytest
import torch
from scipy.stats import chisquare

import bsam
from bsam.lab.data import DATASETS, ArrayData, DrawnPersonData, ImageData, PersonData, dataset_entry
from bsam.lab.data.arrays import Examples, flip_labels
from bsam.lab.data.augment import AUGMENTATIONS
from bsam.lab.data.persons import LSP, MPII
from bsam.lab.data.pose_augment import POSE_AUGMENTATIONS
from bsam.lab.data.stick_figures import stick_figures
from bsam.lab.models import model_entry

ARRAYS, FILES = ("cifar10", "cifar100", "fashion_mnist"), ("flowers102", "stanford_cars", "oxford_pet")
PERSONS, DRAWN = ("lspet", "mpii"), ("stick_figures",)
TEN = Examples(torch.arange(10.0).view(10, 1, 1, 1), torch.arange(10))


def numbered(y):
    """Images whose only pixel is their index."""
    return Examples(torch.arange(float(len(y))).view(-1, 1, 1, 1), y)


MIXED = torch.arange(60) % 5  # twelve of each class
ORDERS = {
    "by turns": MIXED,
    "sorted": MIXED.sort().values,
    "backwards": MIXED.sort(descending=True).values,
    "shuffled": MIXED[torch.randperm(60, generator=torch.Generator().manual_seed(0))],
}


@pytest.mark.parametrize("order", ORDERS)
def test_some_have_as_many_of_each_class_in_any_order(order):
    examples, fewer = numbered(ORDERS[order]), set()
    for n in range(1, 61):
        some = examples.some(n)
        counts = some.y.bincount(minlength=5)
        indices = some.x.flatten().long()
        assert len(some) == n
        assert torch.equal(examples.balanced_indices(n), indices)
        assert fewer < set(indices.tolist())
        fewer = set(indices.tolist())
        assert counts.max() - counts.min() <= 1
        assert (indices.diff() > 0).all()  # in their order, none twice
        assert torch.equal(examples.y[indices], some.y)
        for label in range(5):  # of each class the first ones
            assert torch.equal(indices[some.y == label], (examples.y == label).nonzero().flatten()[: counts[label]])
    assert torch.equal(examples.some(60).x, examples.x)


def test_some_take_more_of_the_others_where_a_class_has_few():
    some = numbered(torch.tensor([2, 2, 2, 2, 0, 2, 7])).some(5)
    assert some.x.flatten().tolist() == [0, 1, 2, 4, 6]
    assert some.y.tolist() == [2, 2, 2, 0, 7]


def test_the_list_is_sound():
    kinds = {ArrayData: ("digits", *ARRAYS), ImageData: FILES, PersonData: PERSONS, DrawnPersonData: DRAWN}
    assert [(name, type(entry)) for name, entry in DATASETS.items()] == [
        (name, kind) for kind, names in kinds.items() for name in names
    ]
    for name, entry in DATASETS.items():
        assert entry.name == name
        assert entry.task == ("pose" if name in (*PERSONS, *DRAWN) else "classification")
        assert entry.augmentation in (AUGMENTATIONS if entry.task == "classification" else POSE_AUGMENTATIONS)
        assert entry.needs_folder == (name not in ("digits", *DRAWN))
        assert (entry.model is None) == (name in FILES)  # that of the pretrained weights
        if entry.task == "pose":
            assert model_entry(entry.model).backbone is not None


def test_the_persons_are_those_of_the_data_sets(tmp_path):
    folders = []
    for name, joints in {"lspet": LSP, "mpii": MPII}.items():
        entry = replace(DATASETS[name], persons=folders.append)
        for folder in (tmp_path, tmp_path / name):  # data sets may share a folder
            folder.mkdir(exist_ok=True)
            entry.person_files(tmp_path)
            assert folders.pop() == folder
        assert entry.classes == len(joints.joints)
    drawn = DATASETS["stick_figures"].draw(48, 8)
    assert (drawn.side, len(drawn.train), len(drawn.test), len(drawn.skeleton.joints)) == (48, 8, 2, 14)
    assert drawn.digest == stick_figures(8, side=48).digest


def test_data_sets_of_files_may_share_a_folder(tmp_path):
    for place in ("", "flowers102/"):
        with pytest.raises(bsam.BsamError, match=f"{tmp_path}/{place}"):
            DATASETS["flowers102"].image_files(tmp_path)
        (tmp_path / "flowers102").mkdir(exist_ok=True)
    for name in map(str, range(102)):
        for part in ("train", "test"):
            (tmp_path / "flowers102" / part / name).mkdir(parents=True)
            (tmp_path / "flowers102" / part / name / "1.jpg").touch()
    assert DATASETS["flowers102"].image_files(tmp_path).folder == tmp_path / "flowers102"
    assert dataset_entry("folder:flowers102").image_files(tmp_path).folder == tmp_path / "flowers102"


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
