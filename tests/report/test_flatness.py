import io
import json
import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matplotlib.image import imread
from mpl_toolkits.mplot3d import Axes3D
from rich.console import Console
from torch import nn

import bsam
from bsam.flatness.density import Density
from bsam.flatness.landscape import Landscape
from bsam.flatness.probe import Probe, Reading
from bsam.flatness.spectrum import Eigenvalues
from bsam.recipes import run_folder
from bsam.recipes.measure import Instruments
from bsam.report import measurements, panels
from bsam.report.flatness import density_info, plot_density, plot_probe, plot_spectrum, probe_info, spectrum_info
from bsam.report.landscapes import landscape_info, plot_contours, plot_surfaces, write_interactive
from bsam.report.measurements import FIGURES, ResultsFile, flatness_report
from bsam.report.progress import progress
from bsam.training.lock import LOCK

AXIS = np.linspace(-1, 1, 5)
CHEAP = {"k": 2, "trace_samples": 6, "density_steps": 3, "density_probes": 1, "points": 3}
QUIET = Console(file=io.StringIO(), width=80)


def eigenvalues(top, n=5):
    values = np.linspace(top, 0.1, n)
    return Eigenvalues(values, values / 1000, np.bool_(top < 5), products=40)


def density(top, sigma):
    nodes, weights = np.array([0.0, top]), np.array([0.9, 0.1])
    grid = np.linspace(-1, top + 1, 50)
    return Density(grid, np.ones(50), nodes, weights, sigma, products=8)


def bowl(scale=1.0, shift=0.0, first=1.0, second=3.0):
    return Landscape((AXIS, AXIS), shift + scale * np.add.outer(first * AXIS**2, second * AXIS**2))


def reading(step, sharpness=0.1, cosine=0.5):
    return Reading(step, 1.0, 2 * sharpness, sharpness, 3 * sharpness, 1.0, 1.5, 0.5, cosine, 0.1, 0.05, 0)


def is_a_picture(path):
    image = imread(path)
    return (
        min(image.shape[:2]) > 400
        and len({tuple(pixel) for pixel in image[::3, ::3].reshape(-1, image.shape[2]).round(1)}) > 10
    )


