"""The code of the pages on Lightning and Fabric runs, as one script."""

from __future__ import annotations

import logging
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from bsam.models.timm_import import _import_torchvision

GUIDES = Path(__file__).parents[2] / "docs/guides"


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on a CPU without bfloat16
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated")
def test_the_code_of_the_pages_runs(tmp_path, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _import_torchvision()
        import lightning.pytorch  # noqa: F401
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    monkeypatch.chdir(tmp_path)  # checkpoints
    torch.manual_seed(0)
    x, y = torch.randn(32, 4), torch.randint(0, 3, (32,))
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    names = {"__name__": "docs", "model": network, "loader": list(zip(x.split(8), y.split(8), strict=True))}
    text = "".join((GUIDES / f"{name}.md").read_text(encoding="utf-8") for name in ("lightning", "fabric"))
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    for code in blocks:
        exec(compile(code, "lightning.md", "exec"), names)
    module = names["module"]
    assert module.trainer.global_step == module.trainer.optimizers[0].t == 4
    assert int(module.net[1].num_batches_tracked) == 8  # once per batch, not once per pass
    assert names["trainer"].optimizers[0].t == 8
    assert names["optimizer"].t == int(network[1].num_batches_tracked) == 4
