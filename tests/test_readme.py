"""The README's code runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn

README = Path(__file__).parents[1] / "README.md"


def test_the_code_of_the_readme_runs():
    torch.manual_seed(0)
    loader = [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(4)]
    names = {"model": nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), "loader": loader, "device": "cpu"}
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, names)
    assert torch.isfinite(names["loss"])
    assert int(names["model"][1].num_batches_tracked) == 8
    assert names["optimizer"].t == 8


def test_the_two_commands_come_first():
    opening = README.read_text(encoding="utf-8")[:500]
    assert "make demo" in opening
    assert "make test" in opening
