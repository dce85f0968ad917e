from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from bsam.common.errors import BsamValueError
from bsam.lab.data.images.decoding import Crop, DecodeError, Resize, decode, decode_bytes
from bsam.lab.data.pose.affine import apply, crop_map, inverse
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
