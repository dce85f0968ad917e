"""``bsam report``: the page of any runs, written to a file or served."""

import json
import re
import statistics
import sys
import threading
from html import unescape
from http.client import HTTPConnection
from urllib.request import urlopen

import pytest
from scipy import stats

from bsam import lab
from bsam.common.errors import BsamValueError
from bsam.lab import cli
from bsam.lab.cli import page_server
from bsam.lab.recipes.planning import TUNING_SEED
from bsam.lab.training.config import Run
from fake_fit import FakeFit

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


def content(page):
    """Return the numbers and sentences of a page."""
    text = page if isinstance(page, str) else page.read_text(encoding="utf-8")
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def rows_of(data):
    (experiment,) = data["experiments"]
    return {row["method"]: row for row in experiment["rows"]}


def test_the_numbers_are_those_of_the_runs(runs, tmp_path, capsys):
    file = tmp_path / "new" / "page.html"
    assert report(runs, "--out", file, "--baseline", "sam", "--title", "Mine <b>") == 0
    assert capsys.readouterr().out == f"9 runs in 1 experiment: 9 finished.\nWritten: {file}\n"
    data = content(file)
    assert data["title"] == "Mine <b>"
    assert unescape(re.search("<title>(.*)</title>", file.read_text())[1]) == "Mine <b>"
    assert data["version"] is None
    assert data["problems"] == []
    assert data["experiments"][0]["baseline"] == "SAM"
    rows = rows_of(data)
    titles = {"base": "SGD", "sam": "SAM", "bsam": "BSAM (2 passes)"}
    assert sorted(rows) == sorted(titles.values())
    for method, title in titles.items():
        scores = [100 * score for score in SCORES[method]]
        assert rows[title]["mean"] == pytest.approx(statistics.fmean(scores))
        assert rows[title]["std"] == pytest.approx(statistics.stdev(scores))
        if method == "sam":
            assert rows[title]["difference"] is None
        else:
            interval = stats.ttest_rel(scores, [100 * score for score in SCORES["sam"]]).confidence_interval()
            found = rows[title]["difference"]
            assert (found["low"], found["high"]) == pytest.approx((interval.low, interval.high))


def test_python_writes_the_page_of_the_command(runs, tmp_path):
    assert report(runs, "--out", tmp_path / "a.html", "--baseline", "sam", "--title", "Mine") == 0
    file = lab.write_report(str(runs), tmp_path / "new" / "b.html", baseline="sam", title="Mine")
    created = {"created": None}
    assert content(file) | created == content(tmp_path / "a.html") | created
    for wrong in ({"runs": tmp_path / "none"}, {"runs": runs, "out": tmp_path}, {"runs": runs, "baseline": "gsam"}):
        with pytest.raises(BsamValueError):
            lab.write_report(**wrong)


@pytest.mark.parametrize("name", ["bsam-2", "BSAM (2 passes)", "bsam (2 passes)"])
def test_the_baseline_may_be_a_title_or_a_name_of_the_command_line(runs, tmp_path, name):
    assert report(runs, "--out", tmp_path / "page.html", "--baseline", name) == 0
    assert content(tmp_path / "page.html")["experiments"][0]["baseline"] == "BSAM (2 passes)"


