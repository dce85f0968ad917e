from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from bsam.core.errors import BsamValueError
from bsam.data.image_decoding import Resize, decode, decode_bytes


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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is no image in one of the formats JPEG, PNG"),
        (b"not an image", "it is no image in one of the formats JPEG, PNG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", "it is no image in one of the formats JPEG"),
        (encoded(pixels(32, 32, 3), "JPEG")[:-400], "truncated"),
        (encoded(pixels(32, 32, 3))[:-400], "truncated"),
        (encoded(Image.fromarray(pixels(8, 8).astype(np.float32)), "TIFF"), "floating-point numbers"),
        (encoded(pixels(40, 60)), "it has more than 2,000 pixels; make it smaller"),
        (encoded(pixels(80, 80)), "it has more than 2,000 pixels; make it smaller"),
        (encoded(pixels(1, 60)), "its sides, 60 and 1 pixels, are too different"),
    ],
)
def test_what_cannot_be_decoded_is_named(tmp_path, monkeypatch, content, message):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)
    (tmp_path / "cat.jpg").write_bytes(content)
    with pytest.raises(BsamValueError, match=rf"cat.jpg cannot be decoded: .*{message}"):
        decode(tmp_path / "cat.jpg", Resize(8))


def test_settings_are_checked():
    assert Resize(224, 0.9).shorter_side == 248
    for wrong, message in (
        ((0,), "size must be a positive number"),
        ((2.5,), "size must be a positive number"),
        ((8, 0.0), "crop must be above 0"),
        ((8, 1.1), "crop must be above 0"),
        ((8, 1.0, "box"), "interpolation must be one of nearest, bilinear, bicubic, lanczos; got 'box'"),
    ):
        with pytest.raises(BsamValueError, match=message):
            Resize(*wrong)
