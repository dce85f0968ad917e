"""``bsam flatness``, on files with a loader and on run directories."""

import json
import math
import re
from dataclasses import asdict, replace

import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from torch import nn

import bsam
from bsam.lab import cli
from bsam.lab.cli import flatness as command
from bsam.lab.cli.flatness import flatness_report, flatness_table
from bsam.lab.common.files import LOCK
from bsam.lab.inference.run_flatness import FlatnessSettings, find_models

CHEAP = {"k": 2, "trace_samples": 6, "density_steps": 3, "density_probes": 1, "points": 3}
CHEAPEST = FlatnessSettings(k=1, trace_samples=6, density_steps=2, density_probes=1, points=3, tol=0.1)
SMALL = ("--limit-train", "128", "--limit-test", "50")


def report(files, out, load=None, device="cpu", **settings):
    return flatness_report(find_models(files, load or loader), FlatnessSettings(**{**CHEAP, **settings}), out, device)


def report_runs(folders, out):
    return flatness_report(find_models(folders, images=50), CHEAPEST, out, "cpu")


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
    monkeypatch.chdir(tmp_path)
    paths = [tmp_path / name for name in ("a.pt", "b.pt", "wide.pt")]
    for path, text in zip(paths, ("1 4", "2 4", "3 6"), strict=True):
        path.write_text(text)
    return paths


@pytest.fixture
def drawn(monkeypatch):
    """The entries whose figures are drawn, on empty pages: what is in the figures is tested elsewhere."""
    entries = []
    monkeypatch.setattr(command, "flatness_figures", lambda by_title: entries.append(by_title) or {})
    monkeypatch.setattr(command, "figures_html", lambda title, figures: b"")
    return entries


