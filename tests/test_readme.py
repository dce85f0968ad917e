"""The README's code runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from bsam.methods import METHODS
from bsam.models.digits_net import DigitsNet

README = Path(__file__).parents[1] / "README.md"


def blocks():
    """The nine pieces of code, in their order, and the names that a reader has."""
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
    assert len(found) == 9
    return names, found


def test_the_code_of_the_readme_runs():
    names, (plain, scaled, choosing, saf, mesa, *_) = blocks()
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


def test_the_measurements_of_the_readme_run(tmp_path, monkeypatch):
    names, (plain, *_, measuring, probing, loading, _) = blocks()
    monkeypatch.chdir(tmp_path)
    exec(plain, names)
    before = [t.clone() for t in names["model"].state_dict().values()]
    exec(measuring, names)
    assert all(torch.equal(a, b) for a, b in zip(before, names["model"].state_dict().values(), strict=True))
    assert names["top"].converged
    assert len(names["top"].values) == 5
    assert names["plane"].loss[10, 10] == names["near"].loss
    assert abs(float(names["density"].weights @ names["density"].nodes) * names["H"].size - names["total"].value) < 1

    exec(probing, names)
    assert [reading.step for reading in names["probe"].readings] == [0, 2]
    assert {reading.extra_passes for reading in names["probe"].readings} == {0}
    assert (tmp_path / "probe.png").stat().st_size > 10_000

    exec(loading, names)
    torch.save(DigitsNet().state_dict(), tmp_path / "net.pt")
    model, loss_fn, data = names["load"](tmp_path / "net.pt")
    assert sum(len(y) for _, y in data) == 757
    assert torch.isfinite(loss_fn(model(data[0][0]), data[0][1]))


def test_the_training_of_the_readme_runs(tmp_path, monkeypatch):
    names, (*_, training) = blocks()
    monkeypatch.chdir(tmp_path)
    exec(training, names)
    assert names["accuracy"] > 0.6
    assert (tmp_path / "runs/first/model.safetensors").exists()


def test_the_table_of_methods_is_the_list_of_methods():
    rows = [
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in README.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    assert [row for row in rows if len(row) == 5] == [
        (f"`{m.cls.__name__}`", f"{m.passes:g}", m.memory, m.needs or "-", m.purpose) for m in METHODS.values()
    ]


def test_the_two_commands_come_first():
    opening = README.read_text(encoding="utf-8")[:500]
    assert "make demo" in opening
    assert "make test" in opening