DRAWINGS = {
    "spectrum.png": lambda path: plot_spectrum(spectrum_info({"a": eigenvalues(4.0)}), path),
    "density.png": lambda path: plot_density(density_info({"a": density(2.0, 0.1)}), path),
    "probe.png": lambda path: plot_probe(probe_info([reading(0), reading(10)]), path),
    "contours.png": lambda path: plot_contours(landscape_info({"a": bowl()}), path),
    "surfaces.png": lambda path: plot_surfaces(landscape_info({"a": bowl()}), path),
    "surfaces.html": lambda path: write_interactive(landscape_info({"a": bowl()}), path),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_on_a_full_disk_the_old_figure_stays(name, on_a_full_disk):
    on_a_full_disk(DRAWINGS[name], name)


@pytest.mark.parametrize(("name", "start"), [("figure.pdf", b"%PDF"), ("figure.svg", b"<?xml"), ("figure", b"\x89PNG")])
def test_the_format_is_the_one_that_the_name_ends_in(name, start, tmp_path):
    for path in (tmp_path / name, str(tmp_path / name)):
        panels.save(panels.figure(1, 1), path)
        assert (tmp_path / name).read_bytes().startswith(start)
        (tmp_path / name).unlink()


def test_spectrum_numbers_are_those_of_the_paper():
    (info,) = spectrum_info(
        {"a": Eigenvalues(np.array([4.0, 2.0, 0.0]), np.array([1e-3, 0.0, 2e-3]), np.bool_(False), 12)}, "g"
    )
    assert (info.title, info.group, info.values, info.residuals) == ("a", "g", [4, 2, 0], [1e-3, 0, 2e-3])
    assert (info.maximum, info.mean, info.variance, info.converged, info.products) == (
        4,
        2,
        pytest.approx(8 / 3),
        False,
        12,
    )
    assert json.loads(json.dumps(info.__dict__))["converged"] is False


def test_histograms_of_a_group_share_bins_and_heights_and_another_group_has_its_own(tmp_path, drawn):
    infos = [
        *spectrum_info({"a": eigenvalues(4.0), "b": eigenvalues(8.0)}, "one"),
        *spectrum_info({"c": eigenvalues(400.0)}, "two"),
    ]
    plot_spectrum(infos, tmp_path / "spectrum.png")
    assert is_a_picture(tmp_path / "spectrum.png")
    a, b, c = drawn[0].axes
    edges = [
        [bar.get_x() for bar in ax.patches] + [ax.patches[-1].get_x() + ax.patches[-1].get_width()] for ax in (a, b, c)
    ]
    assert edges[0] == edges[1]
    assert (edges[0][-1], edges[2][-1]) == (pytest.approx(8), pytest.approx(400))
    assert [sum(bar.get_height() for bar in ax.patches) for ax in (a, b, c)] == [
        5,
        5,
        5,
    ]  # none falls outside, the largest neither
    assert a.get_ylim() == b.get_ylim()
    texts = [ax.texts[0].get_text() for ax in (a, b, c)]
    assert texts[0].startswith("max 4, mean 2.05, variance 1.9")
    assert [ax.get_title() for ax in (a, b, c)] == ["a", "b (not converged)", "c (not converged)"]
    drawn[0].canvas.draw()
    for ax in (a, b, c):  # between the bars and the title, in the width of the panel
        text, title = ax.texts[0].get_window_extent(), ax.title.get_window_extent()
        assert ax.get_window_extent().y1 <= text.y0 < text.y1 <= title.y0
        assert text.width <= 3.6 * drawn[0].dpi
    assert c.get_position().y1 < a.get_position().y0  # a row of its own
    assert len({ax.patches[0].get_facecolor() for ax in (a, b, c)}) == 3
    assert [ax.get_ylabel().split("\n")[0] for ax in (a, b, c)] == ["one", "", "two"]


@pytest.mark.parametrize(
    ("which", "label"),
    [
        ("largest", "how many of the top 5"),
        ("magnitude", "how many of the 5 of largest magnitude"),
        ("both ends", "how many of the 5 at both ends"),
    ],
)
def test_a_histogram_says_which_eigenvalues_it_shows(which, label, tmp_path, drawn):
    plot_spectrum(spectrum_info({"a": eigenvalues(4.0)}, which=which), tmp_path / "spectrum.png")
    assert drawn[0].axes[0].get_ylabel() == label


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
    assert is_a_picture(tmp_path / "density.png")
    (ax,) = drawn[0].axes
    for line, top in zip(ax.lines, (2.0, 4.0), strict=True):
        x, y = line.get_data()
        assert np.trapezoid(y, x) == pytest.approx(1, rel=1e-3)
        peak = y[np.abs(x - top).argmin()]
        assert peak == pytest.approx(0.1 / (0.2 * math.sqrt(2 * math.pi)), rel=1e-2)  # of the width 0.2 in both
        assert ax.get_ylim()[0] < peak < ax.get_ylim()[1]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["narrow", "wide"]


def test_densities_of_two_groups_have_a_panel_each(tmp_path, drawn):
    plot_density(
        [*density_info({"a": density(2.0, 0.1)}, "one"), *density_info({"b": density(400.0, 4.0)}, "two")],
        tmp_path / "density.png",
    )
    first, second = drawn[0].axes
    assert first.get_xlim()[1] < 10 < 300 < second.get_xlim()[1]


def test_landscape_numbers():
    (info,) = landscape_info({"a": bowl(shift=2.0)}, "g")
    assert (info.title, info.group, info.axis, info.centre, info.lowest, info.highest) == (
        "a",
        "g",
        [-1, -0.5, 0, 0.5, 1],
        2,
        2,
        6,
    )
    assert info.share_near == pytest.approx(1 / 25)
    assert info.loss[0][2] == 3  # the first direction, at -1
    assert info.loss[2][0] == 5  # the second one
    lost = bowl()
    lost.loss[0, 0], lost.loss[4, 4] = np.nan, np.inf
    (info,) = landscape_info({"a": lost})
    assert (info.lowest, info.highest) == (0, 4)
    with pytest.raises(bsam.BsamError, match="landscape of flat has 1 dimension"):
        landscape_info({"flat": Landscape((AXIS,), AXIS)})


def test_contours_of_a_group_share_levels_and_the_first_direction_is_horizontal(tmp_path, drawn):
    infos = [
        *landscape_info({"steep": bowl(10), "flat": bowl(1, first=1, second=0.5)}, "one"),
        *landscape_info({"other": bowl(100)}, "two"),
    ]
    plot_contours(infos, tmp_path / "contours.png")
    assert is_a_picture(tmp_path / "contours.png")
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
    assert is_a_picture(tmp_path / "surfaces.png")
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


def test_the_interactive_page_shows_one_at_first_on_a_scale_for_all_and_needs_no_internet(tmp_path):
    infos = [
        *landscape_info({"steep": bowl(10, first=1, second=3), "flat": bowl(1)}, "one"),
        *landscape_info({"other": bowl(100)}, "two"),
    ]
    write_interactive(infos, tmp_path / "surfaces.html")
    text = (tmp_path / "surfaces.html").read_text()
    assert len(text) > 1_000_000  # plotly.js is in it
    assert not re.search(r"<script[^>]+src=", text)
    data, layout = traces(tmp_path / "surfaces.html")
    assert [trace["name"].split(":")[0] for trace in data] == ["steep", "flat", "other"]
    assert [trace.get("visible", True) for trace in data] == [True, "legendonly", True]
    assert [(trace["scene"], trace["coloraxis"]) for trace in data] == [("scene", "coloraxis")] * 2 + [
        ("scene2", "coloraxis2")
    ]
    assert layout["scene"]["zaxis"]["range"] == [0, 8] == [layout["coloraxis"]["cmin"], layout["coloraxis"]["cmax"]]
    assert layout["scene2"]["zaxis"]["range"] == [0, 400]
    assert layout["scene"]["domain"]["y"][0] == layout["scene2"]["domain"]["y"][1] == 0.5
    assert [place for place, _ in layout["coloraxis"]["colorscale"]][1] < 1 / 9  # most colours for the bottom


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
    for draw, name in ((plot_contours, "c.png"), (plot_surfaces, "s.png"), (write_interactive, "s.html")):
        draw(infos, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5_000


def test_more_models_than_columns_wrap(tmp_path, drawn):
    plot_spectrum(spectrum_info({f"model {i}": eigenvalues(4.0) for i in range(8)}), tmp_path / "spectrum.png")
    tops = [round(ax.get_position().y1, 3) for ax in drawn[0].axes]
    assert tops == [tops[0]] * 4 + [tops[4]] * 4
    assert tops[4] < tops[0]


def test_a_probe_is_columns_and_curves(tmp_path, drawn):
    columns = probe_info([reading(0, 1.0, 0.9), reading(10, 0.1, 0.4), reading(20, -0.001, 0.7)])
    assert columns["step"] == [0, 10, 20]
    assert columns["cosine"] == [0.9, 0.4, 0.7]
    plot_probe(columns, tmp_path / "probe.png")
    assert is_a_picture(tmp_path / "probe.png")
    upper, lower = drawn[0].axes
    found = {line.get_label(): line.get_ydata().tolist() for line in upper.lines}
    assert found == {"MaxS": [2, 0.2, -0.002], "MinS": [1, 0.1, -0.001], "BilS": [3 * 1.0, 3 * 0.1, 3 * -0.001]}
    assert lower.lines[0].get_ydata().tolist() == [0.9, 0.4, 0.7]
    assert lower.get_ylim()[0] < 0.4 < 1 < lower.get_ylim()[1]
    assert set(probe_info([])) == set(columns)
    plot_probe(probe_info([]), tmp_path / "empty.png")
    plot_probe(
        probe_info([reading(0, 1.0, math.nan), reading(10, math.nan, 0.4), reading(20, 0.1, 0.7)]),
        tmp_path / "holes.png",
    )
    assert drawn[2].axes[1].get_ylim() == lower.get_ylim()


def test_a_probe_of_a_training_is_drawn(tmp_path, problem):
    optimizer = bsam.BSAM(torch.optim.SGD(problem.model.parameters(), lr=0.1), problem.model)
    probe = Probe(every=2).attach(optimizer)
    for _ in range(6):
        optimizer.step(problem.loss)
    columns = probe_info(probe.readings)
    assert columns["step"] == [0, 2, 4]
    assert columns["extra_passes"] == [0, 0, 0]
    plot_probe(columns, tmp_path / "probe.png")
    assert is_a_picture(tmp_path / "probe.png")


def test_bars_reach_and_fall_back():
    out = io.StringIO()
    with progress(Console(file=out, width=100), {"models": 2, "trace": 1}) as bars:
        bars.reach("trace", 3, 9)
        bars.reach("trace", 9, 9)
        bars.advance("models", 1)
        bars.reach("trace", 2, 8)
    assert "1/2" in out.getvalue()
    assert "2/8" in out.getvalue()


def network(seed, width=4):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))


