"""``bsam report``: the page of any runs, written to a file or served."""

import json
import os
import re
import signal
import statistics
import sys
from html import unescape
from pathlib import Path

import pytest
from scipy import stats

from bsam import lab
from bsam.common.errors import BsamValueError
from bsam.lab import cli
from bsam.lab.analysis.runs_table import read_runs
from bsam.lab.config import Run
from bsam.lab.recipes.plan import TUNING_SEED, describe
from bsam.lab.training.run_dir import RunDir
from fake_fit import FakeFit
from page_runs import cells_of

SCORES = {"base": [0.90, 0.92, 0.91], "sam": [0.93, 0.96, 0.94], "bsam": [0.95, 0.965, 0.97]}
ARGUMENTS = {"bsam": {"passes": 2}}


@pytest.fixture
def runs(tmp_path):
    """The folder of nine finished runs: three methods, three seeds."""
    folder = tmp_path / "runs"
    fit = FakeFit(lambda run: SCORES[run.method][run.seed])
    for method in SCORES:
        for seed in range(3):
            fit(Run(method, ARGUMENTS.get(method, {}), epochs=2, seed=seed), folder / "deep" / f"{method}-{seed}")
    return folder


def report(*arguments):
    return cli.main(["report", *map(str, arguments)])


def rows_of(file):
    """The CSV fields of the first table of a page, by method."""
    return {row["method"]: row for row in cells_of(file.read_text(encoding="utf-8"))}


def problems_of(file):
    return [unescape(problem) for problem in re.findall(r"<li>([^<]*)</li>", file.read_text().split("<main")[1])]


def test_the_numbers_are_those_of_the_runs(runs, tmp_path, capsys):
    file = tmp_path / "new" / "page.html"
    assert report(runs, "--out", file, "--baseline", "sam", "--title", "Mine <b>") == 0
    assert capsys.readouterr().out == f"9 runs in 1 experiment: 9 finished.\nWritten: {file}\n"
    assert unescape(re.search("<title>(.*)</title>", file.read_text())[1]) == "Mine <b>"
    assert "data-watched" not in file.read_text()
    rows = rows_of(file)
    titles = {"base": "SGD", "sam": "SAM", "bsam": "BSAM (2 passes)"}
    assert sorted(rows) == sorted(titles.values())
    for method, title in titles.items():
        scores = [100 * score for score in SCORES[method]]
        assert float(rows[title]["mean"]) == pytest.approx(statistics.fmean(scores))
        assert float(rows[title]["std"]) == pytest.approx(statistics.stdev(scores))
        if method == "sam":
            assert rows[title]["difference"] == ""
        else:
            interval = stats.ttest_rel(scores, [100 * score for score in SCORES["sam"]]).confidence_interval()
            found = rows[title]
            assert (float(found["low"]), float(found["high"])) == pytest.approx((interval.low, interval.high))


def test_python_writes_the_page_of_the_command(runs, tmp_path):
    assert report(runs, "--out", tmp_path / "a.html", "--baseline", "sam", "--title", "Mine") == 0
    file = lab.write_report(str(runs), tmp_path / "new" / "b.html", baseline="sam", title="Mine")
    pages = [re.sub(r"Made on [^<]*", "", path.read_text()) for path in (file, tmp_path / "a.html")]
    assert pages[0] == pages[1]
    for wrong in ({"runs": tmp_path / "none"}, {"runs": runs, "out": tmp_path}, {"runs": runs, "baseline": "gsam"}):
        with pytest.raises(BsamValueError):
            lab.write_report(**wrong)


@pytest.mark.parametrize("name", ["bsam-2", "BSAM (2 passes)", "bsam (2 passes)"])
def test_the_baseline_may_be_a_title_or_a_name_of_the_command_line(runs, tmp_path, name):
    assert report(runs, "--out", tmp_path / "page.html", "--baseline", name) == 0
    assert rows_of(tmp_path / "page.html")["BSAM (2 passes)"]["difference"] == ""


