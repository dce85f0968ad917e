"""The documentation builds without warnings, has no dead links, and loads nothing from other hosts."""

from __future__ import annotations

import inspect
import json
import re
from html.parser import HTMLParser
from itertools import pairwise, takewhile
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import bsam.flatness
import bsam.training
from bsam.common.method_info import MethodInfo
from bsam.methods import METHODS
from processes import Script

ROOT = Path(__file__).parents[2]
EXTERNAL = ("http:", "https:", "//", "mailto:")
VOID = {"br", "col", "hr", "img", "input", "link", "meta", "source"}  # elements without an end


class Page(HTMLParser):
    """The links, anchors, loaded files and texts of a page."""

    def __init__(self, html: Path | str) -> None:
        super().__init__()
        self.links, self.anchors, self.loads = list[str](), set[str](), list[str]()
        self.texts = list[tuple[str, str]]()  # of elements that are closed, innermost first: (tag.class, text)
        self.code = list[str]()  # the blocks, with their line ends
        self._open = list[tuple[str, str, list[str]]]()
        self.feed(html if isinstance(html, str) else html.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if "href" in values:
            linked = tag != "link" or values.get("rel") in ("index", "search", "next", "prev")
            (self.links if linked else self.loads).append(values["href"])
        self.loads += [values[name] for name in ("src", "data", "poster") if name in values]
        self.loads += re.findall(r"url\(([^)]*)\)", values.get("style", ""))
        if tag not in VOID:
            self._open.append((tag, f"{tag}.{values.get('class', '')}", []))

    def handle_data(self, data: str) -> None:
        for _, _, text in self._open:
            text.append(data)

    def handle_endtag(self, tag: str) -> None:
        while any(tag == opened for opened, *_ in self._open):
            opened, name, text = self._open.pop()
            self.texts.append((name, " ".join("".join(text).split())))
            if opened == "pre":
                self.code.append("".join(text))
            if opened == tag:
                break

    def text(self, start: str) -> list[str]:
        """Return the texts of all elements whose ``tag.class`` begins with ``start``."""
        return [text for name, text in self.texts if name.startswith(start)]


def pages_of(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


def dead_links(site: Path, pages: dict[Path, Page]) -> list[str]:
    """Return links and loaded files that do not exist."""
    dead = []
    for path, page in pages.items():
        for link in (*page.links, *page.loads):
            if link.startswith((*EXTERNAL, "data:")):
                continue
            address, anchor = urldefrag(link)
            target = (path.parent / unquote(urlsplit(address).path)).resolve() if address else path
            if not target.is_file() or (anchor and target in pages and unquote(anchor) not in pages[target].anchors):
                dead.append(f"{path.relative_to(site)}: {link}")
    return dead


def foreign_loads(site: Path, pages: dict[Path, Page]) -> list[str]:
    """Return the files that pages and style sheets load from other hosts."""
    loads = [(path, load) for path, page in pages.items() for load in page.loads]
    for path in site.rglob("*.css"):
        css = path.read_text(encoding="utf-8")
        loads += [(path, load.strip("\"' ")) for load in re.findall(r"url\(([^)]*)\)", css)]
        loads += [(path, load) for load in re.findall(r"@import\s+[\"']([^\"']*)", css)]
    return [f"{path.relative_to(site)}: {load}" for path, load in loads if load.startswith(EXTERNAL)]


def missing_parts(page: Page, method: type[MethodInfo]) -> list[str]:
    """Return the facts and sections that the page of a method lacks."""
    facts = dict(zip(page.text("th.stub"), page.text("td."), strict=True))
    needs = method.needs_in_words() or "only a closure that returns the loss"
    wanted = {
        "Passes": f"{method.passes:g} per step",
        "Needs": needs,
        "CUDA graph": f"a step {'can' if method.capturable else 'cannot'} be captured",
        "Paper": method.reference,
    }
    missing = [name for name, value in wanted.items() if facts.get(name) != value]
    missing += [] if facts.get("Extra memory", "").startswith(f"{method.memory} (") else ["Extra memory"]
    missing += [] if page.text("h1")[0].startswith(method.title) else ["title"]
    missing += [] if method.purpose.replace("'", "\N{RIGHT SINGLE QUOTATION MARK}") in page.text("p.") else ["purpose"]
    missing += [] if any(page.text("div.formula")) else ["formula"]
    described = {text.split(" ")[0] for text in page.text("li.")}
    missing += [name for name in inspect.signature(method).parameters if name not in described]
    docstring = takewhile(lambda element: not element[0].startswith("dl.py class"), page.texts)
    paragraphs = [(name, text) for name, text in docstring if name.startswith("p.")]
    sections = {title: text for (name, title), (_, text) in pairwise(paragraphs) if name == "p.rubric"}
    missing += [] if re.search(r"“.+”.*(\d{4}|Algorithm 1)\.", sections.get("Reference", "")) else ["Reference"]
    missing += [] if sections.get("Differences from the paper") else ["Differences from the paper"]
    missing += [] if any(text.startswith(">>>") for text in page.text("pre")) else ["Example"]
    return missing


def long_code_lines(site: Path, pages: dict[Path, Page]) -> list[str]:
    """Return the lines of code that are too long for a page of usual width."""
    return [
        f"{path.relative_to(site)}: {line}"
        for path, page in pages.items()
        for block in page.code
        for line in block.splitlines()
        if len(line) >= 88
    ]


def test_the_site_is_complete(tmp_path: Path) -> None:
    site = tmp_path / "html"
    log = tmp_path / "log"
    built = Script("sphinx", "-q", "-W", "--keep-going", "-n", ROOT / "docs", site, output=log)
    assert built.wait(timeout=200) == 0, log.read_text()
    pages = pages_of(site)
    assert dead_links(site, pages) == []
    assert foreign_loads(site, pages) == []
    missing = {name: missing_parts(pages[site / f"methods/{name}.html"], method) for name, method in METHODS.items()}
    assert missing == {name: [] for name in METHODS}
    signatures = {name: (site / f"methods/{name}.html").read_text(encoding="utf-8") for name in METHODS}
    assert [name for name, page in signatures.items() if '<span class="n"><span class="pre">arguments' in page] == []
    assert '<span class="n"><span class="pre">rho_max' in signatures["bsam"]

    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    documented = {name: index["docnames"][page] for page, *_, name in index["objects"]["bsam"]}
    public = {name: m for name, m in METHODS.items() if getattr(bsam, m.__name__, None) is m}
    assert {name: documented.get(m.__name__) for name, m in public.items()} == {n: f"methods/{n}" for n in public}
    for module in (bsam, bsam.flatness, bsam.training):
        names = {name for name in dir(module) if not name.startswith("_") and not inspect.ismodule(vars(module)[name])}
        assert names <= {name for *_, name in index["objects"][module.__name__]}
    commands = pages[site / "reference/command-line.html"]
    titles = [text.rstrip("\N{PILCROW SIGN}") for text in commands.text("h2")]
    assert {"bsam", "bsam list", "bsam demo", "bsam train", "bsam run", "bsam flatness"} <= set(titles)
    assert all(text.startswith(f"usage: {title} [") for title, text in zip(titles, commands.text("pre"), strict=True))

    assert long_code_lines(site, pages) == []
    links = {name: pages[site / f"methods/{name}.html"].links for name in METHODS}
    papers = {name: [link for link in links[name] if "arxiv.org/abs/" in link] for name in METHODS}
    assert papers == {name: [f"https://arxiv.org/abs/{m.arxiv}"] * bool(m.arxiv) for name, m in METHODS.items()}
    assert papers["bsam"] == ["https://arxiv.org/abs/2409.13173"]  # as in the README
    scripts = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
    examples = pages[site / "reference/examples.html"]
    assert sorted(text.rstrip("\N{PILCROW SIGN}") for text in examples.text("h2")) == scripts
    assert sorted(Path(link).stem for link in examples.links if link.endswith(".py")) == scripts
    settings = pages[site / "reference/settings.html"].text("td.")
    assert any("see --weights" in text for text in settings)
    assert (site / "_static/copybutton.js").is_file()
    first = re.findall(r'toctree-l1[^>]*><a[^>]*href="([^"]+)"', (site / "index.html").read_text("utf-8"))
    assert first[:4] == ["what-bsam-does.html", "results.html", "benchmarks.html", "guarantees.html"]
    assert pages[site / "index.html"].text("span.caption-text") == [
        *("Use it", "Measure and experiment", "Extend it", "Reference"),
    ]
