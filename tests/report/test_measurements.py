"""``bsam flatness`` on the folders of runs that had a probe."""

import io
import json
import shutil

import pytest
from rich.console import Console

import bsam
from bsam import cli
from bsam.recipes.measure import Instruments
from bsam.report import measurements
from bsam.report.measurements import FIGURES, ResultsFile, flatness_report

CHEAP = Instruments(k=1, trace_samples=6, density_steps=2, density_probes=1, points=3, tol=0.1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with two finished runs, of which one had a probe."""
    folder = tmp_path_factory.mktemp("runs")
    for name, flags in {"probed": ["--probe", "2"], "plain": []}.items():
        assert (
            cli.main(
                [
                    "train",
                    "--method",
                    "bsam",
                    "--epochs",
                    "1",
                    "--batch",
                    "128",
                    "--device",
                    "cpu",
                    *flags,
                    "--out",
                    str(folder / name),
                ]
            )
            == 0
        )
    return folder


def report(folders, out):
    return flatness_report(folders, None, CHEAP, out, "cpu", Console(file=io.StringIO(), width=80), images=50)


def test_what_the_probe_of_a_run_saw_is_noted_and_drawn(runs, tmp_path, monkeypatch):
    drawn = []
    genuine = measurements.plot_probe
    monkeypatch.setattr(
        measurements, "plot_probe", lambda columns, path: (drawn.append(columns), genuine(columns, path))
    )
    written = report([runs / "probed", runs / "plain"], tmp_path / "out")
    assert [path.name for path in written] == ["flatness.json", *FIGURES, "probe_probed.png"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in written}
    assert written[-1].read_bytes().startswith(b"\x89PNG")
    readings = [json.loads(line) for line in (runs / "probed" / "probe.jsonl").read_text().splitlines()]
    assert len(readings) > 1
    expected = {name: [reading[name] for reading in readings] for name in readings[0]}
    probed, plain = json.loads((tmp_path / "out" / "flatness.json").read_text())["models"]
    assert probed["probe"] == expected
    assert "probe" not in plain

    report([runs / "probed"], tmp_path / "out")  # known already: from the numbers that were kept
    assert drawn == [expected] * 2


def test_two_runs_of_one_name_have_a_figure_each(runs, tmp_path):
    twin = tmp_path / "other" / "probed"
    shutil.copytree(runs / "probed", twin)
    lines = (twin / "probe.jsonl").read_text().splitlines()
    unknown = {
        name: value if name in ("step", "extra_passes") else None for name, value in json.loads(lines[1]).items()
    }  # what was not finite
    (twin / "probe.jsonl").write_text("\n".join([lines[0], json.dumps(unknown), *lines[2:]]))
    figures = [path for path in report([runs / "probed", twin], tmp_path / "out") if path.name.startswith("probe_")]
    assert len(set(figures)) == 2
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in figures)
    assert all(name.endswith("_probed.png") for name in (path.name for path in figures))


def test_two_runs_whose_names_differ_in_odd_signs_have_a_figure_each(runs, tmp_path, monkeypatch):
    folders = [tmp_path / name for name in ("run 1", "run_1", "run:1", "run_1_2")]
    drawn = []
    monkeypatch.setattr(measurements, "plot_probe", lambda columns, path: drawn.append(path.name))
    for folder in folders:
        shutil.copytree(runs / "probed", folder)
    written = report(folders, tmp_path / "out")
    assert drawn == ["probe_run_1.png", "probe_run_1_2.png", "probe_run_1_3.png", "probe_run_1_2_2.png"]
    assert [path.name for path in written[-4:]] == drawn


def test_a_damaged_probe_is_named_before_anything_is_measured(runs, tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    shutil.copytree(runs / "probed", broken)
    monkeypatch.setattr(measurements, "measure", lambda *arguments: pytest.fail("measured"))
    for text in ("{", '{"step": 1}', "3"):
        (broken / "probe.jsonl").write_text(text)
        with pytest.raises(bsam.BsamError, match=r"probe\.jsonl is damaged.*remove the file"):
            report([broken], tmp_path / "out")


def test_the_figure_of_somebody_elses_probe_is_not_overwritten(tmp_path):
    (tmp_path / "probe_mine.png").write_text("mine")
    with pytest.raises(bsam.BsamError, match=r"probe_mine\.png.*overwritten"):
        ResultsFile(tmp_path, {})
