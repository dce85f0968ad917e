"""``bsam list``."""

import re

import pytest

from bsam import cli
from bsam.models import MODELS


def test_lists(capsys, refused):
    assert cli.main(["list"]) == 0
    everything = capsys.readouterr().out
    found = {}
    for kind in ("methods", "models", "data", "recipes"):
        assert cli.main(["list", kind]) == 0
        found[kind] = capsys.readouterr().out
        assert found[kind].strip() in everything
    assert all(re.search(rf"^{name} ", found["models"], re.MULTILINE) for name in MODELS)
    assert "11,173,962" in found["models"]
    assert "fashion_mnist" in found["data"]
    assert "label-noise" in found["recipes"]
    assert "there is no list of 'papers': choose from methods, models, data, recipes" in refused("list", "papers")


@pytest.mark.parametrize("width", [60, 80, 130])
def test_lists_are_as_wide_as_the_terminal(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    assert cli.main(["list"]) == 0
    longest = max(map(len, capsys.readouterr().out.splitlines()))
    assert width - 10 < longest <= width
