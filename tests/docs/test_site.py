"""The documentation builds without a warning, and has a complete page for every method, name, command and example."""

from __future__ import annotations

import inspect
import json
import pickle
import re
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest
from docutils import nodes
from sphinx import addnodes

import bsam.flatness
import bsam.training
from bsam.cli import COMMANDS
from bsam.common.method_info import MethodInfo
from bsam.methods import METHODS
from processes import Script

ROOT = Path(__file__).parents[2]


def texts(page: nodes.document, kind: type[nodes.Node]) -> list[str]:
    return [node.astext() for node in page.findall(kind)]


def missing_parts(page: nodes.document, method: type[MethodInfo]) -> list[str]:
    """Return the parts of a method's docstring that its page lacks."""
    rubrics = texts(page, nodes.rubric)
    missing = [name for name in ("Reference", "Differences from the paper") if name not in rubrics]
    described = {text.split(" ")[0] for text in texts(page, nodes.list_item)}
    missing += [name for name in inspect.signature(method).parameters if name not in described]
    missing += [] if any(texts(page, nodes.math_block)) else ["formula"]
    missing += [] if any(text.startswith(">>>") for text in texts(page, nodes.doctest_block)) else ["Example"]
    missing += [] if len(re.findall(r"arxiv\.org/abs/", page.pformat())) == 1 else ["link to arXiv"]
    return missing


def test_the_site_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read and resolve all pages, where Sphinx warns of dead links, and look into the results."""
    log = tmp_path / "log"
    flags = ("-q", "-W", "--keep-going", "-n", "-b", "dummy")
    built = Script("sphinx", *flags, "-d", tmp_path, ROOT / "docs", tmp_path, output=log)
    assert built.wait(timeout=200) == 0, log.read_text()
    pages = {path.relative_to(tmp_path).with_suffix("").as_posix(): path for path in tmp_path.rglob("*.doctree")}
    pages = {name: pickle.loads(path.read_bytes()) for name, path in pages.items()}

    monkeypatch.syspath_prepend(ROOT / "docs/_ext")
    from mathml import mathml

    for page in pages.values():
        lines = "\n".join(texts(page, nodes.literal_block)).splitlines()
        assert [line for line in lines if len(line) >= 88] == []  # longer ones scroll
        assert [node["uri"] for node in page.findall(nodes.image) if "//" in node["uri"]] == []
        assert all(map(mathml, texts(page, nodes.math)))

    missing = {name: missing_parts(pages[f"methods/{name}"], method) for name, method in METHODS.items()}
    assert missing == {name: [] for name in METHODS}
    assert "rho_max" in texts(pages["methods/bsam"], addnodes.desc_signature)[0]

    objects = pickle.loads((tmp_path / "environment.pickle").read_bytes()).domaindata["py"]["objects"]
    documented = {name: entry.docname for name, entry in objects.items()}
    of_methods = {f"bsam.{method.__name__}": f"methods/{name}" for name, method in METHODS.items()}
    assert of_methods.items() <= documented.items()
    for module in (bsam, bsam.flatness, bsam.training):
        names = [name for name in dir(module) if not name.startswith("_") and not inspect.ismodule(vars(module)[name])]
        assert {f"{module.__name__}.{name}" for name in names} <= documented.keys()

    sections = {name: texts(pages[f"reference/{name}"], nodes.title) for name in ("command-line", "examples")}
    assert len(sections["command-line"]) == 2 + len(COMMANDS)
    assert sorted(sections["examples"][1:]) == sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("builder", ["html", ""])
def test_the_site_has_the_page_of_our_results(builder, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs/_ext")
    import generated_pages

    warnings = []
    monkeypatch.setattr(generated_pages.logger, "warning", warnings.append)
    app = SimpleNamespace(builder=SimpleNamespace(format=builder), outdir=tmp_path)
    generated_pages.write_report(app)
    assert warnings == []
    if builder != "html":
        assert list(tmp_path.iterdir()) == []
        return
    (file,) = tmp_path.iterdir()
    assert f'<a href="{file.name}">' in (ROOT / "docs/results.md").read_text(encoding="utf-8")
    page = file.read_text(encoding="utf-8")
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert data["verdicts"]
    clean = next(e["rows"] for e in data["experiments"] if e["title"] == "ResNet-18, CIFAR-10, 200 epochs")
    seeds = [(ROOT / f"results/cifar10-resnet18/sgd-seed{seed}.jsonl").read_text() for seed in range(3)]
    scores = [100 * json.loads(lines.splitlines()[-1])["test_accuracy"] for lines in seeds]
    assert {row["method"]: row["mean"] for row in clean}["SGD"] == pytest.approx(statistics.fmean(scores))
    folders = [path.parent for path in (ROOT / "results").glob("*/results.json")]  # with the settings of their runs
    metrics = [path for folder in folders for path in folder.glob("*.jsonl")]
    assert len(metrics) > 100
    shown = {run["name"] for experiment in data["experiments"] for run in experiment["runs"]}
    assert [path for path in metrics if path.stem not in shown] == []
