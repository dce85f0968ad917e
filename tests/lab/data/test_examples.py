from dataclasses import replace

import pytest
import torch

import bsam
from bsam.lab.data import DATASETS, dataset_entry
from bsam.lab.data.augment import AUGMENTATIONS
from bsam.lab.data.entries import ArrayData, DrawnPersonData, ImageData, PersonData
from bsam.lab.data.examples import Examples
from bsam.lab.data.pose.joints import LSP, MPII
from bsam.lab.data.pose.pose_augment import POSE_AUGMENTATIONS
from bsam.lab.data.pose.stick_figures import stick_figures
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


def test_the_persons_are_those_of_the_data_sets(tmp_path, monkeypatch):
    folders = []
    for name, joints in {"lspet": LSP, "mpii": MPII}.items():
        entry = replace(DATASETS[name], persons=folders.append)
        for folder in (tmp_path, tmp_path / name):  # data sets may share a folder
            folder.mkdir(exist_ok=True)
            entry.person_files(tmp_path)
            assert folders.pop() == folder
        assert entry.classes == len(joints.joints)
    monkeypatch.setattr("bsam.lab.data.NUM_FIGURES", 8)
    drawn = DATASETS["stick_figures"].draw(48)
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
