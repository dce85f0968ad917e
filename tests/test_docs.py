"""The pages of docs/: their code runs, their commands parse, their paths exist, their tables are the measured numbers."""

from __future__ import annotations

import re
import shlex
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bsam.cli import _parser
from bsam.cli.run_flags import run_of
from bsam.recipes import recipe_of
from bsam.recipes.experiments import select

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {
    str(path.relative_to(DOCS)): path.read_text(encoding="utf-8")
    for path in sorted(DOCS.rglob("*.md"))
    if not {"_build", "methods"} & set(path.relative_to(DOCS).parts)  # generated ones
}


def blocks(page: str, language: str) -> list[tuple[int, str]]:
    """The blocks of a page in one language, each with its line."""
    text = PAGES[page]
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [(text[: match.start(1)].count("\n"), match[1]) for match in found]


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """What a reader has: a model, batches, an empty folder; and torchrun's variables, for a world of one process."""
    monkeypatch.chdir(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rank = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in rank.items():
        monkeypatch.setenv(name, str(value))
    torch.manual_seed(0)
    x, y = torch.randn(32, 4), torch.randint(0, 3, (32,))
    yield {
        "__name__": "docs",
        "model": nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)),
        "loader": list(zip(x.split(8), y.split(8), strict=True)),
    }
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_the_code_of_a_page_runs(page, reader):
    for line, code in blocks(page, "python"):
        exec(compile("\n" * line + code, DOCS / page, "exec"), reader)
