import json
import math
from dataclasses import replace

import numpy as np
import pytest

from bsam.flatness.density import Density
from bsam.flatness.spectrum import Eigenvalues
from bsam.lab.inference.flatness_numbers import density_info, spectrum_info
from bsam.lab.report.figures.flatness_figures import plot_density, plot_spectrum


def eigenvalues(top, n=5):
    values = np.linspace(top, 0.1, n)
    return Eigenvalues(values, values / 1000, np.bool_(top < 5), products=40)


def density(top, sigma):
    nodes, weights = np.array([0.0, top]), np.array([0.9, 0.1])
    grid = np.linspace(-1, top + 1, 50)
    return Density(grid, np.ones(50), nodes, weights, sigma, products=8)


def test_spectrum_numbers_are_those_of_the_paper():
    (info,) = spectrum_info(
        {"a": Eigenvalues(np.array([4.0, 2.0, 0.0]), np.array([1e-3, 0.0, 2e-3]), np.bool_(False), 12)}, "g"
    )
    assert (info.title, info.group, info.values, info.residuals) == ("a", "g", [4, 2, 0], [1e-3, 0, 2e-3])
    assert (info.maximum, info.mean, info.variance) == (4, 2, pytest.approx(8 / 3))
    assert (info.converged, info.products) == (False, 12)
    assert json.loads(json.dumps(info.__dict__))["converged"] is False


def test_histograms_of_a_group_share_bins_and_heights_and_another_group_has_its_own(tmp_path, drawn):
    infos = [
        *spectrum_info({"a": eigenvalues(4.0), "b": eigenvalues(8.0)}, "one"),
        *spectrum_info({"c": eigenvalues(400.0)}, "two"),
    ]
    plot_spectrum(infos, tmp_path / "spectrum.png")
    assert (tmp_path / "spectrum.png").stat().st_size > 10_000
    a, b, c = drawn[0].axes
    edges = [
        [bar.get_x() for bar in ax.patches] + [ax.patches[-1].get_x() + ax.patches[-1].get_width()] for ax in (a, b, c)
    ]
    assert edges[0] == edges[1]
    assert (edges[0][-1], edges[2][-1]) == (pytest.approx(8), pytest.approx(400))
    assert [sum(bar.get_height() for bar in ax.patches) for ax in (a, b, c)] == [5] * 3  # none falls outside
    assert a.get_ylim() == b.get_ylim()
    texts = [ax.texts[0].get_text() for ax in (a, b, c)]
    assert texts[0].startswith("max 4, mean 2.05, variance 1.9")
    assert [ax.get_title() for ax in (a, b, c)] == ["a", "b (not converged)", "c (not converged)"]
    assert c.get_position().y1 < a.get_position().y0  # a row of its own
    assert len({ax.patches[0].get_facecolor() for ax in (a, b, c)}) == 3
    assert [ax.get_ylabel().split("\n")[0] for ax in (a, b, c)] == ["one", "", "two"]


@pytest.mark.parametrize(
    ("which", "label"),
    [
        ("magnitude", "how many of the 5 of largest magnitude"),
        ("both ends", "how many of the 5 at both ends"),
    ],
)
def test_a_histogram_says_which_eigenvalues_it_shows(which, label, tmp_path, drawn):
    plot_spectrum(spectrum_info({"a": eigenvalues(4.0)}, which=which), tmp_path / "spectrum.png")
    assert drawn[0].axes[0].get_ylabel() == label


def test_axes_name_the_loss_and_its_samples(tmp_path, drawn):
    label = "cross-entropy, 50 training samples"
    plot_spectrum(
        [replace(info, measured_on=label) for info in spectrum_info({"a": eigenvalues(4.0)})], tmp_path / "a.png"
    )
    plot_density(
        [replace(info, measured_on=label) for info in density_info({"a": density(2.0, 0.1)})], tmp_path / "b.png"
    )
    plot_density(density_info({"a": density(2.0, 0.1)}), tmp_path / "c.png")
    labels = [figure.axes[0].get_xlabel() for figure in drawn]
    assert labels == [f"eigenvalue of the Hessian\n({label})"] * 2 + ["eigenvalue of the Hessian"]


@pytest.mark.parametrize("values", [[0.0, 0.0], [-1.0, -2.0], [2.0]])
def test_odd_spectra_are_drawn(values, tmp_path, drawn):
    plot_spectrum(
        spectrum_info({"a": Eigenvalues(np.array(values), np.zeros(len(values)), np.bool_(True), 3)}),
        tmp_path / "spectrum.png",
    )
    assert sum(bar.get_height() for bar in drawn[0].axes[0].patches) == len(values)


def test_density_has_the_moments_of_its_quadrature_and_one_width_in_a_figure(tmp_path, drawn):
    infos = density_info({"narrow": density(2.0, 0.01), "wide": density(4.0, 0.2)})
    assert [info.mean for info in infos] == pytest.approx([0.2, 0.4])
    assert [info.second_moment for info in infos] == pytest.approx([0.4, 1.6])
    plot_density(infos, tmp_path / "density.png")
    assert (tmp_path / "density.png").stat().st_size > 10_000
    (ax,) = drawn[0].axes
    for line, top in zip(ax.lines, (2.0, 4.0), strict=True):
        x, y = line.get_data()
        assert np.trapezoid(y, x) == pytest.approx(1, rel=1e-3)
        peak = y[np.abs(x - top).argmin()]
        assert peak == pytest.approx(0.1 / (0.2 * math.sqrt(2 * math.pi)), rel=1e-2)  # of the width 0.2 in both
        assert ax.get_ylim()[0] < peak < ax.get_ylim()[1]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["narrow", "wide"]