def test_the_default_file(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert report("runs/deep/base-0", "runs/deep/sam-0") == 0
    assert capsys.readouterr().out == "2 runs in 1 experiment: 2 finished.\nWritten: report.html\n"
    assert list(rows_of(content(tmp_path / "report.html"))) == ["SGD", "SAM"]


def test_unfinished_and_diverged_runs_are_counted(runs, tmp_path, capsys):
    (runs / "deep/sam-0/model.safetensors").unlink()
    (runs / "deep/sam-0/metrics.jsonl").write_text("")
    (runs / "deep/bsam-1/model.safetensors").unlink()
    (runs / "deep/bsam-1/metrics.jsonl").unlink()
    (runs / "deep/bsam-1/diverged.json").write_text('{"reason": "the loss became NaN"}')
    assert report(runs, "--out", tmp_path / "page.html") == 0
    assert "9 runs in 1 experiment: 7 finished, 1 diverged, 1 not started." in capsys.readouterr().out
    assert [rows_of(content(tmp_path / "page.html"))["SAM"][name] for name in ("n", "unfinished", "not_started")] == [
        2,
        0,
        1,
    ]


@pytest.mark.parametrize("strict", [False, True])
def test_a_broken_run_is_a_warning_and_with_strict_an_error(runs, tmp_path, capsys, strict):
    (runs / "deep/sam-0/config.json").write_text("{")
    file = tmp_path / "page.html"
    assert report(runs, "--out", file, *(["--strict"] if strict else [])) == (2 if strict else 0)
    out, error = capsys.readouterr()
    (problem,) = content(file)["problems"]
    assert "sam-0" in problem
    assert out == f"Warning: {problem}\n8 runs in 1 experiment: 8 finished.\nWritten: {file}\n"
    assert error == ("bsam: 1 problem, listed above and in " + str(file) + "\n" if strict else "")
    assert rows_of(content(file))["SAM"]["n"] == 2


def test_broken_predictions_are_a_problem_too(runs, tmp_path, error_of):
    (runs / "deep/sam-0/predictions.npz").write_text("not an archive")
    assert "1 problem, listed above" in error_of("report", runs, "--out", tmp_path / "page.html", "--strict")


def test_strict_accepts_runs_without_problems(runs, tmp_path):
    assert report(runs, "--out", tmp_path / "page.html", "--strict") == 0


def test_names_with_html_are_text(runs, tmp_path):
    name = "<img src=x onerror=alert(1)>"
    (runs / "deep/sam-0").rename(runs / name)
    assert report(runs, "--out", tmp_path / "page.html", "--title", "</script><script>alert(2)</script>") == 0
    text = (tmp_path / "page.html").read_text()
    assert "<img src=x" not in text
    assert "<script>alert" not in text
    assert name in [run["name"] for run in content(text)["experiments"][0]["runs"]]


def test_results_of_others(runs, tmp_path, capsys):
    assert report(runs, "--out", tmp_path / "page.html") == 0
    (experiment,) = content(tmp_path / "page.html")["experiments"]
    lines = ["experiment,method,seed,score,unit", f'"{experiment["title"]}",Theirs,0,95,{experiment["unit"]}']
    (tmp_path / "theirs.csv").write_text("\n".join(lines))
    assert report(runs, tmp_path / "theirs.csv", "--baseline", "theirs", "--out", tmp_path / "page.html") == 0
    assert "10 runs in 1 experiment: 10 finished." in capsys.readouterr().out
    rows = rows_of(content(tmp_path / "page.html"))
    assert rows["Theirs"]["mean"] == 95
    assert rows["SAM"]["difference"]["mean"] == pytest.approx(93 - 95)


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


def test_out_must_be_a_file(runs, tmp_path, error_of):
    error = error_of("report", runs, "--out", tmp_path)
    assert error == f"out must be a file, got the folder {tmp_path}: use {tmp_path / 'report.html'}\n"


def test_tuning_runs_are_not_shown(tmp_path, error_of):
    folder = tmp_path / "tuning"
    FakeFit()(Run("sam", epochs=1, eval_split="holdout", seed=TUNING_SEED), folder)
    error = error_of("report", folder, "--out", tmp_path / "page.html")
    assert error == f"{folder}: all runs there are tuning runs, which the page does not show; add other runs\n"


def test_a_baseline_that_no_run_has(runs, tmp_path, error_of):
    error = error_of("report", runs, "--out", tmp_path / "page.html", "--baseline", "gsam")
    assert error == "baseline must be one of the methods of the runs (SGD; SAM; BSAM (2 passes)), got 'gsam'\n"


def test_plotly_is_needed(runs, tmp_path, error_of, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    error = error_of("report", runs, "--out", tmp_path / "page.html")
    assert error.startswith("this needs plotly, which is not installed: ")
    assert "'.[plot]'" in error
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "8000"], "--port needs --watch"),
        (["--watch", "--out", "page.html"], "--out does not work with --watch, which writes no file: use one of them"),
        (["--watch", "--strict"], "--strict does not work with --watch, which writes no file: use one of them"),
        (["--watch", "--port", "70000"], "--port must be a whole number between 0 and 65535, got 70000"),
    ],
)
def test_flags_that_do_not_fit(runs, error_of, flags, message):
    assert error_of("report", runs, *flags) == f"{message}\n"


