from bsam.lab.report.figures.style import COLOURS, style_of
from bsam.methods import METHODS


def test_methods_differ_and_the_paper_s_three_share_their_colours_with_none():
    styles = {method: style_of(method, "") for method in ("base", *METHODS)}
    assert len(set(styles.values())) == len(styles)
    first = {styles[method].colour for method in ("base", "sam", "bsam")}
    assert first == {0, 1, 2}
    assert first.isdisjoint(style.colour for method, style in styles.items() if method not in ("base", "sam", "bsam"))


def test_rows_of_a_method_share_its_colour_and_differ_in_dashes():
    rows = ["SAM", "SAM (sum)", "SAM, rho 0.1"]
    styles = [style_of("sam", row, rows) for row in rows]
    assert {style.colour for style in styles} == {style_of("sam", "").colour}
    assert len({style.dash for style in styles}) == len({style.symbol for style in styles}) == 3
    assert styles[0].trace["line"] == {"color": COLOURS[styles[0].colour], "dash": styles[0].dash, "width": 2}


def test_without_a_method_the_name_in_the_row_decides():
    assert style_of("", "BSAM (2 passes), seed 1") == style_of("bsam", "")
    assert style_of("", "SGD").colour == style_of("base", "").colour
    assert style_of("", "mine") == style_of("", "mine")
    assert style_of("", "mine").colour > 2