def loader(path):
    """The file holds a seed, and the width of the network."""
    seed, width = map(int, path.read_text().split())
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(12, 3, generator=generator), torch.randint(0, 2, (12,), generator=generator)
    loader.asked.append(path.name)
    if seed < 0:
        raise KeyboardInterrupt
    return network(seed, width), F.cross_entropy, list(zip(x.split(5), y.split(5), strict=True))


@pytest.fixture
def files(tmp_path, monkeypatch):
    loader.asked = []
    monkeypatch.setattr(run_folder, "loader", lambda name: loader)
    monkeypatch.chdir(tmp_path)
    paths = [tmp_path / name for name in ("a.pt", "b.pt", "wide.pt")]
    for path, text in zip(paths, ("1 4", "2 4", "3 6"), strict=True):
        path.write_text(text)
    return paths


def test_a_report_has_all_numbers_and_every_figure(files, tmp_path):
    console = Console(file=io.StringIO(), width=80)
    written = flatness_report(files, "m:f", Instruments(**CHEAP), tmp_path / "out", "cpu", console)
    assert [path.name for path in written] == ["flatness.json", *FIGURES]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"flatness.json", *FIGURES}
    found = json.loads((tmp_path / "out" / "flatness.json").read_text(), parse_constant=pytest.fail)
    assert {"bsam", "torch", "machine", "cores", "date"} <= set(found["environment"])
    assert found["settings"] == {
        "loader": "m:f",
        "device": "cpu",
        **Instruments(**CHEAP).settings(),
        "bsam": bsam.__version__,
        "torch": torch.__version__,
    }
    for path, entry in zip(files, found["models"], strict=True):
        model, loss_fn, data = loader(path)
        x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
        assert entry["sharpness"]["loss"] == pytest.approx(loss_fn(model(x), y).item(), rel=1e-5)
        assert entry["landscape"]["centre"] == entry["sharpness"]["loss"] == entry["landscape"]["loss"][1][1]
        exact = hessian(model, loss_fn, x, y)
        assert entry["eigenvalues"]["values"] == pytest.approx(
            torch.linalg.eigvalsh(exact).flip(0)[:2].tolist(), rel=1e-3
        )
        assert entry["eigenvalues"]["maximum"] == entry["eigenvalues"]["values"][0]
        assert abs(entry["trace"]["value"] - float(exact.trace())) <= 5 * entry["trace"]["standard_error"] + 1e-4
        assert entry["parameters"] == len(exact)
        assert entry["samples"] == 12
        assert set(entry["seconds"]) == {"sharpness", "eigenvalues", "trace", "density", "landscape"}
        assert len(entry["density"]["grid"]) == 1000
    a, b, wide = (entry["architecture"] for entry in found["models"])
    assert a == b != wide
    out = console.file.getvalue()
    assert [line.split()[0] for line in out.splitlines() if line.startswith((" a ", " b ", " wide "))] == [
        "a",
        "b",
        "wide",
    ]
    assert f"{found['models'][1]['eigenvalues']['maximum']:.3g}" in out


