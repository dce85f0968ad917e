import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import bsam
from bsam import cli
from bsam.data.digits import digits
from bsam.flatness import HessianOperator, Sharpness, landscape, sharpness, top_eigenvalues
from bsam.methods import METHODS
from bsam.models.digits_net import DigitsNet
from bsam.training.config import Run
from bsam.training.folder import read_metrics
from bsam.training.loop import fit

ROOT = Path(bsam.__file__).parents[1]
KEYS = {
    "method",
    "label_noise",
    "seed",
    "test_accuracy",
    "train_loss",
    "max_sharpness",
    "min_sharpness",
    "bilateral",
    "top_eigenvalue",
    "seconds_per_step",
    "lr",
    "arguments",
}


def command(*arguments, program=("-m", "bsam"), cwd=None):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "PYTHONUNBUFFERED": ""}
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
        cwd=cwd,
    )


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the workers
    yield
    torch.set_num_threads(threads)


def test_version_and_help(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.strip() == f"bsam {bsam.__version__}"
    assert cli.main([]) == 0
    assert "demo" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        cli.main(["demo", "--help"])
    assert end.value.code == 0
    assert "runs/demo" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "word"), [(["--epochs", "0"], "epochs"), (["--seeds", "0"], "seeds"), (["--seed", "-1"], "seed")]
)
def test_a_refusal_is_one_sentence_and_status_2(arguments, word, tmp_path, capsys):
    assert cli.main(["demo", "--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("bsam: ")
    assert word in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("module", ["rich", "sklearn", "matplotlib"])
def test_a_missing_package_is_said_before_anything_runs(module, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    assert cli.main(["demo", "--out", str(tmp_path / "out")]) == 2
    assert "pip install 'bsam[" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_methods_are_listed_by_torch_and_numpy_alone():
    """In a process of its own, where nothing else can be imported."""
    code = "import sys; sys.modules.update(dict.fromkeys(('rich', 'sklearn', 'matplotlib'))); from bsam.cli import main; sys.exit(main(['methods']))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=100, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")
    lines = found.stdout.splitlines()
    assert [line.split()[0] for line in lines[2:] if line and not line.startswith((" ", "Passes"))] == list(METHODS)
    assert max(map(len, lines)) <= 120


def test_an_unknown_method_is_refused_with_the_list(tmp_path, capsys):
    assert cli.main(["demo", "--out", str(tmp_path / "out"), "--methods", "sgd", "adam"]) == 2
    error = capsys.readouterr().err
    assert "'adam'" in error
    assert all(name in error for name in ("sgd", "bsam-2", *METHODS))
    assert not (tmp_path / "out").exists()


def test_the_demo_takes_any_methods_and_a_folder_gathers_them(tmp_path, capsys):
    folder = tmp_path / "demo"
    for methods, title, runs in (("esam", "ESAM", 18), ("saf", "SAF", 36)):
        assert cli.main(["demo", "--out", str(folder), "--seeds", "1", "--epochs", "1", "--methods", methods]) == 0
        assert (folder / "runs.jsonl").read_text().count("\n") == 1 + runs
        assert [row["method"] for row in json.loads((folder / "results.json").read_text())] == [methods] * 2
        assert f"{title} on digits" in capsys.readouterr().out


def test_interrupted_and_resumed_it_gives_the_numbers_of_its_settings(tmp_path, one_thread):
    """Ctrl-C as a terminal sends it, to the whole group; then the same command again; then every row computed once
    more, here.
    """
    folder = tmp_path / "demo"
    arguments = ("--seed", "4", "--seeds", "1", "--epochs", "1")
    first = command("demo", "--out", str(folder), *arguments)
    deadline = time.monotonic() + 100
    while (
        not ((folder / "runs.jsonl").exists() and (folder / "runs.jsonl").read_text().count("\n") > 5)
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGINT)
    _, error = first.communicate(timeout=60)
    assert first.returncode == 130
    assert error.startswith("bsam: interrupted.")
    assert "Traceback" not in error
    kept = (folder / "runs.jsonl").read_text()
    assert 5 < kept.count("\n") < 73
    assert not (folder / "results.json").exists()

    second = command("demo", "--out", str(folder), *arguments)
    out, error = second.communicate(timeout=100)
    assert (second.returncode, error) == (0, "")
    assert str(folder / "results.json") in out
    assert all((folder / name).stat().st_size > 10_000 for name in ("figure.png", "landscape.png"))
    after = (folder / "runs.jsonl").read_text()
    assert after.startswith(kept)
    assert after.count("\n") == 73  # settings, 64 to tune, 8 to report: none was run twice

    found = json.loads((folder / "results.json").read_text())
    assert all(set(row) >= KEYS for row in found)
    assert [(row["method"], row["label_noise"], row["seed"]) for row in found] == [
        (method, noise, 4) for noise in (0.0, 0.4) for method in ("sgd", "sam", "bsam", "bsam-2")
    ]
    assert all(0 <= row["test_accuracy"] <= 1 and row["seconds_per_step"] > 0 for row in found)
    assert all(row["bilateral"] == pytest.approx(row["max_sharpness"] + row["min_sharpness"]) for row in found)

    same = {"batch": 64, "epochs": 1, "label_smoothing": 0.0, "seed": 4, "radius": 0.05, "curvature": True}
    for row in found:
        method = row["method"].removesuffix("-2")
        own = {name: row[name] for name in ("lr", "weight_decay", "label_noise")}
        result = fit(Run(method, row["arguments"], **own, **same), device="cpu")
        last = result.last
        assert row["test_accuracy"] == result.score
        assert row["top_eigenvalue"] == result.top_eigenvalue
        assert (
            Sharpness(
                row["train_loss"], *(row[name] for name in ("max_sharpness", "min_sharpness", "bilateral", "cosine"))
            )
            == last.sharpness
        )

    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert (
        cli.main(["demo", "--out", str(folder), "--seed", "4", "--seeds", "1", "--epochs", "2"]) == 2
    )  # other settings: refused, untouched
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_training_that_nobody_listens_to_says_what_is_kept(tmp_path):
    """As before `| head`; the same command goes on."""
    arguments = (
        "train",
        "--method",
        "sgd",
        "--epochs",
        "60",
        "--limit-train",
        "128",
        "--limit-test",
        "50",
        "--out",
        str(tmp_path / "run"),
        "--device",
        "cpu",
    )
    with command(*arguments) as process:
        assert any(line.startswith("epoch") for line in process.stdout)
        process.stdout.close()
        error = process.stderr.read()
    assert (
        error
        == f"bsam: the output was closed. Finished epochs are kept in {tmp_path / 'run'}; the same command goes on from there.\n"
    )
    assert process.returncode == 141
    kept = len(read_metrics(tmp_path / "run"))
    assert 1 <= kept < 60
    out, error = command(*arguments).communicate(timeout=100)
    assert error == ""
    assert f"Going on after epoch {kept}." in out
    assert len(read_metrics(tmp_path / "run")) == 60


@pytest.mark.parametrize("arguments", [["list"], ["methods"], ["--help"], ["list", "--help"], []])
def test_a_list_that_nobody_reads_ends_quietly(arguments):
    with command(*arguments) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_where_nobody_hears_the_sentence_either_the_status_says_it(tmp_path):
    """As before `2>&1 | head`."""
    with command(
        "train",
        "--method",
        "sgd",
        "--epochs",
        "3",
        "--limit-train",
        "128",
        "--out",
        str(tmp_path / "run"),
        "--device",
        "cpu",
    ) as process:
        process.stdout.close()
        process.stderr.close()
    assert process.returncode == 141


@pytest.fixture(params=["buffered", "unbuffered"])
def full(request):
    """A stream that takes nothing, as on a disk without room."""
    with (
        open("/dev/full", "w")
        if request.param == "buffered"
        else io.TextIOWrapper(open("/dev/full", "wb", buffering=0), write_through=True) as file
    ):
        yield file


UNWRITTEN = "bsam: the output could not be written (No space left on device)."
SMALL = [
    "train",
    "--method",
    "sgd",
    "--epochs",
    "2",
    "--limit-train",
    "128",
    "--limit-test",
    "50",
    "--device",
    "cpu",
    "--out",
]


def test_an_output_that_cannot_be_written_is_one_sentence(full, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", full)
    assert cli.main([*SMALL, str(tmp_path / "run")]) == 1
    assert (
        capsys.readouterr().err
        == f"{UNWRITTEN} Finished epochs are kept in {tmp_path / 'run'}; the same command goes on from there.\n"
    )


def test_where_the_sentence_cannot_be_written_either_the_status_says_it(full, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", full)
    assert cli.main(["train", "--method", "nope", "--out", str(tmp_path / "run")]) == 2


@pytest.mark.parametrize(
    ("arguments", "stream", "status", "heard"),
    [(["list"], "stdout", 1, f"{UNWRITTEN}\n"), (["list", "nope"], "stderr", 2, "")],
)
def test_at_the_end_of_the_process_nothing_is_left_to_complain_about(arguments, stream, status, heard):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: full}
        found = subprocess.run([sys.executable, "-m", "bsam", *arguments], text=True, env=environment, **streams)
    assert (found.returncode, (found.stdout or "") + (found.stderr or "")) == (status, heard)


def test_an_error_of_another_file_is_not_taken_for_one_of_the_output(monkeypatch):
    def fail(arguments):
        raise FileNotFoundError("weights.pt")

    monkeypatch.setattr(cli.listing, "_list", fail)
    with pytest.raises(FileNotFoundError, match=r"weights\.pt"):
        cli.main(["list"])


LOADER = """
import time
import torch
from bsam.data.digits import digits
from bsam.models.digits_net import DigitsNet

def load(path):
    if path.name == "slow.pt" and not path.with_name("hurry").exists():
        print("asleep", flush=True)
        time.sleep(100)
    model = DigitsNet()
    model.load_state_dict(torch.load(path, weights_only=True))
    x, y = digits().test.x[:40], digits().test.y[:40]
    return model, torch.nn.functional.cross_entropy, [(x[:30], y[:30]), (x[30:], y[30:])]
"""
SCRIPT = (
    "-c",
    "import sys; sys.path = [p for p in sys.path if p]; from bsam.cli import main; sys.exit(main(sys.argv[1:]))",
)  # as the installed command
CHEAP = (
    "--k",
    "2",
    "--tol",
    "0.01",
    "--trace-samples",
    "6",
    "--density-steps",
    "4",
    "--density-probes",
    "1",
    "--points",
    "3",
    "--rho",
    "0.1",
)


@pytest.fixture
def saved(tmp_path):
    """Two networks that were saved, and a loader beside them, in what is to be the current folder."""
    for seed, name in enumerate(("first.pt", "slow.pt")):
        torch.manual_seed(seed)
        torch.save(DigitsNet().state_dict(), tmp_path / name)
    (tmp_path / "my_nets.py").write_text(LOADER)
    return tmp_path


def test_flatness_interrupted_and_resumed_measures_what_was_saved(saved):
    """With the loader in the current folder, Ctrl-C as a terminal sends it, and the same command again."""
    arguments = ("flatness", "first.pt", "slow.pt", "--loader", "my_nets:load", "--out", "out", "--seed", "5", *CHEAP)
    first = command(*arguments, program=SCRIPT, cwd=saved)
    for line in first.stdout:
        if "asleep" in line:  # the first one is done
            break
    os.killpg(first.pid, signal.SIGINT)
    _, error = first.communicate(timeout=60)
    assert (first.returncode, error) == (
        130,
        "bsam: interrupted. Finished models are kept in out; the same command goes on from there.\n",
    )
    assert [path.name for path in (saved / "out").iterdir()] == ["flatness.json"]
    kept = json.loads((saved / "out" / "flatness.json").read_text())
    assert [entry["file"] for entry in kept["models"]] == ["first.pt"]

    (saved / "hurry").touch()
    second = command(*arguments, program=SCRIPT, cwd=saved)
    out, error = second.communicate(timeout=100)
    assert (second.returncode, error) == (0, "")
    names = {"flatness.json", "spectrum.png", "density.png", "contours.png", "surfaces.png", "surfaces.html"}
    assert {path.name for path in (saved / "out").iterdir()} == names
    assert all(f"out/{name}" in out for name in names)
    assert "2/2" in out
    found = json.loads((saved / "out" / "flatness.json").read_text())
    assert found["models"][0] == kept["models"][0]
    wanted = {
        "k": 2,
        "tol": 0.01,
        "trace_samples": 6,
        "density_steps": 4,
        "density_probes": 1,
        "points": 3,
        "rho": 0.1,
        "seed": 5,
        "mode": "eval",
        "span": 1.0,
    }
    assert wanted.items() <= found["settings"].items()

    data = digits().test
    for name, entry in zip(("first.pt", "slow.pt"), found["models"], strict=True):
        model = DigitsNet()
        model.load_state_dict(torch.load(saved / name, weights_only=True))
        batches = [(data.x[:40], data.y[:40])]
        near = sharpness(model, torch.nn.functional.cross_entropy, batches, 0.1, 0.1)
        assert entry["sharpness"]["bilateral"] == pytest.approx(near.bilateral, rel=1e-4)
        top = top_eigenvalues(HessianOperator(model, torch.nn.functional.cross_entropy, batches), k=2)
        assert entry["eigenvalues"]["values"] == pytest.approx(top.values.tolist(), rel=1e-3)
        land = landscape(model, torch.nn.functional.cross_entropy, batches, points=3, seed=5)
        assert entry["landscape"]["loss"] == pytest.approx(land.loss, rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.pt", "--loader", "my_nets:load"], "no file missing.pt"),
        (["first.pt", "--loader", "my_nets"], "module:function, got 'my_nets'"),
        (["first.pt", "--loader", "no_nets:load"], "no module 'no_nets'"),
        (["first.pt", "--loader", "math:load"], "'math' has no function 'load'"),
        (["first.pt", "--loader", "math:sqrt", "--points", "10"], "points must be odd"),
        (["first.pt", "--loader", "math:sqrt", "--which", "smallest"], "which must be one of"),
        (["first.pt", "--loader", "math:sqrt", "--device", "abacus"], "'abacus'"),
        (["first.pt", "--loader", "os:fspath"], "must return (model, loss_fn, data); for first.pt it gave str"),
    ],
)
def test_flatness_names_the_culprit(arguments, words, saved, capsys, monkeypatch):
    monkeypatch.chdir(saved)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.main(["flatness", *arguments, "--out", "out"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("bsam: ")
    assert words in error
    assert error.count("\n") == 1
    assert not any((saved / "out").glob("*"))


@pytest.mark.parametrize("module", ["rich", "matplotlib", "plotly"])
def test_flatness_says_what_is_missing_before_anything_is_measured(module, saved, capsys, monkeypatch):
    monkeypatch.chdir(saved)
    monkeypatch.setitem(sys.modules, module, None)
    assert cli.main(["flatness", "first.pt", "--loader", "my_nets:load", "--out", "out"]) == 2
    assert f"{module}, which is not installed: pip install 'bsam[" in capsys.readouterr().err
    assert not (saved / "out").exists()


def test_flatness_help_says_what_a_loader_is(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["flatness", "--help"])
    assert end.value.code == 0
    help_text = " ".join(capsys.readouterr().out.split())
    assert all(
        words in help_text
        for words in (
            "returns (model, loss_fn, data)",
            "current folder",
            "runs/flatness",
            "flatness.json",
            "surfaces.html",
        )
    )
