"""The page of a report in Chromium. Pictures are kept in ``$BSAM_SCREENSHOTS`` if it is set."""

import base64
import csv
import io
import os
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from bsam.lab.report.page.page import write_page
from bsam.lab.report.table import Cell, Table
from chromium import Browser
from page_runs import EVIL, METHODS, PROBLEM, claim_runs, example_runs, score_of, table

pytestmark = pytest.mark.browser
TABLE = "document.querySelector('#experiment-0 table')"
ORDER = f"[...{TABLE}.querySelectorAll('tbody th')].map(cell => cell.textContent)"
SURFACES = "document.querySelector('figure.surfaces .plot')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    write_page(folder / "report.html", *example_runs(folder), title="Ours", problems=[PROBLEM])
    return folder / "report.html"


@pytest.fixture
def page(browser, file):
    """The page, opened from disk."""
    browser.open(file.as_uri())
    return browser


@pytest.fixture
def serve():
    """Serve with a handler; returns the address."""
    servers = []

    def start(handler):
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def click(page, selector, text):
    found = f"[...document.querySelectorAll({selector!r})].find(found => found.textContent.trim().startsWith({text!r}))"
    page.value(f"{found}.click()")


def draw_everything(page):
    """Scroll through the page, until each plot has been drawn."""
    for n in range(page.value("document.querySelectorAll('.plot').length")):
        plot = f"document.querySelectorAll('.plot')[{n}]"
        page.value(f"{plot}.scrollIntoView({{block: 'center'}})")
        page.wait(f"{plot}.querySelector('.main-svg') !== null")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.mark.parametrize("over_http", [False, True])
def test_opens_without_errors_and_asks_for_nothing_else(browser, file, serve, over_http):
    url = serve(partial(Quiet, directory=file.parent)) + "/report.html" if over_http else file.as_uri()
    browser.open(url)
    draw_everything(browser)
    assert browser.messages == []
    assert [request for request in browser.requests if not request.startswith(("data:", "blob:"))] == [url]
    assert browser.value("document.title") == "Ours"
    assert browser.value(ORDER) == [*METHODS, "GSAM"]
    text = browser.value("document.body.innerText")
    assert f"{EVIL}-seed0" in browser.value("document.body.textContent")
    assert PROBLEM in text
    assert "1 diverged" in text
    assert "1 unfinished" in text
    labels = "[...document.querySelectorAll('.plot text')].map(text => text.textContent)"
    assert "<b>dog</b>" in browser.value(labels), "plotly shows tags as text"


def test_tables_sort_by_click_and_by_keyboard(page):
    assert page.value(f"{TABLE}.querySelectorAll('[aria-sort=none]').length") > 5
    click(page, "#experiment-0 thead button", "test accuracy")
    assert page.value(ORDER) == [EVIL, "SAM, rho 0.2", "SAM", "SGD", "GSAM"], "the best is first"
    heading = f"{TABLE}.querySelectorAll('thead th')[1]"
    assert page.value(f"{heading}.getAttribute('aria-sort')") == "descending"
    page.value(f"{heading}.querySelector('button').focus()")
    page.press_enter()
    assert page.value(f"{heading}.getAttribute('aria-sort')") == "ascending"
    assert page.value(ORDER) == ["SGD", "SAM", "SAM, rho 0.2", EVIL, "GSAM"], "missing numbers are last"
    click(page, "#experiment-0 thead button", "method")
    assert page.value(f"{TABLE}.querySelector('thead th').getAttribute('aria-sort')") == "ascending"


def test_numbers_are_rounded_as_in_the_verdicts(browser, tmp_path):
    scores = [89.625, 89.375, -89.625, 89.615, 1.005, 64.125, -0.125, 12.5]  # some are exact ties
    runs = table({"experiment": "E", "row": f"M{n}", "unit": "%", "score": score} for n, score in enumerate(scores))
    write_page(tmp_path / "report.html", runs, pd.DataFrame(columns=["experiment", "run"]))
    browser.open((tmp_path / "report.html").as_uri())
    cells = f"[...{TABLE}.querySelectorAll('tbody td:nth-child(2) .v')].map(cell => cell.textContent)"
    assert browser.value(cells) == [f"{score:.2f}\u00a0(1)".replace("-", "\u2212") for score in scores]