def hessian(model, loss_fn, x, y):
    names, shapes = zip(*((name, p.shape) for name, p in model.named_parameters()), strict=True)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    def value(w):
        pieces = w.split([shape.numel() for shape in shapes])
        return loss_fn(
            torch.func.functional_call(
                model, {n: p.view(s) for n, p, s in zip(names, pieces, shapes, strict=True)}, (x,)
            ),
            y,
        )

    return torch.autograd.functional.hessian(value, flat)


def test_interrupted_it_keeps_finished_models_and_goes_on_with_the_next(files, tmp_path, monkeypatch):
    broken, out = files[1].read_text(), tmp_path / "out"
    files[1].write_text("-1 4")
    with pytest.raises(KeyboardInterrupt):
        flatness_report(files, "m:f", Instruments(**CHEAP), out, "cpu", QUIET)
    kept = json.loads((out / "flatness.json").read_text())
    assert [entry["file"] for entry in kept["models"]] == [str(files[0])]
    assert [path.name for path in out.iterdir()] == ["flatness.json"]
    files[1].write_text(broken)
    measured, genuine = [], measurements.measure
    monkeypatch.setattr(
        measurements, "measure", lambda model, *rest: measured.append(model[0].weight.shape[0]) or genuine(model, *rest)
    )
    console = Console(file=io.StringIO(), width=80)
    flatness_report(files, "m:f", Instruments(**CHEAP), out, "cpu", console)
    assert measured == [4, 6]  # the second and the third one
    assert "anew" not in console.file.getvalue()
    after = json.loads((out / "flatness.json").read_text())
    assert after["models"][0] == kept["models"][0]
    assert [entry["file"] for entry in after["models"]] == list(map(str, files))

    measured.clear()
    files[0].write_text("7 4")  # other weights under the same name
    drawn = []
    monkeypatch.setattr(measurements, "plot_spectrum", lambda infos, path: drawn.append([info.title for info in infos]))
    flatness_report(files[:1] * 2, "m:f", Instruments(**CHEAP), out, "cpu", QUIET)
    assert measured == [4]
    assert drawn == [["a"]]
    models = json.loads((out / "flatness.json").read_text())["models"]
    assert [entry["file"] for entry in models] == [
        str(files[1]),
        str(files[2]),
        str(files[0]),
    ]  # its old numbers are gone
    assert models[2]["eigenvalues"] != after["models"][0]["eigenvalues"]


