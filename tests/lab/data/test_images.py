from __future__ import annotations

import io
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import PIL
import pytest
import torch
from PIL import Image

from bsam.common.errors import BsamRuntimeError, BsamValueError
from bsam.lab.data import images as data_images
from bsam.lab.data.arrays import Dataset
from bsam.lab.data.folders import read_folder
from bsam.lab.data.images import Crop, DecodeError, Resize, decode, decode_bytes, decode_pixels
from bsam.lab.data.pose_augment import apply, crop_map, inverse
from pose_reference import bilinear


def pixels(*shape: int, kind: type = np.uint8) -> np.ndarray:
    return np.random.default_rng(1).integers(0, np.iinfo(kind).max, shape, kind, endpoint=True)


def encoded(image: Image.Image | np.ndarray, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, kind, **options)
    return file.getvalue()


def cubic(x: np.ndarray) -> np.ndarray:
    x = abs(x)
    return np.where(x < 1, 1.5 * x**3 - 2.5 * x**2 + 1, np.where(x < 2, -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2, 0))


KERNELS = {"bilinear": lambda x: np.maximum(1 - abs(x), 0), "bicubic": cubic}


def resampled(image: np.ndarray, axis: int, n: int, kernel) -> np.ndarray:
    """Antialiased interpolation along one axis: the kernel is as wide as a pixel of the coarser of the two grids."""
    old = image.shape[axis]
    centre = (np.arange(n)[:, None] + 0.5) * old / n
    weights = kernel((np.arange(old) + 0.5 - centre) / max(1, old / n))
    weights /= weights.sum(1, keepdims=True)
    return np.moveaxis(np.tensordot(weights, image, (1, axis)), 0, axis).round().clip(0, 255)


@pytest.mark.parametrize("interpolation", KERNELS)
@pytest.mark.parametrize(
    ("shape", "resized", "corner"),
    [
        ((20, 33), (18, 29), (1, 6)),  # 29.7 pixels, of which 6.5 are cut at the left
        ((30, 20), (27, 18), (6, 1)),  # 5.5 at the top: rounded to the even number, as torchvision does
        ((7, 7), (18, 18), (1, 1)),
        ((20, 70), (18, 63), (1, 24)),  # 23.5
    ],
)
def test_resizing_agrees_with_a_transcription(shape, resized, corner, interpolation):
    image = pixels(*shape, 3)
    want = image.astype(float)
    for axis in (1, 0):  # Pillow rounds in between
        want = resampled(want, axis, resized[axis], KERNELS[interpolation])
    top, left = corner
    found = decode_bytes(encoded(image), "x", Resize(16, 0.875, interpolation))  # 16 / 0.875 is 18.3
    assert found.shape == (16, 16, 3)
    assert found.dtype == np.uint8
    assert abs(found - want[top : top + 16, left : left + 16]).max() <= 1


@pytest.mark.parametrize(
    ("orientation", "upright"),
    [
        (1, lambda a: a),
        (2, lambda a: a[:, ::-1]),
        (3, lambda a: a[::-1, ::-1]),
        (4, lambda a: a[::-1]),
        (5, lambda a: a.swapaxes(0, 1)),
        (6, lambda a: np.rot90(a, -1)),  # clockwise
        (7, lambda a: a[::-1, ::-1].swapaxes(0, 1)),
        (8, lambda a: np.rot90(a)),
        (9, lambda a: a),
    ],
)
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_the_orientation_is_applied_once(orientation, upright, kind):
    stored, exif = pixels(8, 8, 3), Image.Exif()
    exif[0x0112] = orientation
    assert np.array_equal(decode_bytes(encoded(stored, kind, exif=exif), "x", Resize(8)), upright(stored))


def test_damaged_metadata_around_good_pixels_are_ignored():
    image = pixels(8, 8, 3)
    for exif in (b"Exif\0\0nonsense", b"Exif\0\0II*\0\x08\0\0\0\xff\xff\x12\x01"):
        assert np.array_equal(decode_bytes(encoded(image, exif=exif), "x", Resize(8)), image)


