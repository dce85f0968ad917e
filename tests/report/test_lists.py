import re

import pytest

from bsam.methods import METHODS
from bsam.report.lists import LISTS, list_table, methods_info


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("width", [100, 120, 400])
def test_a_list_fits_and_loses_no_word(name, width):
    lines = list_table(name, width).splitlines()
    assert max(map(len, lines)) <= min(width, 160)
    starts = [lines[0].index(title) for title in LISTS[name].header]
    ends = [start - 2 for start in starts[1:]] + [None]
    columns = list(zip(starts, ends, strict=True))
    cells = [[line[start:end].strip() for start, end in columns] for line in lines[2:]]
    rows = []
    for line in cells:
        if line[0]:
            rows.append(line)
        else:
            rows[-1] = [f"{so_far} {more}".strip() for so_far, more in zip(rows[-1], line, strict=True)]
    assert [tuple(text.replace("- ", "-") for text in row) for row in rows] == LISTS[name].rows()


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("width", [42, 80])
def test_in_a_narrow_terminal_a_list_fits_and_loses_no_word(name, width):
    text = list_table(name, width)
    assert max(map(len, text.splitlines())) <= width
    words = text.replace(";", " ").replace(":", " ").split()
    assert all(
        word in words for row in LISTS[name].rows() for word in re.split(r"[\s;:]+", " ".join(row)) if word != "-"
    )


def test_the_list_of_methods_has_them_all():
    assert [row[0] for row in methods_info()] == ["sgd", *METHODS]
    assert [float(row[3]) for row in methods_info()] == [1, *(method.passes for method in METHODS.values())]


def test_figures_that_are_drawn_need_no_files():
    rows = {row[0]: row for row in LISTS["data"].rows()}
    assert rows["stick_figures"][3::3] == ("drawn", "bsam")
    assert rows["lspet"][3::3] == ("files", "--data-dir FOLDER")
    assert [rows[name][2] for name in ("digits", "lspet", "mpii")] == ["10", "14 joints", "16 joints"]
    assert rows["digits"][6] == "scikit-learn"