def test_a_second_process_on_the_folder_is_refused_and_loses_nothing(files, tmp_path, monkeypatch):
    """Each wrote the file with what it knew, and the models of the other were gone."""
    out, genuine = tmp_path / "out", measurements.measure

    def disturbed(*arguments):
        monkeypatch.setattr(measurements, "measure", genuine)
        with pytest.raises(bsam.BsamError, match=f"{out}: another process is measuring there. Wait for it, or choose"):
            flatness_report(files[1:2], "m:f", Instruments(**CHEAP), out, "cpu", QUIET)
        return genuine(*arguments)

    monkeypatch.setattr(measurements, "measure", disturbed)
    flatness_report(files[:1], "m:f", Instruments(**CHEAP), out, "cpu", QUIET)
    flatness_report(files[1:2], "m:f", Instruments(**CHEAP), out, "cpu", QUIET)
    models = json.loads((out / "flatness.json").read_text())["models"]
    assert [entry["file"] for entry in models] == list(map(str, files[:2]))
    assert not (out / LOCK).exists()


def loaded(scale=1.0, samples=12, build=network):
    """What a loader returns that is as it says."""
    x, y = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2
    return build(1), F.cross_entropy, [(scale * x[:samples], y[:samples])]


def scaled(seed):
    """The same function as the network, in other shapes."""
    return nn.Sequential(
        network(seed), nn.Linear(2, 2, bias=False).requires_grad_(False), nn.Linear(2, 2, bias=False)
    ).apply(identity)


def identity(module):
    if isinstance(module, nn.Linear) and module.weight.shape == (2, 2):
        nn.init.eye_(module.weight)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scale": 1.01}, r"its loss is 0\.\d+ now, and was 0\.\d+"),
        ({"samples": 11}, "it has 11 samples now, and had 12"),
        ({"build": scaled}, "it is another network now"),
    ],
)
def test_a_file_is_measured_anew_when_its_loader_or_the_data_changed(change, words, files, tmp_path, monkeypatch):
    def report():
        console = Console(file=io.StringIO(), width=80)
        flatness_report(files[:1], "m:f", Instruments(**CHEAP), tmp_path / "out", "cpu", console)
        (entry,) = json.loads((tmp_path / "out" / "flatness.json").read_text())["models"]
        return entry, console.file.getvalue()

    monkeypatch.setattr(run_folder, "loader", lambda name: lambda path: loaded())
    first, _ = report()
    again, out = report()
    assert again == first
    assert "anew" not in out
    monkeypatch.setattr(run_folder, "loader", lambda name: lambda path: loaded(**change))
    changed, out = report()
    assert re.search(rf"a\.pt is measured anew: {words}\. Has the loader changed, or its data\?", out)
    assert changed["eigenvalues"]["values"] != first["eigenvalues"]["values"]
    assert report()[0] == changed