def test_all_kinds_of_pixels_become_rgb(tmp_path):
    grey, deep, alpha = pixels(8, 8), pixels(8, 8, kind=np.uint16), pixels(8, 8, 4)
    palette = Image.fromarray(alpha[..., :3]).quantize(16)
    colours = np.array(palette.getpalette()).reshape(-1, 3)[np.array(palette)]
    ink = alpha.astype(float)
    cases = [
        (encoded(grey), np.stack([grey] * 3, 2)),
        (encoded(Image.fromarray(grey > 99)), np.stack([255 * (grey > 99)] * 3, 2)),
        (encoded(alpha[..., :2].copy()), np.stack([alpha[..., 0]] * 3, 2)),
        (encoded(alpha), alpha[..., :3]),
        (encoded(palette, transparency=bytes(range(16))), colours),
        (encoded(palette, "GIF"), colours),
        (encoded(alpha[..., :3].copy(), "WEBP", lossless=True), alpha[..., :3]),
        (encoded(Image.fromarray(alpha, "CMYK"), "TIFF"), (255 - ink[..., :3]) * (255 - ink[..., 3:]) / 255),
        *((encoded(deep, kind), np.stack([deep // 256] * 3, 2)) for kind in ("PNG", "TIFF", "PPM")),
    ]
    for number, (content, want) in enumerate(cases):
        (tmp_path / "x.jpg").write_bytes(content)
        assert abs(decode(tmp_path / "x.jpg", Resize(8)) - want).max() <= (1 if number == 7 else 0), number


def test_a_crop_is_cut_out_and_black_where_the_image_ends():
    image = np.random.default_rng(2).integers(0, 256, (20, 30, 3), np.uint8)
    padded = np.zeros((60, 70, 3), np.uint8)
    padded[20:40, 20:50] = image
    for x, y in ((0, 0), (-5, 3), (22, 12), (7, -15), (-15, -15)):  # the pixel where the square of 16 begins
        crop = Crop((x + 1.5, y - 0.5, x + 13.5, y + 15.5), margin=1.0, size=16)
        found = decode_bytes(encoded(image), "x", crop)
        assert np.array_equal(found, padded[y + 20 : y + 36, x + 20 : x + 36]), (x, y)


@pytest.mark.parametrize("box", [(3.2, 2.1, 12.7, 9.4), (-6.3, -2.0, 5.0, 8.5), (20.0, 10.0, 33.3, 26.1)])
def test_an_enlarged_crop_is_bilinear_interpolation_by_the_map_of_crop_map(box):
    image = np.random.default_rng(3).integers(0, 256, (20, 30, 3), np.uint8)
    found = decode_bytes(encoded(image), "x", Crop(box, margin=1.25, size=24))
    back = inverse(crop_map(torch.tensor([box]), 1.25, 24))
    for i, j in np.ndindex(24, 24):
        x, y = apply(back, torch.tensor([[[j, i]]], dtype=torch.float64)).flatten().tolist()
        assert abs(found[i, j] - bilinear(image.transpose(2, 0, 1), x, y)).max() <= 1.1  # bytes are rounded


def test_a_reduced_crop_averages_and_keeps_places():
    image = np.zeros((200, 300, 3), np.uint8)
    image[::2] = 255
    assert abs(decode_bytes(encoded(image), "x", Crop((60, 50, 140, 150), 1.0, 20)).astype(int) - 127).max() <= 8
    image = np.zeros((200, 300, 3), np.uint8)
    image[61:68, 90:97] = 255  # around (93, 64)
    found = decode_bytes(encoded(image), "x", Crop((60, 30, 140, 150), 1.25, 40))[:, :, 0].astype(float)
    place = (found.sum(0) @ np.arange(40) / found.sum(), found.sum(1) @ np.arange(40) / found.sum())
    want = apply(crop_map(torch.tensor([[60, 30, 140, 150]]), 1.25, 40), torch.tensor([[[93.0, 64.0]]]))
    assert place == pytest.approx(want.flatten().tolist(), abs=0.05)


def test_crops_without_an_area_or_beside_the_image_are_errors():
    content = encoded(np.zeros((20, 30, 3), np.uint8))
    for box in ((40, 5, 50, 10), (-9, 5, -2, 12), (5, -9, 10, -4), (5, 22, 10, 26)):
        with pytest.raises(BsamValueError, match=r"outside.*30"):
            decode_bytes(content, "x", Crop(box, 1.0, 8))
    with pytest.raises(BsamValueError, match="too large"):
        decode_bytes(content, "x", Crop((0, 0, 1e6, 5), 1.0, 8))


def test_the_whole_image_in_its_own_size():
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    assert np.array_equal(decode_bytes(encoded(pixels), "x"), pixels)
    exif = Image.Exif()
    exif[0x0112] = 3
    assert np.array_equal(decode_bytes(encoded(pixels, exif=exif), "x"), pixels[::-1, ::-1])


def test_the_margin_around_a_large_image_may_be_larger_than_the_largest_image(monkeypatch):
    content, crop = encoded(np.full((20, 30, 3), 90, np.uint8)), Crop((-0.5, -0.5, 29.5, 19.5), 1.5, 9)
    before = decode_bytes(content, "x", crop)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 900)  # the square has 45 x 45, and a few more on each side
    assert np.array_equal(decode_bytes(content, "x", crop), before)
    with pytest.raises(BsamValueError, match="too large"):
        decode_bytes(content, "x", Crop((-0.5, -0.5, 29.5, 19.5), 3, 9))


def test_elongated_images_are_errors_before_they_are_enlarged(tmp_path, monkeypatch):
    """An image of 65000 x 1 pixels has 88 bytes, and would take 13 GB with a shorter side of 256 pixels."""
    content = encoded(Image.new("1", (65000, 1)))
    assert len(content) < 300
    (tmp_path / "long.png").write_bytes(content)
    resize = Image.Image.resize
    monkeypatch.setattr(Image.Image, "resize", lambda *_: pytest.fail("the image was resized"))
    with pytest.raises(DecodeError, match=r"long\.png.*65000 x 1"):
        decode(tmp_path / "long.png", Resize(224, 0.875))
    monkeypatch.setattr(Image.Image, "resize", resize)
    assert decode_bytes(encoded(pixels(2, 1000, 3)), "x", Resize(8)).shape == (8, 8, 3)


SIZE = 8
COUNTS = {"train": 5, "val": 1, "test": 2}  # images of each of the two classes: 16, in 4 blocks
TOTAL = 16
RESIZE = Resize(SIZE)


@pytest.fixture
def folder(tmp_path):
    """Images whose sorted names, class by class, are not the order in which they were drawn."""
    random = np.random.default_rng(0)
    for part, count in COUNTS.items():
        for name in ("wolf", "cat"):
            (tmp_path / "images" / part / name).mkdir(parents=True)
            for i in range(count):
                path = tmp_path / "images" / part / name / f"{i}.png"
                Image.fromarray(random.integers(0, 256, (10, 12, 3), np.uint8)).save(path)
    return tmp_path / "images"


@pytest.fixture(autouse=True)
def _small_blocks(decoded):
    """All tests decode blocks of five images."""


def load(folder: Path, resize: Resize = RESIZE, **options) -> tuple[Dataset, list[str]]:
    return data_images.load_images(read_folder(folder), resize, mean=(0.5,), std=(0.25,), **options)


def cache_file(folder: Path, suffix: str) -> Path:
    (path,) = (folder / ".bsam-cache").glob(f"*{suffix}")
    return path


def assert_correct(data: Dataset, folder: Path, without: tuple[str, ...] = ()) -> None:
    for part, examples in (("train", data.train), ("val", data.validation), ("test", data.test)):
        paths = sorted((folder / part).glob("*/*"))
        paths = [path for path in paths if path.relative_to(folder).as_posix() not in without]
        want = np.stack([decode_pixels(path.read_bytes(), path, RESIZE) for path in paths]).transpose(0, 3, 1, 2)
        assert torch.equal(examples.x, torch.from_numpy(want.copy()))
        assert examples.y.tolist() == [["cat", "wolf"].index(path.parent.name) for path in paths]
        assert examples.x.is_contiguous(memory_format=torch.channels_last)


def test_the_data_set_has_the_decoded_images_in_order_and_the_second_call_decodes_nothing(folder, decoded):
    seen = []
    data, left_out = load(folder, progress=lambda *done: seen.append(done))
    assert_correct(data, folder)
    assert (data.name, data.classes, data.class_names) == ("images", 2, ("cat", "wolf"))
    assert (data.mean, data.std, data.split) == ((0.5,), (0.25,), "folders train, val and test")
    assert left_out == []
    assert seen == [(n, TOTAL) for n in (5, 10, 15, 16)]
    assert len(decoded) == len(set(decoded)) == TOTAL
    again, _ = load(folder, progress=lambda *done: seen.append(done))
    assert (len(seen), len(decoded)) == (4, TOTAL)
    assert_correct(again, folder)
    assert again.digest == data.digest

    one = again.train.x.untyped_storage().data_ptr()  # parts of one file, without a copy
    assert [part.x.untyped_storage().data_ptr() for part in (again.validation, again.test)] == [one, one]
    before = cache_file(folder, ".npy").read_bytes()
    assert np.array_equal(np.load(cache_file(folder, ".npy"))[:10].transpose(0, 3, 1, 2), data.train.x.numpy())
    again.train.x.zero_()
    assert cache_file(folder, ".npy").read_bytes() == before
    assert_correct(load(folder)[0], folder)


def test_the_digest_is_that_of_pixels_labels_and_order(folder, tmp_path):
    digests = [load(folder)[0].digest, load(folder, cache_dir=tmp_path / "elsewhere")[0].digest]
    assert digests[0] == digests[1]
    assert cache_file(folder, ".npy").exists()
    files = read_folder(folder)
    other = replace(files, train=replace(files.train, labels=files.train.labels[::-1]))
    digests.append(data_images.load_images(other, RESIZE, mean=(0.5,), std=(0.25,))[0].digest)
    first, second = folder / "train/cat/0.png", folder / "train/cat/1.png"
    content = first.read_bytes(), second.read_bytes()
    first.write_bytes(content[1])
    digests.append(load(folder)[0].digest)
    second.write_bytes(content[0])
    digests.append(load(folder)[0].digest)
    first.replace(folder / "train/wolf/00.png")
    digests.append(load(folder)[0].digest)
    assert len(set(digests)) == 5


def test_the_cache_of_other_content_settings_or_software_is_not_used(folder, decoded, monkeypatch):
    load(folder)
    path = folder / "test/cat/0.png"
    before, (content, other) = path.stat(), (path.read_bytes(), (folder / "test/cat/1.png").read_bytes())
    path.write_bytes(other)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert_correct(load(folder)[0], folder)
    path.write_bytes(content)
    assert len(decoded) == 2 * TOTAL
    load(folder)
    assert len(decoded) == 2 * TOTAL
    for number, resize in enumerate((Resize(SIZE, 0.8), Resize(SIZE, 1.0, "bicubic"), Resize(7)), 3):
        data, _ = load(folder, resize)
        assert np.array_equal(
            data.train.x[0].permute(1, 2, 0), decode_pixels((folder / "train/cat/0.png").read_bytes(), "", resize)
        )
        assert len(decoded) == number * TOTAL
    monkeypatch.setattr(PIL, "__version__", "0.1")
    load(folder)
    assert len(decoded) == 6 * TOTAL


@pytest.mark.parametrize("suffix", [".npy", ".json"])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1])])
def test_a_missing_or_incomplete_file_is_made_again(folder, decoded, suffix, damage):
    digest = load(folder)[0].digest
    want = cache_file(folder, ".npy").read_bytes()
    damage(cache_file(folder, suffix))
    data, _ = load(folder)
    assert_correct(data, folder)
    assert (data.digest, len(decoded)) == (digest, 2 * TOTAL)
    assert cache_file(folder, ".npy").read_bytes() == want


