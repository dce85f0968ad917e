"""The table: formats of numbers, and all that it writes."""

import csv
import io
import re
from html import unescape

import pytest

from bsam.lab.report.table import LONGEST, Cell, Column, Table

DATA = [
    {"row": "SGD", "mean": 90.125, "n": 3, "low": -0.5},
    {"row": "SAM, rho 0.2", "mean": float("nan"), "n": 0, "low": None, "mean marks": ("2 diverged",)},
    {"row": "a|b <c>", "mean": 7.0, "n": 1, "low": 1.0, "mean best": True, "mean interval": (1, 2, 3, 4)},
]
COLUMNS = (
    Column("method", "row", words=True),
    Column("score", "mean", ".2f", {"mean": "mean", "n": "n"}, "score: in %.", descending=True),
    Column("low", "low", lambda row: f"{row['low']:+.1f} [{row['low']:+.1f}, +9.0] ({row['n']})"),
)
TABLE = Table.of("A title", DATA, COLUMNS, ["A note."])


def texts(table):
    return [[str(cell) for cell in row] for row in table.rows]


def test_cells_of_data():
    assert texts(TABLE) == [
        ["SGD", "90.12", "-0.5 [-0.5, +9.0] (3)"],
        ["SAM, rho 0.2", "2 diverged", "-"],
        ["a|b <c>", "7.00", "+1.0 [+1.0, +9.0] (1)"],
    ]
    assert [row[1].best for row in TABLE.rows] == [False, False, True]
    assert [row[1].key for row in TABLE.rows] == [90.125, "", 7.0]


def test_empty_columns_are_left_out_with_what_they_mean():
    assert TABLE.notes == ("A note.", "score: in %.")
    table = Table.of("", [{**row, "mean": None, "mean marks": ()} for row in DATA], COLUMNS)
    assert [column.title for column in table.columns] == ["method", "low"]
    assert table.notes == ()
    assert Table.of("", [], COLUMNS).rows == ()


def test_a_pivot_has_rows_and_columns_in_their_order_and_dashes_between():
    place = {"method": "SGD", "data": "digits"}
    cells = [
        {**place, "": Cell("95.1"), "paper": Cell("95.0")},
        {"method": "SAM", "data": "cifar10", "": Cell("96.3")},
        {**place, "method": Cell("SAM"), "": Cell("97.0")},
        {**place, "chosen": Cell("")},
    ]
    table = Table.pivot("", cells, "method", "data", ("", "paper", "seconds", "chosen"), ["A note."])
    assert [column.title for column in table.columns] == ["method", "digits", "paper", "chosen", "cifar10"]
    assert texts(table) == [["SGD", "95.1", "95.0", "", "-"], ["SAM", "97.0", "-", "-", "96.3"]]
    assert table.notes == ("A note.",)
    assert Table.pivot("", [], "method", "data").rows == ()


def test_markdown():
    assert TABLE.to_markdown().splitlines() == [
        "| method | score | low |",
        "| --- | ---: | ---: |",
        "| SGD | 90.12 | -0.5 [-0.5, +9.0] (3) |",
        "| SAM, rho 0.2 | 2 diverged | - |",
        r"| a\|b <c> | 7.00 | +1.0 [+1.0, +9.0] (1) |",
    ]
    names = ["a\n| b", "c\td\x1b]0;e\x07", b"caf\xe9".decode("utf-8", "surrogateescape")]
    lines = Table.of("", [{"row": name} for name in names], COLUMNS[:1]).to_markdown().splitlines()
    assert lines[2:] == [r"| a\x0a\| b |", r"| c\x09d\x1b]0;e\x07 |", "| caf? |"]


def test_csv_has_values_and_the_fields_of_columns():
    assert list(csv.reader(io.StringIO(TABLE.to_csv()))) == [
        ["method", "mean", "n", "low"],
        ["SGD", "90.125", "3", "-0.5"],
        ["SAM, rho 0.2", "", "0", ""],
        ["a|b <c>", "7.0", "1", "1.0"],
    ]


def test_text():
    assert TABLE.to_text(80).splitlines() == [
        "A title",
        "method             score                    low",
        "-----------------------------------------------",
        "SGD                90.12  -0.5 [-0.5, +9.0] (3)",
        "SAM, rho 0.2  2 diverged                      -",
        "a|b <c>             7.00  +1.0 [+1.0, +9.0] (1)",
        "",
        "A note.",
        "score: in %.",
    ]
    assert TABLE.to_text(36).splitlines()[1:6] == [
        "method      score                low",
        "------------------------------------",
        "SGD         90.12  -0.5 [-0.5, +9.0]",
        "                                 (3)",
        "SAM,            2                  -",
    ]


