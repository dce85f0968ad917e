"""``bsam list``."""

import re

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