def flipped(path: Path, byte: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


def zeros(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:128] + bytes(len(path.read_bytes()) - 128))


def saved(change):
    return lambda path: np.save(path, change(np.load(path)))


def json_of(change):
    return lambda path: path.write_text(json.dumps(change(json.loads(path.read_text()))))


DAMAGE = {
    "a bit of a pixel": (".npy", lambda path: flipped(path, 500)),
    "the last bit": (".npy", lambda path: flipped(path, -1, 7)),
    "all zeros": (".npy", zeros),
    "another type": (".npy", saved(lambda x: x.view(np.int8))),
    "half the images": (".npy", saved(lambda x: x[:8])),
    "more images": (".npy", saved(lambda x: np.concatenate([x, x]))),
    "another shape": (".npy", saved(lambda x: x.reshape(TOTAL, -1))),
    "another order": (".npy", saved(lambda x: x[::-1])),
    "a header without end": (".npy", lambda path: flipped(path, 8, 7)),
    "no file": (".npy", lambda path: path.write_bytes(b"")),
    "a digest": (".json", lambda path: flipped(path, -10)),
    "a list": (".json", json_of(lambda record: [record])),
    "no digests": (".json", json_of(lambda record: {"corrupt": [], "sha256": []})),
    "more digests": (".json", json_of(lambda record: {**record, "sha256": [*record["sha256"], "0" * 64]})),
    "a reason": (".json", json_of(lambda record: {**record, "corrupt": [[2, "it is damaged"]]})),
    "a reason for no image": (".json", json_of(lambda record: {**record, "corrupt": [[99, "it is damaged"]]})),
    "numbers": (".json", json_of(lambda record: {"corrupt": 3, "sha256": 4})),
    "nested lists": (".json", lambda path: path.write_text("[" * 100_000)),
    "not text": (".json", lambda path: path.write_bytes(b"\xff" * 40)),
    "a folder": (".npy", lambda path: (path.unlink(), path.mkdir())),
    "a pipe": (".json", lambda path: (path.unlink(), os.mkfifo(path))),
    "a pipe of images": (".npy", lambda path: (path.unlink(), os.mkfifo(path))),
}


