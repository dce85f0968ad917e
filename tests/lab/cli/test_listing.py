import re
from dataclasses import replace

import pytest

from bsam.lab.cli.listing import LISTS, list_table, methods_info
from bsam.methods import METHODS


@pytest.mark.parametrize("name", LISTS)
def test_a_list_fits_and_loses_no_word(name, monkeypatch):
    rows = LISTS[name].rows()
    monkeypatch.setitem(LISTS, name, replace(LISTS[name], rows=lambda: rows))  # recipes take long to plan
    for width in (42, 80, 120, 400):
        text = list_table(name).to_text(width)
        assert max(map(len, text.splitlines())) <= width
        words = text.replace(";", " ").replace(":", " ").split()
        assert all(word in words for row in rows for word in re.split(r"[\s;:]+", " ".join(row)) if word)


def test_the_list_of_methods_has_them_all():
    assert [row[0] for row in methods_info()] == ["sgd", *METHODS]
    assert [float(row[3]) for row in methods_info()] == [1, *(method.passes for method in METHODS.values())]


def test_figures_that_are_drawn_need_no_files():
    rows = {row[0]: row for row in LISTS["data"].rows()}
    assert rows["stick_figures"][3::3] == ("drawn", "bsam")
    assert rows["lspet"][3::3] == ("files", "--data-dir FOLDER")
    assert [rows[name][2] for name in ("digits", "lspet", "mpii")] == ["10", "14 joints", "16 joints"]
    assert rows["digits"][6] == "scikit-learn"
