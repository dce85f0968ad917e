"""The pages of docs/: code runs, commands parse, paths exist, and tables match the stored numbers."""

from __future__ import annotations

import functools
import json
import re
import shlex
import socket
import tomllib
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
import torch.distributed as dist
from torch import nn

import docs_tables
from bsam import SAM
from bsam.lab.cli import parser_of
from bsam.lab.cli.run_flags import run_of, settings_of
from bsam.lab.common import names
from bsam.lab.config import Run
from bsam.lab.data import digits
from bsam.lab.recipes import recipe_of, start
from bsam.lab.recipes.compare import compared_runs
from bsam.lab.recipes.plan import Plan, select
from bsam.lab.tasks import images

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GENERATED = {"_build", "methods", "reference"}
PAGES = {
    path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(DOCS.rglob("*.md"))
    if not GENERATED & set(path.relative_to(DOCS).parts)
}


def blocks(page: str, language: str) -> list[tuple[int, str]]:
    """The blocks of a page in one language, each with the number of lines before it."""
    text = PAGES[page]
    matches = re.finditer(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [(text[: match.start(1)].count("\n"), match[1]) for match in matches]


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """A reader's model and batches, an empty folder, and torchrun's variables for a single process."""
    monkeypatch.chdir(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in world.items():
        monkeypatch.setenv(name, str(value))
    torch.manual_seed(0)
    x, y = torch.randn(32, 4), torch.randint(0, 3, (32,))
    yield {
        "__name__": "docs",
        "model": nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)),
        "loader": list(zip(x.split(8), y.split(8), strict=True)),
    }
    if dist.is_initialized():
        dist.destroy_process_group()


def check_get_started(names):
    assert names["optimizer"].t == 4
    assert names["result"].score > 0.6
    assert {"config.json", "identity.json", "metrics.jsonl", "environment.json", "checkpoint.pt"} <= {
        file.name for file in Path("runs/second").iterdir()
    }


def check_training_loops(names):
    assert names["norm"] > 0
    assert names["radii"] == pytest.approx([0.0005, 0.02525, 0.05, 0.025])
    assert names["scaler"].get_scale() > 0
    assert names["train_g"].t == names["train_c"].t == len(names["loader"]) == 4
    assert int(names["generator"][1].num_batches_tracked) == 8  # once in each step of either optimizer
    assert int(names["network"][1].num_batches_tracked) == names["ddp"].module[1].num_batches_tracked == 4
    assert type(names["sharded"][0].weight).__name__ == "DTensor"
    assert 0 < (names["loss_fn"].average[0].weight - names["model"][0].weight).abs().max() < 1
    assert not dist.is_initialized()


def check_flatness(names):
    top, plane, near, density = (names[name] for name in ("top", "plane", "near", "density"))
    assert top.converged
    assert list(top.values) == sorted(top.values, reverse=True)
    assert plane.loss[2, 2] == near.loss
    assert near.bilateral == pytest.approx(near.max_sharpness + near.min_sharpness)
    assert np.trapezoid(density.density, density.grid) == pytest.approx(1, abs=0.01)
    assert 0 < names["total"].standard_error < names["total"].value < names["H"].size * top.values[0]
    assert [len(trace.x) for trace in names["figure"].data] == [4] * 4
    torch.save(names["DigitsNet"]().state_dict(), "net.pt")
    model, loss_fn, data = names["load"]("net.pt")
    assert sum(len(y) for _, y in data) == 757
    assert torch.isfinite(loss_fn(model(data[0][0]), data[0][1]))


def check_radii(names):
    assert 10 < names["one_run"] < 100


OF_RUNS = {"guides/report.md", "guides/own-analysis.md"}  # need runs
ELSEWHERE = {"guides/fine-tune.md", "guides/pose.md", "guides/quantization.md", *OF_RUNS}  # tests/docs runs their code
FRAMEWORKS = ("lightning", "fabric", "transformers", "peft", "accelerate", "timm", "ignite", "skorch")
ELSEWHERE |= {f"guides/{name}.md" for name in FRAMEWORKS}  # tests/integrations
CHECKS = {  # beyond the assertions in the pages
    "guides/get-started.md": check_get_started,
    "guides/training-loops.md": check_training_loops,
    "guides/flatness.md": check_flatness,
    "guides/methods-and-radii.md": check_radii,
}


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python") and page not in ELSEWHERE])
def test_the_code_of_a_page_runs(page, reader):
    for line, code in blocks(page, "python"):
        exec(compile("\n" * line + code, DOCS / page, "exec", dont_inherit=True), reader)
    CHECKS.get(page, lambda names: None)(reader)


