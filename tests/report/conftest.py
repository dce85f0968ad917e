"""What the tests of figures share."""

import resource

import pytest

import bsam
from bsam.report import figures, flatness, panels, probe_figures, recipe_figures

OLD = b"as it was"


@pytest.fixture
def drawn(monkeypatch):
    """The figures, as matplotlib holds them, instead of the pixels alone."""
    made, genuine = [], panels.figure
    for module in (panels, figures, flatness, recipe_figures, probe_figures):
        monkeypatch.setattr(module, "figure", lambda *size: made.append(genuine(*size)) or made[-1])
    return made


@pytest.fixture
def on_a_full_disk(tmp_path):
    """Draws where no file gets longer than a kilobyte: that is said in a sentence, the old file is as it was, and
    nothing lies beside it.
    """

    def check(draw, name):
        path = tmp_path / "full" / name
        path.parent.mkdir()
        path.write_bytes(OLD)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
        try:
            with pytest.raises(
                bsam.BsamError, match=rf"{name} could not be written \(File too large\); what was there before is kept"
            ):
                draw(path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert {file: file.read_bytes() for file in path.parent.iterdir()} == {path: OLD}

    return check
