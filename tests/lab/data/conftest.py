"""Fixtures for tests of data."""

import pytest
from PIL import ImageOps

from bsam.lab.data import images


@pytest.fixture
def decoded(monkeypatch):
    """The names of the images that this process decodes, in blocks of five, which do not divide their number."""
    names = []
    decode = images.decode_pixels

    def counted(content, name, decoding):
        names.append(name)
        return decode(content, name, decoding)

    monkeypatch.setattr(images, "decode_pixels", counted)
    monkeypatch.setattr(images, "BLOCK", 5)
    return names


@pytest.fixture
def black_without_bits(monkeypatch):
    """Let Pillow's posterize return black for 0 bits and less, as it did before version 13; now it raises an error."""
    posterize = ImageOps.posterize

    def without_error(image, bits):
        return posterize(image, bits) if bits > 0 else image.point(lambda level: 0)

    monkeypatch.setattr(ImageOps, "posterize", without_error)
