"""The guide "Your own analysis": its code runs, and its table lists the columns."""

import re
from pathlib import Path

from bsam.lab.analysis.runs_table import COLUMNS
from bsam.lab.config import Run
from fake_fit import FakeFit

TEXT = (Path(__file__).parents[2] / "docs/guides/own-analysis.md").read_text(encoding="utf-8")


def test_the_code_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for seed in range(3):
        for method, score in (("sgd", 0.9), ("sam", 0.95)):
            fit = FakeFit(lambda run, score=score: score + 0.01 * (run.seed + len(run.method)) ** 2)
            fit(Run(method, epochs=2, seed=seed), tmp_path / "runs" / f"{method}-{seed}")
    for file in tmp_path.glob("runs/*/metrics.jsonl"):
        file.write_text(file.read_text().replace('"epoch"', '"train_loss": 1.5, "epoch"'))
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    exec(compile(code, "own-analysis.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "SAM" in printed
    assert "1.5" in printed


def test_the_table_lists_all_columns():
    first = re.findall(r"^\| (`.*?) \|", TEXT, flags=re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(first)) != []
    assert set(re.findall(r"`(\w+)`", " ".join(first))) == set(COLUMNS)
