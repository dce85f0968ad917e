"""The loop with a CUDA graph in the guide to training loops, with recorded operations in place of the graph."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import bsam
from recorded_steps import like_a_gpu

PAGE = Path(__file__).parents[2] / "docs/guides/training-loops.md"


def test_a_loop_with_a_graph_takes_the_steps_of_an_eager_loop(monkeypatch):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
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