@pytest.mark.parametrize(("suffix", "damage"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_made_again(folder, decoded, suffix, damage):
    digest = load(folder)[0].digest
    want = [cache_file(folder, name).read_bytes() for name in (".npy", ".json")]
    damage(cache_file(folder, suffix))
    data, left_out = load(folder, skip_corrupt=True)
    assert_correct(data, folder)
    assert (data.digest, left_out, len(decoded)) == (digest, [], 2 * TOTAL)
    assert [cache_file(folder, name).read_bytes() for name in (".npy", ".json")] == want
    load(folder)
    assert len(decoded) == 2 * TOTAL


def test_every_bit_matters(folder, decoded):
    """One bit of each of 60 places, in a cache that also records a file that cannot be decoded."""
    spoil(folder, "train/cat/1.png")
    digest = load(folder, skip_corrupt=True)[0].digest
    random = np.random.default_rng(0)
    for number, suffix in enumerate([".npy", ".json"] * 30, 2):
        path = cache_file(folder, suffix)
        flipped(path, random.integers(path.stat().st_size), random.integers(8))
        data, left_out = load(folder, skip_corrupt=True)
        assert (data.digest, len(left_out), len(decoded)) == (digest, 1, number * TOTAL), suffix


def test_files_reach_the_disk_before_they_get_their_names(folder, monkeypatch):
    calls = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: calls.append(os.fstat(file).st_ino) or fsync(file))
    monkeypatch.setattr(Path, "replace", lambda a, b: calls.append(a.stat().st_ino) or replace(a, b))
    load(folder)
    assert len(calls) == 4
    assert calls[::2] == calls[1::2]


def test_drafts_that_a_killed_process_left_are_removed(folder):
    load(folder)
    path = cache_file(folder, ".npy")
    drafts = [path.with_name(f"{path.name}.0123abcd.draft"), path.with_suffix(".json.0123abcd.draft")]
    for draft in drafts:
        draft.write_bytes(b"a part")
    path.unlink()
    load(folder)
    assert not any(draft.exists() for draft in drafts)
    assert path.exists()


@pytest.fixture
def reads(monkeypatch):
    """The names of the image files that are read, by any function; their changes count as settled at once."""
    names = []

    def counted(path):
        names.append("/".join(path.parts[-3:]))
        return path.read_bytes()

    monkeypatch.setattr(data_images, "read_image", counted)
    monkeypatch.setattr(data_images, "SETTLED", 0)
    return names


def test_only_files_that_changed_are_read_again(folder, reads, decoded):
    load(folder)
    assert len(reads) == 2 * TOTAL  # once for the digests, and once to decode them
    reads.clear()
    for _ in range(6):  # the runs of a queue
        assert_correct(load(folder)[0], folder)
    assert reads == []
    path = folder / "test/cat/0.png"
    before, content = path.stat(), path.read_bytes()
    path.write_bytes(bytes(reversed(content)))
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # the time of the change itself differs
    load(folder)
    assert reads == ["test/cat/0.png"]
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns - 10**9))
    load(folder)
    assert reads == ["test/cat/0.png"] * 2
    reads.clear()
    (folder / "train/cat/new.png").write_bytes(content)
    assert_correct(load(folder)[0], folder)  # decodes all images, but hashes only one
    assert sorted(reads) == sorted(["train/cat/new.png", *decoded[TOTAL:]])
    assert len(decoded) == 2 * TOTAL + 1
    reads.clear()
    path.write_bytes(content[:-1])
    assert load(folder, skip_corrupt=True)[0].digest
    assert reads[0] == "test/cat/0.png"


