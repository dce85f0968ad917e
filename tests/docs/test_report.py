"""The guide "Put runs on one page": its first commands run in small, and its CSV file is read."""

from __future__ import annotations

import re
from pathlib import Path

from bsam.lab.analysis.runs_table import read_runs
from docs_guides import first_commands, in_small, run_commands

TEXT = (Path(__file__).parents[2] / "docs/guides/report.md").read_text(encoding="utf-8")


def test_the_first_commands_of_the_guide(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = in_small(first_commands(TEXT), {"--epochs 5": "--epochs 1 --limit-train 64 --limit-test 20 --device cpu"})
    printed = run_commands(small, capsys)
    assert list(printed) == ["train", "report"]
    assert printed["report"] == "2 runs in 1 experiment: 2 finished.\nWritten: report.html\n"
    assert "BSAM (Algorithm 1) against SGD" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_results_of_others(tmp_path):
    (tmp_path / "theirs.csv").write_text(re.search(r"```text\n(experiment,.*?)```", TEXT, re.DOTALL)[1])
    runs = read_runs(tmp_path / "theirs.csv", problems := [])
    assert problems == []
    assert runs[["row", "seed", "score", "radius"]].values.tolist() == [
        ["SAM (timm)", 0, 96.7, 0.05],
        ["SAM (timm)", 1, 96.6, 0.05],
    ]
