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


class SAM(torch.optim.Optimizer):
    """The interface of two half-steps that the README's left-hand example uses."""

    def __init__(self, params, base, rho=0.05, **settings):
        super().__init__(params, {"rho": rho, **settings})
        self.base = base(self.param_groups, **settings)

    def weights(self):
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        norm = torch.stack([p.grad.norm() for p in self.weights()]).norm()
        self.moves = [0.05 * p.grad / norm for p in self.weights()]
        for p, move in zip(self.weights(), self.moves, strict=True):
            p.add_(move)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for p, move in zip(self.weights(), self.moves, strict=True):
            p.sub_(move)
        self.base.step()
        self.zero_grad()


def test_the_loops_run(blocks, names):
    use, scaled, *_ = blocks
    exec(use, names)
    assert names["optimizer"].t == 4
    assert int(names["model"][1].num_batches_tracked) == 4
    before = names["model"][0].weight.clone()
    exec(scaled, names)
    assert torch.isfinite(names["loss"])
    assert names["optimizer"].t == 6
    assert int(names["model"][1].num_batches_tracked) == 8
    assert not torch.equal(before, names["model"][0].weight)
    assert all(p.grad is None for p in names["model"].parameters())


def test_before_and_after_train_alike(blocks, names):
    use, _, before, after, _ = blocks
    names["model"] = names["model"].double()
    names["loader"] = [(x.double(), y) for x, y in names["loader"]]
    other = {**names, "model": copy.deepcopy(names["model"])}
    exec(use.split("base =")[0] + after, names)

    def tracking(on):
        return lambda model: setattr(model[1], "track_running_stats", on)

    old_ways = {"SAM": SAM, "enable_running_stats": tracking(True), "disable_running_stats": tracking(False)}
    exec(use.split("base =")[0] + before, other | old_ways)
    for new, old in zip(names["model"].state_dict().values(), other["model"].state_dict().values(), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=1e-12)


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
        both = [" / ".join(cells[method]) for method in ("SGD", "SAM", "BSAM (Algorithm 1)")]
        return [*both, cells["SAM (sum)"][0], cells["SAM (follow)"][0]]

    def noisy(column):
        cells = stored("cifar10-resnet18-label-noise", column)
        (three, _), (released, paper) = cells["BSAM (Algorithm 1)"], cells["BSAM (as released)"]
        both = [" / ".join(cells[method]) for method in ("SGD", "SAM")]
        return [*both, f"{three}, as released {released} / {paper}".removeprefix("-, ")]

    rows: dict[str, list[str]] = {}
    for name, *cells in (line[2:-2].split(" | ") for line in TEXT.split("\n") if line.startswith("| CIFAR")):
        rows.setdefault(name, []).extend(cells)
    harder = {row: ours for row, (ours, _) in stored("cifar10-resnet18-noise40", "40%").items()}
    assert rows == {
        "CIFAR-10": clean("cifar10-resnet18", "CIFAR-10"),
        "CIFAR-10, 40 % label noise": noisy("40%"),
        "CIFAR-10, 80 % label noise": noisy("80%"),
        "CIFAR-100": clean("cifar100-resnet18", "CIFAR-100"),
        f"CIFAR-10, 40 % wrong labels (BSAM: {harder['BSAM (Algorithm 1)']})": [
            harder["SAM (sum)"],
            harder["SAM (follow)"],
        ],
    }


def test_linked_files_exist():
    links = re.findall(r"\]\(([^)#]+)", TEXT)
    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []
