"""What the tests of reports share: figures as matplotlib holds them."""

import pytest

from bsam.lab.report.figures import epoch_figures, panels, probe_figures, setting_figures


@pytest.fixture
def drawn(monkeypatch):
    """The figures, as matplotlib holds them."""
    made, genuine = [], panels.new_figure
    for module in (panels, epoch_figures, setting_figures, probe_figures):
        monkeypatch.setattr(module, "new_figure", lambda *size: made.append(genuine(*size)) or made[-1])
    return made
