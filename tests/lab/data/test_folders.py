from __future__ import annotations

from pathlib import Path

import pytest

from bsam.lab.data.folders import LabelledFiles, read_folder


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def pairs(files: LabelledFiles) -> list[tuple[str, int]]:
    return list(zip(files.names, files.labels, strict=True))


def test_a_random_split_takes_a_share_of_each_class_and_depends_on_the_seed_only(tmp_path):
    big, small = [f"b/{i:02d}.jpg" for i in range(10)], ["a/y.png", "a/x.png"]
    touch(tmp_path, *big, *small, "a/.hidden", "b/Thumbs.db", "a/desktop.ini", ".bsam-cache/1.npy", "README.txt")
    files = read_folder(tmp_path, seed=3)
    assert (files.class_names, files.validation, files.split) == (("a", "b"), None, "80/20 of each class, seed 3")
    assert files.name == tmp_path.name
    assert sorted(files.train.names + files.test.names) == sorted(big + small)
    for part, sizes in ((files.train, [1, 8]), (files.test, [1, 2])):
        assert part.names == tuple(sorted(part.names))
        assert part.labels == tuple("ab".index(name[0]) for name in part.names)
        assert [part.labels.count(label) for label in (0, 1)] == sizes
    assert read_folder(str(tmp_path), seed=3) == files
    assert len({read_folder(tmp_path, seed).test.names for seed in range(8)}) > 4
    assert read_folder(tmp_path, test_fraction=0.95).train.labels == (0, 1)  # one image of each class is left
    assert read_folder(tmp_path, test_fraction=0.35).split == "65/35 of each class, seed 0"


@pytest.mark.parametrize("validation", ["val", "valid", "validation"])
def test_folders_of_sets_are_the_sets(tmp_path, validation):
    touch(tmp_path, "train/10/a.jpg", "train/9/c.jpg", "train/9/b.jpg", "extra/9/x.jpg")
    touch(tmp_path, f"{validation}/10/d.jpg", f"{validation}/9/e.jpg")
    files = read_folder(tmp_path)
    assert files.class_names == ("9", "10")  # as numbers
    assert pairs(files.train) == [("train/9/b.jpg", 0), ("train/9/c.jpg", 0), ("train/10/a.jpg", 1)]
    assert pairs(files.test) == [(f"{validation}/9/e.jpg", 0), (f"{validation}/10/d.jpg", 1)]
    assert (files.validation, files.split) == (None, f"folders train and {validation}")

    touch(tmp_path, "test/9/f.jpg", "test/10/g.jpg")
    three = read_folder(tmp_path)
    assert (three.train, three.validation) == (files.train, files.test)
    assert pairs(three.test) == [("test/9/f.jpg", 0), ("test/10/g.jpg", 1)]
    assert three.split == f"folders train, {validation} and test"
    assert list(three.sets.values()) == [three.train, three.validation, three.test]
