"""Extra memory is in units of the trained parameters, and the guide's table is that of the stored measurement."""

import json
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
UNITS = {"SAM": 1, "BSAM2": 2, "BSAM3": 3}


@pytest.mark.filterwarnings("ignore")
def test_adapters_need_copies_of_adapters_only(lora_memory, monkeypatch):
    for name, value in {"WIDTH": 32, "LAYERS": 2, "WORDS": 64, "LENGTH": 8, "RANK": 4}.items():
        monkeypatch.setattr(lora_memory, name, value)
    full, lora = lora_memory.measure(torch.device("cpu"))
    assert full["trained"] == full["model"]
    assert lora["trained"] == 2 * 2 * (4 * 32 + 32 * 4) * 4  # layers, two projections, two matrices of each, bytes
    for row in (full, lora):
        for label, units in UNITS.items():
            assert row["extra"][label] / row["trained"] == pytest.approx(units, abs=0.35)


def test_the_guide_has_the_stored_numbers():
    stored = json.loads((ROOT / "benchmarks/results/lora_memory_cpu.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs/guides/peft.md").read_text(encoding="utf-8")
    titles = {False: "all parameters", True: f"adapters of rank {stored['sizes']['rank']}"}
    assert f"{stored['sizes']['layers']} blocks of width {stored['sizes']['width']}" in page
    for row in stored["results"]:
        extra = [f"+ {row['extra'][label] / 2**20:.2f}" for label in UNITS]
        cells = [titles[row["lora"]], f"{row['trained'] / 2**20:.2f}", f"{row['peak'] / 2**20:.2f}", *extra]
        assert f"| {' | '.join(cells)} |" in page
