"""The documentation builds without a warning, and has a complete page for every method, name, command and example."""

from __future__ import annotations

import inspect
import json
import pickle
import re
import statistics
from pathlib import Path

import pytest
from docutils import nodes
from sphinx import addnodes

import bsam.flatness
import bsam.lab.training
from bsam.common.method_info import MethodInfo
from bsam.lab.cli import COMMANDS
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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with the command of ``make docs`` into another folder."""
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ndocs:")[2]
    *flags, source, target = re.search(r" -m sphinx (.*)", recipe)[1].split()
    assert {"-W", "-n"} <= set(flags)  # warnings are errors, also about dead links
    assert (source, target) == ("docs", "docs/_build/html")
    folder = tmp_path_factory.mktemp("site")
    built = Script("sphinx", *flags, ROOT / source, folder / "html", output=folder / "log")
    assert built.wait(timeout=200) == 0, (folder / "log").read_text()
    return folder / "html"


def test_make_docs_builds_the_whole_site(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one test, so that the site is built once, whatever number of processes run the tests."""
    check_pages(site, monkeypatch)
    check_results(site / "results-page.html")
    check_comparison(site)


def check_pages(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    doctrees = site / ".doctrees"
    pages = {path.relative_to(doctrees).with_suffix("").as_posix(): path for path in doctrees.rglob("*.doctree")}
    assert all((site / f"{name}.html").is_file() for name in pages)
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

    objects = pickle.loads((doctrees / "environment.pickle").read_bytes()).domaindata["py"]["objects"]
    documented = {name: entry.docname for name, entry in objects.items()}
    of_methods = {f"bsam.{method.__name__}": f"methods/{name}" for name, method in METHODS.items()}
    assert of_methods.items() <= documented.items()
    ours = {name.removeprefix("bsam.lab.") for name in documented}  # bsam.lab has some names of bsam.lab.training, too
    for module in (bsam, bsam.flatness, bsam.lab.training):
        public = [name for name in dir(module) if not name.startswith("_")]
        names = [name for name in public if not inspect.ismodule(getattr(module, name))]
        prefix = module.__name__
        assert [name for name in names if f"{prefix}.{name}" not in documented and name not in ours] == []

    sections = {name: texts(pages[f"reference/{name}"], nodes.title) for name in ("command-line", "examples")}
    assert len(sections["command-line"]) == 2 + len(COMMANDS)
    assert sorted(sections["examples"][1:]) == sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


def check_comparison(site: Path) -> None:
    page = pickle.loads((site / ".doctrees/methods/accuracy-and-seconds.doctree").read_bytes())
    rows = [texts(row, nodes.entry) for row in page.findall(nodes.row)]
    titles = {re.sub(r" \(.*", "", row[0]) for row in rows[1:]}
    assert titles == {"SGD", *(method.title for method in METHODS.values())}
    timed = json.loads((ROOT / "benchmarks/results/throughput_methods_cuda.json").read_text(encoding="utf-8"))
    seconds = timed["results"][0]["epoch_seconds"]
    run = ROOT / "results/cifar10-resnet18-label-noise/noise40-sam-rho0.1-seed0.jsonl"
    score = 100 * json.loads(run.read_text(encoding="utf-8").splitlines()[-1])["test_accuracy"]
    ratio = timed["results"][0]["over_base"]["SAM"]["median"]
    expected = ["SAM", "0.1", "2", f"{200 * ratio * seconds['SGD']['median']:.0f}", f"{ratio:.2f}", "captured"]
    assert [row for row in rows if row[:2] == ["SAM", "0.1"]] == [[*expected, f"{score:.2f} (1)"]]


def check_results(file: Path) -> None:
    assert f'<a href="{file.name}">' in (ROOT / "docs/results.md").read_text(encoding="utf-8")
    page = file.read_text(encoding="utf-8")
    clean = page.partition("<h2>ResNet-18, CIFAR-10, 200 epochs</h2>")[2]
    seeds = [(ROOT / f"results/cifar10-resnet18/sgd-seed{seed}.jsonl").read_text() for seed in range(3)]
    scores = [100 * json.loads(lines.splitlines()[-1])["test_accuracy"] for lines in seeds]
    assert f"{statistics.fmean(scores):.2f} ± {statistics.stdev(scores):.2f} (3)" in clean.replace("\xa0", " ")
    folders = [path.parent for path in (ROOT / "results").glob("*/results.json")]  # with the settings of their runs
    metrics = [path for folder in folders for path in folder.glob("*.jsonl")]
    assert len(metrics) > 100
    assert [path for path in metrics if path.stem not in page] == []
