from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from bsam.common.errors import BsamRuntimeError, BsamValueError
from bsam.lab.data.images import Crop, decode_pixels
from bsam.lab.data.persons import LSP, MPII, PersonFiles, PoseData, Skeleton, load_persons, read_lspet, read_mpii
from bsam.lab.data.pose_augment import apply


@pytest.mark.parametrize("skeleton", [LSP, MPII])
def test_left_and_right_are_exchanged_and_the_drawing_connects_everything(skeleton):
    for joint, other in enumerate(skeleton.mirrored):
        name, partner = skeleton.joints[joint], skeleton.joints[other]
        swapped = {"right": "left", "left": "right"}.get(name.split()[0])
        assert partner == (f"{swapped} {name.split(maxsplit=1)[1]}" if swapped else name)
    reached = {0}
    for _ in skeleton.joints:
        reached |= {joint for edge in skeleton.edges if reached & {*edge} for joint in edge}
    assert reached == {*range(len(skeleton.joints))}
    limbs = [{"ankle", "knee"}, {"knee", "hip"}, {"wrist", "elbow"}, {"elbow", "shoulder"}]
    for side in ("left", "right"):
        for limb in limbs:
            assert {skeleton.joints.index(f"{side} {part}") for part in limb} in [{*edge} for edge in skeleton.edges]


def lspet(folder: Path, n: int = 20) -> np.ndarray:
    """The table of LSP Extended's file: every coordinate is another number, and a few joints are not labelled."""
    (folder / "images").mkdir(exist_ok=True)
    table = np.random.default_rng(0).uniform(10, 200, (14, 3, n))
    table[:, 2] = 1
    table[3, :, 2] = -40, 0, 0
    for i in range(n):
        (folder / f"images/im{i + 1:05d}.jpg").touch()
    savemat(folder / "joints.mat", {"joints": table})
    return table


def test_lspet(tmp_path):
    table = lspet(tmp_path)
    table[:, 2, 4] = 0
    savemat(tmp_path / "joints.mat", {"joints": table})
    files = read_lspet(tmp_path)
    assert (files.name, len(files), files.left_out, files.head_sizes) == ("lspet", 19, files.left_out, None)
    assert files.left_out == ("images/im00005.jpg has no labelled joint",)
    assert "images/im00005.jpg" not in files.images
    assert files.images[:5] == tuple(f"images/im0000{i}.jpg" for i in (1, 2, 3, 4, 6))
    x, y, flag = table[:, :, 2].T
    labelled = np.arange(14) != 3
    np.testing.assert_array_equal(files.joints[2], np.stack([x, y, flag], axis=1))
    size = max(np.ptp(x[labelled]), np.ptp(y[labelled])) * 0.05
    want = x[labelled].min() - size, y[labelled].min() - size, x[labelled].max() + size, y[labelled].max() + size
    assert files.boxes[2] == pytest.approx(want)


def test_the_split_of_lspet_is_fixed(tmp_path):
    lspet(tmp_path, 40)
    files = read_lspet(tmp_path)
    assert [files.images[i][-6:-4] for i in files.test] == ["05", "12", "25", "28"]
    assert sorted([*files.train, *files.test]) == list(range(40))
    assert files.split == "90/10 of the images, seed 0"


def test_persons_who_cannot_be_cut_out_are_left_out_with_a_sentence(tmp_path):
    table = lspet(tmp_path)
    table[:, 2, 4] = 0
    table[1:, 2, 7] = 0  # a single joint
    table[:, :2, 9] = 17 + 0.01 * table[:, :2, 9]  # less than two pixels apart: kept
    table[:, :2, 11] = 17 + 0.001 * table[:, :2, 11]
    savemat(tmp_path / "joints.mat", {"joints": table[:, :, :18]})
    files = read_lspet(tmp_path)
    assert files.left_out == (
        "images/im00005.jpg has no labelled joint",
        "images/im00008.jpg has all its labelled joints in one place",
        "images/im00012.jpg has all its labelled joints in one place",
    )
    assert [int(name[-9:-4]) for name in files.images] == [n for n in range(1, 19) if n not in (5, 8, 12)]
    savemat(tmp_path / "joints.mat", {"joints": 0 * table})
    with pytest.raises(BsamValueError, match=r"0 persons.*im00001\.jpg"):
        read_lspet(tmp_path)