NUMBERS = ["91.00 ± 1.00 (3)", "(-1.2345 ± 0.0020)e-07", "4.56e-05 (not converged)", "-"]
NAMES = ["SGD", "BSAM rho_max 0.05 rho_min 0.05, seed 1", "runs/" + "long_" * 10 + "name.pt"]


@pytest.mark.parametrize("width", [30, 40, 60, 79, 80, 81, 90, 119, 120, 200])
@pytest.mark.parametrize("columns", [1, 3, 8])
def test_text_fits_and_numbers_are_whole_at_any_width(width, columns):
    numbers = (NUMBERS * columns)[:columns]
    header = [Column("model", words=True), *(Column(f"λmax {n}") for n in range(columns))]
    table = Table("", tuple(header), tuple((Cell(name), *map(Cell, numbers)) for name in NAMES))
    lines = table.to_text(width).splitlines()
    assert max(map(len, lines)) <= width
    words = [word.rstrip(";") for line in lines for word in line.split()]
    for part in " ".join(number for number in numbers if number != "-").split():
        assert words.count(part) >= len(NAMES)
    assert not any(line.split()[-1:] == ["±"] for line in lines), "± stays with its number"
    assert "".join(words).count("_") == "".join(NAMES).count("_"), "long names may be broken"


def test_only_long_words_are_broken_and_deviations_stand_below_means():
    name = "x" * (LONGEST + 1)
    row = (Cell("SAM"), *[Cell("91.00 ± 1.00 (3)")] * 8)
    header = (Column("method", words=True), *[Column("Elbow")] * 8)
    lines = Table("", header, (row,)).to_text(70).splitlines()
    assert lines[2].split() == ["SAM", *["91.00"] * 8]
    assert lines[3].split() == ["±", "1.00"] * 8
    two = (Column("a", words=True), Column("b", words=True))
    assert name in Table("", two, ((Cell(name), Cell("x")),)).to_text(80)
    assert name not in Table("", two, ((Cell(name), Cell("x")),)).to_text(LONGEST + 3)
    assert name[1:] in Table("", two, ((Cell(name[1:]), Cell("x")),)).to_text(LONGEST + 3)


def test_a_row_is_a_paragraph_where_columns_do_not_fit():
    text = Table.of("", DATA, COLUMNS).to_text(16)
    assert text.splitlines()[:3] == ["SGD: score", "  90.12; low", "  -0.5 [-0.5,"]
    assert "low -" not in text.replace("low\n  -0.5", ""), "without empty cells"


def test_html_has_texts_as_text_and_what_sorts_and_copies():
    html = TABLE.to_html()
    rows = re.findall(r"<tr>.*?</tr>", html, re.DOTALL)[1:]
    cells = [re.findall(r"<(t[hd]).*?data-value=\"(.*?)\" data-csv=\"(.*?)\">(.*?)</\1>", row) for row in rows]
    assert [[kind for kind, *_ in row] for row in cells] == [["th", "td", "td"]] * 3
    assert [row[1][1:3] for row in cells] == [("90.125", "90.125,3"), ("", ",0"), ("7.0", "7.0,1")]
    assert "<c>" not in html
    assert "a|b &lt;c&gt;" in cells[2][0][3]
    assert cells[0][2][3] == '<span class="v">\u22120.5 [\u22120.5,\u00a0+9.0]\u00a0(3)</span>'
    assert 'class="badge diverged">2 diverged' in cells[1][1][3]
    assert cells[1][2][3] == ""
    assert rows[1].count('class="none"') == 1
    assert (rows[2].count('class="best"'), rows[2].count("<svg")) == (1, 1)
    assert "data-descending" in html.partition("<tbody>")[0]


def test_a_cell_opens_more_and_leads_somewhere():
    cells = (Cell("<E>", link="#a"), Cell("-0.15", marks=("✓ confirmed",), more="One & two.\nThree."))
    html = Table("Claims", (Column("experiment", words=True), Column("SAM")), (cells,)).to_html("claims")
    (target,) = re.findall(r'popovertarget="(.*?)"', html)
    (label,) = re.findall(r'aria-label="(SAM.*?)"', html)
    assert unescape(label) == "SAM, <E>: -0.15, ✓ confirmed"
    assert f'<div popover id="{target}"><h4>&lt;E&gt;</h4><p>One &amp; two.</p><p>Three.</p></div>' in html
    assert '<a href="#a"><span class="v">&lt;E&gt;</span></a>' in html
    assert 'class="badge confirmed">✓ confirmed' in html