@pytest.fixture(params=["clipboard", "selection"])
def copied(request, page):
    """Click a button and return what is copied, with the clipboard of the browser and where it is not allowed."""
    if request.param == "selection":
        page.value("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    else:
        page.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    page.value("addEventListener('copy', () => { window.taken = document.activeElement.value; })")

    def copy(name):
        click(page, "#experiment-0 .tools button", name)
        page.wait(f"document.getElementById('status').textContent === 'Copied as {name}'")
        if request.param == "selection":
            return page.value("window.taken")
        page.call("Page.bringToFront")
        return page.value("navigator.clipboard.readText()")

    return copy


def test_tables_are_copied_in_three_formats(copied):
    rows = list(csv.DictReader(io.StringIO(copied("CSV"))))
    assert [row["method"] for row in rows] == [*METHODS, "GSAM"]
    for row in rows[:4]:
        scores = [score_of(row["method"], seed) for seed in range(3)]
        assert float(row["mean"]) == pytest.approx(np.mean(scores))
        assert float(row["std"]) == pytest.approx(np.std(scores, ddof=1))
    assert (rows[1]["diverged"], rows[4]["unfinished"], rows[4]["mean"]) == ("1", "1", "")
    top = "λmax, cross-entropy, 256 training samples"
    assert (float(rows[1][top]), float(rows[1][f"{top} std"])) == (11, 0)
    lines = copied("Markdown").splitlines()
    assert len(lines) == 7
    assert lines[2].startswith("| SGD | 60.00 ± 0.50 (3) |")
    assert "\\<script\\>" in lines[5]
    latex = copied("LaTeX")
    assert "SGD & 60.00 $\\pm$ 0.50 (3) &" in latex
    assert "\\textbf{90.00 $\\pm$ 1.25 (3)}" in latex
    assert "test accuracy in \\%" in latex


def test_surfaces_are_drawn_and_turn_together(page):
    assert page.value("document.querySelectorAll('.gl-container canvas').length") == 0, "drawn when they are seen"
    page.value(f"{SURFACES}.scrollIntoView({{block: 'center'}})")
    page.wait(f"{SURFACES}.querySelectorAll('canvas').length >= 4")
    page.value(f"{SURFACES}.querySelector('canvas').scrollIntoView({{block: 'center'}})")  # legends moved it
    picture = page.value(f"Plotly.toImage({SURFACES}, {{format: 'png', width: 300, height: 300}})")
    pixels = np.array(Image.open(io.BytesIO(base64.b64decode(picture.split(",")[1]))).convert("RGB"))
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 200, "a surface has many colours"
    cameras = "['scene', 'scene2', 'scene3', 'scene4'].map(name => layout[name]._scene.getCamera().eye)"
    eyes = f"(layout => {cameras}.map(eye => Object.values(eye)))({SURFACES}._fullLayout)"
    before = page.value(eyes)
    page.drag(f"{SURFACES}.querySelector('canvas')", 60, 20)
    page.wait(f"Math.abs({eyes}[0][0] - {before[0][0]}) > 0.1")
    page.wait(f"{eyes}.every(eye => eye.every((x, i) => Math.abs(x - {eyes}[0][i]) < 0.05))")
    page.value("scrollTo(0, 0)")
    page.wait("document.querySelectorAll('.gl-container canvas').length === 0")
    assert page.messages == []


def test_a_method_can_be_hidden(page):
    page.value("document.querySelector('figure .plot').scrollIntoView()")
    page.wait("document.querySelector('figure .plot .legendtoggle') !== null")
    shown = "document.querySelector('figure .plot')._fullData.filter(trace => trace.visible === true).length"
    before = page.value(shown)
    entry = (
        "[...document.querySelectorAll('figure .plot .traces')].find(found => found.textContent.startsWith('SAM, rho'))"
    )
    page.drag(f"{entry}.querySelector('.legendtoggle')", 0, 0)
    page.wait(f"{shown} === {before - 2}")  # a line and its band


@pytest.mark.parametrize(("name", "columns"), [("probe", 2), ("contours", 3)])
def test_panels_are_below_each_other_on_a_phone(browser, file, name, columns):
    found, plot = {}, f"document.querySelector('[data-figure={name}]')"
    for width in (390, 1400):
        browser.open(file.as_uri(), width)
        browser.value(f"{plot}.scrollIntoView()")
        browser.wait(f"{plot}.querySelector('.main-svg') !== null")
        found[width] = browser.value(f"{plot}._fullLayout.grid.columns")
    assert found == {390: 1, 1400: columns}


@pytest.fixture(scope="module")
def claims(tmp_path_factory):
    """A page with claims: confirmed, contradicted and open ones."""
    file = tmp_path_factory.mktemp("claims") / "report.html"
    write_page(file, claim_runs(), pd.DataFrame(columns=["experiment", "run"]))
    return file


OPEN_CELL = "document.querySelector('[popover]:popover-open')"


@pytest.mark.parametrize("width", [390, 1400])
def test_a_cell_of_the_claims_opens_by_click_and_by_keyboard(browser, claims, width):
    browser.open(claims.as_uri(), width)
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.value(OPEN_CELL) is None
    assert browser.value("document.querySelectorAll('.grid .more:not([tabindex=\"-1\"])').length") == 1, "one tab stop"
    browser.value("document.querySelector('.more').click()")
    text = browser.value(f"{OPEN_CELL}.innerText")
    assert "SAM better than SGD" in text
    assert "95 % interval" in text
    box = browser.value(f"(box => [box.left, box.right])({OPEN_CELL}.getBoundingClientRect())")
    assert 0 <= box[0] < box[1] <= width
    browser.value(f"{OPEN_CELL}.hidePopover()")
    browser.value("document.querySelector('.more').focus()")
    right, down = ({"key": key, "code": key} for key in ("ArrowRight", "ArrowDown"))
    for key in (right, down, right):
        browser.call("Input.dispatchKeyEvent", type="rawKeyDown", **key)
    browser.press_enter()
    assert "not run" in browser.value(f"{OPEN_CELL}.innerText"), "right, down and right again"
    assert browser.value("document.activeElement.getAttribute('aria-label')").startswith("BSAM")
    assert browser.messages == []


def test_cells_of_the_claims_show_their_text_whole(browser, claims):
    for width in (390, 700, 1024, 1400):
        browser.open(claims.as_uri(), width)
        wide = "[...document.querySelectorAll('.more')].filter(cell => cell.scrollWidth > cell.clientWidth + 1)"
        assert browser.value(f"{wide}.map(cell => cell.innerText)") == [], width


@pytest.mark.parametrize("width", [390, 1400])
def test_headings_have_a_distance_from_what_stands_above(browser, tmp_path, width):
    cell = {"method": "SGD", "data": "digits", "": Cell("90")}
    tables = [Table.pivot(f"Table {n}", [cell], "method", "data") for n in range(2)]
    context = {"findings": ["A finding."], "tables": tables, "notes": ["A note."]}
    write_page(tmp_path / "report.html", *example_runs(tmp_path), context=context)
    browser.open((tmp_path / "report.html").as_uri(), width)
    gaps = browser.value(
        """[...document.querySelectorAll("section > h3, .figures > figure:first-child > h3")].map(heading => {
          const above = (heading.parentElement.tagName === "FIGURE" ? heading.closest(".figures") : heading)
            .previousElementSibling;
          return heading.getBoundingClientRect().top - above.getBoundingClientRect().bottom;
        })"""
    )
    assert len(gaps) == 3
    assert min(gaps) >= 20


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1024, 1920])
def test_fits_each_window_in_both_themes(browser, file, tmp_path, width, theme):
    browser.open(file.as_uri(), width, theme)
    browser.wait("document.querySelector('.plot .main-svg') !== null || scrollBy(0, 800)")
    assert browser.value("document.documentElement.scrollWidth") <= width
    browser.value("scrollTo(0, 0)")
    folder = Path(os.environ.get("BSAM_SCREENSHOTS", tmp_path))
    browser.screenshot(folder / f"{width}-{theme}.png")
    corner = np.array(Image.open(folder / f"{width}-{theme}.png").convert("L"))[-1, -1]
    assert corner > 200 if theme == "light" else corner < 60
    browser.value("document.getElementById('theme').click()")
    wanted = "dark" if theme == "light" else "light"
    assert browser.value("document.documentElement.dataset.theme") == wanted
    browser.value("localStorage.clear()")