def test_every_guide_has_code_or_commands():
    assert set(CHECKS) <= set(PAGES)
    guides = {page for page in PAGES if page.startswith("guides/")}
    assert len(guides) >= 8
    assert all(blocks(page, "python") or blocks(page, "bash") for page in guides)


def commands(page: str) -> list[str]:
    """The commands of a page without comments; in transcripts, the lines after the prompt."""
    lines = {kind: [line for _, block in blocks(page, kind) for line in _joined(block)] for kind in ("bash", "console")}
    typed, shown = lines["bash"], [line[2:] for line in lines["console"] if line.startswith("$ ")]
    return [line for line in (*typed, *shown) if line.strip() and not line.startswith("#")]


def _joined(block: str) -> list[str]:
    return re.sub(r"\\\n\s*", "", block).splitlines()


@functools.cache
def planned(recipe: str, scale: str | None, seeds: int) -> list[Plan]:
    """The runs of a recipe, which several commands train."""
    return recipe_of(recipe)(scale, seeds).plans


def check_command(line: str) -> None:
    """Raise if the name or the arguments of a command are wrong."""
    words = shlex.split(line, comments=True)
    if words[0] == "sbatch":
        words = shlex.split(words[words.index("--wrap") + 1])
    if words[0] == "torchrun":
        words = words[words.index("-m") + 1 :]
    if words[0] == "bsam":
        arguments = parser_of(words[1:]).parse_args(words[1:])
        if arguments.command == "train":
            run_of(arguments)
        if arguments.command == "compare":
            compared_runs(arguments.methods, settings_of(arguments))
        if arguments.command == "run" and ":" not in arguments.recipe:  # tests/recipes runs those of a module
            plans = planned(arguments.recipe, arguments.scale, arguments.seeds or 1)
            assert select(plans, arguments.only, arguments.models, arguments.data)
    elif words[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in words[1:])
    elif words[0] == "python":
        scripts = (ROOT / words[1], ROOT / "benchmarks" / "machine.py")
        known = "".join(script.read_text(encoding="utf-8") for script in scripts)
        if "--" in words:  # of results/add_runs.py: the flags of bsam train follow
            end = words.index("--")
            check_command(shlex.join(["bsam", "train", *words[end + 1 :]]))
            words = words[:end]
        assert all(f'"{flag}"' in known for flag in words if flag.startswith("--"))
    else:
        assert words[:2] in (["pip", "install"], ["pip", "download"], ["npm", "pack"], ["ray", "start"])


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_the_commands_of_a_page_parse(page, monkeypatch):
    for module in (start, images):
        monkeypatch.setattr(module, "find_weights", lambda weights, data_dir: weights)  # the reader has the file
        monkeypatch.setattr(module, "model_of_file", lambda path: path.stem)
    monkeypatch.setattr(start.RunDir, "finished_run", lambda self: Run("sgd"))
    for function in ("my_data:load", "my_data:people"):  # and the functions
        monkeypatch.setitem(names._OWN, function, lambda folder: digits())
    monkeypatch.setitem(names._OWN, "two_step:TwoStepSAM", SAM)  # and the class
    for line in commands(page):
        try:
            check_command(line)
        except (SystemExit, Exception) as error:
            pytest.fail(f"{page}: {line}: {error!r}")


@pytest.mark.parametrize("page", list(PAGES))
def test_the_paths_of_a_page_exist(page):
    named = re.findall(r"`((?:tests|benchmarks|results|src|examples|docs)/[\w./-]*)`", PAGES[page])
    missing = [path for path in named if not (ROOT / path).exists()]
    links = re.findall(r"\]\(([\w./-]+\.md)", PAGES[page])
    folder = (DOCS / page).parent
    written = [link for link in links if not GENERATED & set(Path(link).parts)]
    missing += [link for link in written if not (folder / link).exists()]
    assert not missing