def test_a_file_that_changed_just_now_is_read_again(folder, reads, monkeypatch):
    """Another change within the resolution of the clock would not show."""
    monkeypatch.setattr(data_images, "SETTLED", 10**11)
    load(folder)
    reads.clear()
    load(folder)
    assert len(reads) == TOTAL


@pytest.mark.parametrize("damage", [lambda x: x[:-20], lambda x: x.replace(b"0.png", b"1.png", 1), lambda x: b"\xff"])
def test_damaged_digests_of_files_are_computed_again(folder, reads, decoded, damage):
    digest = load(folder)[0].digest
    (index,) = (folder / ".bsam-cache").glob("*.index")
    index.write_bytes(damage(index.read_bytes()))
    reads.clear()
    assert load(folder)[0].digest == digest
    assert (len(reads), len(decoded)) == (TOTAL, TOTAL)


def test_each_class_needs_an_image_that_can_be_decoded(folder):
    for part in ("train", "val", "test"):
        content = {path: path.read_bytes() for path in (folder / part / "wolf").iterdir()}
        spoil(folder, *(path.relative_to(folder).as_posix() for path in content))
        with pytest.raises(BsamValueError, match=r"class wolf in the \w+ set"):
            load(folder, skip_corrupt=True)
        for path in list(content)[1:]:
            path.write_bytes(content[path])
        if len(content) > 1:
            load(folder, skip_corrupt=True)
        for path in content:
            path.write_bytes(content[path])


