import json
import math
import re

import numpy as np
import pytest

import bsam
from bsam.flatness.density import Density
from bsam.flatness.landscape import Landscape
from bsam.flatness.probe import Reading
from bsam.flatness.spectrum import Eigenvalues
from bsam.lab.report.figures.flatness_figures import (
    contour_figure,
    density_figure,
    eigenvalue_figure,
    flatness_figures,
    probe_figure,
    round_ticks,
    surface_figure,
)
from bsam.lab.report.page.render import figures_html
from bsam.lab.training.flatness_numbers import density_info, landscape_info, probe_info, spectrum_info

AXIS = np.linspace(-1, 1, 5)


def eigenvalues(*values, converged=True):
    return spectrum_info(Eigenvalues(np.array(values), np.zeros(len(values)), np.bool_(converged), products=9))


def bowl(scale=1.0, first=1.0, second=3.0):
    return landscape_info(Landscape((AXIS, AXIS), scale * np.add.outer(first * AXIS**2, second * AXIS**2)))


def entry(architecture="net", method="sam", **parts):
    return {"architecture": architecture, "samples": 50, "run": {"method": method}, **parts}


def lands(steep=10.0):
    """Two networks."""
    return {name: entry(landscape=land) for name, land in {"steep": bowl(steep), "flat": bowl(1, second=0.5)}.items()}


def reading(step, sharpness=0.1, cosine=0.5):
    return Reading(step, 1.0, 2 * sharpness, sharpness, 3 * sharpness, 1.0, 1.5, 0.5, cosine, 0.1, 0.05, 0)


def test_numbers_are_plain_and_those_of_the_paper():
    info = spectrum_info(Eigenvalues(np.array([4.0, 2.0, 0.0]), np.array([1e-3, 0.0, 2e-3]), np.bool_(False), 12))
    assert (info["values"], info["residuals"], info["converged"], info["products"]) == (
        [4, 2, 0],
        [1e-3, 0, 2e-3],
        False,
        12,
    )
    assert (info["maximum"], info["mean"], info["variance"]) == (4, 2, pytest.approx(8 / 3))
    loss = 2 + np.add.outer(AXIS**2, 3 * AXIS**2)
    info = landscape_info(Landscape((AXIS, AXIS), loss))
    assert (info["centre"], info["lowest"], info["highest"], info["share_near"]) == (2, 2, 6, pytest.approx(1 / 25))
    assert (info["loss"][0][2], info["loss"][2][0]) == (3, 5)  # the first direction is that of the rows
    loss[0, 0], loss[4, 4] = np.nan, np.inf
    info = landscape_info(Landscape((AXIS, AXIS), loss))
    assert (info["lowest"], info["highest"]) == (2, 2 + 4 * 0.25 + 3)  # of the finite ones
    assert landscape_info(Landscape((AXIS, AXIS), np.full((5, 5), np.nan)))["lowest"] is not None
    with pytest.raises(bsam.BsamError, match="dims=2"):
        landscape_info(Landscape((AXIS,), AXIS))


def test_eigenvalues_are_dots_on_a_line_per_network():
    entries = {
        "a": entry(eigenvalues=eigenvalues(8.0, 2.0, 1.0)),
        "b": entry(method="bsam", eigenvalues=eigenvalues(4.0, -1.0, converged=False)),
        "c": entry("other", eigenvalues=eigenvalues(400.0)),
        "d": entry("third"),
    }
    figure, other = flatness_figures(entries)  # one for each architecture
    (a, b), (c,) = figure.data, other.data
    assert [list(trace.x) for trace in (a, b, c)] == [[8, 2, 1], [4, -1], [400]]
    assert [list(trace.y) for trace in (a, b, c)] == [[0] * 3, [1] * 2, [0]]
    assert a.marker.color != b.marker.color
    for text, part in zip(figure.layout.yaxis.ticktext, ("8", "not converged"), strict=True):
        assert part in text
    assert "50 training samples" in figure.layout.meta["caption"]
    assert eigenvalue_figure({"a": entry()}) is None


