from bsam.lab.report.figures.style import style_of
from bsam.methods import METHODS


def colour(style):
    assert style["line"]["color"] == style["marker"]["color"]
    return style["line"]["color"]


def test_methods_differ_and_the_paper_s_three_share_their_colours_with_none():
    styles = {method: style_of(method, "") for method in ("base", *METHODS)}
    assert len({str(style) for style in styles.values()}) == len(styles)
    first = {colour(styles.pop(method)) for method in ("base", "sam", "bsam")}
    assert len(first) == 3
    assert first.isdisjoint(map(colour, styles.values()))


def test_rows_of_a_method_share_its_colour_and_differ_in_dashes():
    rows = ["SAM", "SAM (sum)", "SAM, rho 0.1"]
    styles = [style_of("sam", row, rows) for row in rows]
    assert set(map(colour, styles)) == {colour(style_of("sam", ""))}
    assert len({style["line"]["dash"] for style in styles}) == len({style["marker"]["symbol"] for style in styles}) == 3


def test_without_a_method_the_name_in_the_row_decides():
    assert style_of("", "BSAM (2 passes), seed 1") == style_of("bsam", "")
    assert style_of("", "SGD") == style_of("base", "")
    assert style_of("", "mine") == style_of("", "mine")
    assert colour(style_of("", "mine")) not in [colour(style_of(method, "")) for method in ("base", "sam", "bsam")]
