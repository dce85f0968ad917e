"""Fixtures for tests of data."""

import pytest
from PIL import ImageOps


@pytest.fixture
def black_without_bits(monkeypatch):
    """Let Pillow's posterize return black for 0 bits and less, as it did before version 13; now it raises an error."""
    posterize = ImageOps.posterize

    def without_error(image, bits):
        return posterize(image, bits) if bits > 0 else image.point(lambda level: 0)

    monkeypatch.setattr(ImageOps, "posterize", without_error)