def test_densities_have_one_width_and_integrate_to_one():
    def density(top, sigma):
        grid = np.linspace(-1, top + 1, 50)
        nodes, weights = np.array([0.0, top]), np.array([0.9, 0.1])
        return density_info(Density(grid, np.ones(50), nodes, weights, sigma, products=8))

    infos = density(2.0, 0.01), density(4.0, 0.2)
    assert [info["mean"] for info in infos] == pytest.approx([0.2, 0.4])
    assert [info["second_moment"] for info in infos] == pytest.approx([0.4, 1.6])
    figure = density_figure({"narrow": entry(density=infos[0]), "wide": entry(density=infos[1])})
    low, high = figure.layout.yaxis.range
    for trace, top in zip(figure.data, (2.0, 4.0), strict=True):
        assert np.trapezoid(trace.y, trace.x) == pytest.approx(1, rel=1e-3)
        peak = trace.y[np.abs(trace.x - top).argmin()]
        assert peak == pytest.approx(0.1 / (0.2 * math.sqrt(2 * math.pi)), rel=1e-2)  # of the width 0.2 in both
        assert low < math.log10(peak) < high
    assert figure.data[0].line.dash != figure.data[1].line.dash  # two rows of one method


@pytest.mark.parametrize("draw", [contour_figure, surface_figure])
def test_landscapes_share_their_scale_and_the_first_direction_is_x(draw):
    figure = draw(lands())
    steep, flat = (next(trace for trace in figure.data if trace.name == name) for name in lands())
    assert steep.coloraxis == flat.coloraxis
    assert steep.customdata.max() == 3  # twice as high as the flat one goes; the steep one is cut off there
    assert (flat.customdata[0][2], flat.customdata[2][0]) == (0.5, 1)  # rows go along y, the second direction
    colour = flat.z if draw is contour_figure else flat.surfacecolor
    assert colour == pytest.approx(np.sqrt(flat.customdata / 3))
    assert "cut off" in figure.layout.coloraxis.colorbar.title.text
    assert "cut off" not in draw({"flat": lands()["flat"]}).layout.coloraxis.colorbar.title.text
    bar = figure.layout.coloraxis.colorbar
    assert [3 * place**2 for place in bar.tickvals] == pytest.approx(list(map(float, bar.ticktext)))
    assert draw({}) is None


def test_surfaces_have_named_axes_one_camera_and_one_range():
    scenes = list(surface_figure(lands()).select_scenes())
    assert [list(scene.zaxis.range) for scene in scenes] == [[0, 3], [0, 3]]
    assert len({json.dumps(scene.camera.to_plotly_json()) for scene in scenes}) == 1
    for scene in scenes:
        assert all(axis.title.text for axis in (scene.xaxis, scene.yaxis, scene.zaxis))


@pytest.mark.parametrize("loss", [np.full((5, 5), np.nan), np.full((5, 5), 3.0)])
def test_a_landscape_without_heights_is_drawn(loss):
    figure = contour_figure({"a": entry(landscape=landscape_info(Landscape((AXIS, AXIS), loss)))})
    assert np.isfinite(figure.data[0].z).all()


@pytest.mark.parametrize(("low", "high"), [(0, 8), (2.31, 2.9), (3e-4, 4.1e-3), (1, 5000), (0.107, 0.9)])
def test_ticks_are_round_and_spread_over_the_colours(low, high):
    ticks = round_ticks(low, high)
    assert 4 <= len(ticks) <= 6
    assert all(low <= tick <= high for tick in ticks)
    assert all(len(re.sub(r"e.*|[.-]", "", f"{tick:e}").rstrip("0")) <= 3 for tick in ticks)
    places = np.sqrt((np.array(ticks) - low) / (high - low))
    assert np.diff([0, *places, 1]).max() < 0.35