def test_a_report_has_all_numbers_and_every_figure(files, tmp_path, capsys):
    files = files[1:]
    written = report(files, tmp_path / "out")
    assert [path.name for path in written] == ["flatness.json", "flatness.html"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {LOCK, "flatness.json", "flatness.html"}
    assert written[1].read_text().count('class="plot"') == 8, "four for each architecture"
    found = json.loads((tmp_path / "out" / "flatness.json").read_text(), parse_constant=pytest.fail)
    assert {"bsam", "torch", "machine", "cores", "date"} <= set(found["environment"])
    assert found["settings"] == {
        "loader": f"{__name__}:loader",
        "device": "cpu",
        **asdict(FlatnessSettings(**CHEAP)),
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
        low, high = entry["trace"]["interval"]
        assert low - 1e-4 <= float(exact.trace()) <= high + 1e-4
        assert entry["parameters"] == len(exact)
        assert entry["samples"] == 12
        assert set(entry["seconds"]) == {"sharpness", "eigenvalues", "trace", "density", "landscape"}
        assert len(entry["density"]["grid"]) == 1000
    out = capsys.readouterr().out
    assert out.startswith("Loss: the loader's loss, 12 samples\n")
    assert [line.split()[0] for line in out.splitlines() if line.startswith(("b ", "wide "))] == ["b", "wide"]
    assert f"{found['models'][0]['eigenvalues']['maximum']:.3g}" in out
    total = found["models"][0]["trace"]
    half = scipy.stats.t.ppf(0.975, 1) * total["standard_error"]  # from the last two of six products
    shown = re.search(r"^b .*?([\d.]+) ± ([\d.]+)", out, flags=re.MULTILINE)
    assert [float(number) for number in shown.groups()] == pytest.approx([total["value"], half], abs=half / 10)


@pytest.mark.usefixtures("drawn")
def test_a_table_for_each_loss_and_number_of_samples(files, tmp_path, capsys):
    tasks = dict(zip(files, ("classification", "pose", "classification"), strict=True))
    models = replace(find_models(files, loader), about=lambda path: {"run": {"task": tasks[path]}})
    flatness_report(models, FlatnessSettings(**CHEAP), tmp_path / "out", "cpu")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    labels = ["cross-entropy, 12 training samples", "SimCC loss, 12 training samples"]
    shown = [line for line in lines if line and line[0] in ("Loss:", "a", "b", "wide")]
    assert [line[0] for line in shown] == ["Loss:", "a", "wide", "Loss:", "b"]
    assert [" ".join(line[1:]) for line in shown if line[0] == "Loss:"] == labels


def test_an_eigenvalue_that_has_not_converged_is_marked():
    near = dict.fromkeys(("loss", "max_sharpness", "min_sharpness", "bilateral"), -1.23e-5)
    trace = {"value": -1.2345e-7, "interval": [-1.2365e-7, -1.2325e-7]}
    entries = {
        name: {"sharpness": near, "eigenvalues": {"maximum": 4.56e-5, "converged": converged}, "trace": trace}
        for name, converged in (("SGD", True), ("SAM", False))
    }
    table = flatness_table("Loss", entries)
    assert [column.title for column in table.columns] == [
        "model",
        "loss",
        "λmax",
        "trace (95 %)",
        "MaxS",
        "MinS",
        "BilS",
    ]
    assert list(map(str, table.rows[0])) == [
        "SGD",
        "-1.23e-05",
        "4.56e-05",
        "(-1.2345 ± 0.0020)e-07",
        *["-1.23e-05"] * 3,
    ]
    assert str(table.rows[1][2]) == "4.56e-05 (not converged)"


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


@pytest.mark.usefixtures("drawn")
def test_finished_models_are_kept_and_only_new_weights_are_measured(files, tmp_path):
    content, out = files[1].read_text(), tmp_path / "out"
    files[1].write_text("-1 4")
    with pytest.raises(KeyboardInterrupt):
        report(files, out)
    (kept,) = entries(out)
    assert kept["file"] == str(files[0])
    files[1].write_text(content)
    report(files, out)
    assert entries(out)[0] == kept  # with the same seconds
    assert [entry["file"] for entry in entries(out)] == list(map(str, files))
    files[0].write_text("7 4")  # other weights under the same name
    report(files[:1] * 2, out)
    assert [entry["file"] for entry in entries(out)] == [str(files[i]) for i in (1, 2, 0)]  # its old numbers are gone
    assert entries(out)[2]["eigenvalues"] != kept["eigenvalues"]


def entries(out):
    return json.loads((out / "flatness.json").read_text())["models"]


@pytest.mark.usefixtures("drawn")
def test_a_file_is_measured_again_when_its_loss_changed(files, tmp_path, capsys):
    def measured(scale):
        x, y = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2
        returned = network(1), F.cross_entropy, [(scale * x, y)]
        report(files[:1], tmp_path / "out", lambda path: returned)
        (entry,) = json.loads((tmp_path / "out" / "flatness.json").read_text())["models"]
        return entry, capsys.readouterr().out

    first = measured(1.0)
    assert measured(1.0) == first
    assert "Measuring" not in first[1]
    changed, out = measured(1.01)
    assert re.search(
        r"Measuring .*a\.pt again: its loss was 0\.\d+ and is 0\.\d+ now\. The loader or its data may", out
    )
    assert changed["eigenvalues"]["values"] != first[0]["eigenvalues"]["values"]
    assert measured(1.01)[0] == changed


def test_landscapes_with_non_finite_points_are_drawn_again_from_the_file(files, tmp_path, capsys):
    class Edge(nn.Linear):
        """Its loss exists on one side of the model alone, and sharpness reaches beyond the edge."""

    def load(path):
        torch.manual_seed(0)
        model, x = Edge(3, 2), torch.ones(4, 3)
        near = float(model(x).detach().square().mean())
        return model, lambda out, y: torch.sqrt(1.01 * near - out.square().mean()), [(x, torch.zeros(4))]

    tables = []
    written = []
    for _ in range(2):
        report(files[:1], tmp_path / "out", load, points=5, rho=1.0)
        tables.append(capsys.readouterr().out.partition("Loss: ")[2])
        written.append((tmp_path / "out" / "flatness.json").read_bytes())
    entry = json.loads((tmp_path / "out" / "flatness.json").read_text())["models"][0]
    assert any(None in row for row in entry["landscape"]["loss"])
    assert entry["sharpness"]["min_sharpness"] is None or entry["sharpness"]["max_sharpness"] is None
    assert written[1] == written[0]
    assert "nan" in tables[0]
    assert tables[1] == tables[0]


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"seed": 1}, "seed"),
        ({"load": lambda path: loader(path)}, "loader"),
        ({"device": "gpu"}, "gpu"),
    ],
)
def test_other_settings_are_refused_and_the_folder_is_untouched(changed, words, files, tmp_path):
    out = tmp_path / "out"
    report(files[:1], out)
    before = {path: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(bsam.BsamError, match=words):
        report(files, out, **changed)
    assert {path: path.read_bytes() for path in out.iterdir()} == before


def test_a_loss_that_is_not_finite_is_refused_with_the_file(files, tmp_path):
    returned = network(0), lambda out, y: out.sum() * math.nan, [(torch.ones(2, 3), torch.ones(2))]
    with pytest.raises(bsam.BsamError, match=r"a\.pt"):
        report(files, tmp_path / "out", lambda path: returned)


def test_titles_are_names_or_whole_paths_where_names_are_alike(files, tmp_path, drawn):
    (tmp_path / "other").mkdir()
    twin = tmp_path / "other" / "a.pt"
    twin.write_text("9 4")
    report(files, tmp_path / "out")
    report([files[0], twin], tmp_path / "out")
    assert list(map(list, drawn)) == [["a", "b", "wide"], [str(files[0]), str(twin)]]
    a, b, wide = (entry["architecture"] for entry in drawn[0].values())
    assert a == b != wide  # which decides about the scale


def test_the_readings_of_a_probe_are_recorded_and_drawn(tmp_path, drawn):
    run = tmp_path / "probed"
    flags = ["train", "--method", "bsam", "--epochs", "1", "--batch", "32", "--device", "cpu", *SMALL, "--probe", "2"]
    assert cli.main([*flags, "--out", str(run)]) == 0
    for _ in range(2):  # the second time from the numbers that were kept
        report_runs([run], tmp_path / "out")
    readings = [json.loads(line) for line in (run / "probe.jsonl").read_text().splitlines()]
    assert len(readings) > 1
    expected = {name: [reading[name] for reading in readings] for name in readings[0]}
    assert [by_title["probed"]["probe"] for by_title in drawn] == [expected] * 2
    assert entries(tmp_path / "out")[0]["probe"] == expected