def test_landscapes_with_points_that_are_no_numbers_are_drawn_again_from_the_file(files, tmp_path, monkeypatch):
    class Edge(nn.Linear):
        """Its loss exists on one side of the model alone, and sharpness reaches beyond the edge."""

    def load(path):
        torch.manual_seed(0)
        model, x = Edge(3, 2), torch.ones(4, 3)
        near = float(model(x).detach().square().mean())
        return model, lambda out, y: torch.sqrt(1.01 * near - out.square().mean()), [(x, torch.zeros(4))]

    monkeypatch.setattr(run_folder, "loader", lambda name: load)
    monkeypatch.setattr(measurements, "measure", measured := Counted(measurements.measure))
    tables = []
    for _ in range(2):
        console = Console(file=io.StringIO(), width=80)
        flatness_report(
            files[:1], "m:f", Instruments(**{**CHEAP, "points": 5, "rho": 1.0}), tmp_path / "out", "cpu", console
        )
        tables.append(console.file.getvalue()[console.file.getvalue().index("model ") :])
    entry = json.loads((tmp_path / "out" / "flatness.json").read_text())["models"][0]
    assert any(None in row for row in entry["landscape"]["loss"])
    assert entry["sharpness"]["min_sharpness"] is None or entry["sharpness"]["max_sharpness"] is None
    assert measured.calls == 1
    assert "nan" in tables[0]
    assert tables[1].split("models")[0] == tables[0].split("models")[0]


class Counted:
    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *arguments):
        self.calls += 1
        return self.function(*arguments)


def test_other_settings_and_strange_folders_are_refused_untouched(files, tmp_path):
    out = tmp_path / "out"
    flatness_report(files[:1], "m:f", Instruments(**CHEAP), out, "cpu", QUIET)
    before = {path: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(bsam.BsamError, match="seed 0 there, 1 here"):
        flatness_report(files, "m:f", Instruments(**CHEAP, seed=1), out, "cpu", QUIET)
    with pytest.raises(bsam.BsamError, match="loader m:f there, m:g here"):
        flatness_report(files, "m:g", Instruments(**CHEAP), out, "cpu", QUIET)
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    (out / "flatness.json").write_text('{"something": "else"}')
    with pytest.raises(bsam.BsamError, match="no file of bsam flatness"):
        ResultsFile(out, {})
    (out / "flatness.json").unlink()
    with pytest.raises(bsam.BsamError, match=r"spectrum\.png, density\.png.*overwritten"):
        ResultsFile(out, {})
    with pytest.raises(bsam.BsamError, match="cannot be used"):
        ResultsFile(files[0], {})


def test_a_loss_that_is_not_finite_is_refused_with_the_file(files, tmp_path, monkeypatch):
    monkeypatch.setattr(
        run_folder,
        "loader",
        lambda name: (
            lambda path: (network(0), lambda out, y: out.sum() * math.nan, [(torch.ones(2, 3), torch.ones(2))])
        ),
    )
    with pytest.raises(bsam.BsamError, match=r"a\.pt: the loss is nan"):
        flatness_report(files, "m:f", Instruments(**CHEAP), tmp_path / "out", "cpu", QUIET)


@pytest.mark.parametrize("device", ["gpu", "meta:x", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(device, files, tmp_path):
    with pytest.raises(bsam.BsamError, match=f"device.*{device}"):
        flatness_report(files, "m:f", Instruments(**CHEAP), tmp_path / "out", device, QUIET)
    assert not (tmp_path / "out").exists()


def test_titles_are_names_or_whole_paths_where_names_are_alike(files, tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    twin = tmp_path / "other" / "a.pt"
    twin.write_text("9 4")
    seen = []
    monkeypatch.setattr(measurements, "plot_contours", lambda infos, path: seen.append([info.title for info in infos]))
    flatness_report([files[0], files[1]], "m:f", Instruments(**CHEAP), tmp_path / "out", "cpu", QUIET)
    flatness_report([files[0], twin], "m:f", Instruments(**CHEAP), tmp_path / "out", "cpu", QUIET)
    assert seen == [["a", "b"], [str(files[0]), str(twin)]]


def test_models_of_one_architecture_are_one_group(files, tmp_path, monkeypatch):
    seen = []
    for name in ("plot_spectrum", "plot_density", "plot_contours", "plot_surfaces", "write_interactive"):
        monkeypatch.setattr(
            measurements, name, lambda infos, path: seen.append([len(group) for group in panels.grouped(infos)])
        )
    flatness_report(files, "m:f", Instruments(**CHEAP), tmp_path / "out", "cpu", QUIET)
    assert seen == [[2, 1]] * 5