def test_a_probe_is_a_line_per_network_in_each_panel():
    columns = probe_info([reading(0, 1.0, 0.9), reading(10, 0.1, math.nan), reading(20, -0.001, 0.7)])
    assert (columns["step"], columns["min_sharpness"]) == ([0, 10, 20], [1.0, 0.1, -0.001])
    figure = probe_figure({"a": columns, "b": probe_info([reading(5)])}, {"a": "sam", "b": "bsam"})
    a, b = figure.data[::2], figure.data[1::2]
    for trace, scale in zip(a, (2, 1, 3), strict=False):  # MaxS, MinS, BilS
        assert trace.y.tolist() == pytest.approx([scale, 0.1 * scale, -0.001 * scale])
    assert (a[3].x.tolist(), a[3].y.tolist()) == ([0, 20], pytest.approx([0.9, 0.7]))  # the NaN is left out
    assert [trace.mode for trace in b] == ["markers"] * 4  # a single point
    assert len({trace.line.color for trace in a}) == 1
    assert a[0].line.color != b[0].line.color
    long = probe_info([reading(step, (-1) ** step) for step in range(8000)])
    smoothed = probe_figure({"long": long}).data[1]
    assert (len(smoothed.x), smoothed.x[-1]) == (200, 7999)
    assert np.abs(smoothed.y).max() < 0.02
    assert probe_figure({}) is None


@pytest.mark.parametrize("factor", [50, 5000])
def test_a_radius_that_is_far_too_large_does_not_squash_the_other_lines(factor):
    """The axis is logarithmic. Places of negative values and of those near 0 are checked with their ticks."""
    readings = {
        "good": probe_info([reading(0, 0.02), reading(1, 0.01)]),
        "bad": probe_info([reading(0, factor * 0.01)]),
    }
    figure = probe_figure(readings, caption="A caption.")
    is_wide = factor > 100
    assert [figure.layout[f"yaxis{n}"].type for n in (1, 2, 3, 4)] == ["log" if is_wide else None] * 3 + [None]
    assert ("logarithmic" in figure.layout.meta["caption"]) == is_wide
    assert figure.layout.meta["caption"].startswith("A caption.")
    assert figure.data[0].y.tolist() == pytest.approx([0.04, 0.02])


def test_a_wide_axis_with_negative_values_is_linear_around_0():
    readings = {"good": probe_info([reading(0, 0.02), reading(1, -0.001)]), "bad": probe_info([reading(0, -70.0)])}
    figure = probe_figure(readings)
    axis, good, bad = figure.layout.yaxis2, figure.data[2], figure.data[3]
    assert good.customdata.tolist() == pytest.approx([0.02, -0.001])
    assert bad.customdata.tolist() == [-70.0]
    assert "customdata" in good.hovertemplate
    ticks = dict(zip(map(float, axis.ticktext), axis.tickvals, strict=True))
    assert list(ticks) == sorted(ticks)
    assert ticks[0.0] == 0
    assert ticks[-100.0] < bad.y[0] < 0.9 * ticks[-100.0]
    assert good.y[0] > 0.05 * abs(bad.y[0])  # 0.0003 of it on a linear axis
    assert good.y[1] < 0 < good.y[0]
    low, high = axis.range
    assert low < bad.y[0] < good.y[0] < high


def test_a_page_has_every_figure_and_needs_no_internet():
    entries = {"a & </script>": entry(eigenvalues=eigenvalues(8.0), landscape=bowl(), probe=probe_info([reading(0)]))}
    figures = flatness_figures(entries)
    page = figures_html("a <b> title", figures).decode()
    assert len(page) < 2_500_000
    assert "a <b>" not in page
    assert not re.search(r"<script[^>]+src=", page)
    stored = re.findall(r'<script type="application/json">(.*?)</script>', page)
    assert [json.loads(text)["data"] for text in stored] == [json.loads(f.to_json())["data"] for f in figures]
    assert len(stored) == 4
    assert json.loads(stored[2])["data"][0]["name"] == "a &amp; &lt;/script&gt;"


def test_a_legend_explains_each_network_once():
    readings = {title: probe_info([reading(0)]) for title in ("SAM", "SGD")}
    assert [trace.name for trace in probe_figure(readings).data if trace.showlegend] == ["SAM", "SGD"]