def test_files_with_the_same_content_are_counted(folder):
    assert load(folder)[0].duplicates == {}
    same = (folder / "train/cat/0.png").read_bytes()
    (folder / "train/cat/copy.png").write_bytes(same)  # no leak
    assert load(folder)[0].duplicates == {}
    for name in ("test/cat/0.png", "val/cat/0.png", "test/cat/1.png"):
        (folder / name).write_bytes(same)
    other = (folder / "train/wolf/0.png").read_bytes()
    (folder / "train/cat/4.png").write_bytes(other)
    counted = {"train and validation": 1, "train and test": 2, "validation and test": 2, "classes": 2}
    for train in (None, Resize(9)):
        data, _ = load(folder, train=train)
        assert data.duplicates == counted
    spoil(folder, "test/cat/0.png", "test/cat/1.png", "test/wolf/0.png")
    (folder / "test/cat/2.png").write_bytes((folder / "test/wolf/1.png").read_bytes())
    data, _ = load(folder, skip_corrupt=True)  # files that are left out do not count
    assert data.duplicates == {"train and validation": 1, "classes": 4}


def test_an_interrupted_call_leaves_no_images_and_stops_soon(folder, decoded, monkeypatch):
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    def slow(content, name, resize):
        time.sleep(0.01)
        return counted(content, name, resize)

    counted = data_images.decode_pixels
    monkeypatch.setattr(data_images, "decode_pixels", slow)
    monkeypatch.setattr(data_images, "ThreadPoolExecutor", lambda: ThreadPoolExecutor(1))
    with pytest.raises(KeyboardInterrupt):
        load(folder, progress=interrupt)
    assert len(decoded) < TOTAL
    assert not [path for path in (folder / ".bsam-cache").iterdir() if path.suffix != ".lock"]
    decoded.clear()
    assert_correct(load(folder)[0], folder)
    assert len(decoded) == TOTAL


