import json
import re

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from mpl_toolkits.mplot3d import Axes3D

import bsam
from bsam.flatness.landscape import Landscape
from bsam.lab.inference.flatness_numbers import landscape_info
from bsam.lab.report.figures.landscape_figures import plot_contours, plot_surfaces, write_interactive

AXIS = np.linspace(-1, 1, 5)


def bowl(scale=1.0, shift=0.0, first=1.0, second=3.0):
    return Landscape((AXIS, AXIS), shift + scale * np.add.outer(first * AXIS**2, second * AXIS**2))


def test_landscape_numbers():
    (info,) = landscape_info({"a": bowl(shift=2.0)}, "g")
    assert (info.title, info.group, info.axis) == ("a", "g", [-1, -0.5, 0, 0.5, 1])
    assert (info.centre, info.lowest, info.highest) == (2, 2, 6)
    assert info.share_near == pytest.approx(1 / 25)
    assert info.loss[0][2] == 3  # the first direction, at -1
    assert info.loss[2][0] == 5  # the second one
    lost = bowl()
    lost.loss[0, 0], lost.loss[4, 4] = np.nan, np.inf
    (info,) = landscape_info({"a": lost})
    assert (info.lowest, info.highest) == (0, 4)
    with pytest.raises(bsam.BsamError, match="flat"):
        landscape_info({"flat": Landscape((AXIS,), AXIS)})


def test_contours_of_a_group_share_levels_and_the_first_direction_is_horizontal(tmp_path, drawn):
    infos = [
        *landscape_info({"steep": bowl(10), "flat": bowl(1, first=1, second=0.5)}, "one"),
        *landscape_info({"other": bowl(100)}, "two"),
    ]
    plot_contours(infos, tmp_path / "contours.png")
    assert (tmp_path / "contours.png").stat().st_size > 10_000
    steep, flat, other = (
        next(ax for ax in drawn[0].axes if ax.get_title().startswith(title)) for title in ("steep", "flat", "other")
    )
    levels = [ax.collections[0].levels.tolist() for ax in (steep, flat, other)]
    assert levels[0] == levels[1]
    assert (levels[0][0], levels[0][-1]) == (0, 3)  # twice as high as the flat one goes; the steep one is cut off there
    assert levels[2][-1] == 400
    assert np.diff(levels[0])[0] < np.diff(levels[0])[-1]
    assert [ax.collections[0].extend for ax in (steep, flat, other)] == ["max", "max", "neither"]
    width, height = np.ptp(np.concatenate(flat.collections[1].get_paths()[4].to_polygons(closed_only=False)), axis=0)
    assert width < height  # it is steeper along the first direction, whose axis is the horizontal one
    assert steep.get_ylabel().startswith("one")
    assert other.get_ylabel().startswith("two")


def test_surfaces_of_a_group_share_their_scale_and_are_cut_at_its_top(tmp_path, drawn, monkeypatch):
    surfaces, genuine = [], Axes3D.plot_surface
    monkeypatch.setattr(
        Axes3D, "plot_surface", lambda ax, *xyz, **options: surfaces.append(xyz) or genuine(ax, *xyz, **options)
    )
    infos = [*landscape_info({"steep": bowl(10), "flat": bowl(1)}, "one"), *landscape_info({"other": bowl(100)}, "two")]
    plot_surfaces(infos, tmp_path / "surfaces.png")
    assert (tmp_path / "surfaces.png").stat().st_size > 10_000
    steep, flat, other = drawn[0].axes
    assert steep.get_zlim() == flat.get_zlim()
    assert flat.get_zlim()[1] == pytest.approx(8, rel=0.1)
    assert other.get_zlim()[1] == pytest.approx(400, rel=0.1)
    (_, _, cut), (x, y, z), _ = surfaces
    assert cut.max() == 8
    assert z == pytest.approx(x**2 + 3 * y**2)


def traces(path):
    """Data and layout of a plotly page."""
    text = path.read_text()
    start = text.index("[", text.rindex("Plotly.newPlot("))
    data, end = json.JSONDecoder().raw_decode(text[start:])
    layout, _ = json.JSONDecoder().raw_decode(text[text.index("{", start + end) :])
    return data, layout


def test_the_interactive_page_shows_all_on_a_scale_for_each_group_and_needs_no_internet(tmp_path):
    infos = [
        *landscape_info({"rho_min 0.1 & <b>": bowl(10, first=1, second=3), "flat": bowl(1)}, "one"),
        *landscape_info({"other": bowl(100)}, "two"),
    ]
    write_interactive(infos, tmp_path / "surfaces.html")
    text = (tmp_path / "surfaces.html").read_text()
    assert len(text) > 1_000_000  # plotly.js is in it
    assert not re.search(r"<script[^>]+src=", text)
    data, layout = traces(tmp_path / "surfaces.html")
    assert [trace["name"] for trace in data] == ["rho_min 0.1 & <b>", "flat", "other"]
    places = [(trace["scene"], trace["coloraxis"]) for trace in data]
    assert places == [("scene", "coloraxis"), ("scene2", "coloraxis"), ("scene3", "coloraxis2")]
    assert layout["scene"]["zaxis"]["range"] == [0, 8] == [layout["coloraxis"]["cmin"], layout["coloraxis"]["cmax"]]
    assert layout["scene2"]["zaxis"]["range"] == [0, 8]
    assert layout["scene3"]["zaxis"]["range"] == [0, 400]
    texts = [note["text"] for note in layout["annotations"]]
    assert texts[0] == "one<br><b>\u03c1<sub>min</sub> 0.1 &amp; &lt;b&gt;</b><br>loss 0"
    assert text.count("page.on(") == 2  # the surfaces turn together
    assert [place for place, _ in layout["coloraxis"]["colorscale"]][1] < 1 / 9  # most colours for the bottom


def test_titles_and_labels_of_contours_are_clear_of_the_edge(tmp_path, drawn):
    title = "BSAM (Algorithm 1), rho_min 0.1, seed {}"
    plot_contours(landscape_info({title.format(n): bowl() for n in range(5)}), tmp_path / "contours.png")
    inside = drawn[0].bbox.padded(-8 / 150 * drawn[0].dpi)  # 8 pixels of the file
    canvas = FigureCanvasAgg(drawn[0])
    canvas.draw()
    for ax in drawn[0].axes:
        box = ax.get_tightbbox(canvas.get_renderer())
        assert inside.x0 < box.x0 < box.x1 < inside.x1
        assert inside.y0 < box.y0 < box.y1 < inside.y1
    assert drawn[0].axes[0].get_title() == "BSAM (Algorithm 1), $\\rho_{\\min}$ 0.1,\nseed 0\nloss 0"


def test_rows_of_the_interactive_surface_go_along_the_second_direction(tmp_path, monkeypatch):
    import plotly.graph_objects as go

    made = []
    monkeypatch.setattr(go.Figure, "to_html", lambda page, **options: made.append(page) or "")
    write_interactive(landscape_info({"a": bowl(first=1, second=3)}), tmp_path / "surfaces.html")
    (surface,) = made[0].data
    assert surface.z[0][2] == 3  # at -1 along the second direction
    assert surface.z[2][0] == 1


@pytest.mark.parametrize("loss", [np.full((5, 5), np.nan), np.full((5, 5), 3.0)])
def test_a_landscape_without_heights_is_drawn(loss, tmp_path):
    infos = landscape_info({"a": Landscape((AXIS, AXIS), loss)})
    for draw, name in ((plot_contours, "c.png"), (plot_surfaces, "s.png")):
        draw(infos, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5_000
