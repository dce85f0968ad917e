import pytest

from bsam.report import panels


@pytest.mark.parametrize(("name", "start"), [("figure.pdf", b"%PDF"), ("figure.svg", b"<?xml"), ("figure", b"\x89PNG")])
def test_the_format_is_the_one_that_the_name_ends_in(name, start, tmp_path):
    for path in (tmp_path / name, str(tmp_path / name)):
        panels.save(panels.figure(1, 1), path)
        assert (tmp_path / name).read_bytes().startswith(start)
        (tmp_path / name).unlink()