def visited(monkeypatch, visit, *arguments):
    """Serve a page, and return what ``visit`` sees in it; the files are looked at each time."""
    monkeypatch.setattr(page_server, "SECONDS", 0)
    serve, seen = page_server.PageServer.serve_forever, []

    def read(server):
        thread = threading.Thread(target=serve, args=[server, 0.01])
        thread.start()

        def page():
            with urlopen(server.url) as answer:
                return content(answer.read().decode())

        try:
            seen.extend(visit(page))
        finally:
            server.shutdown()
            thread.join()
        raise KeyboardInterrupt

    monkeypatch.setattr(page_server.PageServer, "serve_forever", read)
    assert report("--watch", "--port", 0, *arguments) == 0
    return seen


def test_a_served_page_waits_for_the_first_run(runs, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()

    def visit(page):
        yield page()
        (runs / "deep").rename(tmp_path / "empty/deep")
        yield page()

    before, after = visited(monkeypatch, visit, tmp_path / "empty", "--baseline", "sam")
    assert before["experiments"] == []
    assert before["version"] not in (None, after["version"])
    assert before["problems"][0].startswith(f"{tmp_path / 'empty'} has no runs: ")
    assert (after["experiments"][0]["baseline"], after["problems"]) == ("SAM", [])


def test_a_served_page_waits_for_its_baseline(runs, tmp_path, monkeypatch):
    for seed in range(3):
        (runs / f"deep/sam-{seed}").rename(tmp_path / f"sam-{seed}")

    def visit(page):
        yield page()
        (tmp_path / "sam-1").rename(runs / "sam-1")
        yield page()

    before, after = visited(monkeypatch, visit, runs, "--baseline", "sam")
    (problem,) = before["problems"]
    assert problem.startswith("baseline must be one of the methods of the runs (SGD; BSAM (2 passes)), got 'sam'. ")
    assert before["experiments"][0]["baseline"] == "SGD"
    assert (after["experiments"][0]["baseline"], after["problems"]) == ("SAM", [])


def test_a_served_page_survives_that_its_runs_vanish(runs, tmp_path, monkeypatch):
    def visit(page):
        yield page()
        runs.rename(tmp_path / "elsewhere")
        yield page()
        (tmp_path / "elsewhere").rename(runs)
        yield page()

    before, without, after = visited(monkeypatch, visit, runs)
    assert (without["experiments"], without["problems"]) == ([], [f"{runs} does not exist."])
    assert before["version"] != without["version"]
    assert rows_of(after) == rows_of(before)


def test_a_served_page_follows_the_runs(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(page_server, "SECONDS", 0)
    serve, seen = page_server.PageServer.serve_forever, []

    def visit(server):
        thread = threading.Thread(target=serve, args=[server, 0.01])
        thread.start()
        try:
            with urlopen(server.url) as page:
                seen.append(page.read().decode())
            file = runs / "deep/base-0/metrics.jsonl"
            epochs = [json.loads(line) for line in file.read_text().splitlines()]
            epochs[-1]["test_accuracy"] = 0.5
            file.write_text("".join(json.dumps(epoch) + "\n" for epoch in epochs))
            with urlopen(f"{server.url}version") as version:
                seen.append(json.load(version)["version"])
            with urlopen(server.url) as page:
                seen.append(page.read().decode())
            connection = HTTPConnection("127.0.0.1", server.server_port)
            connection.request("POST", "/", body=b"")
            seen.append(connection.getresponse().status)
            connection.close()
        finally:
            server.shutdown()
            thread.join()
        raise KeyboardInterrupt

    monkeypatch.setattr(page_server.PageServer, "serve_forever", visit)
    assert report("--watch", runs, "--port", 0, "--baseline", "sgd") == 0
    first, version, second, status = seen
    assert content(first)["version"] != content(second)["version"] == version
    assert rows_of(content(first))["SGD"]["mean"] == pytest.approx(91)
    assert rows_of(content(second))["SGD"]["mean"] == pytest.approx((50 + 92 + 91) / 3)
    assert status == 405
    out = capsys.readouterr().out
    assert re.fullmatch(r"The page is at http://127\.0\.0\.1:\d+/ on this .*\n\nStopped serving the page\.\n", out)
    assert not (tmp_path / "report.html").exists()


def test_ctrl_c_ends_the_server(runs, monkeypatch, capsys):
    def served(server):
        assert b"<html" in server.page.html()
        raise KeyboardInterrupt

    monkeypatch.setattr(page_server.PageServer, "serve_forever", served)
    assert cli.main(["report", "--watch", str(runs), "--port", "0"]) == 0
    printed = capsys.readouterr()
    assert re.search(r"http://127.0.0.1:\d+", printed.out)
    assert printed.out.endswith("\nStopped serving the page.\n")
    assert printed.err == ""
