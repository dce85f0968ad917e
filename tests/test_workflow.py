"""The workflow on GitHub, the pre-commit hooks, the Makefile, the constraints and pyproject.toml agree."""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))


def recipe(target: str) -> list[str]:
    return re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)[1].replace("\t", "").splitlines()


def variable(name: str) -> list[str]:
    return re.search(rf"^{name} := (.*)$", MAKEFILE, re.MULTILINE)[1].split()


def combinations(job: dict) -> list[dict]:
    """The entries of a job's matrix."""
    matrix = dict(job.get("strategy", {}).get("matrix", {}))
    if "include" in matrix:
        return matrix["include"]
    return [dict(zip(matrix, values, strict=True)) for values in itertools.product(*matrix.values())]


def filled(text: str, entry: dict) -> str:
    return re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda match: entry[match[1]], text)


def jobs() -> list[tuple[str, str, list[str]]]:
    """The machine, the Python version and the commands of each job and entry of its matrix."""
    found = []
    for job in WORKFLOW["jobs"].values():
        (version,) = (step["with"]["python-version"] for step in job["steps"] if "with" in step)
        commands = [step["run"] for step in job["steps"] if "run" in step]
        for entry in combinations(job):
            machine, python, *texts = (filled(text, entry) for text in (job["runs-on"], version, *commands))
            found.append((machine, python, texts))
    return found


def pins(name: str) -> dict[str, list[Requirement]]:
    """The pinned versions in a file of constraints, by package."""
    lines = (line.partition(" #")[0] for line in (ROOT / name).read_text(encoding="utf-8").splitlines())
    parsed = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {pin.name: [other for other in parsed if other.name == pin.name] for pin in parsed}


def test_the_jobs_cover_the_supported_machines_versions_and_targets():
    targets = {(machine, command) for machine, _, commands in jobs() for command in commands}
    linux = "ubuntu-latest", "ubuntu-24.04-arm"
    assert {(machine, f"make {target}") for machine in linux for target in ("test", "test-oldest")} < targets
    assert {
        ("ubuntu-latest", "make lint"),
        ("ubuntu-latest", "make docs"),
        ("macos-latest", "make test-library"),
    } < targets
    named = {command.removeprefix("make ") for _, command in targets if command.startswith("make ")}
    assert all(recipe(target) for target in named)
    classifiers = {text.rpartition(" ")[2] for text in PROJECT["classifiers"] if "Python :: 3." in text}
    assert {python for _, python, _ in jobs()} == classifiers == {"3.11", "3.12", "3.13"}


def test_windows_runs_the_tests_of_the_library():
    """All but the integrations, with the same options."""
    ((install, _, run),) = (commands for machine, _, commands in jobs() if machine == "windows-latest")
    assert '-c constraints.txt -e ".[test]"' in install
    command, *folders = run.split(" tests/")
    assert set(folders) == {"test_contract.py", *variable("WING")} - {"integrations"}
    assert command.replace(' -k "not ranks"', "").split() == ["python", *variable("PYTEST")]


def test_hooks_are_the_commands_of_make_lint():
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert repo["repo"] == "local"
    assert [hook["entry"] for hook in repo["hooks"]] == recipe("lint")
    assert {(hook["language"], hook["pass_filenames"]) for hook in repo["hooks"]} == {("system", False)}


@pytest.mark.parametrize("name", ["torch", "numpy"])
def test_the_oldest_versions_are_the_lower_bounds(name):
    (needed,) = (str(text) for text in PROJECT["dependencies"] if text.startswith(name))
    pinned = [pin for pin in pins("constraints-oldest.txt")[name] if pin.marker is None or "<" in str(pin.marker)]
    assert [f"{name}{pin.specifier}" for pin in pinned] == [needed.replace(">=", "==") + ".0"]


def test_other_versions_are_those_of_make_test():
    newest, oldest = pins("constraints.txt"), pins("constraints-oldest.txt")
    assert {name for name in oldest if oldest[name] != newest[name]} == {"torch", "numpy", "scipy", "torchvision"}
