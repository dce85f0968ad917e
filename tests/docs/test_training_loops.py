"""The loops of the guide "Put it into your loop" that other tests do not run."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import bsam
from recorded_steps import like_a_gpu

GUIDE = Path(__file__).parents[2] / "docs/guides/training-loops.md"


class SAM(torch.optim.Optimizer):
    """The interface of two half-steps of the old loop."""

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


def test_the_loop_with_two_half_steps_and_ours_train_alike():
    text = GUIDE.read_text(encoding="utf-8").split("## Coming from `first_step`")[1]
    old, new = (re.search(rf"```{kind}\n(.*?)```", text, flags=re.DOTALL)[1] for kind in ("text", "python"))
    torch.manual_seed(0)
    x, y = torch.randn(32, 4, dtype=torch.float64), torch.randint(0, 3, (32,))
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    names = {"F": F, "torch": torch, "bsam": bsam, "loader": list(zip(x.split(8), y.split(8), strict=True))}

    def tracking(on):
        return lambda model: setattr(model[1], "track_running_stats", on)

    old_names = {"SAM": SAM, "enable_running_stats": tracking(True), "disable_running_stats": tracking(False)}
    ours, theirs = names | {"model": model}, names | old_names | {"model": copy.deepcopy(model)}
    exec(new, ours)
    exec(old, theirs)
    assert ours["optimizer"].t == 4
    for a, b in zip(ours["model"].state_dict().values(), theirs["model"].state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_loop_with_a_graph_takes_the_steps_of_an_eager_loop(monkeypatch):
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if "CUDAGraph" in block)
    torch.manual_seed(0)
    loader = [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(5)]

    torch.manual_seed(1)
    twin = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    base = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    expected = bsam.BSAM(base, twin)
    for number, (x, y) in enumerate([loader[0]] * 4 + loader[1:]):
        base.param_groups[0]["lr"] = 0.05 * 0.9 ** max(0, number - 3)
        expected.step(lambda: F.cross_entropy(twin(x), y))

    like_a_gpu(monkeypatch)
    names = {"torch": torch, "nn": nn, "F": F, "bsam": bsam, "loader": loader, "device": "cpu"}
    torch.manual_seed(1)
    exec(block.replace('if device == "cuda":', "if True:"), names)
    for p, q in zip(names["model"].parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert names["optimizer"].t == expected.t == 8
