from types import SimpleNamespace

import pytest

from bsam.lab.report.figures import panels


def test_more_models_than_columns_wrap_and_a_group_begins_a_row():
    infos = [SimpleNamespace(group=group) for group in "aaaaab"]
    _, groups = panels.panels(infos, 1, 1)
    places = [[(ax.get_subplotspec().rowspan.start, ax.get_subplotspec().colspan.start) for _, ax in g] for g in groups]
    assert places == [[(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)], [(2, 0)]]


@pytest.mark.parametrize(("name", "start"), [("figure.pdf", b"%PDF"), ("figure.svg", b"<?xml"), ("figure", b"\x89PNG")])
def test_the_format_is_the_one_that_the_name_ends_in(name, start, tmp_path):
    for path in (tmp_path / name, str(tmp_path / name)):
        panels.save(panels.new_figure(1, 1), path)
        assert (tmp_path / name).read_bytes().startswith(start)
        (tmp_path / name).unlink()
