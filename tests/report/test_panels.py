import resource

import pytest

import bsam
from bsam.report import panels


@pytest.mark.parametrize(("name", "start"), [("figure.pdf", b"%PDF"), ("figure.svg", b"<?xml"), ("figure", b"\x89PNG")])
def test_the_format_is_the_one_that_the_name_ends_in(name, start, tmp_path):
    for path in (tmp_path / name, str(tmp_path / name)):
        panels.save(panels.figure(1, 1), path)
        assert (tmp_path / name).read_bytes().startswith(start)
        (tmp_path / name).unlink()


def test_on_a_full_disk_the_old_figure_stays(tmp_path):
    """No file gets longer than a kilobyte: the message says so, and nothing lies beside the old file."""
    path = tmp_path / "figure.png"
    path.write_bytes(b"as it was")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(bsam.BsamError, match=r"figure.png could not be written \(File too large\); what was there"):
            panels.save(panels.figure(9, 9), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == {path: b"as it was"}