def test_of_two_calls_one_decodes_and_the_other_waits(folder, decoded, monkeypatch):
    began, go_on = threading.Event(), threading.Event()

    def slow(done: int, total: int) -> None:
        began.set()
        assert go_on.wait(30)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(load, folder, progress=slow)
        assert began.wait(30)
        second = threads.submit(load, folder)
        with pytest.raises(TimeoutError):
            second.result(timeout=0.2)
        go_on.set()
        assert first.result()[0].digest == second.result()[0].digest
    assert len(decoded) == TOTAL
    assert_correct(second.result()[0], folder)

    monkeypatch.setattr(data_images, "FileLock", None)
    load(folder)  # a complete cache is read without a lock: its folder may be read-only


def spoil(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_bytes(b"not an image")


def test_images_that_cannot_be_decoded_are_named_or_left_out(folder, decoded):
    names = ("train/cat/1.png", "train/cat/notes.txt", "train/wolf/0.png", "test/wolf/1.png")
    spoil(folder, *names)
    with pytest.raises(BsamValueError, match="--skip-corrupt") as caught:
        load(folder)
    lines = str(caught.value).splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(names)
    decoded.clear()
    data, left_out = load(folder, skip_corrupt=True)
    assert decoded == []
    assert left_out == [line.strip() for line in lines]
    assert_correct(data, folder, without=names)
    (folder / "train/cat/notes.txt").unlink()
    assert load(folder, skip_corrupt=True)[0].digest != data.digest


def test_a_folder_that_cannot_be_written_is_an_error_that_says_which_option_helps(folder, tmp_path):
    (folder / ".bsam-cache").write_text("a file")
    with pytest.raises(BsamRuntimeError, match="--cache-dir"):
        load(folder)
    assert_correct(load(folder, cache_dir=str(tmp_path / "new/folder"))[0], folder)