def test_the_default_file(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert report("runs/deep/base-0", "runs/deep/sam-0") == 0
    assert capsys.readouterr().out == "2 runs in 1 experiment: 2 finished.\nWritten: report.html\n"
    assert list(rows_of(tmp_path / "report.html")) == ["SGD", "SAM"]


def test_unfinished_and_diverged_runs_are_counted(runs, tmp_path, capsys):
    (runs / "deep/sam-0/model.safetensors").unlink()
    (runs / "deep/sam-0/metrics.jsonl").write_text("")
    (runs / "deep/bsam-1/model.safetensors").unlink()
    (runs / "deep/bsam-1/metrics.jsonl").unlink()
    (runs / "deep/bsam-1/diverged.json").write_text('{"reason": "the loss became NaN"}')
    assert report(runs, "--out", tmp_path / "page.html") == 0
    assert "9 runs in 1 experiment: 7 finished, 1 diverged, 1 not started." in capsys.readouterr().out
    row = rows_of(tmp_path / "page.html")["SAM"]
    assert [row[name] for name in ("n", "unfinished", "not started")] == ["2", "0", "1"]


@pytest.mark.parametrize("strict", [False, True])
def test_a_broken_run_is_a_warning_and_with_strict_an_error(runs, tmp_path, capsys, strict):
    (runs / "deep/sam-0/config.json").write_text("{")
    file = tmp_path / "page.html"
    assert report(runs, "--out", file, *(["--strict"] if strict else [])) == (2 if strict else 0)
    out, error = capsys.readouterr()
    problem = problems_of(file)[0]
    assert "sam-0" in problem
    assert out == f"Warning: {problem}\n8 runs in 1 experiment: 8 finished.\nWritten: {file}\n"
    assert error == ("bsam: 1 problem, listed above and in " + str(file) + "\n" if strict else "")
    assert rows_of(file)["SAM"]["n"] == "2"


def test_run_directories_of_older_versions_are_counted(runs, tmp_path):
    folders = sorted(runs.glob("deep/*"))
    for folder in folders[2:]:
        (folder / "run.json").write_text(json.dumps(describe(RunDir(folder).run())))
    report(*folders, "--out", tmp_path / "a.html")
    report(*folders[2:], "--out", tmp_path / "b.html")
    texts = [re.search('<p id="about">(.*)</p>', file.read_text())[1] for file in sorted(tmp_path.glob("?.html"))]
    assert ["run.json" in text for text in texts] == [True, False]
    assert " 2 of " in texts[0]


def test_broken_predictions_are_a_problem_too(runs, tmp_path, error_of):
    (runs / "deep/sam-0/predictions.npz").write_text("not an archive")
    assert "problems, listed above" in error_of("report", runs, "--out", tmp_path / "page.html", "--strict")


def test_results_of_others(runs, tmp_path, capsys):
    first = read_runs(runs).iloc[0]
    lines = ["experiment,method,seed,score,unit", f'"{first["experiment"]}",Theirs,0,95,{first["unit"]}']
    (tmp_path / "theirs.csv").write_text("\n".join(lines))
    assert report(runs, tmp_path / "theirs.csv", "--baseline", "theirs", "--out", tmp_path / "page.html") == 0
    assert "10 runs in 1 experiment: 10 finished." in capsys.readouterr().out
    rows = rows_of(tmp_path / "page.html")
    assert float(rows["Theirs"]["mean"]) == 95
    assert float(rows["SAM"]["difference"]) == pytest.approx(93 - 95)


def test_the_page_of_csv_files_has_their_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("theirs.csv", "others.csv"):
        Path(name).write_text(f"experiment,method,seed,score\n{name},SAM,0,96.7\n")
    titles = {}
    for given in (["theirs.csv"], ["theirs.csv", "others.csv"], ["theirs.csv", "--title", "Mine"]):
        assert cli.main(["report", *given]) == 0
        titles[len(given)] = re.search("<title>(.*)</title>", Path("report.html").read_text("utf-8"))[1]
    assert titles == {1: "Results in theirs.csv", 2: "Results in theirs.csv, others.csv", 3: "Mine"}


def test_a_path_that_does_not_exist(runs, tmp_path, error_of):
    error = error_of("report", runs, tmp_path / "none", "--out", tmp_path / "page.html")
    assert error == f"{tmp_path / 'none'} does not exist: pass run directories, folders of them, or CSV files\n"
    assert not (tmp_path / "page.html").exists()


def test_a_folder_without_runs(tmp_path, error_of):
    (tmp_path / "empty").mkdir()
    error = error_of("report", tmp_path / "empty", "--out", tmp_path / "page.html")
    assert error.startswith(f"{tmp_path / 'empty'} has no runs: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "page.html").exists()


def test_tuning_runs_are_not_shown(tmp_path, error_of):
    folder = tmp_path / "tuning"
    FakeFit()(Run("sam", epochs=1, eval_split="holdout", seed=TUNING_SEED), folder)
    error = error_of("report", folder, "--out", tmp_path / "page.html")
    assert error.startswith(f"{folder} has no runs")


def test_a_baseline_that_no_run_has(runs, tmp_path, error_of):
    error = error_of("report", runs, "--out", tmp_path / "page.html", "--baseline", "gsam")
    assert error == "baseline must be one of the methods of the runs (SGD; SAM; BSAM (2 passes)), got 'gsam'\n"


def test_plotly_is_needed(runs, tmp_path, error_of, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    error = error_of("report", runs, "--out", tmp_path / "page.html")
    assert error.startswith("this needs plotly, which is not installed: ")
    assert "'.[plot]'" in error
    assert not (tmp_path / "page.html").exists()


def test_strict_does_not_watch(runs, error_of):
    assert error_of("report", runs, "--watch", "--strict").startswith("--strict does not work with --watch")


def watched(monkeypatch, out, steps, *arguments):
    """Watch runs; call the steps one after the other instead of sleeping, then press Ctrl-C; return the pages."""
    pages, waiting = [], iter(steps)

    def sleep(_):
        pages.append(out.read_text())
        step = next(waiting, None)
        if step is None:
            raise KeyboardInterrupt
        step()

    monkeypatch.setattr("bsam.lab.cli.report.time.sleep", sleep)
    assert report("--watch", "--out", out, *arguments) == 0
    return [*pages, out.read_text()]


def test_a_watched_page_follows_the_runs(runs, tmp_path, monkeypatch, capsys):
    (tmp_path / "runs-of-today").mkdir()
    file = tmp_path / "runs-of-today/deep/base-0/metrics.jsonl"

    def change():
        epochs = [json.loads(line) for line in file.read_text().splitlines()]
        epochs[-1]["test_accuracy"] = 0.5
        file.write_text("".join(json.dumps(epoch) + "\n" for epoch in epochs))

    steps = [lambda: (runs / "deep").rename(tmp_path / "runs-of-today/deep"), change, lambda: None]
    folder, out = tmp_path / "runs-of-today", tmp_path / "page.html"
    empty, first, second, same, last = watched(monkeypatch, out, steps, folder, "--baseline", "sam")
    assert 'id="waiting"' in empty
    assert [float(cells_of(page)[0]["mean"]) for page in (first, second)] == pytest.approx([91, (50 + 92 + 91) / 3])
    assert cells_of(first)[1]["difference"] == "", "the baseline is there now"
    assert same == second, "nothing has changed"
    assert ["data-watched" in page for page in (empty, second, last)] == [True, True, False], "Ctrl-C ends the reloads"
    assert "Press Ctrl-C to stop." in capsys.readouterr().out


def test_a_watched_page_is_complete_at_sigterm_and_the_status_says_so(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("bsam.lab.cli.report.time.sleep", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert report("--watch", runs, "--out", tmp_path / "page.html") == 143
    assert "data-watched" not in (tmp_path / "page.html").read_text()
    assert capsys.readouterr().err == "bsam: terminated.\n"


def test_a_watched_page_waits_for_its_baseline(runs, tmp_path, monkeypatch):
    for seed in range(3):
        (runs / f"deep/sam-{seed}").rename(tmp_path / f"sam-{seed}")
    steps = [lambda: (tmp_path / "sam-1").rename(runs / "sam-1")]
    before, after, _ = watched(monkeypatch, tmp_path / "page.html", steps, runs, "--baseline", "sam")
    assert "Until a run of this method appears" in before
    assert "Until a run of this method appears" not in after