def test_print_draws_every_flat_plot(page):
    page.wait("window.Plotly !== undefined")
    printed = base64.b64decode(page.call("Page.printToPDF")["data"])
    assert printed.startswith(b"%PDF")
    undrawn = "[...document.querySelectorAll('figure:not(.surfaces) .plot')].filter(plot => !plot.querySelector('svg'))"
    assert page.value(f"{undrawn}.length") == 0


@pytest.mark.parametrize("width", [390, 1024, 1400, 1920])
def test_no_table_is_clipped(browser, file, width):
    browser.open(file.as_uri(), width)
    browser.value("document.querySelectorAll('details').forEach(fold => { fold.open = true; })")
    wide = "[...document.querySelectorAll('.scroll')].filter(box => box.scrollWidth > box.clientWidth + 1)"
    assert browser.value(f"{wide}.map(box => [box.scrollWidth, box.clientWidth])") == []


def test_the_theme_recolours_drawn_plots(page):
    page.value("document.querySelector('figure .plot').scrollIntoView()")
    page.wait("document.querySelector('figure .plot .main-svg') !== null")
    colour = "document.querySelector('figure .plot')._fullLayout.font.color"
    before = page.value(colour)
    page.value("document.getElementById('theme').click()")
    page.wait(f"{colour} !== {before!r}")
    page.value("localStorage.clear()")


def test_a_watched_page_loads_itself_again_with_its_folds(browser, tmp_path):
    file, (runs, epochs) = tmp_path / "report.html", example_runs(tmp_path)
    write_page(file, runs.iloc[:0], epochs.iloc[:0], title="none", watched=True)
    browser.open(file.as_uri())
    assert "Waiting for the first run." in browser.value("document.body.innerText")
    loaded = "document.readyState === 'complete' && document.title"
    write_page(file, runs, epochs, title="one", watched=True)
    browser.wait(f"{loaded} === 'one'", 30)
    folds = "Object.fromEntries([...document.querySelectorAll('details')].map(fold => [fold.dataset.fold, fold.open]))"
    before = browser.value(folds)
    assert set(before.values()) == {True, False}
    browser.value("document.querySelectorAll('details').forEach(fold => { fold.open = !fold.open; })")
    write_page(file, runs, epochs, title="two", watched=True)
    browser.wait(f"{loaded} === 'two'", 30)
    assert browser.value(folds) == {name: not opened for name, opened in before.items()}
    assert browser.messages == []
