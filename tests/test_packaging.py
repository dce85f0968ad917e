"""Wheel and sdist: their files, their metadata, and that the package works without the repository."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.utils import canonicalize_name

import bsam

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "examples", "tests", "benchmarks")
INFO = f"bsam-{bsam.__version__}.dist-info"
OPTIONAL = ["PIL", "jinja2", "pandas", "plotly", "safetensors", "scipy", "sklearn", "tensorboard", "timm"]
OPTIONAL += ["torchvision"]
POSIX = ["crypt", "fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"]

BUILD = "from setuptools import build_meta; build_meta.build_{}('..')"
TRAINING = """
import json, sys
target, packages, optional, posix = json.loads(sys.argv[1])
sys.path = [target, *sys.path, *packages]  # without site: .pth files, and so editable installs, have no effect
sys.modules |= dict.fromkeys(optional)  # as if they were not installed

import os, signal
sys.modules |= dict.fromkeys(posix)  # as on Windows
del os.fork, os.sched_getaffinity, signal.pthread_sigmask

import importlib.metadata, pkgutil, torch, bsam

command = importlib.metadata.distribution("bsam").entry_points["bsam"].load()
sys.argv = ["bsam", "list", "methods"]
status = command()
assert "torch._dynamo" not in sys.modules  # its import takes seconds

for name in ("common", "core", "check", "methods", "flatness"):
    package = importlib.import_module(f"bsam.{name}")
    for module in pkgutil.iter_modules(package.__path__, f"bsam.{name}."):
        importlib.import_module(module.name)

torch.manual_seed(0)
x, y = torch.randn(32, 4), torch.randint(0, 3, (32,))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
optimizer = bsam.BSAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
losses = [optimizer.step(lambda: torch.nn.functional.cross_entropy(model(x), y)).item() for _ in range(5)]
files = [module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "bsam"]
print()
print(json.dumps([losses, int(model[1].num_batches_tracked), status, importlib.metadata.version("bsam"), files]))
"""


def run(*command, cwd):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist of a copy of the repository, and the wheel built from it."""
    folder = tmp_path_factory.mktemp("packaging")
    copy = folder / "copy"  # building writes beside the sources
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
    run(sys.executable, "-W", "ignore", "-c", BUILD.format("sdist"), cwd=copy)
    sdist = folder / f"bsam-{bsam.__version__}.tar.gz"
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    run(sys.executable, "-W", "ignore", "-c", BUILD.format("wheel"), cwd=folder / f"bsam-{bsam.__version__}")
    return sdist, folder / f"bsam-{bsam.__version__}-py3-none-any.whl"


def package():
    """The files of the package, relative to ``src``."""
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "src/bsam/lab/report/page/files").iterdir()]
    files.append(ROOT / "src/bsam/lab/published.json")
    return {path.relative_to(ROOT / "src").as_posix() for path in files} | {"bsam/py.typed"}


def test_the_wheel_contains_the_package_and_nothing_else(built):
    names = "METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE"
    assert set(zipfile.ZipFile(built[1]).namelist()) == package() | {f"{INFO}/{name}" for name in names}


def test_the_sdist_contains_the_sources_and_the_examples(built):
    with tarfile.open(built[0]) as archive:
        files = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    files = {name for name in files if not name.startswith("src/bsam.egg-info/")}
    top = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}
    examples = {f"examples/{path.name}" for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".md")}
    assert files == top | examples | {f"src/{name}" for name in package()}


def test_the_metadata_is_complete(built):
    metadata = Metadata.from_email(zipfile.ZipFile(built[1]).read(f"{INFO}/METADATA"), validate=True)
    assert (metadata.name, str(metadata.version)) == ("bsam", bsam.__version__)
    assert (metadata.license_expression, metadata.license_files) == ("MIT", ["LICENSE"])
    assert str(metadata.requires_python) == ">=3.11"
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description == (ROOT / "README.md").read_text(encoding="utf-8")

    needed = [requirement for requirement in metadata.requires_dist if requirement.marker is None]
    assert sorted(requirement.name for requirement in needed) == ["numpy", "torch"]
    extras = set(metadata.provides_extra)
    assert extras >= {"plot", "train", "demo", "dev"}
    of_bsam = [requirement for requirement in metadata.requires_dist if canonicalize_name(requirement.name) == "bsam"]
    assert of_bsam
    assert all(requirement.extras <= extras for requirement in of_bsam)  # pip only warns of unknown extras


def test_the_version_is_in_one_place(built):
    assert f'__version__ = "{bsam.__version__}"\n' in (ROOT / "src/bsam/__init__.py").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dynamic = ["version"]' in project
    assert bsam.__version__ not in project
    assert f"## [{bsam.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_no_module_imports_what_windows_lacks():
    """In the sources, including those whose frameworks take seconds to import."""
    statement = re.compile(rf"^\s*(?:import|from) (?:{'|'.join(POSIX)})\b", re.MULTILINE)
    assert statement.search("import os\nimport fcntl\n")
    sources = [*(ROOT / "src").rglob("*.py")]
    assert [path.name for path in sources if statement.search(path.read_text(encoding="utf-8"))] == []


def test_the_wheel_works_without_the_repository_and_optional_packages(built, tmp_path):
    """Five training steps and a command, with this environment's torch and NumPy, as on Windows."""
    zipfile.ZipFile(built[1]).extractall(tmp_path / "target")  # as pip does with a wheel of Python files
    packages = [path for path in sys.path if path.endswith("-packages")]
    arguments = json.dumps([str(tmp_path / "target"), packages, OPTIONAL, POSIX])
    out = run(sys.executable, "-I", "-S", "-W", "ignore", "-c", TRAINING, arguments, cwd=tmp_path)
    losses, batches, status, version, files = json.loads(out.splitlines()[-1])
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.97 * losses[0]
    assert (batches, status, version) == (5, 0, bsam.__version__)
    assert "Flat in both directions" in out
    assert len(files) > 20
    assert all(Path(file).is_relative_to(tmp_path / "target") for file in files)
