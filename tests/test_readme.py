"""The README's code runs, and its tables match the methods and the stored results."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from bsam.methods import METHODS

README = Path(__file__).parents[1] / "README.md"
TEXT = README.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def blocks():
    """The code blocks, in order."""
    return re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.fixture
def names():
    """A reader's names."""
    torch.manual_seed(0)
    x, y = torch.randn(32, 4), torch.randint(0, 3, (32,))
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    return {"model": model, "loader": list(zip(x.split(8), y.split(8), strict=True)), "device": "cpu"}


def test_the_loops_run(blocks, names):
    use, clipped, *_ = blocks
    exec(use, names)
    assert names["optimizer"].t == 4
    assert int(names["model"][1].num_batches_tracked) == 4
    before = names["model"][0].weight.clone()
    exec(clipped, names)
    assert torch.isfinite(names["loss"])
    assert names["optimizer"].t == 8
    assert int(names["model"][1].num_batches_tracked) == 8
    assert not torch.equal(before, names["model"][0].weight)
    assert all(p.grad is None for p in names["model"].parameters())


def test_the_measurements_run(blocks, names):
    use, *_, measuring = blocks
    exec(use, names)
    before = copy.deepcopy(names["model"].state_dict())
    exec(measuring, names)
    assert all(torch.equal(before[name], t) for name, t in names["model"].state_dict().items())
    assert names["top"].converged
    assert len(names["top"].values) == 5
    assert names["plane"].loss[10, 10] == names["sharp"].loss
    assert abs(names["total"].value) > names["total"].standard_error


def test_the_table_of_methods_is_the_list_of_methods():
    rows = [
        f"| `{m.__name__}` | {m.passes:.3g} | {m.needs_in_words() or '-'} | {m.purpose} |" for m in METHODS.values()
    ]
    written = [line for line in TEXT.splitlines() if line.startswith("| `")]
    assert written == rows, "\n".join(["the table in README.md must be:", *rows])


def test_the_results_are_those_of_the_stored_tables():
    def stored(folder, column):
        """Return our number and the published one of each row."""
        text = (README.parent / "results" / folder / "table.md").read_text(encoding="utf-8")
        header, _, *rows = (
            [cell.strip() for cell in line[1:-1].split("|")] for line in text.split("\n") if line[:1] == "|"
        )
        place = header.index(column)
        return {row[0]: (row[place], row[place + 1] if row[place + 1 :] else "-") for row in rows}

    def clean(folder, column):
        cells = stored(folder, column)
        return [" / ".join(cells[method]) for method in ("SGD", "SAM", "BSAM (Algorithm 1)")]

    def noisy(column):
        cells = stored("cifar10-resnet18-label-noise", column)
        (three, _), (released, paper) = cells["BSAM (Algorithm 1)"], cells["BSAM (as released)"]
        both = [" / ".join(cells[method]) for method in ("SGD", "SAM")]
        return [*both, f"{three}, as released {released} / {paper}".removeprefix("-, ")]

    lines = (line[2:-2].split(" | ") for line in TEXT.split("\n") if line.startswith("| CIFAR"))
    assert {name: cells for name, *cells in lines} == {
        "CIFAR-10": clean("cifar10-resnet18", "CIFAR-10"),
        "CIFAR-10, 40 % label noise": noisy("40%"),
        "CIFAR-10, 60 % label noise": noisy("60%"),
        "CIFAR-10, 80 % label noise": noisy("80%"),
        "CIFAR-100": clean("cifar100-resnet18", "CIFAR-100"),
    }


def test_the_length():
    """One screen of what it is, and not many more for the rest: guides are for single groups of readers."""
    assert sum(bool(line.strip()) for line in TEXT.splitlines()) <= 130


def test_linked_files_exist():
    links = re.findall(r"\]\(([^)#]+)", TEXT)
    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []
