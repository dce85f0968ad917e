from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bsam.common.errors import BsamValueError
from bsam.lab.data.images import cache
from bsam.lab.data.images.decoding import Crop, decode, decode_pixels
from bsam.lab.data.pose.affine import apply
from bsam.lab.data.pose.joints import Skeleton
from bsam.lab.data.pose.person_files import PersonFiles
from bsam.lab.data.pose.persons import PoseData, load_persons

SIDE = 16  # crops of 22 pixels are stored
IMAGES = ("a.png", "b.png", "b.png", "c.png", "c.png", "d.png")


@pytest.fixture
def files(tmp_path) -> PersonFiles:
    """Six persons in four images of noise; two images have two persons."""
    random = np.random.default_rng(0)
    for name in sorted(set(IMAGES)):
        Image.fromarray(random.integers(0, 256, (40, 50, 3), np.uint8)).save(tmp_path / name)
    begin, size = random.uniform(-5, 20, (6, 2)), random.uniform(8, 30, (6, 2))
    joints = np.concatenate([random.uniform(0, 40, (6, 3, 2)), random.integers(0, 2, (6, 3, 1))], axis=2)
    joints[2, 1] = np.nan, np.nan, 0
    boxes, heads = np.concatenate([begin, begin + size], axis=1), random.uniform(3, 9, 6)
    train, test = np.array([0, 2, 3, 5]), np.array([1, 4])
    skeleton = Skeleton(("head", "left", "right"), ((1, 2),), ())
    return PersonFiles("some", tmp_path, IMAGES, boxes, joints, heads, skeleton, train, test, "by hand")


@pytest.fixture(autouse=True)
def decoded(monkeypatch):
    names = []

    def counted(content, name, decoding):
        names.append(name)
        return decode_pixels(content, name, decoding)

    monkeypatch.setattr(cache, "decode_pixels", counted)
    monkeypatch.setattr(cache, "BLOCK", 4)
    return names


def load(files: PersonFiles, **options) -> PoseData:
    return load_persons(files, SIDE, **options)[0]


def assert_correct(data: PoseData, files: PersonFiles, without: tuple[int, ...] = ()) -> None:
    for part, persons in ((files.train, data.train), (files.test, data.test)):
        chosen = [person for person in part if person not in without]
        assert persons.images == tuple(IMAGES[person] for person in chosen)
        assert persons.x.is_contiguous(memory_format=torch.channels_last)
        assert persons.x.shape == (len(chosen), 3, 22, 22)
        for row, person in enumerate(chosen):
            box = tuple(files.boxes[person].tolist())
            want = decode(files.folder / IMAGES[person], Crop(box, 1.25 * 1.375, 22))
            assert np.array_equal(persons.x[row].permute(1, 2, 0).numpy(), want), person
            places, flags = files.joints[person][:, :2], files.joints[person][:, 2] > 0
            centre, extent = np.array([box[0] + box[2], box[1] + box[3]]) / 2, max(box[2] - box[0], box[3] - box[1])
            crop = (places - centre) * 16 / (1.25 * extent) + 10.5  # as many pixels as in the input
            np.testing.assert_allclose(persons.y[row, flags, :2].numpy(), crop[flags], atol=1e-4)
            assert persons.y[row, :, 2].tolist() == flags.tolist()
            assert persons.y[row, ~flags].eq(0).all()
            back = apply(persons.to_image, persons.y[:, :, :2].double())[row]
            np.testing.assert_allclose(back[flags].numpy(), places[flags], atol=1e-4)
            assert persons.head_sizes[row].item() == pytest.approx(files.head_sizes[person])


def test_every_person_is_a_row_and_the_second_call_decodes_nothing(files, decoded):
    seen = []
    data, left_out = load_persons(files, SIDE, progress=lambda *done: seen.append(done))
    assert_correct(data, files)
    assert (data.name, data.side, data.split, data.skeleton) == ("some", 16, "by hand", files.skeleton)
    assert (left_out, seen, len(decoded)) == ([], [(4, 6), (6, 6)], 6)
    again = load(files)
    assert_correct(again, files)
    assert (len(decoded), again.digest) == (6, data.digest)
    assert again.train.x.untyped_storage().data_ptr() == again.test.x.untyped_storage().data_ptr()  # one mapped file
    last = data.train.part([len(data.train) - 1])
    assert (last.images, last.x.shape[0]) == (data.train.images[-1:], 1)
    assert torch.equal(last.head_sizes, data.train.head_sizes[-1:])


def test_other_boxes_sides_or_sets_are_another_cache_and_other_joints_are_not(files, decoded):
    first = load(files)
    boxes = files.boxes.copy()
    boxes[5, 0] += 0.01
    moved = replace(files, boxes=boxes)
    assert_correct(load(moved), moved)
    assert len(decoded) == 12
    assert load_persons(files, 17)[0].train.x.shape[-1] == 23
    assert len(decoded) == 18
    assert_correct(load(files), files)
    assert len(decoded) == 18
    joints = files.joints.copy()
    joints[5, 0] = 3.25, 4, 1
    relabelled = replace(files, joints=joints)
    other = load(relabelled)
    assert_correct(other, relabelled)
    assert len(decoded) == 18
    assert first.digest != other.digest
    swapped = replace(files, boxes=files.boxes[[0, 1, 2, 4, 3, 5]])  # of two persons in one image
    assert_correct(load(swapped), swapped)
    assert len(decoded) == 24
    exchanged = replace(files, train=files.test, test=files.train)
    assert_correct(load(exchanged), exchanged)
    assert load(exchanged).digest != first.digest
    heads = files.head_sizes.copy()
    heads[1] += 0.01
    assert load(replace(files, head_sizes=heads)).digest != first.digest == load(files).digest


def test_persons_whose_image_cannot_be_decoded_are_named_or_left_out(files):
    Path(files.folder, "c.png").write_bytes(b"not an image")
    with pytest.raises(BsamValueError, match=r"c\.png"):
        load(files)
    data, left_out = load_persons(files, SIDE, skip_corrupt=True)
    assert_correct(data, files, without=(3, 4))
    assert [sentence.split()[0] for sentence in left_out] == ["c.png", "c.png"]


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_set_needs_a_person_also_with_skip_corrupt(files, part):
    for person in getattr(files, part):
        Path(files.folder, files.images[person]).write_bytes(b"not an image")
    with pytest.raises(BsamValueError, match=f"no person of the {part} set"):
        load_persons(files, SIDE, skip_corrupt=True)


def test_boxes_beside_the_image_are_named_or_left_out(files):
    boxes = files.boxes.copy()
    boxes[3:5] = [[-5000, -5000.4321987, -4900, -4900], [0, 0, 1e7, 1e7]]
    moved = replace(files, boxes=boxes, left_out=("images/e.png has no labelled joint",))
    with pytest.raises(BsamValueError, match="--skip-corrupt"):
        load(moved)
    data, left_out = load_persons(moved, SIDE, skip_corrupt=True)
    assert_correct(data, moved, without=(3, 4))
    assert left_out[0] == moved.left_out[0]
    assert ["c.png" in sentence for sentence in left_out] == [False, True, True]