def test_every_guarantee_names_a_test():
    promises = re.split(r"\n(?=- )", PAGES["guarantees.md"].partition("\n- ")[2])
    assert len(promises) > 20
    assert all("`tests/" in promise or "`benchmarks/" in promise for promise in promises)


@pytest.mark.parametrize("rows", docs_tables.TABLES, ids=lambda rows: rows.__name__)
def test_the_tables_of_benchmarks_are_the_stored_measurements(rows):
    lines = PAGES["benchmarks.md"].splitlines()
    missing = [row for row in rows() if row not in lines]
    assert not missing


def test_the_tables_of_results_are_the_stored_ones():
    lines = set(PAGES["results.md"].splitlines())
    tables = sorted((ROOT / "results").glob("*/table.md"))
    assert len(tables) >= 3
    for table in tables:
        rows = [line for line in table.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
        assert rows
        assert set(rows) <= lines, table
        assert f"`results/{table.parent.name}`" in PAGES["results.md"]


def test_text_and_tables_have_the_titles_of_methods_and_code_their_classes():
    """One name for one thing: K-SAM in text and tables, `KSAM` in code."""
    classes = "|".join(cls for cls, title in docs_tables.TITLES.items() if cls != title)
    assert "KSAM" in classes
    texts = {**PAGES, "README.md": (ROOT / "README.md").read_text(encoding="utf-8")}
    plain = {page: re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL) for page, text in texts.items()}
    assert not [(page, name) for page, text in plain.items() for name in re.findall(rf"\b(?:{classes})\b", text)]


def test_lines_are_short():
    stored = {row for table in (ROOT / "results").glob("*/table.md") for row in table.read_text("utf-8").splitlines()}
    lines = [(page, line) for page, text in PAGES.items() for line in text.splitlines() if line not in stored]
    assert not [f"{page}: {line}" for page, line in lines if len(line) > 120]


def test_no_line_begins_with_a_percent_sign():
    """It would be a comment, which the site leaves out."""
    assert not [f"{page}: {line}" for page, text in PAGES.items() for line in text.splitlines() if line[:1] == "%"]


def test_the_flatness_of_the_networks_is_that_of_the_stored_files():
    folder = ROOT / "results/cifar100-resnet18"
    files = [json.loads((folder / f"flatness{name}.json").read_text()) for name in ("", "-sam-radius0.2", "-bsam-2")]
    (sgd, sam, bsam), (fixed, falling), (two_passes,) = (file["models"] for file in files)
    models = {"SGD": sgd, "SAM": sam, "SAM (sum)": fixed, "SAM (follow)": falling}
    models |= {"BSAM (Algorithm 1)": bsam, "BSAM (2 passes)": two_passes}
    rows = [line[2:-2].split(" | ") for line in (DOCS / "results.md").read_text(encoding="utf-8").splitlines()]
    on_cifar100, on_cifar10 = (i + 2 for i, row in enumerate(rows) if "MaxS" in row)
    stored = json.loads((ROOT / "results/cifar10-resnet18/flatness.json").read_text())["models"]
    clean = zip(("SGD (seed 2)", "SAM (sum)", "SAM (follow)"), stored, strict=True)
    shown = rows[on_cifar100 : on_cifar100 + 6] + rows[on_cifar10 : on_cifar10 + 3]
    for (title, model), row in zip([*models.items(), *clean], shown, strict=True):
        near, trace = model["sharpness"], model["trace"]
        assert row == [
            title,
            f"{near['loss']:.3f}",
            f"{model['eigenvalues']['values'][0]:.1f}",
            f"{trace['value']:.0f} ± {scipy.stats.t.ppf(0.975, 7) * trace['standard_error']:.0f}",
            *(f"{near[name]:.3f}" for name in ("max_sharpness", "min_sharpness", "bilateral")),
        ]


def test_no_page_and_no_message_installs_from_the_index():
    """The package is not on the index: extras are installed from a clone."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.py"), *ROOT.glob("benchmarks/*.py")]
    assert not [page for page in pages if re.search(r"pip install ['\"]?bsam", page.read_text())]


def test_the_table_of_extras_is_complete():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    section = (ROOT / "docs/guides/get-started.md").read_text().partition("### Extras")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `(\w+)`", section, re.MULTILINE)
    assert {*named, "plot", "train"} == {*extras} - {"dev", "test", "docs", "bench"}
