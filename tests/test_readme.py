"""The README's code runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from bsam.methods import METHODS

README = Path(__file__).parents[1] / "README.md"


def blocks():
    """The five pieces of code, in their order, and the names that a reader has."""
    torch.manual_seed(0)
    x, y = torch.randn(32, 4), torch.randint(0, 3, (32,))
    names = {
        "model": nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)),
        "loader": list(zip(x.split(8), y.split(8), strict=True)),
        "dataset": TensorDataset(x, y),
        "device": "cpu",
        "classes": 3,
        "epochs": 7,
    }
    found = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(found) == 5
    return names, found


def test_the_code_of_the_readme_runs():
    names, (plain, scaled, choosing, saf, mesa) = blocks()
    exec(plain, names)
    exec(scaled, names)
    assert torch.isfinite(names["loss"])
    assert int(names["model"][1].num_batches_tracked) == 8
    assert names["optimizer"].t == 8

    exec(choosing, names)
    assert torch.isfinite(names["loss"])
    assert names["optimizer"].t == 4

    exec(saf, names)
    loss = names["loss_fn"]
    assert sorted(set(loss.stamp.flatten().tolist())) == [3, 4, 5, 6]  # every sample, in each of the last epochs
    assert torch.isfinite(names["loss"])

    exec(mesa, names)
    average, model = names["loss_fn"].average, names["model"]
    assert torch.isfinite(names["loss"])
    assert 0 < (average[0].weight - model[0].weight).abs().max() < 1


def test_the_table_of_methods_is_the_list_of_methods():
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert [row for row in rows if len(row) == 5] == [(f"`{m.cls.__name__}`", f"{m.passes:g}", m.memory, m.needs or "-", m.purpose) for m in METHODS.values()]


def test_the_two_commands_come_first():
    opening = README.read_text(encoding="utf-8")[:500]
    assert "make demo" in opening
    assert "make test" in opening