def point(number: int, x: float, y: float, **fields) -> dict:
    return {"id": number, "x": x, "y": y, **fields}


def structs(rows: list[dict]) -> np.ndarray:
    """An array of MATLAB structures; a field that a row does not have is empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    array = np.empty(len(rows), dtype=[(name, object) for name in names])
    for place, row in enumerate(rows):
        array[place] = tuple(row.get(name, np.empty((0, 0))) for name in names)
    return array


def person(points: list[dict], x: float = 100, y: float = 120, scale: float = 1.5) -> dict:
    head = {"x1": np.uint8(250), "y1": np.uint8(40), "x2": np.uint16(280), "y2": np.uint8(80)}
    found = {**head, "scale": scale, "objpos": {"x": x, "y": y}}
    return {**found, "annopoints": {"point": structs(points)}} if points else found


def mpii(folder: Path) -> None:
    joints = [point(9, 201.5, 31), point(0, 11, 301, is_visible="0"), point(10, 51, 61, is_visible=np.uint8(1))]
    several = [person(joints, x=300), person([]), person(joints[:1], scale=2.0)]
    del several[2]["objpos"]
    several.append({"x1": 1, "y1": 1, "x2": 4, "y2": 5, "annopoints": {"point": structs(joints)}})
    several.append(person(joints))
    del several[4]["y2"]
    rows = [structs([person(joints)]), np.empty((0, 0)), structs(several), structs([{"x1": 1, "y1": 2}])]
    rows += [structs([person(joints[:1], scale=2.0), person(joints, y=50)])]
    names = ["one.jpg", "none.jpg", "several.jpg", "test.jpg", "two.jpg"]
    images = [{"image": {"name": name}, "annorect": row} for name, row in zip(names, rows, strict=True)]
    release = {"annolist": structs(images), "img_train": np.array([1, 1, 1, 0, 1]), "version": "12"}
    savemat(folder / "mpii_human_pose_v1_u12_1.mat", {"RELEASE": release})
    (folder / "images").mkdir()
    for name in names[:3:2] + names[4:]:
        (folder / "images" / name).touch()


def test_mpii(tmp_path):
    mpii(tmp_path)
    files = read_mpii(tmp_path)
    assert files.images == tuple(f"images/{name}.jpg" for name in ("one", "several", "two", "two"))
    assert files.left_out == (
        "images/several.jpg has a person with no labelled joint",
        "images/several.jpg has a person with no labelled centre",
        "images/several.jpg has a person with no labelled centre, scale",
        "images/several.jpg has a person with no labelled head",
    )
    want = np.zeros((16, 3))
    want[9], want[0], want[10] = (200.5, 30, 1), (10, 300, 1), (50, 60, 1)
    np.testing.assert_array_equal(files.joints[:2], [want, want])
    np.testing.assert_array_equal(files.joints[2][9], want[9])
    assert files.joints[2, :, 2].sum() == 1
    # 300 pixels around (99, 119 + 22.5); 300 around (299, ...); 400 around (99, 119 + 30)
    assert files.boxes[0].tolist() == pytest.approx([-51, -8.5, 249, 291.5])
    assert files.boxes[1].tolist() == pytest.approx([149, -8.5, 449, 291.5])
    assert files.boxes[2].tolist() == pytest.approx([-101, -51, 299, 349])
    assert files.head_sizes.tolist() == pytest.approx([30.0] * 4)  # 0.6 times 50
    sets = [{files.images[i].partition("/")[2] for i in part} for part in (files.train, files.test)]
    assert not sets[0] & sets[1]
    assert sets[0] | sets[1] == {"one.jpg", "several.jpg", "two.jpg"}
    assert len(sets[1]) == 1

    (tmp_path / "images/several.jpg").unlink()
    with pytest.raises(BsamRuntimeError, match=r"missing.*several\.jpg"):
        read_mpii(tmp_path)


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
def _small_blocks(decoded):
    """All tests decode blocks of five images."""


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
            want = decode_pixels((files.folder / IMAGES[person]).read_bytes(), "", Crop(box, 1.25 * 1.375, 22))
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
    assert (left_out, seen, len(decoded)) == ([], [(5, 6), (6, 6)], 6)
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
